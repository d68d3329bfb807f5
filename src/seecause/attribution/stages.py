"""CAAP and mosaic on networks of stages: convolutional ones (arXiv 2603.13652, appendix B.3), Swin
and others.

A feature map has no class token that could see earlier layers, so that patching stages l_s..l_e is
the same as patching the map after l_e alone, and mixing keys becomes mixing that map:

    CAAP     F*_i = F(blank), with the cells S(i) taken from F(source);   a_i = score(rest on F*_i)
    mosaic   F(m) = F(blank) + m (F(source) - F(blank));   a_i = mean over masks of d score / dm_i

The default l_e is the stage at two thirds of the depth. Sets and masks are of layout cells: at
another stage, every feature that overlaps a chosen cell is taken, and has the largest weight of the
cells it overlaps. The blank's features come from a real run: zero padding makes them differ at the
borders. Nothing after l_e is shared between cells or masks, so each costs a run of that part of the
network, and with mosaic its derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.caap import (
    ONE_CLASS,
    Classes,
    Direction,
    Swept,
    sweep_pictures,
    to_maps,
)
from seecause.attribution.mosaic import (
    Cells,
    Law,
    MaskPlan,
    Masks,
    Near,
    Seed,
    draw_masks,
    standard_error,
)
from seecause.attribution.registry import Maps, join, method
from seecause.engine.blanks import Blank, blank_image
from seecause.engine.chunks import fit, in_chunks, joined
from seecause.engine.mixture import need_gradients, reaches
from seecause.engine.sweep import Select, selection
from seecause.errors import NotDefined
from seecause.models.dense import Places
from seecause.models.staged import StagedModel
from seecause.target import Score, Target
from seecause.types import wide

TWO_THIRDS = "the one at two thirds of the depth"


@method(
    "caap",
    forwards="2 + N x the part after the stage",
    needs="activations",
    architectures=("staged", "dense"),
    unset={"stage": TWO_THIRDS, "classes": ONE_CLASS},
)
@torch.no_grad()
def caap_staged(
    model: StagedModel,
    images: Tensor,
    target: Target,
    *,
    stage: str | None = None,
    select: Select | Tensor = "box1",
    blank: Blank | Tensor = "white",
    score: Score = "prob",
    direction: Direction = "insert",
    classes: Classes = None,
    seed: int = 0,
) -> Maps:
    """Feature patching into a blank context: the class score each cell causes on its own."""
    stage = stage or model.cells
    chosen = selection(model.check(images).grid, select)
    size = (images.shape[-2], images.shape[-1])
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    swept = sweep_features(model, images, empty, chosen, stage, direction=direction)
    used = {"stage": stage}
    return to_maps(
        model, swept, target, score=score, direction=direction, classes=classes, used=used
    )


def sweep_features(
    model: StagedModel,
    images: Tensor,
    blank: Tensor,
    chosen: Tensor,
    stage: str,
    *,
    direction: Direction = "insert",
) -> Swept:
    """Logits of all interventions chosen [N, N], in chunks of images and of cells that fit the
    memory budget."""
    layout = model.check(images)

    def prepare(count: int, one_for_all: Tensor | None) -> Callable[..., tuple[Tensor, ...]]:
        shared = None if one_for_all is None else model.run_to(stage, one_for_all)  # [1, C, h, w]
        cells = chosen.to(model.device).unflatten(1, layout.grid)  # [N, gh, gw]
        after = count * model.forward_bytes(layout, after=stage)
        together = fit(len(cells), after, model.device, share=0.8)

        def run(pictures: Tensor, *blanks: Tensor) -> tuple[Tensor, ...]:
            features = model.run_to(stage, pictures)  # [b, C, h, w]
            empty = model.run_to(stage, blanks[0]) if shared is None else shared
            context, donor = (empty, features) if direction == "insert" else (features, empty)

            def some_cells(a: int, b: int) -> Tensor:
                mixed = patched(cells[a:b], donor, context)
                return model.run_from(stage, mixed).unflatten(0, (len(pictures), b - a))

            logits = list(in_chunks(some_cells, len(cells), together, what="cells"))
            plain, bare = model.run_from(stage, features), model.run_from(stage, empty)
            return joined(logits, dim=1), plain, bare

        return run

    settings = ("conv caap", stage, direction)
    each = 2 * model.forward_bytes(layout)
    return sweep_pictures(model, images, blank, prepare, settings, chosen, bytes_each=each)


def patched(cells: Tensor, donor: Any, context: Any) -> Any:
    """Features [B * n, C, h, w] of contexts (or one for all) in which sets of cells [n, gh, gw] are
    the donors'; of every level, where rows read several."""
    if isinstance(donor, Places):
        return donor.over(context, partial(patched, cells))
    size = (donor.shape[-2], donor.shape[-1])
    marks = F.adaptive_max_pool2d(cells.float()[:, None], size)[:, 0] > 0  # [n, h, w]
    return torch.where(marks[None, :, None], donor[:, None], context[:, None]).flatten(0, 1)


@method(
    "mosaic",
    forwards="1 + 3 x masks x the part after the stage",
    needs="gradients",
    architectures=("staged", "dense"),
    unset={"stage": TWO_THIRDS},
    signed=True,
)
@torch.no_grad()
def mosaic_staged(
    model: StagedModel,
    images: Tensor,
    target: Target,
    *,
    masks: Masks = 24,
    law: Law = "smooth",
    cells: Cells = 7,
    eps: Near = 0.02,
    antithetic: bool = False,
    score: Score = "prob",
    blank: Blank | Tensor = "white",
    stage: str | None = None,
    seed: Seed = 0,
) -> Maps:
    """What the prediction depends on: slopes of the class score over mixtures of feature maps."""
    need_gradients(model, "mosaic")
    plan = MaskPlan(masks, law, cells, eps, antithetic, seed)
    layout, stage = model.check(images), stage or model.cells
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
        values, checks = torch.einsum("n,bnp->bp", plan.weights.to(slope), slope), {}
        if plan.law == "path":
            nothing, everything = torch.zeros_like(slope[:, :1]), torch.ones_like(slope[:, :1])
            first, last = scores(torch.cat([nothing, everything], dim=1)).unbind(dim=1)
            gap = values.sum(dim=1) - (last - first)
            checks = {"completeness gap": gap, "difference": last - first}
        errors = standard_error(slope, plan) if plan.draws > 1 else None
        return Maps(values, bound, errors=errors, checks=checks, used={"stage": stage})

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


def mixtures(masks: Tensor, blank: Any, picture: Any) -> Any:
    """Feature maps [B * n, C, h, w] between those of blanks [1 or B, C, h, w] and of images
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
