"""Blocks whose keys can be hidden, token by token and head by head, by facts that travel with the
token.

A state is [content | flags]: after the residual stream come a few channels that say of each token
whether it may be read. `embed` decides them, from pixels or anything else; blocks pass them on
untouched. Keys get one more lane that holds 0 or a large negative number, and queries a 1 there, so
hidden keys weigh exactly nothing:

    q' = [q, 1, 0 ...],    k' = [k, 0 or HIDDEN, 0 ...],    v' = [v, 0 ...]

Everything stays row-wise, so that visibility goes with the keys wherever another run borrows them,
and no engine has to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.models.block import Block, Fn, same
from seecause.models.layout import At

FLAG = 2.0**-14  # small, so that whoever measures states is not disturbed
HIDDEN = -3e4  # the largest that float16 holds comfortably; exp(scale * HIDDEN) is exactly 0
LANES = 8  # fused kernels want head widths in eights


def flagged(content: Tensor, hidden: Tensor) -> Tensor:
    """States [B, T, D] with flags for tokens hidden [B, T, F] (bool) -> [B, T, D + F]."""
    return torch.cat([content, hidden.to(content.dtype) * FLAG], dim=-1)


def hiding(block: Block, width: int, flags: int, hides: Callable[[Tensor], Tensor] = same) -> Block:
    """`block` for states of `width` channels and `flags` flags. `hides` turns flags [B, R, F]
    (bool) into hidden keys [B, R, 1 or Hkv]."""

    def lanes(flag: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hides(flag > 0).to(flag.dtype)[..., None] * HIDDEN  # [B, R, 1 or Hkv, 1]
        return torch.ones_like(hidden[..., :1, :]), hidden

    return laned(block, width, flags, lanes)


def laned(
    block: Block, width: int, flags: int, more: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Block:
    """`block` with more lanes in queries and keys: `more` makes them of the flags [B, R, F], [B, R,
    1 or H, n] each, n at most LANES.

    What they add to a score says who sees whom, where a key is hidden from some queries and not
    from others.
    """
    heads, lanes = block.heads, block.head_dim

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = block.project(x[..., :width])
        asking, telling = more(x[..., width:].detach() / FLAG)
        return _beside(q, asking), _beside(k, telling), F.pad(v, (0, LANES))

    def strip(x: Tensor) -> Tensor:  # [B, R, H * (dh + LANES)] -> [B, R, H * dh]
        return x.unflatten(-1, (heads, lanes + LANES))[..., :lanes].flatten(-2)

    def widen(x: Tensor) -> Tensor:
        return F.pad(x.unflatten(-1, (heads, lanes)), (0, LANES)).flatten(-2)

    rotate, out_gate = block.rotate, block.out_gate

    def turn(x: Tensor, at: At) -> Tensor:
        assert rotate is not None
        return torch.cat([rotate(x[..., :lanes], at), x[..., lanes:]], dim=-1)

    return replace(
        block,
        head_dim=lanes + LANES,
        project=project,
        norm=_on_first(block.norm, width),
        q_norm=_on_first(block.q_norm, lanes),
        k_norm=_on_first(block.k_norm, lanes),
        rotate=None if rotate is None else turn,
        sub_norm=same if _idle(block.sub_norm) else lambda x: widen(block.sub_norm(strip(x))),
        out_gate=None if out_gate is None else lambda x: widen(out_gate(x[..., :width])),
        mix=lambda x: F.pad(block.mix(strip(x)), (0, flags)),
        branch=_on_first(block.branch, width),
        feed=lambda x: F.pad(block.feed(x[..., :width]), (0, flags)),
    )


def _beside(x: Tensor, more: Tensor) -> Tensor:
    """[B, R, H, dh] and [B, R, 1 or H, n] -> [B, R, H, dh + LANES]."""
    more = F.pad(more.to(x.dtype), (0, LANES - more.shape[-1]))
    return torch.cat([x, more.expand(*x.shape[:-1], LANES)], dim=-1)


def _on_first(step: Fn, count: int) -> Fn:
    """`step` on the first channels; the others stay."""
    if _idle(step):
        return same
    return lambda x: torch.cat([step(x[..., :count]), x[..., count:]], dim=-1)


def _idle(step: Fn) -> bool:
    return step is same or isinstance(step, nn.Identity)
