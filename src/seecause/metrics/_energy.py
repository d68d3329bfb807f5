"""How much of a map's mass, and of its peaks, lies on the object? With pixels P, the object M and
the map A,

    energy pointing game  = sum_M max(A, 0) / sum_P max(A, 0)     (Wang et al. 2020, Score-CAM)
    relevance mass        = sum_M |A| / sum_P |A|                 (Arras et al. 2022, CLEVR-XAI)
    relevance rank        = |top_|M|(A) and M| / |M|              (the same)
    top-k intersection    = |top_k(A) and M| / k                  (Theiner et al. 2022; k = 1000 as
    in Quantus)
All from 0 to 1, higher is better. A flat map scores the share of the object in the first two. Mass
depends on the scale and zero of the map: A + c scores otherwise, unlike in ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seecause.data.dataset import IGNORE
from seecause.engine.chunks import fit, in_chunks
from seecause.errors import BadOption
from seecause.metrics._pixels import Upsampling, to_pixels
from seecause.metrics.registry import higher, metric

_PIXEL_BYTES = 96  # float64 and int64 values held for each pixel while a map is sorted


@dataclass(frozen=True, eq=False)
class Energy:
    """Scores of each image, float64 [B]; NaN where there is no object or no mass."""

    energy: Tensor
    mass: Tensor
    rank: Tensor
    top: Tensor
    protocol: dict[str, Any] = field(default_factory=dict)


@metric(
    "energy",
    family="place of the object",
    columns={
        "energy-pointing": higher(
            "share of the positive values that lies on the object", field="energy"
        ),
        "relevance-mass": higher(
            "share of all values, by size, that lies on the object", field="mass"
        ),
        "relevance-rank": higher(
            "share of the object that the highest values cover, as many as it has pixels",
            field="rank",
        ),
        "top-k": higher("share of the k highest values that lies on the object", field="top"),
    },
)
@torch.no_grad()
def energy(
    maps: Tensor,
    masks: Tensor,
    *,
    k: int = 1000,
    upsample: Upsampling = "bilinear",
    ignore: int | None = IGNORE,
) -> Energy:
    """Maps [B, gh, gw] or [B, H, W] against masks [B, H, W], as in `localization`; ignored pixels
    count nowhere. Of equals, the first goes first."""
    if masks.ndim != 3 or len(masks) != len(maps):
        raise BadOption("masks", list(masks.shape), f"[{len(maps)}, H, W], one for each map")
    size = (masks.shape[1], masks.shape[2])
    if not 1 <= k <= masks[0].numel():
        raise BadOption("k", k, f"1 to {masks[0].numel()} pixels")
    masks = masks.to(maps.device)
    counted = torch.ones_like(masks, dtype=torch.bool) if ignore is None else masks != ignore
    wanted = (masks != 0) & counted

    def run_chunk(a: int, b: int) -> Tensor:
        pixels = to_pixels(maps[a:b], size, upsample).flatten(1)
        on, valid = wanted[a:b].flatten(1), counted[a:b].flatten(1)
        order = pixels.masked_fill(~valid, -torch.inf).argsort(dim=1, descending=True, stable=True)
        hits = on.gather(1, order).cumsum(dim=1)  # [b, P]: object pixels among the first
        objects = on.sum(dim=1)
        first = valid.sum(dim=1).clamp(max=k)
        return torch.stack(
            [
                _share(pixels.clamp(min=0), on, valid),
                _share(pixels.abs(), on, valid),
                _part(hits, objects),
                _part(hits, first),
            ]
        )

    chunk = fit(len(maps), size[0] * size[1] * _PIXEL_BYTES, maps.device)
    scores = torch.cat(
        list(in_chunks(run_chunk, len(maps), chunk, what="maps")), dim=1
    ).cpu()  # [4, B]
    scores[:, ~wanted.flatten(1).any(dim=1).cpu()] = torch.nan
    protocol = {"metric": "energy", "k": k, "upsample": upsample, "ignore": ignore}
    return Energy(scores[0], scores[1], scores[2], scores[3], protocol)


def _share(values: Tensor, on: Tensor, valid: Tensor) -> Tensor:
    """The part of the counted values that lies on the object, [B]."""
    return (values * on).sum(dim=1) / (values * valid).sum(dim=1)


def _part(hits: Tensor, count: Tensor) -> Tensor:
    """Hits among the first `count` [B], as a share of them."""
    return hits.gather(1, (count[:, None] - 1).clamp(min=0))[:, 0].double() / count
