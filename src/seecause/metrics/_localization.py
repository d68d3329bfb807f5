"""Does the map lie on the object? Average precision and the pointing game against a mask.

    AUPR_1 = AP(M, A)      AUPR_0 = AP(1 - M, -A)      AP = sum_k (R_k - R_{k-1}) P_k
with k over the distinct values of the map, ties taken together (scikit-learn's average precision,
not the trapezoid). Ranks alone matter, so maps are not normalised. A random map scores the share of
the object, a constant one exactly that.

Pointing game: whether the first maximum lies on the object, without tolerance. In a block-constant
map the first maximum would be the corner of a patch, so the middle of the patch is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seecause.data.dataset import IGNORE
from seecause.engine.chunks import fit, in_chunks
from seecause.errors import BadOption
from seecause.metrics._pixels import Upsampling, patch_centres, to_pixels
from seecause.metrics.registry import higher, metric
from seecause.metrics.statistics import tie_ends

_PIXEL_BYTES = 128  # float64 and int64 values held for each pixel while a map is sorted


@dataclass(frozen=True, eq=False)
class Localization:
    """Scores of each image, float64 [B]; NaN where an image could not be scored, and `reasons` says
    why."""

    aupr1: Tensor
    aupr0: Tensor
    pointing: Tensor  # 1 hit, 0 miss
    reasons: tuple[str, ...]  # "" for scored images
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def skipped(self) -> int:
        return sum(reason != "" for reason in self.reasons)


@metric(
    "localization",
    family="place of the object",
    columns={
        "aupr1": higher(
            "does the map rank the object's pixels first? Average precision; a random map scores "
            "the object's share of the picture",
            field="aupr1",
        ),
        "aupr0": higher(
            "does it rank the background's pixels last? Average precision", field="aupr0"
        ),
        "pointing": higher(
            "share of images whose highest point lies on the object", field="pointing"
        ),
    },
)
@torch.no_grad()
def localization(
    maps: Tensor,
    masks: Tensor | None,
    *,
    upsample: Upsampling = "bilinear",
    ignore: int | None = IGNORE,
) -> Localization:
    """Maps [B, gh, gw] or [B, H, W] against masks [B, H, W]: bool, or integers where `ignore` is
    neither object nor background.

    Ignored pixels count nowhere. Images without any object or background are skipped: they have no
    precision and cannot be missed.

    >>> import torch
    >>> maps = torch.tensor([[[0.9, 0.1], [0.8, 0.0]]])
    >>> left = torch.tensor([[[True, False], [True, False]]])
    >>> result = localization(maps, left)
    >>> result.aupr1, result.pointing
    (tensor([1.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    if masks is None:
        raise BadOption("masks", None, "the masks of a dataset that has some")
    if masks.ndim != 3 or len(masks) != len(maps):
        raise BadOption("masks", list(masks.shape), f"[{len(maps)}, H, W], one for each map")
    masks = masks.to(maps.device)
    height, width = size = (masks.shape[1], masks.shape[2])
    blocks = upsample == "nearest" and tuple(maps.shape[1:]) != size
    counted = torch.ones_like(masks, dtype=torch.bool) if ignore is None else masks != ignore
    wanted = (masks != 0) & counted
    spots = (
        counted & patch_centres((maps.shape[1], maps.shape[2]), size, maps.device)
        if blocks
        else counted
    )

    def run_chunk(a: int, b: int) -> Tensor:
        pixels = to_pixels(maps[a:b], size, upsample).flatten(1)  # [b, H * W]
        on, valid = wanted[a:b].flatten(1), counted[a:b].flatten(1)
        best = pixels.masked_fill(~spots[a:b].flatten(1), -torch.inf).argmax(dim=1, keepdim=True)
        hit = on.gather(1, best)[:, 0].double()
        return torch.stack(
            [average_precision(pixels, on, valid), average_precision(-pixels, ~on, valid), hit]
        )

    reasons = _reasons(wanted, counted, spots)
    fitting = fit(len(maps), height * width * _PIXEL_BYTES, maps.device)
    scores = torch.cat(
        list(in_chunks(run_chunk, len(maps), fitting, what="maps")), dim=1
    ).cpu()  # [3, B]
    scores[:, [reason != "" for reason in reasons]] = torch.nan
    protocol = {
        "metric": "localization",
        "upsample": upsample,
        "ignore": ignore,
        "pointing": "patch centre" if blocks else "first maximum",
    }
    return Localization(scores[0], scores[1], scores[2], reasons, protocol)


def average_precision(scores: Tensor, positive: Tensor, counted: Tensor) -> Tensor:
    """AP [B] of scores [B, P] for the positives among the counted entries, both [B, P] bool; NaN
    without positives."""
    ordered, order = scores.sort(dim=1, descending=True)
    positives = (positive & counted).gather(1, order).double()
    hits, seen = positives.cumsum(dim=1), counted.gather(1, order).double().cumsum(dim=1)
    precision = (hits / seen.clamp(min=1)).gather(
        1, tie_ends(ordered)
    )  # of the whole run of equals
    return (positives * precision).sum(dim=1) / hits[:, -1]


def _reasons(wanted: Tensor, counted: Tensor, spots: Tensor) -> tuple[str, ...]:
    unscored = {
        "every pixel is ignored": ~counted.flatten(1).any(dim=1),
        "no object in the frame": ~wanted.flatten(1).any(dim=1),
        "no background in the frame": ~(counted & ~wanted).flatten(1).any(dim=1),
        "every patch centre is ignored": ~spots.flatten(1).any(dim=1),
    }
    reasons = [""] * len(wanted)
    for reason, rows in reversed(unscored.items()):  # the first one that holds is told
        for image in rows.nonzero()[:, 0].tolist():
            reasons[image] = reason
    return tuple(reasons)
