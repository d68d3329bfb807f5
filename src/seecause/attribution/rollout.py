"""Attention rollout (Abnar & Zuidema 2020).

Information reaching the class token if every block mixed tokens by its fused attention and passed
half of them on unchanged:

    A~ = normalise(fuse_h A + I),   R = A~_L ... A~_start,   map = R[class, patches]          (eq.
    1)

`normalise` makes rows sum to one; with mean fusion it is (A + I) / 2. `discard` first sets the
smallest entries of each fused matrix to zero. Averaging readouts take the mean of their rows of R;
a latent pool is one more step, without I. Values, MLPs and signs are ignored. `compat` repeats
vit-explain's slip, which divides column j by the sum of row j, so that rows no longer sum to one.
Class-agnostic: `target` is recorded, not used.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from seecause.attribution.gradients import one_block, over_images
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import attention_probs, read_rows
from seecause.errors import BadOption
from seecause.models.view import VisionModel
from seecause.target import Target

Fusion = Literal["mean", "max", "min"]


@method("rollout", forwards="1", needs="attention", class_specific=False)
@over_images(one_block)
@torch.no_grad()
def rollout(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: int = 0,
    fusion: Fusion = "mean",
    discard: float = 0.0,
    compat: bool = False,
) -> Maps:
    """Attention of all blocks multiplied through, as if values did not matter."""
    layout = model.check(images)
    reach = reaching(model, images, start=start, fusion=fusion, discard=discard, compat=compat)
    return Maps(read_rows(model, layout, reach)[:, layout.patches], target)


@torch.no_grad()
def reaching(
    model: VisionModel,
    images: Tensor,
    *,
    start: int = 0,
    fusion: Fusion = "mean",
    discard: float = 0.0,
    compat: bool = False,
) -> Tensor:
    """The product R [B, T, T], streamed: one block's matrix at a time. With a latent pool, its rows
    alone: [B, Q, T]."""
    if fusion not in get_args(Fusion):
        raise BadOption("fusion", fusion, f"one of {', '.join(get_args(Fusion))}")
    if not 0 <= discard < 1:
        raise BadOption("discard", discard, "a share of the entries, from 0 to below 1")
    reach: Tensor | None = None
    for layer, probs in enumerate(
        attention_probs(model, images, start=start), start
    ):  # each [B, H, T, T]
        step = drop_smallest(fuse(probs, fusion), discard)
        if layer < model.n_layers:
            step = step + torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)
        total = step.sum(dim=-1)
        step = step / (total[:, None, :] if compat and layer < model.n_layers else total[..., None])
        reach = step if reach is None else step @ reach
    assert reach is not None
    return reach


def fuse(probs: Tensor, fusion: Fusion) -> Tensor:
    """[B, H, T, T] -> [B, T, T]."""
    return (
        probs.mean(dim=1)
        if fusion == "mean"
        else probs.amax(dim=1)
        if fusion == "max"
        else probs.amin(dim=1)
    )


def drop_smallest(attention: Tensor, share: float) -> Tensor:
    """Zero the smallest `share` of each image's entries [B, R, T]; the very first one, of the class
    token to itself, stays."""
    flat = attention.flatten(1)
    lowest = flat.topk(int(flat.shape[1] * share), dim=1, largest=False).indices
    kept = torch.ones_like(flat).scatter(1, lowest, 0)
    kept[:, 0] = 1
    return (flat * kept).view_as(attention)
