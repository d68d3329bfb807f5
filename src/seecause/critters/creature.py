"""Drawing the creature with petals, the one stroke that every creature is made of.

A petal runs from one point to another with its own radius at both ends, a bulge in between and a
bend. Balls, ears, horns, feathers and leaves are all petals, so a batch of different creatures is
one tensor expression over a table of numbers. Petals are painted back to front, each with its own
outline and a little light.

Every pixel is a palette colour times a brightness, so its saturation is that of the palette.
Backgrounds are muted, creatures vivid: the two never share a colour. Edges are hard at every part
boundary: removing a part leaves all other pixels exactly as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from seecause._random import sine
from seecause.critters.latents import PARTS, TABLE, VARIANT_COLOURS, VARIANTS, Latents

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
    pixels = torch.arange(side, device=centre.device, dtype=centre.dtype) + 0.5
    offset = corner[..., None] + pixels - centre[..., None]  # [B, 2, S]

    per_pixel = 2 / (latents.extent * size)  # [B] creature units
    sin, cos = sine(latents.tilt), sine(latents.tilt + 0.25)
    mirror = 1 - 2 * latents.flip.to(cos.dtype)
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
    # [B, K, S, S], 0 at start, 1 at end
    along = _affine(ux / length, uy / length, -(ux * x0 + uy * y0) / length, where)
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


_STROKES = [[TABLE[part][variant]["petals"] for variant in VARIANTS[part]] for part in PARTS[1:]]
_PETALS = max(len(petals) for variants in _STROKES for petals in variants)
# a petal that covers nothing, to fill up short lists
_NEVER = [0.0, 0.0, 1.0, 0.0, -_FAR, -_FAR, 0.0, 0.0, 0.0]
# face strokes without an outline of their own
_DECALS = tuple(feature["decal"] for feature in TABLE["face"].values())


class Anatomy(NamedTuple):
    """The creatures as numbers, float32 whatever the default dtype of the process is."""

    part_petals: Tensor  # [P, V, K, 9] strokes of every part variant
    part_colours: Tensor  # [P, V, 3]
    body_petals: Tensor  # [2, 9] torso and head
    coat_colours: Tensor  # [coats, 3] of bodies
    face_petals: Tensor  # [F, 9] painted on the body, first to last
    face_colours: Tensor  # [coats, F, 3]; some take the colour of the coat


@cache
def anatomy(device: torch.device) -> Anatomy:
    """The tables of `anatomy.toml`, once for each device."""
    colours, coats, face = TABLE["colours"], list(TABLE["coats"].values()), TABLE["face"].values()
    strokes = [feature["colour"] for feature in face]
    tables = (
        [[petals + [_NEVER] * (_PETALS - len(petals)) for petals in part] for part in _STROKES],
        [[colours[colour] for colour in VARIANT_COLOURS[part]] for part in PARTS[1:]],
        list(TABLE["body"].values()),
        coats,
        [feature["petal"] for feature in face],
        [[{"coat": coat, **TABLE["face_colours"]}[name] for name in strokes] for coat in coats],
    )
    return Anatomy(*(torch.tensor(rows, device=device, dtype=torch.float32) for rows in tables))


_BEHIND = ("tail", "feet", "crest")  # painted before the body; the wings come last, on top of it
_OUTLINE = 0.055  # creature units: 1.5 pixels at 96
_BODY = 1  # stroke numbers: 0 nothing, 1 body, then the face, then _PETALS for each part
_FACE = 2
_FIRST_PART = _FACE + len(_DECALS)


@dataclass(frozen=True)
class Layer:
    """The creature alone, in its window of the picture."""

    colour: Tensor  # [B, 3, S, S]
    parts: Tensor  # [B, S, S] uint8, 0 where nothing is drawn
    top: Tensor  # [B]
    left: Tensor  # [B]


class _Canvas:
    """Number and depth of the topmost stroke at every pixel."""

    def __init__(self, batch: int, side: int, device: torch.device) -> None:
        self.stroke = torch.zeros(batch, side, side, dtype=torch.int64, device=device)
        self.depth = torch.zeros(batch, side, side, device=device, dtype=torch.float32)

    def paint(self, depth: Tensor, stroke: int, *, decal: bool = False) -> None:
        """Cover the pixels where depth [B, S, S] is positive; a decal keeps the depth, hence the
        shading, of what it lies on."""
        covered = depth > 0
        self.stroke.masked_fill_(covered, stroke)
        if not decal:
            self.depth = torch.where(covered, depth, self.depth)


def draw(latents: Latents, *, size: int, style: str) -> Layer:
    """All creatures of a batch, each in its own window."""
    where = frame(latents, size)
    batch, side = where.rows.shape
    canvas = _Canvas(batch, side, where.rows.device)
    for name in _BEHIND:
        _paint_part(canvas, latents, name, where)
    _paint_body(canvas, latents, where)
    _paint_part(canvas, latents, "wings", where)

    strokes = canvas.stroke.flatten(1)[:, None].expand(-1, 3, -1)
    colour = _palette(latents).gather(2, strokes).view(batch, 3, side, side)
    parts = _part_of_stroke(colour.device)[canvas.stroke]
    return Layer(_shaded(colour, canvas.depth, where, style), parts, where.top, where.left)


def _paint_part(canvas: _Canvas, latents: Latents, name: str, where: Frame) -> None:
    index = PARTS.index(name)
    strokes = anatomy(latents.seed.device).part_petals[index - 1]
    petals = strokes[latents.variants[:, index - 1]]  # [B, K, 9]
    depth = petal_depth(petals, where, present=latents.present[:, index])  # [B, K, S, S]
    for k in range(_PETALS):
        canvas.paint(depth[:, k], _FIRST_PART + (index - 1) * _PETALS + k)


def _paint_body(canvas: _Canvas, latents: Latents, where: Frame) -> None:
    shapes, there = anatomy(latents.seed.device), latents.present[:, 0]
    torso, head = petal_depth(shapes.body_petals, where, present=there).unbind(1)
    canvas.paint(soft_union(torso, head, blend=0.16), _BODY)
    face = petal_depth(shapes.face_petals, where, present=there)  # [B, F, S, S]
    for k, decal in enumerate(_DECALS):
        canvas.paint(face[:, k], _FACE + k, decal=decal)


def _palette(latents: Latents) -> Tensor:
    """[B, 3, strokes]: the colour of every stroke, times its tone."""
    device, batch = latents.seed.device, len(latents)
    shapes = anatomy(device)
    body_tone, part_tone = latents.tone[:, :1, None], latents.tone[:, 1:, None, None]
    nothing = latents.tone.new_zeros(batch, 1, 3)
    body = shapes.coat_colours[latents.coat][:, None] * (0.92 * body_tone)  # [B, 1, 3]
    face = shapes.face_colours[latents.coat] * body_tone  # [B, F, 3]
    which = torch.arange(len(PARTS) - 1, device=device)
    colour = shapes.part_colours[which, latents.variants][:, :, None]  # [B, P, 1, 3]
    tones = shapes.part_petals[which, latents.variants][..., 8:]  # [B, P, K, 1]
    parts = (colour * tones * part_tone).flatten(1, 2)  # [B, P * K, 3]
    return torch.cat([nothing, body, face, parts], dim=1).transpose(1, 2)


def _part_of_stroke(device: torch.device) -> Tensor:
    """[strokes] uint8: the part map's number for every stroke."""
    stroke = torch.arange(_FIRST_PART + (len(PARTS) - 1) * _PETALS, device=device)
    part = 2 + (stroke - _FIRST_PART) // _PETALS
    return torch.where(stroke < _FIRST_PART, (stroke > 0).to(part.dtype), part).to(torch.uint8)


def _shaded(colour: Tensor, depth: Tensor, where: Frame, style: str) -> Tensor:
    """Colour [B, 3, S, S] with pen lines and light from the depth [B, S, S] under the edge of each
    stroke."""
    line = (depth * (1 / _OUTLINE)).clamp_(0, 1)  # 0 on the line, 1 inside
    if style == "flat":
        return colour
    if style == "sketch":  # ink and wash: dark pen, colours thinned with white
        return (0.4 + 0.6 * colour) * (0.2 + 0.8 * line)[:, None]
    rounded = (depth * (1 / 0.18)).clamp_(0, 1) * 0.12 + 0.88
    sun = 0.96 - 0.04 * where.height()  # from above
    light = (line * 0.65 + 0.35) * rounded * sun
    return colour * light[:, None]
