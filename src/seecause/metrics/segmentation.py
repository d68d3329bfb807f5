"""Is a mask where the object is?

    IoU = |mask and object| / |mask or object|
Of each image, or of a whole dataset: `Overlap` counts pixels over all images first, so large
objects weigh more. The foreground mIoU of PDiscoFormer and iFAM is the latter, of their part maps
(`foreground`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.data.dataset import IGNORE
from seecause.errors import BadOption


@dataclass(frozen=True)
class Overlap:
    """Pixels of mask and object, over any number of images; add those of several batches."""

    both: int = 0
    either: int = 0

    def __add__(self, other: Overlap) -> Overlap:
        return Overlap(self.both + other.both, self.either + other.either)

    @property
    def iou(self) -> float:
        """NaN where there is neither mask nor object."""
        return self.both / self.either if self.either else math.nan


def overlap(masks: Tensor, truth: Tensor, *, ignore: int | None = IGNORE) -> Overlap:
    """Masks [B, H, W] against objects [B, H, W] (bool, or integers: 1 object, 0 background,
    `ignore` neither), counted over all images."""
    both, either = _counts(masks, truth, ignore)
    return Overlap(int(both.sum()), int(either.sum()))


def iou(masks: Tensor, truth: Tensor, *, ignore: int | None = IGNORE) -> Tensor:
    """[B] float64: IoU of each image, NaN where there is neither mask nor object."""
    both, either = _counts(masks, truth, ignore)
    return both.double() / either


def foreground(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, H, W] bool: where a part wins over the background, which is the last channel of the part
    maps [B, K + 1, h, w].

    Maps are upsampled first, bilinearly with corners aligned, as in the public code.
    """
    return part_labels(maps, size) != maps.shape[1] - 1


def part_labels(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, H, W] int64: the channel that wins at each pixel."""
    if maps.ndim != 4 or maps.shape[1] < 2:
        raise BadOption(
            "maps",
            list(maps.shape),
            "[B, K + 1, h, w] with at least one part and the background last",
        )
    return F.interpolate(maps.detach(), size, mode="bilinear", align_corners=True).argmax(dim=1)


def box_mask(box: tuple[float, float, float, float], size: tuple[int, int]) -> Tensor:
    """[H, W] bool: the pixels whose centre lies in a box x, y, width, height. A box is a coarse
    stand-in for an object."""
    x, y, width, height = box
    rows, columns = (torch.arange(side, dtype=torch.float64) + 0.5 for side in size)
    return ((rows >= y) & (rows < y + height))[:, None] & ((columns >= x) & (columns < x + width))


def _counts(masks: Tensor, truth: Tensor, ignore: int | None) -> tuple[Tensor, Tensor]:
    """Pixels [B] in both and in either, ignored ones in neither."""
    if masks.ndim != 3 or masks.shape != truth.shape:
        raise BadOption(
            "masks", list(masks.shape), f"[B, H, W] like the objects, {list(truth.shape)}"
        )
    truth = truth.to(masks.device)
    counted = (
        torch.ones_like(truth, dtype=torch.bool)
        if ignore is None or truth.dtype == torch.bool
        else truth != ignore
    )
    mask, wanted = (masks != 0) & counted, (truth != 0) & counted
    return (mask & wanted).sum(dim=(1, 2)), (mask | wanted).sum(dim=(1, 2))
