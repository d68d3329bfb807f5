"""From patch maps to the pixels that metrics compare."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.errors import BadOption

Upsampling = Literal["bilinear", "nearest", "bicubic"]


def to_pixels(maps: Tensor, size: tuple[int, int], mode: Upsampling = "bilinear") -> Tensor:
    """Maps [B, gh, gw] -> [B, H, W] in float64, so that resampling makes no ties; maps that already
    have `size` keep every value."""
    if mode not in get_args(Upsampling):
        raise BadOption("upsample", mode, f"one of {', '.join(get_args(Upsampling))}")
    maps = checked(maps)
    if tuple(maps.shape[1:]) == tuple(size):
        return maps
    if mode == "bilinear":
        return _bilinear(maps, size)
    return F.interpolate(maps[:, None], size=size, mode=mode)[:, 0]


def to_grid(maps: Tensor, size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Maps [B, h, w] by patch, in float64: a pixel map [B, H, W] is averaged over `grid`; a coarser
    one keeps its own grid."""
    maps = checked(maps)
    return F.adaptive_avg_pool2d(maps, grid) if tuple(maps.shape[1:]) == tuple(size) else maps


def patch_centres(grid: tuple[int, int], size: tuple[int, int], device: torch.device) -> Tensor:
    """[H, W] bool: the middle pixel of every patch of the grid."""
    marks = torch.zeros(size, dtype=torch.bool, device=device)
    rows, columns = (
        ((torch.arange(cells, device=device) + 0.5) * side / cells).long()
        for cells, side in zip(grid, size, strict=True)
    )
    marks[rows[:, None], columns] = True
    return marks


def spread_out(patches: Tensor, size: tuple[int, int]) -> Tensor:
    """Values of patches [m, gh, gw] at their pixels [m, H, W]."""
    rows, columns = (
        torch.arange(side, device=patches.device) * cells // side
        for cells, side in zip(patches.shape[1:], size, strict=True)
    )
    return patches[:, rows[:, None], columns]


def _bilinear(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """`F.interpolate(mode="bilinear")` that gives equals between equals, to the last bit: its
    rounding would break ties of flat regions."""
    for axis, side in enumerate(size, start=1):
        cells = maps.shape[axis]
        at = (
            (torch.arange(side, dtype=maps.dtype, device=maps.device) + 0.5) * cells / side - 0.5
        ).clamp(0, cells - 1)
        low = at.long()
        weight = (at - low).view(-1, *[1] * (2 - axis))
        maps = maps.index_select(axis, low).lerp(
            maps.index_select(axis, (low + 1).clamp(max=cells - 1)), weight
        )
    return maps


def checked(maps: Tensor) -> Tensor:
    """Maps in float64, or what is wrong with them: NaN has no rank."""
    if maps.ndim != 3 or len(maps) == 0:
        raise BadOption(
            "maps", list(maps.shape), "one map for each image, [B, gh, gw] or [B, H, W]"
        )
    if not torch.isfinite(maps).all():
        raise BadOption("maps", "NaN or infinity", "finite values")
    return maps.detach().double()
