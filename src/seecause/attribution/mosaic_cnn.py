"""Mosaic on networks of stages: slopes over mixtures of feature maps (ours).

A feature map has no row that reads keys. The map after one stage, which CAAP patches, is mixed:

    F(m) = F(blank) + m (F(source) - F(blank)),   a_i = mean over masks of d score(F(m)) / dm_i

m in {0, 1} are CAAP's cell sets (caap_cnn.py); at a stage finer or coarser than the cells a feature
has the largest weight of the cells it overlaps. Nothing after the stage is shared between masks, so
each costs a run of that part and its derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seecause.attribution.mosaic import Law, MaskPlan, draw_masks, standard_error
from seecause.attribution.registry import Maps, join, method
from seecause.engine.blanks import Blank, blank_image
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.mixture import need_gradients, reaches
from seecause.errors import NotDefined
from seecause.models.dense_families import Places
from seecause.models.staged_view import StagedModel
from seecause.target import Score, Target
from seecause.types import wide


@method(
    "mosaic",
    forwards="1 + 3 x masks x the part after the stage",
    needs="gradients",
    architectures=("staged", "dense"),
    unset={"stage": "the one at two thirds of the depth"},
    signed=True,
)
@torch.no_grad()
def mosaic_cnn(
    model: StagedModel,
    images: Tensor,
    target: Target,
    *,
    masks: int = 24,
    law: Law = "smooth",
    cells: int = 7,
    eps: float = 0.02,
    antithetic: bool = False,
    score: Score = "prob",
    blank: Blank | Tensor = "white",
    stage: str | None = None,
    seed: int = 0,
) -> Maps:
    """What the answer hangs on: slopes of the class score over mixtures of feature maps."""
    need_gradients(model, "mosaic")
    plan = MaskPlan(masks, law, cells, eps, antithetic, seed)
    layout, stage = model.check(images), model.cells if stage is None else stage
    drawn = draw_masks(plan, layout.grid).to(images)
    size = (images.shape[-2], images.shape[-1])
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    shared = model.run_to(stage, empty) if len(empty) == 1 else None  # [1, C, h, w]

    def some_images(a: int, b: int) -> Maps:
        features = model.run_to(stage, images[a:b])
        ground = model.run_to(stage, empty[a:b]) if shared is None else shared
        bound = target.take(slice(a, b)).bind(model.run_from(stage, features))

        def scores(m: Tensor) -> Tensor:  # [b, n, N] -> [b, n]
            between = mixtures(m.unflatten(2, layout.grid), ground, features)
            logits = model.run_from(stage, between).unflatten(0, m.shape[:2])
            return bound.score(logits, score, sigmoid=model.sigmoid)

        # with what the step back needs
        each = 4 * (b - a) * model.forward_bytes(layout, after=stage)
        together = fit(len(drawn), each, images.device, share=0.8)
        slope = _slopes(model, scores, drawn.expand(b - a, -1, -1), together)
        return replace(_to_maps(slope, scores, bound, plan), used={"stage": stage})

    at_once = fit(len(images), model.forward_bytes(layout), images.device, share=0.5)
    return join(list(in_chunks(some_images, len(images), at_once, what="images")))


def _slopes(
    model: StagedModel, scores: Callable[[Tensor], Tensor], masks: Tensor, together: int
) -> Tensor:
    """Derivatives [B, n, N] of scores [B, n] at masks [B, n, N], `together` masks at a time."""

    def some_masks(a: int, b: int) -> Tensor:
        with torch.enable_grad():
            m = masks[:, a:b].clone().requires_grad_()
            total = scores(m).sum()
            if not reaches(total, m):
                raise NotDefined(
                    "mosaic",
                    f"no gradient passes {model.name}, as in quantised layers",
                    "Use method='caap', which takes no gradient",
                )
            return torch.autograd.grad(total, m)[0]

    return wide(torch.cat(list(in_chunks(some_masks, masks.shape[1], together)), dim=1))


def _to_maps(
    slope: Tensor, scores: Callable[[Tensor], Tensor], bound: Target, plan: MaskPlan
) -> Maps:
    """Means of slopes [B, n, N] over masks, their errors, and of a path how complete it is."""
    values, checks = torch.einsum("n,bnp->bp", plan.weights.to(slope), slope), {}
    if plan.law == "path":
        ends = torch.stack([torch.zeros_like(slope[:, 0]), torch.ones_like(slope[:, 0])], dim=1)
        first, last = scores(ends).unbind(dim=1)
        gap = values.sum(dim=1) - (last - first)
        checks = {"completeness gap": gap, "difference": last - first}
    errors = standard_error(slope, plan) if plan.draws > 1 else None
    return Maps(values, bound, errors=errors, checks=checks)


def mixtures(masks: Tensor, blank: Any, picture: Any) -> Any:
    """Feature maps [B * n, C, h, w] between those of blanks [1 or B, C, h, w] and of pictures
    [B, C, h, w], by masks [B, n, gh, gw] of cells; of every level, where rows read several."""
    if isinstance(picture, Places):
        return picture.over(blank, lambda theirs, ground: mixtures(masks, ground, theirs))
    size = (picture.shape[-2], picture.shape[-1])
    share = largest_weights(masks, size)[:, :, None].to(picture.dtype)
    return (blank[:, None] + share * (picture - blank)[:, None]).flatten(0, 1)


def largest_weights(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Weights [B, n, h, w] of features, each the largest of the cells [B, n, gh, gw] it overlaps.
    Cells of equal weight share its slope, which `adaptive_max_pool2d` gives to one of them."""
    if masks.shape[-2:] == size:
        return masks
    (rows, tall), (columns, broad) = (
        _overlaps(cells, features, masks.device)
        for cells, features in zip(masks.shape[-2:], size, strict=True)
    )
    windows = masks[:, :, rows[:, None, :, None], columns[None, :, None, :]]  # [B, n, h, w, kh, kw]
    inside = tall[:, None, :, None] & broad[None, :, None, :]
    return windows.masked_fill(~inside, -torch.inf).amax(dim=(-2, -1))


def _overlaps(cells: int, features: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which cells [features, k] each feature of one axis overlaps; k is the most any does, and the
    second tensor says which of them are real."""
    index = torch.arange(features)[:, None]
    first, end = index * cells // features, -((-(index + 1) * cells) // features)
    which = first + torch.arange(int((end - first).max()))
    return which.clamp(max=cells - 1).to(device), (which < end).to(device)
