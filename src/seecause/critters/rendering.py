"""From latents to images, with exact counterfactuals.

`render(latents, do=Do(background=2))` is the same scene on another background: every pixel of the
creature keeps its bits. Other interventions change only the pixels that they
concern.

Creatures are drawn with petals. A petal runs from one point to another with its own radius at both
ends, a bulge in between and a bend. Balls, ears, horns, feathers and leaves are all petals, so a
batch of different creatures is one tensor expression over a table of numbers. Petals are painted
back to front, each with its own outline and a little light. Edges are hard at every part boundary:
removing a part leaves all other pixels exactly as they were.

Backgrounds are four textures, which differ in pattern and in colours. Each is two fields in [0, 1]:
`shade` runs from the dark to the light colour, `accent` paints the third on top. Every pixel of a
creature is a palette colour times a brightness, so its saturation (max - min) / max is that of the
palette; a mix of colours of at most some saturation has at most that. Backgrounds are muted,
creatures vivid: the two never share a colour.

`critters:REGIME[:SPLIT]` is a dataset of these images. It is infinite, so `limit` is its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause._random import lattice, uniform
from seecause.critters.world import (
    BACKGROUNDS,
    CLASSES,
    PARTS,
    REACH,
    SPLITS,
    TABLE,
    VARIANT_COLOURS,
    VARIANTS,
    Latents,
    Regime,
    draw,
    find_regime,
)
from seecause.data.dataset import Names, Sample
from seecause.errors import BadOption, UnknownName, may_stop
from seecause.files import digest

# positions are rounded to 1/8 pixel: exact in float32, so whole-pixel moves change no bit of the
# creature
PIXEL_STEPS = 8
WINDOW = 0.7  # side of the square in which a creature is drawn, as a share of the image's side
_FAR = 9.0  # creature units, beyond any window


@dataclass(frozen=True)
class Frame:
    """The square window of pixels of each creature, and the creature's own coordinates in it.

    Creature x = across[0] * column + across[1] * row, and y likewise by `down`; rows and columns
    count from the creature's centre.
    """

    top: Tensor  # [B] int64, first row of the window in the image
    left: Tensor  # [B] int64
    rows: Tensor  # [B, S] float32, pixel centres relative to the creature's centre
    columns: Tensor  # [B, S]
    across: tuple[Tensor, Tensor]  # [B] each: x per column, x per row
    down: tuple[Tensor, Tensor]  # [B] each: y per column, y per row


def frame(latents: Latents, size: int) -> Frame:
    """The window of each creature in an image of `size` pixels a side."""
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

    With t the position along the stroke clamped to [0, 1] and s = 4 t (1 - t):
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
    overshoot = along.sub_(t).mul_(_pixelwise(length))
    aside = aside.sub_(s * _pixelwise(bend))
    away = overshoot.mul_(overshoot).add_(aside.mul_(aside)).sqrt_()
    radius = t.mul_(_pixelwise(end - start)).add_(_pixelwise(start)).add_(s.mul_(_pixelwise(bulge)))
    return radius.sub_(away)


def _affine(px: Tensor, py: Tensor, constant: Tensor, where: Frame) -> Tensor:
    """px * x + py * y + constant on the window: [B, K] each -> [B, K, S, S]. Separable, so only one
    full-size operation."""
    per_column = px * where.across[0][:, None] + py * where.down[0][:, None]  # [B, K]
    per_row = px * where.across[1][:, None] + py * where.down[1][:, None]
    columns = per_column[..., None] * where.columns[:, None] + constant[..., None]  # [B, K, S]
    rows = per_row[..., None] * where.rows[:, None]
    return columns[..., None, :] + rows[..., :, None]


def _pixelwise(x: Tensor) -> Tensor:
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
    backgrounds: Tensor  # [backgrounds, 3 stops, 3]
    part_of_stroke: Tensor  # [strokes] uint8: the part map's number for every stroke


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
        list(TABLE["backgrounds"].values()),
    )
    numbers = [0, *[1] * (_FIRST_PART - 1)]
    numbers += [2 + part for part in range(len(PARTS) - 1) for _ in range(_PETALS)]
    made = [torch.tensor(rows, device=device, dtype=torch.float32) for rows in tables]
    return Anatomy(*[*made, torch.tensor(numbers, device=device, dtype=torch.uint8)])


_BEHIND = ("tail", "feet", "crest")  # painted before the body; the wings come last, on top of it
_OUTLINE = 0.055  # creature units: 1.5 pixels at 96
_BODY = 1  # stroke numbers: 0 nothing, 1 body, then the face, then _PETALS for each part
_FACE = 2
_FIRST_PART = _FACE + len(_DECALS)


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


def draw_creatures(
    latents: Latents, *, size: int, style: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The creatures of a batch in their windows: colours [B, 3, S, S], parts [B, S, S] (uint8, 0
    where nothing is drawn), and the top and left [B] of the windows."""
    where = frame(latents, size)
    batch, side = where.rows.shape
    canvas = _Canvas(batch, side, where.rows.device)
    for name in _BEHIND:
        _paint_part(canvas, latents, name, where)
    _paint_body(canvas, latents, where)
    _paint_part(canvas, latents, "wings", where)

    strokes = canvas.stroke.flatten(1)[:, None].expand(-1, 3, -1)
    colour = _palette(latents).gather(2, strokes).view(batch, 3, side, side)
    parts = anatomy(colour.device).part_of_stroke[canvas.stroke]
    return _shaded(colour, canvas.depth, where, style), parts, where.top, where.left


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
    apart, blend = torso - head, 0.16  # melted into one, with a seam of this width
    mix = (0.5 + apart * (0.5 / blend)).clamp(0, 1)
    canvas.paint(head + apart * mix + mix * (1 - mix) * blend, _BODY)
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


def _shaded(colour: Tensor, depth: Tensor, where: Frame, style: str) -> Tensor:
    """Colour [B, 3, S, S] with pen lines and light from the depth [B, S, S] under the edge of each
    stroke."""
    line = (depth * (1 / _OUTLINE)).clamp_(0, 1)  # 0 on the line, 1 inside
    if style == "flat":
        return colour
    if style == "sketch":  # ink and wash: dark pen, colours thinned with white
        return (0.4 + 0.6 * colour) * (0.2 + 0.8 * line)[:, None]
    rounded = (depth * (1 / 0.18)).clamp_(0, 1) * 0.12 + 0.88
    per_column, per_row = where.down[0][:, None], where.down[1][:, None]
    y = (per_column * where.columns)[:, None] + (per_row * where.rows)[..., None]  # [B, S, S]
    sun = 0.96 - 0.04 * y  # from above
    light = (line * 0.65 + 0.35) * rounded * sun
    return colour * light[:, None]


def paint_background(code: Tensor, seed: Tensor, *, size: int, style: str) -> Tensor:
    """Backgrounds [B, 3, size, size] for codes [B]; everything but the kind of texture is hashed
    from the seeds [B]."""
    shade = torch.empty(len(seed), size, size, device=seed.device, dtype=torch.float32)
    accent = torch.empty_like(shade)
    for index, texture in enumerate((_dunes, _lagoon, _meadow, _starlight)):
        rows = (code == index).nonzero().flatten()
        shade[rows], accent[rows] = texture(seed[rows], size)
    colours = anatomy(code.device).backgrounds[code][..., None, None]
    dark, light, third = colours.unbind(1)  # [B, 3, 1, 1] each
    if style == "flat":
        shade, accent = shade * 0.2 + 0.4, accent * 0.2
    colour = dark + (light - dark) * shade[:, None]
    colour = colour + (third - colour) * accent[:, None]
    return 0.65 + 0.35 * colour if style == "sketch" else colour


def smooth_noise(seed: Tensor, purpose: int, cells: int, size: int) -> Tensor:
    """Value noise [B, size, size] in [0, 1): a lattice of `cells` bumps a side, blended by a cubic
    step."""
    values = lattice(seed, purpose, cells + 1, cells + 1)
    place = (torch.arange(size, device=seed.device, dtype=torch.float32) + 0.5) * (cells / size)
    first = place.to(torch.int64)  # [size]
    step = place - first
    step = step * step * (3 - 2 * step)
    above = values[:, first]
    rows = above + (values[:, first + 1] - above) * step[:, None]  # [B, size, cells + 1]
    return rows[..., first] + (rows[..., first + 1] - rows[..., first]) * step


def sine(turns: Tensor) -> Tensor:
    """A sine of angles in turns (1 = full circle), within 0.1 %, made of exact operations."""
    x = turns - torch.floor(turns) - 0.5
    y = 16 * x * x.abs() - 8 * x
    return y * (0.775 + 0.225 * y.abs())


def _dunes(seed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Ridges of sand: light on the windward side, a bright crest, fine ripples."""
    x, y = _grid(seed, size)
    slant = uniform(seed, 31, -1.0, 1.0)[:, None, None]
    ridge = y * 7 + x * slant + smooth_noise(seed, 32, 2, size) * 2.2
    place = ridge - torch.floor(ridge)  # 0 just below a crest, 1 on the next one
    ripple = sine(ridge * 3 + smooth_noise(seed, 33, 6, size)) * 0.1
    crest = ((place - 0.75) * 4).clamp(0, 1)
    return place * 0.8 + 0.1 + ripple, crest * crest * 0.8


def _lagoon(seed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A net of light on water."""
    x, y = _grid(seed, size)
    drift, swell = smooth_noise(seed, 41, 5, size), smooth_noise(seed, 42, 5, size)
    across = sine(x * 2.9 + y * 1.3 + drift * 1.4).abs()
    down = sine(y * 3.1 - x * 1.2 + swell * 1.4).abs()
    net = 1 - torch.minimum(across, down)
    net = net * net * net
    return drift * 0.6 + swell * 0.4, net * net


def _meadow(seed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Leaves on dark ground, each turned its own way, with a few pale blossoms."""
    shade = smooth_noise(seed, 51, 4, size) * 0.25
    for layer, cells in enumerate((9, 8)):
        right, down, value = _cells(seed, 52 + layer, cells, size)
        turned = value * 4 - torch.floor(value * 4) > 0.5
        along = torch.where(turned, right + down, right - down) * 0.7071
        aside = torch.where(turned, right - down, right + down) * 0.7071
        depth = 0.26 * (1 - along * along * 3.6) - aside.abs()
        vein = (aside.abs() * 14).clamp(0, 1) * 0.28 + 0.72
        shade = torch.where(depth > 0, (0.35 + 0.65 * value) * vein, shade)
    right, down, value = _cells(seed, 58, 7, size)
    bloom = (0.05 - (right * right + down * down)) * 60
    return shade, torch.where(value > 0.72, bloom.clamp(0, 1), 0.0)


def _starlight(seed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A night sky: slow clouds, four-pointed stars."""
    cloud = smooth_noise(seed, 61, 3, size) * 0.65 + smooth_noise(seed, 62, 7, size) * 0.35
    accent = torch.zeros_like(cloud)
    for layer, (cells, large) in enumerate(((7, 0.78), (11, 0.7))):
        right, down, value = _cells(seed, 63 + layer, cells, size)
        reach = torch.sqrt(right.abs()) + torch.sqrt(down.abs())
        star = ((large * (0.45 + 0.55 * value) - reach) * 5).clamp(0, 1)
        accent = torch.maximum(accent, torch.where(value > 0.15, star, 0.0))
    return cloud * cloud * 1.25, accent


def _cells(seed: Tensor, purpose: int, cells: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets right and down from a point drawn in each cell, in cells, and the cell's own value:
    [B, size, size] each.

    Cells form a brick pattern that starts at a random position, so nothing repeats at the same
    pixel.
    """
    x, y = _grid(seed, size)
    row_place = y * cells + uniform(seed, purpose + 100)[:, None, None]  # [B, size, 1]
    row = torch.floor(row_place)
    column_place = (
        x * cells + uniform(seed, purpose + 200)[:, None, None] + row * 0.5 - torch.floor(row * 0.5)
    )
    column = torch.floor(column_place)  # [B, size, size]
    side = cells + 2
    index = (row * side + column).to(torch.int64).flatten(1)
    drawn = lattice(seed, purpose, side, side).flatten(1)
    value = drawn.gather(1, index).view(len(seed), size, size)
    jitter = value * 7 - torch.floor(value * 7)  # other digits of the same draw
    right = column_place - column - 0.5 - (jitter - 0.5) * 0.3
    down = row_place - row - 0.5 - (value - 0.5) * 0.3
    return right, down, value


def _grid(seed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """x [1, 1, size] and y [1, size, 1] of the pixel centres, in shares of the side."""
    place = (torch.arange(size, device=seed.device, dtype=torch.float32) + 0.5) / size
    return place[None, None, :], place[None, :, None]


Style = Literal["plain", "flat", "sketch"]
STYLES: tuple[Style, ...] = get_args(Style)
MAT_CELLS = 12  # patches a side of the grid that a mat follows: 8 pixels each at 96
_NEUTRAL = 0.5
_CPU_ROWS = 16  # images drawn at once on a CPU: temporaries then stay in its cache


class Rendering(NamedTuple):
    """Images and what is where in them."""

    image: Tensor  # [B, 3, H, W] float32 in [0, 1]
    mask: Tensor  # [B, H, W] bool, True on the creature
    parts: Tensor  # [B, H, W] uint8: 0 background, 1 body, 2.. as in PARTS


@dataclass(frozen=True)
class Do:
    """An intervention on a scene; what is not given stays as the latents have it.

    Attributes:
        background: Another texture, as one code or [B].
        cue: The strength of the background: 0 is a flat mean colour.
        without: Parts to remove; all of them leaves the background alone.
        swap: Another variant for each part named.
        move: Pixels down and right, as far as the image allows.

    Example:
        >>> from seecause import critters
        >>> latents = critters.draw("clean", "test", 1)
        >>> critters.render(latents, do=Do(without=("tail",))).image.shape
        torch.Size([1, 3, 96, 96])
    """

    background: int | Tensor | None = None
    cue: float = 1.0
    without: tuple[str, ...] = ()
    swap: Mapping[str, str] = field(default_factory=dict)
    move: tuple[int, int] = (0, 0)


@torch.no_grad()
def render(
    latents: Latents, *, size: int = 96, do: Do | None = None, style: Style = "plain"
) -> Rendering:
    """Draw a batch of scenes on the device of their latents.

    Args:
        latents: What the scenes are made from, as `draw` returns it.
        size: Pixels of a side.
        do: An intervention.
        style: "plain", "flat" or "sketch".

    Returns:
        `image` [B, 3, H, W] in [0, 1], `mask` [B, H, W] of the creature and `parts` [B, H, W]. An
        image depends on its own latents only, bit by bit.

    Example:
        >>> from seecause import critters
        >>> latents = critters.draw("clean", "test", 2)
        >>> here, there = render(latents), render(latents, do=Do(background=2))
        >>> bool((here.image == there.image)[here.mask[:, None].expand_as(here.image)].all())
        True
    """
    if style not in STYLES:
        raise UnknownName("drawing style", style, STYLES)
    if size < 32:
        raise BadOption("size", size, "at least 32 pixels; parts are not visible below")
    do = do or Do()
    latents = intervene(latents, do, size=size)
    rows = _CPU_ROWS if latents.seed.device.type == "cpu" else max(1, len(latents))
    drawn = [_draw(batch, do, size, style) for batch in latents.split(rows)]
    return Rendering(*(torch.cat(tensors) for tensors in zip(*drawn, strict=True)))


def intervene(latents: Latents, do: Do, *, size: int = 96) -> Latents:
    """The latents after the intervention; `cue` concerns pixels only, and is left to `render`."""
    if do.background is not None:
        code = torch.as_tensor(do.background, device=latents.background.device)
        if bool(((code < 0) | (code >= len(BACKGROUNDS))).any()):
            last = len(BACKGROUNDS) - 1
            raise BadOption("background", do.background, f"a code from 0 to {last}, or one each")
        latents = latents.replace(background=code.expand_as(latents.background))
    if do.without:
        present = latents.present.clone()
        present[:, [_index("part", part, PARTS) for part in do.without]] = False
        latents = latents.replace(present=present)
    if do.swap:
        variants = latents.variants.clone()
        for part, variant in do.swap.items():
            place = _index("part with variants", part, PARTS[1:])
            variants[:, place] = _index(f"{part} variant", variant, VARIANTS[part])
        latents = latents.replace(variants=variants)
    if do.move != (0, 0):
        shift = latents.centre.new_tensor(do.move) / size
        latents = latents.replace(centre=(latents.centre + shift).clamp(0.5 - REACH, 0.5 + REACH))
    return latents


def _draw(latents: Latents, do: Do, size: int, style: str) -> Rendering:
    may_stop()
    image = paint_background(latents.background, latents.seed, size=size, style=style)
    if do.cue != 1:
        mean = anatomy(image.device).backgrounds[:, :2].mean(dim=(0, 1))[:, None, None]  # of all
        image = mean + do.cue * (image - mean)
    colour, shown, top, left = draw_creatures(latents, size=size, style=style)
    side = shown.shape[-1]
    pixels = torch.arange(side, device=image.device)
    batch = torch.arange(len(latents), device=image.device)[:, None, None]
    rows = (top[:, None] + pixels)[:, :, None]  # [B, S, 1]
    columns = (left[:, None] + pixels)[:, None, :]  # [B, 1, S]

    parts = torch.zeros(len(latents), size, size, dtype=torch.uint8, device=image.device)
    parts[batch, rows, columns] = shown
    window = image[batch, :, rows, columns]  # [B, S, S, 3]
    seen = (shown > 0)[..., None]
    image[batch, :, rows, columns] = torch.where(seen, colour.permute(0, 2, 3, 1), window)
    mask = parts > 0
    if image.device.type != "cpu" or latents.mat.any():  # on a GPU the test would synchronise
        patches = F.adaptive_max_pool2d(mask[:, None].float(), MAT_CELLS)
        touched = F.interpolate(patches, mask.shape[-2:])[:, 0] > 0
        mat = touched & ~mask & latents.mat[:, None, None]
        image = torch.where(mat[:, None], _NEUTRAL, image)
    return Rendering(image.mul_(latents.gain[:, None, None, None]), mask, parts)


def _index(kind: str, name: str, known: tuple[str, ...]) -> int:
    if name not in known:
        raise UnknownName(kind, name, known)
    return known.index(name)


DEFAULT_LENGTH = 512
_RENDER_ROWS = 64


@dataclass(frozen=True, eq=False)
class CrittersData:
    """Samples 0 .. length of a regime's split, drawn when they are asked for."""

    regime: str
    split: str
    length: int
    capabilities: ClassVar = frozenset({"masks", "counterfactuals"})
    places: ClassVar = BACKGROUNDS

    @property
    def name(self) -> str:
        return f"critters:{self.regime}:{self.split}"

    @property
    def classes(self) -> Names:
        return tuple(CLASSES)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the name, the length and the first image's pixels, which detects changes of
        the renderer."""
        return digest(f"{self.name} {self.length}", self[0].image.numpy().tobytes())

    def digests(self, start: int, stop: int) -> list[str]:
        """Digests of the name, the index of each sample, and the first image's pixels."""
        first = self[0].image.numpy().tobytes()
        return [digest(f"{self.name} {index}", first) for index in range(start, stop)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> Sample:
        place = range(self.length)[index]
        return next(samples(self.regime, self.split, 1, start=place))

    def latents(self, start: int, stop: int, *, device: torch.device | str = "cpu") -> Latents:
        """The latents of samples `start` to `stop`, from which exact counterfactuals can be
        rendered."""
        return draw(self.regime, self.split, stop - start, start=start, device=device)


def samples(
    regime: str | Regime,
    split: str,
    n: int,
    *,
    start: int = 0,
    size: int = 96,
) -> Iterator[Sample]:
    """Draw images one by one, in small batches on the CPU.

    Args:
        regime: The name of a regime, such as "certified".
        split: "train", "val" or "test".
        n: The number of samples.
        start: The first sample.
        size: Pixels of a side.

    Returns:
        Samples with label, group (creature, background) as they are shown, mask and part map.

    Example:
        >>> from seecause import critters
        >>> next(critters.samples("clean", "test", 1)).image.shape
        torch.Size([3, 96, 96])
    """
    name = find_regime(regime).name
    for first in range(start, start + n, _RENDER_ROWS):
        rows = min(_RENDER_ROWS, start + n - first)
        latents = draw(regime, split, rows, start=first)
        drawn = render(latents, size=size)
        for row in range(rows):
            yield Sample(
                image=drawn.image[row],
                label=int(latents.label[row]),
                group=(int(latents.creature[row]), int(latents.background[row])),
                mask=drawn.mask[row],
                parts=drawn.parts[row],
                id=f"{name}-{split}-{first + row}",
            )


def open_critters(rest: str, *, limit: int | None = None) -> CrittersData:
    """Open a regime; the test split unless another is named."""
    regime, _, split = rest.partition(":")
    if split and split not in SPLITS:
        raise UnknownName("split", split, SPLITS)
    return CrittersData(find_regime(regime).name, split or "test", limit or DEFAULT_LENGTH)
