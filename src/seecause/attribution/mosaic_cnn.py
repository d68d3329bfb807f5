"""Mosaic on convolutional networks: slopes over mixtures of feature maps (ours).

A feature map has no row that reads keys. The map after one stage, which CAAP patches, is mixed:

    F(m) = F(blank) + m (F(source) - F(blank)),   a_i = mean over masks of d score(F(m)) / dm_i

m in {0, 1} are CAAP's cell sets (caap_cnn.py); at a stage finer or coarser than the cells a feature
has the largest weight of the cells it overlaps. Nothing after the stage is shared between masks, so
each costs a run of that part and its derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.attribution.gradients import join
from seecause.attribution.mosaic import Law, MaskPlan, draw_masks, standard_error
from seecause.attribution.registry import Maps, method
from seecause.engine.blanks import Blank, blank_image
from seecause.engine.chunks import fit, in_chunks
from seecause.errors import NotDefined
from seecause.models.conv_view import ConvModel
from seecause.target import Score, Target
from seecause.types import wide


@method(
    "mosaic",
    forwards="1 + 3 x masks x the part after the stage",
    needs="gradients",
    architectures=("conv",),
    unset={"stage": "the one at two thirds of the depth"},
)
@torch.no_grad()
def mosaic_cnn(
    model: ConvModel,
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
    plan, stage = MaskPlan(masks, law, cells, eps, antithetic, seed), stage or model.cells
    layout = model.check(images)
    mixed = draw_masks(plan, layout.grid).to(images)
    weights = plan.weights.to(wide(mixed))
    size = (images.shape[-2], images.shape[-1])
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    shared = model.run_to(stage, empty) if len(empty) == 1 else None  # [1, C, h, w]
    each = 4 * model.forward_bytes(layout, after=stage)  # with what the step back needs

    def some_images(a: int, b: int) -> Maps:
        features = model.run_to(stage, images[a:b])
        ground = model.run_to(stage, empty[a:b]) if shared is None else shared
        plain = model.run_from(stage, features)
        bound = target.take(slice(a, b)).bind(plain)

        def scores(m: Tensor) -> Tensor:  # [b, n, N] -> [b, n]
            between = mixtures(m.unflatten(2, layout.grid), ground, features)
            logits = model.run_from(stage, between.flatten(0, 1)).unflatten(0, m.shape[:2])
            return bound.score(logits, score, sigmoid=model.sigmoid)

        def some_masks(c: int, d: int) -> Tensor:
            with torch.enable_grad():
                m = mixed[c:d].expand(b - a, -1, -1).clone().requires_grad_()
                total = scores(m).sum()
                if not total.requires_grad:
                    raise NotDefined(
                        "mosaic",
                        f"no gradient passes {model.name}, as in quantised layers",
                        "Use method='caap', which takes no gradient",
                    )
                return torch.autograd.grad(total, m)[0]

        together = fit(len(mixed), (b - a) * each, images.device, share=0.8)
        slope = wide(torch.cat(list(in_chunks(some_masks, len(mixed), together)), dim=1))
        values, checks = torch.einsum("n,bnp->bp", weights, slope), {}
        if plan.law == "path":
            ends = torch.stack([torch.zeros_like(mixed[0]), torch.ones_like(mixed[0])])
            first, last = scores(ends.expand(b - a, -1, -1)).unbind(dim=1)
            gap = values.sum(dim=1) - (last - first)
            checks = {"completeness gap": gap, "difference": last - first}
        errors = standard_error(slope, plan) if plan.draws > 1 else None
        return Maps(values, bound, used={"stage": stage}, errors=errors, checks=checks)

    size = fit(len(images), model.forward_bytes(layout), images.device, share=0.5)
    return join(list(in_chunks(some_images, len(images), size, what="images")))


def mixtures(masks: Tensor, blank: Tensor, picture: Tensor) -> Tensor:
    """Feature maps [B, n, C, h, w] between those of blanks [1 or B, C, h, w] and of pictures
    [B, C, h, w], by masks [B, n, gh, gw] of cells."""
    size = (picture.shape[-2], picture.shape[-1])
    share = largest_weights(masks, size)[:, :, None].to(picture.dtype)
    return blank[:, None] + share * (picture - blank)[:, None]


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
