"""Insertion and deletion (RISE, Petsiuk et al. 2018): does the answer come and go with the pixels
the map puts first?

Deletion starts from the picture and covers its most important pixels with a constant, step by step;
insertion starts from the blurred picture and uncovers them. With class scores y_0 .. y_n,
    area = (y_0 / 2 + y_1 + ... + y_{n-1} + y_n / 2) / n
so every step weighs the same, also a short last one. Low deletion and high insertion are good; the
difference is taken for each image.

Not done here: curves are not normalised or made monotone, and misclassified images are not left
out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seecause.engine.chunks import batched, fit, in_chunks
from seecause.errors import BadOption
from seecause.metrics._pixels import (
    Blur,
    Order,
    Steps,
    Ties,
    Upsampling,
    blurred,
    importance_ranks,
    thresholds,
)
from seecause.metrics.registry import higher, lower, metric
from seecause.models.base import ImageModel
from seecause.target import Score, Spec, parse


@dataclass(frozen=True, eq=False)
class Curves:
    """Class scores of each image, float64 [B, n + 1], after each step; `shares` [n + 1] of the
    picture changed by then."""

    deletion: Tensor
    insertion: Tensor
    shares: Tensor
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def deletion_area(self) -> Tensor:
        return area(self.deletion)

    @property
    def insertion_area(self) -> Tensor:
        return area(self.insertion)

    @property
    def difference(self) -> Tensor:
        """Insertion less deletion, [B]; its standard error is that of the difference, not of the
        parts."""
        return self.insertion_area - self.deletion_area


@metric(
    "insertion-deletion",
    family="curves",
    columns={
        "insertion": higher(
            "class score while the patches the map puts first are uncovered in a blurred picture, "
            "area under the curve",
            field="insertion_area",
        ),
        "deletion": lower(
            "class score while the patches the map puts first are covered, area under the curve",
            field="deletion_area",
        ),
        "ins-del": higher(
            "insertion less deletion: one number for faithfulness", field="difference"
        ),
    },
)
@torch.no_grad()
def insertion_deletion(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    steps: Steps = "rise",
    order: Order = "pixel",
    upsample: Upsampling = "bilinear",
    blur: Blur = "rise",
    fill: float = 0.0,
    score: Score = "prob",
    ties: Ties = "raster",
) -> Curves:
    """Curves of maps [B, gh, gw] or [B, H, W] for normalised images [B, 3, H, W]; `target` as in
    `sc.attribute`.

    `fill` is in normalised units, so 0 is the mean colour. With `order="patch"` whole patches
    change, most important first. Images and steps run together, as many as the memory budget
    allows; the three ends (picture, blurred, constant) are run once for each image.
    """
    images = images.to(model.device, model.dtype)
    grid, size = model.check(images).grid, (images.shape[-2], images.shape[-1])
    if len(maps) != len(images):
        raise BadOption("maps", list(maps.shape), f"one map for each of the {len(images)} images")
    ranks, count = importance_ranks(
        maps.to(images.device), size, grid, order=order, upsample=upsample, ties=ties
    )
    taken = thresholds(count, size, grid, steps)
    soft, constant = blurred(images, blur), torch.full_like(images[:1], fill)

    chunk = fit(len(images) * len(taken), model.forward_bytes(model.check(images)), images.device)
    plain = batched(model, images, chunk)
    bound = parse(model, target, len(images)).bind(plain)

    def scored(logits: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        return bound.take(rows).score(logits, score, sigmoid=model.sigmoid)

    ends = [
        scored(logits)
        for logits in (plain, batched(model, soft, chunk), model(constant).expand_as(plain))
    ]
    whole, hazy, empty = (end.double().cpu()[:, None] for end in ends)  # [B, 1]

    def between(start: Tensor, goal: Tensor) -> Tensor:
        return _between(
            lambda mixed, rows: scored(model(mixed), rows), start, goal, ranks, taken, chunk
        )

    options = {"order": order, "upsample": upsample, "blur": blur, "fill": fill, "score": score}
    protocol = {"metric": "insertion-deletion", "steps": steps, "evaluations": len(taken)}
    return Curves(
        deletion=torch.cat([whole, between(images, constant), empty], dim=1),
        insertion=torch.cat([hazy, between(soft, images), whole], dim=1),
        shares=taken.double() / count,
        protocol={**protocol, **options, "ties": ties, "target": bound.record(model)},
    )


def area(curves: Tensor) -> Tensor:
    """The area under curves [B, n + 1] by the trapezoid rule on even steps, [B]."""
    return torch.trapezoid(curves, dim=1) / (curves.shape[1] - 1)


def _between(
    answer: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    goal: Tensor,
    ranks: Tensor,
    taken: Tensor,
    chunk: int,
) -> Tensor:
    """Scores [B, n - 1] of the pictures between `start` and `goal` [1|B, 3, H, W], whose most
    important pixels have changed already."""
    taken = taken[1:-1].to(start.device)

    def run_chunk(a: int, b: int) -> Tensor:
        item = torch.arange(a, b, device=start.device)  # of B * (n - 1)
        image, step = item // len(taken), item % len(taken)
        changed = ranks[image] < taken[step][:, None, None]  # [m, H, W]
        return answer(
            torch.where(changed[:, None], goal if len(goal) == 1 else goal[image], start[image]),
            image,
        )

    scores = torch.cat(
        list(in_chunks(run_chunk, len(start) * len(taken), chunk, what="curve steps"))
    )
    return scores.double().cpu().view(len(start), len(taken))
