"""Attention to some keys only, with three ways for a gradient to reach the choice; and attention of
rows that are packed end to end, so that hidden tokens cost nothing.

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

from seecause.engine.attend import Groups
from seecause.engine.chunks import fit
from seecause.models.block import fused
from seecause.types import wide

Gradient = Literal["ste", "none", "soft"]
# q, k, v [B, H, T, dh], scale -> [B, T, H, dh]
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]

# log odds of a hidden key that are still told apart; beyond, products with zero would overflow
_HOTTEST = 30.0


def reads_only(visible: Tensor) -> Attend:
    """Keys outside visible [B, T] (bool) are not there."""
    return lambda q, k, v, scale: fused(q, k, v, scale, visible[:, None, None])


def reads_straight_through(weights: Tensor) -> Attend:
    """The same for weights [B, T] of 0 and 1, which get the gradient of the relaxed attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k = q.to(v.dtype), k.to(v.dtype)  # norms widen them under autocast
        return _Relaxed.apply(q, k, v, weights, scale).transpose(1, 2)

    return attend


def reads_softly(share: Tensor) -> Attend:
    """Every key j is read in proportion to share [B, T]."""
    bias = torch.log(share + 1e-10)[:, None, None]
    return lambda q, k, v, scale: fused(q, k, v, scale, bias.to(q.dtype))


def reads_packed(groups: Groups) -> Attend:
    """Rows of all images end to end, [1, H, R, dh]: each image's rows read one another. With a
    kernel for sequences of different lengths where there is one, image by image elsewhere."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k = q.to(v.dtype), k.to(v.dtype)  # norms widen them under autocast
        if has_kernel(q.device, q.dtype) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
            from torch.nn.attention.varlen import varlen_attn

            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [R, H, dh]
            starts, longest = groups.starts, groups.longest
            o = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale)
            assert isinstance(o, Tensor)
            return o[None]
        sizes = groups.sizes.tolist()
        images = zip(q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2), strict=True)
        return torch.cat([fused(q, k, v, scale) for q, k, v in images], dim=1)

    return attend


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether sequences of different lengths have a kernel of their own: half precision, on a GPU
    from Ampere on."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


class _Relaxed(Function):
    """Forward: the fused kernel with a mask. Backward: probabilities again, a few images at a time,
    of the rows that have a slope.

    Those are few: nobody reads a hidden token, and of the last block only the class token is read.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, scale: float) -> Tensor:
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=(weights > 0)[:, None, None], scale=scale
        )
        ctx.save_for_backward(q, k, v, weights, o)
        ctx.scale = scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        q, k, v, weights, o = ctx.saved_tensors
        rows = _sloping(slope)  # [B, n], padded with rows whose slope is zero and adds nothing
        each = 4 * q.shape[1] * rows.shape[1] * k.shape[2] * wide(q[:0]).element_size()
        size = fit(len(q), each, q.device)
        tensors = (_take(q, rows), k, v, weights, _take(o, rows), _take(slope, rows))
        chunks = zip(*(tensor.split(size) for tensor in tensors), strict=True)
        grads = [_relaxed_grads(*chunk, scale=ctx.scale) for chunk in chunks]
        d_rows, *others = (torch.cat(pieces) for pieces in zip(*grads, strict=True))
        return _put(d_rows, rows, q), *others, None


def _sloping(slope: Tensor) -> Tensor:
    """Places [B, n] of the rows of slope [B, H, T, dh] that are not all zero; n is that of the
    image with most."""
    sloping = slope.ne(0).any(dim=3).any(dim=1)  # [B, T]
    most = max(1, int(sloping.sum(dim=1).max()))
    return sloping.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]


def _take(tokens: Tensor, rows: Tensor) -> Tensor:
    """[B, H, T, dh] -> [B, H, n, dh]"""
    if rows.shape[1] == tokens.shape[2]:
        return tokens
    return tokens.gather(2, _wide_index(rows, tokens))


def _put(grads: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """[B, H, n, dh] back among zeros; `_take` left whole what has a slope everywhere."""
    if rows.shape[1] == like.shape[2]:
        return grads
    return torch.zeros_like(like).scatter_(2, _wide_index(rows, like), grads)


def _wide_index(rows: Tensor, like: Tensor) -> Tensor:
    return rows[:, None, :, None].expand(-1, like.shape[1], -1, like.shape[3])


def _relaxed_grads(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, o: Tensor, slope: Tensor, *, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of q [B, H, n, dh], k, v [B, H, T, dh] and of weights [B, T], from the slope at the
    output o."""
    keys = weights[:, None, None]
    # rounding scores to bfloat16 would tilt every probability
    scores = (wide(q) @ wide(k).transpose(-1, -2)).mul_(scale)
    total = scores.masked_fill(keys == 0, -torch.inf).logsumexp(dim=-1, keepdim=True)
    odds = scores.sub_(total).clamp_(max=_HOTTEST).exp_()  # a_ij / s_j
    probs = _product(odds, keys, q.dtype)
    # slope_i . (v_j - o_i)
    spread = odds.mul_(slope @ v.transpose(-1, -2) - wide(slope * o).sum(dim=-1, keepdim=True))
    d_scores = _product(spread, keys * scale, q.dtype)
    return (
        d_scores @ k,
        d_scores.transpose(-1, -2) @ q,
        probs.transpose(-1, -2) @ slope,
        spread.sum(dim=(1, 2)).to(weights.dtype),
    )


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a * b, rounded to `dtype` as it is written."""
    return torch.mul(a, b, out=torch.empty_like(a, dtype=dtype))
