"""Drawing the creature: strokes painted back to front, each with its own outline and a little
light.

Every pixel is a palette colour times a brightness, so its saturation is that of the palette.
Backgrounds are muted, creatures vivid: the two never share a colour. Edges are hard at every part
boundary: removing a part leaves all other pixels exactly as they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seecause.critters import anatomy
from seecause.critters.anatomy import DECALS, PARTS, PETALS
from seecause.critters.latents import Latents
from seecause.critters.shapes import Frame, frame, petal_depth, soft_union

_BEHIND = ("tail", "feet", "crest")  # painted before the body; the wings come last, on top of it
_OUTLINE = 0.055  # creature units: 1.5 pixels at 96
_BODY = 1  # stroke numbers: 0 nothing, 1 body, then the face, then PETALS for each part
_FACE = 2
_FIRST_PART = _FACE + len(DECALS)


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
        self.depth = torch.zeros(batch, side, side, device=device)

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
    petals = anatomy.part_petals(latents.seed.device)[index - 1][
        latents.variants[:, index - 1]
    ]  # [B, K, 9]
    depth = petal_depth(petals, where, present=latents.present[:, index])  # [B, K, S, S]
    for k in range(PETALS):
        canvas.paint(depth[:, k], _FIRST_PART + (index - 1) * PETALS + k)


def _paint_body(canvas: _Canvas, latents: Latents, where: Frame) -> None:
    device = latents.seed.device
    there = latents.present[:, 0]
    torso, head = petal_depth(anatomy.body_petals(device), where, present=there).unbind(1)
    canvas.paint(soft_union(torso, head, blend=0.16), _BODY)
    face = petal_depth(anatomy.face_petals(device), where, present=there)  # [B, F, S, S]
    for k, decal in enumerate(DECALS):
        canvas.paint(face[:, k], _FACE + k, decal=decal)


def _palette(latents: Latents) -> Tensor:
    """[B, 3, strokes]: the colour of every stroke, times its tone."""
    device, batch = latents.seed.device, len(latents)
    body_tone, part_tone = latents.tone[:, :1, None], latents.tone[:, 1:, None, None]
    nothing = torch.zeros(batch, 1, 3, device=device)
    body = anatomy.coat_colours(device)[latents.coat][:, None] * (0.92 * body_tone)  # [B, 1, 3]
    face = anatomy.face_colours(device)[latents.coat] * body_tone  # [B, F, 3]
    which = torch.arange(len(PARTS) - 1, device=device)
    colour = anatomy.part_colours(device)[which, latents.variants][:, :, None]  # [B, P, 1, 3]
    tones = anatomy.part_petals(device)[which, latents.variants][..., 8:]  # [B, P, K, 1]
    parts = (colour * tones * part_tone).flatten(1, 2)  # [B, P * K, 3]
    return torch.cat([nothing, body, face, parts], dim=1).transpose(1, 2)


def _part_of_stroke(device: torch.device) -> Tensor:
    """[strokes] uint8: the part map's number for every stroke."""
    stroke = torch.arange(_FIRST_PART + (len(PARTS) - 1) * PETALS, device=device)
    part = 2 + (stroke - _FIRST_PART) // PETALS
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
