"""Petals: the one stroke every creature is drawn with.

A petal runs from one point to another with its own radius at both ends, a bulge in between and a
bend. Balls, ears, horns, feathers and leaves are all petals, so a batch of different creatures is
one tensor expression over a table of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seecause._random import sine
from seecause.critters.latents import Latents

# places are rounded to 1/8 pixel: exact in float32, so whole-pixel moves change no bit of the
# creature
PIXEL_STEPS = 8
WINDOW = 0.7  # side of the square in which a creature is drawn, as a share of the picture's side
_FAR = 9.0  # creature units, beyond any window


@dataclass(frozen=True)
class Frame:
    """Where each creature sits: a square window of pixels, and the creature's own coordinates in
    it.

    Creature x = across[0] * column + across[1] * row, and y likewise by `down`; rows and columns
    count from the creature's centre.
    """

    top: Tensor  # [B] int64, first row of the window in the picture
    left: Tensor  # [B] int64
    rows: Tensor  # [B, S] float32, pixel centres relative to the creature's centre
    columns: Tensor  # [B, S]
    across: tuple[Tensor, Tensor]  # [B] each: x per column, x per row
    down: tuple[Tensor, Tensor]  # [B] each: y per column, y per row

    def height(self) -> Tensor:
        """Creature y of every pixel [B, S, S], growing downwards."""
        return (self.down[0][:, None] * self.columns)[:, None, :] + (
            self.down[1][:, None] * self.rows
        )[:, :, None]


def frame(latents: Latents, size: int) -> Frame:
    """The window of each creature in a picture of `size` pixels a side."""
    side = int(WINDOW * size)
    centre = torch.round(latents.centre * (size * PIXEL_STEPS)) / PIXEL_STEPS  # [B, 2] pixels
    corner = torch.floor(centre - side / 2).clamp(0, size - side)
    pixels = torch.arange(side, device=centre.device) + 0.5
    offset = corner[..., None] + pixels - centre[..., None]  # [B, 2, S]

    per_pixel = 2 / (latents.extent * size)  # [B] creature units
    sin, cos = sine(latents.tilt), sine(latents.tilt + 0.25)
    mirror = torch.where(latents.flip, -1.0, 1.0)
    return Frame(
        top=corner[:, 0].to(torch.int64),
        left=corner[:, 1].to(torch.int64),
        rows=offset[:, 0],
        columns=offset[:, 1],
        across=(mirror * cos * per_pixel, sin * per_pixel),
        down=(-mirror * sin * per_pixel, cos * per_pixel),
    )


def petal_depth(petals: Tensor, where: Frame, *, present: Tensor) -> Tensor:
    """How deep each pixel lies inside each petal: [B, K, 9] or [K, 9] strokes -> [B, K, S, S], in
    creature units.

    Positive inside; negative everywhere for rows that are not `present` [B].

    With t the place along the stroke clamped to [0, 1] and s = 4 t (1 - t):
        depth = r0 + (r1 - r0) t + bulge s - | p - point(t) - bend s * normal |
    """
    x0, y0, x1, y1, start, end, bulge, bend = petals.expand(len(present), -1, -1)[..., :8].unbind(
        -1
    )  # [B, K]
    start = torch.where(present[:, None], start, -_FAR)
    end = torch.where(present[:, None], end, -_FAR)
    dx, dy = x1 - x0, y1 - y0
    length = torch.sqrt(dx * dx + dy * dy)
    ux, uy = dx / length, dy / length
    along = _affine(
        ux / length, uy / length, -(ux * x0 + uy * y0) / length, where
    )  # [B, K, S, S], 0 at start, 1 at end
    aside = _affine(-uy, ux, uy * x0 - ux * y0, where)

    t = along.clamp(0, 1)
    s = (1 - t).mul_(t).mul_(4)
    overshoot = along.sub_(t).mul_(_wide(length))
    aside = aside.sub_(s * _wide(bend))
    away = overshoot.mul_(overshoot).add_(aside.mul_(aside)).sqrt_()
    radius = t.mul_(_wide(end - start)).add_(_wide(start)).add_(s.mul_(_wide(bulge)))
    return radius.sub_(away)


def soft_union(a: Tensor, b: Tensor, *, blend: float) -> Tensor:
    """The depth of two shapes melted into one; `blend` is the width of the seam."""
    mix = (0.5 + (a - b) * (0.5 / blend)).clamp(0, 1)
    return b + (a - b) * mix + mix * (1 - mix) * blend


def _affine(px: Tensor, py: Tensor, constant: Tensor, where: Frame) -> Tensor:
    """px * x + py * y + constant on the window: [B, K] each -> [B, K, S, S]. Separable, so only one
    full-size operation."""
    per_column = px * where.across[0][:, None] + py * where.down[0][:, None]  # [B, K]
    per_row = px * where.across[1][:, None] + py * where.down[1][:, None]
    columns = per_column[..., None] * where.columns[:, None] + constant[..., None]  # [B, K, S]
    rows = per_row[..., None] * where.rows[:, None]
    return columns[..., None, :] + rows[..., :, None]


def _wide(x: Tensor) -> Tensor:
    return x[..., None, None]
