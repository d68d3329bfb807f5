"""Runs on some of the patches: the others are dropped after the position embedding, as if they had
never been there.

Special tokens always stay, and every kept patch keeps its own position (also a rotary one). Images
may keep different numbers of patches: shorter sequences are padded, and no row, mean or latent
query sees the padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.engine.chunks import fit, in_chunks
from seecause.engine.trace import enter
from seecause.engine.walk import walk
from seecause.errors import BadOption
from seecause.models.block import fused
from seecause.models.layout import At, TokenLayout
from seecause.models.readout import Readout
from seecause.models.view import VisionModel


def kept_logits(model: VisionModel, h0: Tensor, keep: Tensor, at: At, *, start: int = 0) -> Tensor:
    """Logits [B, C] of tokens h0 [B, T, D] that enter block `start`, whose patches outside keep [B,
    N] (bool) are dropped."""
    layout = at.layout
    index, valid = _kept(keep, layout)  # [B, R]
    h = h0.gather(1, index[..., None].expand(-1, -1, h0.shape[-1]))  # [B, R, D]
    padding = (
        None
        if bool(valid.all())
        else h.new_zeros(valid.shape).masked_fill(~valid, -torch.inf)[:, None, None]
    )  # [B, 1, 1, R]
    steps = walk(model, h, at.take(index), start=start)
    for step in steps:
        if padding is not None:
            step.bias = padding if step.bias is None else step.bias + padding
    return _read(model.readout, steps.h, valid, padding, layout)


def kept_logits_each(model: VisionModel, images: Tensor, keep: Tensor) -> Tensor:
    """Logits [B, M, C] for M choices keep [B, M, N] of patches for each image; images and choices
    run together, as many as fit."""
    layout, (h0, at) = model.check(images), enter(model, images)
    batch, many = keep.shape[:2]
    share = int(keep.sum(dim=-1).max()) + layout.prefix
    each = model.forward_bytes(layout) * share // layout.tokens

    def some(a: int, b: int) -> Tensor:
        item = torch.arange(a, b, device=images.device)  # of B * M
        image = item // many
        return kept_logits(model, h0[image], keep[image, item % many], at.of(image))

    logits = in_chunks(
        some, batch * many, fit(batch * many, each, images.device), what="choices of patches"
    )
    return torch.cat(list(logits)).unflatten(0, (batch, many))


def _kept(keep: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
    """Token indices [B, R] that stay, in their order, and which of them are not padding."""
    if keep.shape[-1] != layout.n_patches or not keep.any(dim=-1).all():
        raise BadOption(
            "keep",
            list(keep.shape),
            f"[B, {layout.n_patches}] with at least one patch of each image",
        )
    counts = keep.sum(dim=1, keepdim=True)
    most = int(counts.max())
    patches = (~keep).byte().argsort(dim=1, stable=True)[:, :most] + layout.prefix
    prefix = torch.arange(layout.prefix, device=keep.device).expand(len(keep), -1)
    valid = torch.arange(most, device=keep.device) < counts
    return torch.cat([prefix, patches], dim=1), torch.cat(
        [torch.ones_like(prefix, dtype=torch.bool), valid], dim=1
    )


def _read(
    readout: Readout, h: Tensor, valid: Tensor, padding: Tensor | None, layout: TokenLayout
) -> Tensor:
    """`readout` on kept rows h [B, R, D]: means and latent queries see those that are valid [B,
    R]."""
    if readout.reads_rows:
        return readout(h, layout)
    rows, first = readout.norm(h), readout.averaged(layout).start
    if readout.latent is not None:
        k, v = readout.latent.kv(rows[:, first:])
        q = readout.latent.query().expand(len(h), -1, -1, -1)
        seen = None if padding is None else padding[..., first:]
        return readout.head(readout.latent.finish(fused(q, k, v, readout.latent.scale, seen)))
    weight = valid[:, first:, None].to(rows.dtype)
    mean = (rows[:, first:] * weight).sum(dim=1) / weight.sum(dim=1)
    return readout.head(
        torch.cat([*(rows[:, t] for t in readout.read_prefix(layout)), mean], dim=-1)
    )
