"""Attention to some keys only, with three ways for a gradient to reach the choice.

none   hidden keys are masked; the choice is a constant (what the released code does)
ste    a_ij = s_j e^{q_i.k_j} / sum_l s_l e^{q_i.k_l} with s in {0, 1}: exact, also for hidden keys,
           d out_i / d s_j = e^{q_i.k_j} (v_j - out_i) / Z_i
soft   bias log(f_j + 1e-10): every key is read a little (an ablation)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seecause.engine.chunks import fit
from seecause.models.block import fused
from seecause.types import wide

Gradient = Literal["ste", "none", "soft"]
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v [B, H, T, dh], scale -> [B, T, H, dh]

_HOTTEST = 30.0  # log odds of a hidden key that are still told apart; beyond, products with zero would overflow


def reads_only(visible: Tensor) -> Attend:
    """Keys outside visible [B, T] (bool) are not there."""
    return lambda q, k, v, scale: fused(q, k, v, scale, visible[:, None, None])


def reads_straight_through(weights: Tensor) -> Attend:
    """The same for weights [B, T] of 0 and 1, which get the gradient of the relaxed attention."""
    return lambda q, k, v, scale: _Relaxed.apply(q.to(v.dtype), k.to(v.dtype), v, weights, scale).transpose(1, 2)  # norms widen q and k under autocast


def reads_softly(share: Tensor) -> Attend:
    """Every key j is read in proportion to share [B, T]."""
    bias = torch.log(share + 1e-10)[:, None, None]
    return lambda q, k, v, scale: fused(q, k, v, scale, bias.to(q.dtype))


class _Relaxed(Function):
    """Forward: the fused kernel with a mask. Backward: probabilities again, a few images at a time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, scale: float) -> Tensor:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=(weights > 0)[:, None, None], scale=scale)
        ctx.save_for_backward(q, k, v, weights, o)
        ctx.scale = scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        q, k, v, weights, o = ctx.saved_tensors
        each = 4 * q.shape[1] * q.shape[2] * k.shape[2] * wide(q[:0]).element_size()
        size = fit(len(q), each, q.device)
        parts = zip(*(t.split(size) for t in (q, k, v, weights, o, slope)), strict=True)
        grads = [_relaxed_grads(*part, scale=ctx.scale) for part in parts]
        return *(torch.cat(found) for found in zip(*grads, strict=True)), None


def _relaxed_grads(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, o: Tensor, slope: Tensor, *, scale: float) -> tuple[Tensor, ...]:
    """Gradients of q, k, v [B, H, T, dh] and of weights [B, T], from the slope at the output o."""
    scores = wide(q) @ wide(k).transpose(-1, -2) * scale  # rounding scores to bfloat16 would tilt every probability
    total = scores.masked_fill(weights[:, None, None] == 0, -torch.inf).logsumexp(dim=-1, keepdim=True)
    odds = (scores - total).clamp(max=_HOTTEST).exp()  # a_ij / s_j
    gain = wide(slope @ v.transpose(-1, -2)) - wide(slope * o).sum(dim=-1, keepdim=True)  # slope_i . (v_j - o_i)
    spread = odds * gain
    d_scores = (spread * weights[:, None, None] * scale).to(q.dtype)
    probs = (odds * weights[:, None, None]).to(q.dtype)
    return d_scores @ k, d_scores.transpose(-1, -2) @ q, probs.transpose(-1, -2) @ slope, spread.sum(dim=(1, 2)).to(weights.dtype)
