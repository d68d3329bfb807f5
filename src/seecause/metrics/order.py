"""In which order a map says that pixels matter, and how many of them a step takes."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.metrics.pixels import Upsampling, spread_out, to_grid, to_pixels

Order = Literal["pixel", "patch"]
Steps = Literal["rise", "patch"] | int
Ties = Literal["raster"] | int

RISE_ROWS = 8  # rows of pixels in one of RISE's batched steps


def importance_ranks(
    maps: Tensor,
    size: tuple[int, int],
    grid: tuple[int, int],
    *,
    order: Order = "pixel",
    upsample: Upsampling = "bilinear",
    ties: Ties = "raster",
) -> tuple[Tensor, int]:
    """The place [B, H, W] (int32, 0 = most important) of each pixel, and how many places there are.

    By pixel, or by patch: then all pixels of a patch share its place, and there are no ties inside
    it. Equal values follow raster order, or a random order drawn from the seed `ties`, the same for
    every image.
    """
    if order not in get_args(Order):
        raise BadOption("order", order, f"one of {', '.join(get_args(Order))}")
    values = to_pixels(maps, size, upsample) if order == "pixel" else to_grid(maps, size, grid)
    count = values[0].numel()
    first = _tie_order(count, ties).to(values.device)  # [P]: who goes first among equals
    places = first[
        (-values.flatten(1)[:, first]).argsort(dim=1, stable=True)
    ]  # [B, P]: the pixel at each place
    index = torch.arange(count, dtype=torch.int32, device=values.device)
    ranks = torch.empty_like(places, dtype=torch.int32).scatter_(
        1, places, index.expand(len(values), -1)
    )
    return spread_out(ranks.view_as(values), size), count


def thresholds(
    count: int, size: tuple[int, int], grid: tuple[int, int], steps: Steps = "rise"
) -> Tensor:
    """How many of `count` places are taken after each step, [n + 1], from 0 to all.

    `rise`: as many as cover 8 rows of pixels (28 steps at 224 px); `patch`: as many as cover one
    patch; the last step may be short. A number: that many steps, as even as whole places allow.
    """
    if isinstance(steps, int):
        if not 2 <= steps <= count:
            raise BadOption("steps", steps, f"2 to {count} steps, or one of rise, patch")
        return torch.linspace(0, count, steps + 1, dtype=torch.float64).round().long()
    if steps not in ("rise", "patch"):
        raise BadOption("steps", steps, "rise, patch or a number of steps")
    share = (
        min(1.0, RISE_ROWS / size[0]) if steps == "rise" else 1 / (grid[0] * grid[1])
    )  # of the picture
    each = max(1, round(share * count))
    return (torch.arange(math.ceil(count / each) + 1) * each).clamp(max=count)


def _tie_order(count: int, ties: Ties) -> Tensor:
    if ties == "raster":
        return torch.arange(count)
    if not isinstance(ties, int):
        raise BadOption("ties", ties, "raster, or a seed")
    return torch.randperm(count, generator=torch.Generator().manual_seed(ties))
