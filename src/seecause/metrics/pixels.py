"""From maps to the pixels that metrics compare (upsampling, ranks, the order of pixels, blur), and
the model's scores for changed images, which every metric of faithfulness needs.

Insertion starts from the blurred image. The blur is RISE's (Petsiuk et al. 2018): a point filtered
with sigma 5 inside an 11 x 11 window whose borders reflect. The mass folds back, so that it is
nearly a box filter: 0.0077 to 0.0088. Beyond the edge of the normalised image are zeros, the mean
colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.data.dataset import Size
from seecause.engine.chunks import fit, in_chunks, plain_logits, shared_run
from seecause.errors import BadOption
from seecause.models.base import ImageModel
from seecause.models.block import Named, spread_out, wide
from seecause.target import Score, Spec, Target, parse

Order = Literal["pixel", "patch"]
Steps = Literal["rise", "patch"] | int
Fill = float | Literal["mean"]

RISE_ROWS = 8  # rows of pixels per step of RISE's code
WINDOW, SIGMA = 11, 5.0  # window and deviation of the blur in pixels


def to_pixels(maps: Tensor, size: Size) -> Tensor:
    """Maps [B, gh, gw] enlarged bilinearly to [B, H, W], in float64; maps that already have `size`
    keep every value.

    Unlike `F.interpolate`, values between equal values are equal to the last bit: rounding would
    break the ties of flat regions.
    """
    maps = checked(maps)
    if tuple(maps.shape[1:]) == tuple(size):
        return maps
    for axis, side in enumerate(size, start=1):
        cells = maps.shape[axis]
        centres = torch.arange(side, dtype=maps.dtype, device=maps.device) + 0.5
        at = (centres * cells / side - 0.5).clamp(0, cells - 1)
        low = at.long()
        weight = (at - low).view(-1, *[1] * (2 - axis))
        above = maps.index_select(axis, (low + 1).clamp(max=cells - 1))
        maps = maps.index_select(axis, low).lerp(above, weight)
    return maps


def to_grid(maps: Tensor, size: Size, grid: Size) -> Tensor:
    """Maps [B, h, w] by patch, in float64: a pixel map [B, H, W] is averaged over `grid`; a coarser
    map keeps its own grid."""
    maps = checked(maps)
    return F.adaptive_avg_pool2d(maps, grid) if tuple(maps.shape[1:]) == tuple(size) else maps


def checked(maps: Tensor) -> Tensor:
    """Maps in float64; those of a film [B, t, gh, gw] one below the other.

    Raises:
        BadOption: If there is not one map for each image, or a value is not finite: NaN has no
            rank.
    """
    maps = maps.flatten(1, 2) if maps.ndim == 4 else maps
    if maps.ndim != 3 or len(maps) == 0:
        expected = "one map for each image, [B, gh, gw] or [B, H, W]"
        raise BadOption("maps", list(maps.shape), expected)
    if not torch.isfinite(maps).all():
        raise BadOption("maps", "NaN or infinity", "finite values")
    return maps.detach().double()


def importance_ranks(
    maps: Tensor, size: Size, grid: Size, order: Order = "pixel"
) -> tuple[Tensor, int]:
    """The rank [B, H, W] (int32, 0 = most important) of each pixel, and the number of ranks.

    Ranks are by pixel, or by patch: then all pixels of a patch share its rank. Equal values follow
    raster order.
    """
    values = to_pixels(maps, size) if order == "pixel" else to_grid(maps, size, grid)
    places = (-values.flatten(1)).argsort(dim=1, stable=True)  # [B, P]: the pixel at each rank
    count = places.shape[1]
    index = torch.arange(count, dtype=torch.int32, device=values.device).expand_as(places)
    ranks = torch.empty_like(places, dtype=torch.int32).scatter_(1, places, index)
    return spread_out(ranks.view_as(values), size), count


def thresholds(count: int, size: Size, grid: Size, steps: Steps = "rise") -> Tensor:
    """The number of `count` ranks that are taken after each step, [n + 1], from 0 to all.

    `rise`: as many as cover 8 rows of pixels (28 steps at 224 px); `patch`: as many as cover one
    patch; the last step may be short. A number: that many steps, as even as possible.
    """
    if isinstance(steps, int):
        if not 2 <= steps <= count:
            raise BadOption("steps", steps, f"2 to {count} steps, or one of rise, patch")
        return torch.linspace(0, count, steps + 1, dtype=torch.float64).round().long()
    share = min(1.0, RISE_ROWS / size[0]) if steps == "rise" else 1 / (grid[0] * grid[1])
    each = max(1, round(share * count))
    return (torch.arange(math.ceil(count / each) + 1) * each).clamp(max=count)


def blurred(images: Tensor) -> Tensor:
    """Normalised images [B, C, H, W], blurred in float32 or better, in their own dtype."""
    from scipy.ndimage import gaussian_filter

    point = np.zeros((WINDOW, WINDOW))
    point[WINDOW // 2, WINDOW // 2] = 1
    kernel = torch.from_numpy(gaussian_filter(point, SIGMA, mode="reflect"))  # sums to one
    channels = images.shape[1]
    weight = kernel.to(wide(images)).expand(channels, 1, -1, -1)
    soft = F.conv2d(wide(images), weight, padding=WINDOW // 2, groups=channels)
    return soft.to(images.dtype)


@dataclass(frozen=True, eq=False)
class ImageScorer:
    """A model, its images [B, 3, H, W] and the bound target; `plain` [B] float64 is the score of
    the unchanged images."""

    model: ImageModel
    images: Tensor
    target: Target
    score: Score
    plain: Tensor
    grid: Size
    chunk: int

    @property
    def size(self) -> Size:
        return self.images.shape[-2], self.images.shape[-1]

    def one_each(self, maps: Tensor) -> Tensor:
        """The maps on the device of the images."""
        if len(maps) != len(self.images):
            expected = f"one map for each of the {len(self.images)} images"
            raise BadOption("maps", list(maps.shape), expected)
        return maps.to(self.images.device)

    def cells(self, maps: Tensor) -> Tensor:
        """Maps by patch [B, gh, gw], float64."""
        return to_grid(self.one_each(maps), self.size, self.grid)

    def ranks(self, maps: Tensor, order: Order) -> tuple[Tensor, int]:
        """`importance_ranks` of one map for each image."""
        return importance_ranks(self.one_each(maps), self.size, self.grid, order)

    @torch.no_grad()
    def each(self, variants: int, changed: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Scores [B, variants], float64. `changed(image, variant)` makes a batch [m, 3, H, W] from
        two index vectors [m]."""

        def run_chunk(a: int, b: int) -> Tensor:
            item = torch.arange(a, b, device=self.images.device)  # of B * variants
            image, variant = item // variants, item % variants
            logits = self.model(changed(image, variant))
            return self.target.take(image).score(logits, self.score)

        total = len(self.images) * variants
        parts = in_chunks(run_chunk, total, self.chunk, what="changed images")
        scores = torch.cat([self.images.new_empty(0), *parts])
        return scores.double().cpu().view(len(self.images), variants)

    def same(self, what: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Scores [B, 1], float64, of images that do not depend on a map: `make()` is [B, 3, H, W].
        All maps of the same images share their runs (`chunks.once`)."""
        logits = shared_run(self.model, self.images, what, lambda: plain_logits(self.model, make()))
        return self.target.score(logits, self.score).double().cpu()[:, None]

    def mixed(self, start: Tensor, goal: Tensor, places: Tensor, taken: Tensor) -> Tensor:
        """Scores [B, n] of images between `start` and `goal` [B, 3, H, W]: pixels at the first
        `taken` [n] of their ranks [B, H, W] are the goal's."""
        taken = taken.to(places.device)

        def changed(image: Tensor, step: Tensor) -> Tensor:
            reached = places[image] < taken[step][:, None, None]  # [m, H, W]
            return torch.where(reached[:, None], goal[image], start[image])

        return self.each(len(taken), changed)

    def drops(self, gone: Tensor, fill: Fill = 0.0) -> Tensor:
        """How much the score falls, [B, M], when patches `gone` [1|B, M, gh, gw] are `fill`."""
        goal, gone = filled(self.images, fill), gone.to(self.images.device)

        def changed(image: Tensor, variant: Tensor) -> Tensor:
            patches = gone[image if len(gone) > 1 else 0, variant]
            pixels = spread_out(patches, self.size)[:, None]
            return torch.where(pixels, goal[image], self.images[image])

        return self.plain[:, None] - self.each(gone.shape[1], changed)

    def protocol(self, metric: str, **options: Any) -> Named:
        record = self.target.record(self.model)
        return {"metric": metric, **options, "score": self.score, "target": record}


@torch.no_grad()
def image_scorer(
    model: ImageModel, images: Tensor, target: Spec = None, *, score: Score = "prob"
) -> ImageScorer:
    """Run the images once and bind the target; the predicted class if none is given."""
    images = images.to(model.device, model.dtype)
    layout = model.check(images)
    chunk = fit(1 << 30, model.forward_bytes(layout), images.device)
    logits = plain_logits(model, images)
    bound = parse(model, target, len(images)).bind(logits)
    plain = bound.score(logits, score).double().cpu()
    return ImageScorer(model, images, bound, score, plain, layout.grid, chunk)


def filled(images: Tensor, fill: Fill) -> Tensor:
    """The fill of removed pixels, [B, 3, H, W]: a constant in normalised units (0 is
    the mean colour of the model's training data), or each image's own mean colour."""
    if fill == "mean":
        return images.mean(dim=(-2, -1), keepdim=True).expand_as(images)
    return torch.full_like(images[:1], fill).expand_as(images)


def bound_spec(target: Target, spec: Spec) -> Spec:
    """The target for maps of changed images: the class predicted for the unchanged image, never a
    new prediction."""
    return target.classes if spec is None else spec
