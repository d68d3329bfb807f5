"""From maps to the pixels that metrics compare: upsampling, ranks, the order of pixels, blur.

What insertion starts from is the picture, blurred:
rise       RISE's 11 x 11 kernel (Petsiuk et al. 2018): a point filtered with sigma 5 inside an
           11 x 11 window whose borders reflect. The mass folds back, so it is nearly a box: 0.0077
           to 0.0088. Zeros (the mean colour) beyond the edge of the normalised picture.
gaussian   the truncated Gaussian of the same size and sigma: 0.0044 to 0.0120. The picture is
           reflected at its edge.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.errors import BadOption
from seecause.models.layout import pixel_cells

Upsampling = Literal["bilinear", "nearest", "bicubic"]
Order = Literal["pixel", "patch"]
Steps = Literal["rise", "patch"] | int
Ties = Literal["raster"] | int
Blur = Literal["rise", "gaussian"]

RISE_ROWS = 8  # rows of pixels in one of RISE's batched steps
WINDOW, SIGMA = 11, 5.0  # of both blurs


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
        pixel_cells(side, cells, patches.device)
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
    """Maps in float64, those of a film [B, t, gh, gw] one below the other, or what is wrong with
    them: NaN has no rank."""
    maps = maps.flatten(1, 2) if maps.ndim == 4 else maps
    if maps.ndim != 3 or len(maps) == 0:
        raise BadOption(
            "maps", list(maps.shape), "one map for each image, [B, gh, gw] or [B, H, W]"
        )
    if not torch.isfinite(maps).all():
        raise BadOption("maps", "NaN or infinity", "finite values")
    return maps.detach().double()


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


def blurred(images: Tensor, blur: Blur = "rise") -> Tensor:
    """Normalised images [B, C, H, W], blurred in float32 or better, in their own dtype."""
    if blur not in get_args(Blur):
        raise BadOption("blur", blur, f"one of {', '.join(get_args(Blur))}")
    wide = images if images.dtype == torch.float64 else images.float()
    return (rise_blur if blur == "rise" else gaussian_blur)(wide).to(images.dtype)


def rise_kernel() -> Tensor:
    """[11, 11], float64; sums to one."""
    from scipy.ndimage import gaussian_filter

    point = np.zeros((WINDOW, WINDOW))
    point[WINDOW // 2, WINDOW // 2] = 1
    return torch.from_numpy(gaussian_filter(point, SIGMA, mode="reflect"))


def rise_blur(images: Tensor) -> Tensor:
    """Each channel of [B, C, H, W] with RISE's kernel."""
    channels = images.shape[1]
    kernel = rise_kernel().to(images).expand(channels, 1, -1, -1)
    return F.conv2d(images, kernel, padding=WINDOW // 2, groups=channels)


def gaussian_blur(images: Tensor) -> Tensor:
    """Each channel of [B, C, H, W] with a truncated Gaussian."""
    from torchvision.transforms.functional import gaussian_blur as truncated_gaussian

    return truncated_gaussian(images, [WINDOW, WINDOW], [SIGMA, SIGMA])
