"""Parts move with the picture: the maps of a turned, shifted, scaled image, brought back, are those
of the image itself.

One affine map for the whole batch, drawn from (seed, step): angle in +-90 degrees, shift of up to
11 % of each side in whole pixels, scale 0.8-1.4.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import affine


@dataclass(frozen=True)
class Affine:
    """Turn by `angle` degrees and scale about the centre, then shift by (x, y) pixels."""

    angle: float
    shift: tuple[int, int]
    scale: float

    @classmethod
    def draw(cls, seed: int, step: int, size: tuple[int, int]) -> Affine:
        """The map of one step, for images of (height, width)."""
        draw = random.Random(f"{seed} {step}")
        angle, (down, across), scale = (
            draw.uniform(-90, 90),
            (round(draw.uniform(-0.11, 0.11) * side) for side in size),
            draw.uniform(0.8, 1.4),
        )
        return cls(angle, (across, down), scale)

    def warp(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W], bilinear; what comes from outside is 0, the mean colour."""
        return affine(
            images,
            self.angle,
            list(self.shift),
            self.scale,
            [0.0, 0.0],
            interpolation=InterpolationMode.BILINEAR,
        )

    def unwarp(self, maps: Tensor, size: tuple[int, int]) -> Tensor:
        """Maps [B, K, gh, gw] of a warped image of `size` pixels, brought back in two
        nearest-neighbour steps."""
        across, down = (
            -s * cells / side
            for s, cells, side in zip(
                self.shift, (maps.shape[3], maps.shape[2]), (size[1], size[0]), strict=True
            )
        )
        moved = affine(
            maps, 0.0, [across, down], 1.0, [0.0, 0.0], interpolation=InterpolationMode.NEAREST
        )  # type: ignore[list-item]
        return affine(
            moved,
            -self.angle,
            [0, 0],
            1 / self.scale,
            [0.0, 0.0],
            interpolation=InterpolationMode.NEAREST,
        )


def equivariance_loss(
    maps: Tensor, warped_maps: Tensor, moved: Affine, size: tuple[int, int]
) -> Tensor:
    """1 - the mean cosine of foreground maps [B, K + 1, gh, gw] and those of the warped images of
    `size`, brought back. Gradient flows through both."""
    back = moved.unwarp(warped_maps[:, :-1], size)
    return 1 - torch.mean(F.cosine_similarity(maps[:, :-1].flatten(2), back.flatten(2), dim=2))
