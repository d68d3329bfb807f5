"""From latents to pictures, with exact counterfactuals.

`render(latents, do=Do(background=2))` is the same scene on another background: every pixel of the
creature keeps its bits. The same holds for the other interventions: what was not touched does not
change.

Backgrounds are four textures, told apart by pattern and by mood, in muted colours no creature
wears. Each is two fields in [0, 1]: `shade` runs from the dark to the light colour, `accent` paints
the third on top. A mix of colours with saturation (max - min) / max of at most s has saturation of
at most s too, so muted palettes guarantee muted pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from seecause._random import lattice, sine, smooth_noise, uniform
from seecause._stop import may_stop
from seecause.critters import creature
from seecause.critters.latents import PARTS, REACH, VARIANTS, Latents
from seecause.errors import BadOption, UnknownName

BACKGROUNDS = ("dunes", "lagoon", "meadow", "starlight")
_PALETTES = {  # dark, light, accent
    "dunes": ((0.43, 0.35, 0.27), (0.95, 0.83, 0.63), (1.00, 0.93, 0.77)),
    "lagoon": ((0.22, 0.33, 0.35), (0.47, 0.67, 0.69), (0.86, 0.97, 0.94)),
    "meadow": ((0.13, 0.17, 0.12), (0.62, 0.77, 0.49), (0.92, 0.93, 0.80)),
    "starlight": ((0.11, 0.12, 0.18), (0.34, 0.30, 0.44), (0.97, 0.95, 0.88)),
}


def paint_background(code: Tensor, seed: Tensor, *, size: int, style: str) -> Tensor:
    """Backgrounds [B, 3, size, size] for codes [B]; everything but the kind of texture is hashed
    from the seeds [B]."""
    shade = torch.empty(len(seed), size, size, device=seed.device, dtype=torch.float32)
    accent = torch.empty_like(shade)
    for index, texture in enumerate((_dunes, _lagoon, _meadow, _starlight)):
        rows = (code == index).nonzero().flatten()
        shade[rows], accent[rows] = texture(seed[rows], size)
    dark, light, third = palettes(code.device)[code][..., None, None].unbind(1)  # [B, 3, 1, 1] each
    if style == "flat":
        shade, accent = shade * 0.2 + 0.4, accent * 0.2
    colour = dark + (light - dark) * shade[:, None]
    colour = colour + (third - colour) * accent[:, None]
    return 0.65 + 0.35 * colour if style == "sketch" else colour


def mean_colour(device: torch.device) -> Tensor:
    """[3] the middle of all palettes: a fill that says nothing about the background it replaces."""
    return palettes(device)[:, :2].mean(dim=(0, 1))


@cache
def palettes(device: torch.device) -> Tensor:
    """[backgrounds, 3 stops, 3]."""
    stops = [_PALETTES[name] for name in BACKGROUNDS]
    return torch.tensor(stops, device=device, dtype=torch.float32)


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

    Cells sit on a brick pattern that starts at a random place, so nothing repeats at the same
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

    def pick(values: Tensor) -> Tensor:
        return values.flatten(1).gather(1, index).view(len(seed), size, size)

    value = pick(lattice(seed, purpose, side, side))
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
_CPU_ROWS = 16  # pictures drawn at once on a CPU: temporaries then stay in its cache


class Picture(NamedTuple):
    image: Tensor  # [B, 3, H, W] float32 in [0, 1]
    mask: Tensor  # [B, H, W] bool, True on the creature
    parts: Tensor  # [B, H, W] uint8: 0 background, 1 body, 2.. as in PARTS


@dataclass(frozen=True)
class Do:
    """An intervention. What is left out stays as the latents have it."""

    background: int | Tensor | None = None  # another texture, one code or [B]
    cue: float = 1.0  # strength of the background: 0 is flat mean colour
    fill: tuple[float, float, float] | None = None  # this colour instead of a background
    without: tuple[str, ...] = ()  # parts to remove; all of PARTS leaves the background alone
    swap: Mapping[str, str | int] = field(default_factory=dict)  # part -> variant, by name or index
    move: tuple[int, int] = (0, 0)  # pixels down and right, as far as the picture allows


@torch.no_grad()
def render(
    latents: Latents, *, size: int = 96, do: Do | None = None, style: Style = "plain"
) -> Picture:
    """Draw a batch on the device the latents live on. Deterministic: a picture depends on its own
    latent only.

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
    pictures = [_draw(batch, do, size, style) for batch in latents.split(rows)]
    return Picture(*(torch.cat(tensors) for tensors in zip(*pictures, strict=True)))


def intervene(latents: Latents, do: Do, *, size: int = 96) -> Latents:
    """The latents after the intervention (what concerns only pixels, `cue` and `fill`, is left to
    `render`)."""
    if do.background is not None:
        code = torch.as_tensor(do.background, device=latents.background.device)
        if bool(((code < 0) | (code >= len(BACKGROUNDS))).any()):
            last = len(BACKGROUNDS) - 1
            raise BadOption("background", do.background, f"a code from 0 to {last}, or one each")
        latents = latents.replace(background=code.expand_as(latents.background))
    if do.without:
        present = latents.present.clone()
        present[:, [_part_index(part) for part in do.without]] = False
        latents = latents.replace(present=present)
    if do.swap:
        variants = latents.variants.clone()
        for part, variant in do.swap.items():
            variants[:, _part_index(part) - 1] = _variant_index(part, variant)
        latents = latents.replace(variants=variants)
    if do.move != (0, 0):
        shift = latents.centre.new_tensor(do.move) / size
        latents = latents.replace(centre=(latents.centre + shift).clamp(0.5 - REACH, 0.5 + REACH))
    return latents


def _draw(latents: Latents, do: Do, size: int, style: str) -> Picture:
    may_stop()
    image = _backdrop(latents, do, size, style)  # [B, 3, H, W]
    layer = creature.draw(latents, size=size, style=style)
    side = layer.parts.shape[-1]
    pixels = torch.arange(side, device=image.device)
    batch = torch.arange(len(latents), device=image.device)[:, None, None]
    rows = (layer.top[:, None] + pixels)[:, :, None]  # [B, S, 1]
    columns = (layer.left[:, None] + pixels)[:, None, :]  # [B, 1, S]

    parts = torch.zeros(len(latents), size, size, dtype=torch.uint8, device=image.device)
    parts[batch, rows, columns] = layer.parts
    window = image[batch, :, rows, columns]  # [B, S, S, 3]
    seen = (layer.parts > 0)[..., None]
    image[batch, :, rows, columns] = torch.where(seen, layer.colour.permute(0, 2, 3, 1), window)
    mask = parts > 0
    if image.device.type != "cpu" or latents.mat.any():  # a GPU would wait to be asked
        mat = _touched(mask) & ~mask & latents.mat[:, None, None]
        image = torch.where(mat[:, None], _NEUTRAL, image)
    return Picture(image.mul_(latents.gain[:, None, None, None]), mask, parts)


def _touched(mask: Tensor) -> Tensor:
    """[B, H, W] bool: pixels of the patches that hold a pixel of the mask."""
    size = mask.shape[-1]
    cell = torch.arange(size, device=mask.device) * MAT_CELLS // size  # [size]
    belongs = (
        cell == torch.arange(MAT_CELLS, device=mask.device)[:, None]
    ).float()  # [cells, size]
    cells = belongs @ mask.float() @ belongs.T > 0  # [B, cells, cells]
    return cells[:, cell][:, :, cell]


def _backdrop(latents: Latents, do: Do, size: int, style: str) -> Tensor:
    if do.fill is not None:
        fill = latents.gain.new_tensor(do.fill)
        return fill[:, None, None].expand(len(latents), 3, size, size).clone()
    painted = paint_background(latents.background, latents.seed, size=size, style=style)
    if do.cue == 1:
        return painted
    mean = mean_colour(painted.device)[:, None, None]
    return mean + do.cue * (painted - mean)


def _part_index(part: str) -> int:
    if part not in PARTS:
        raise UnknownName("part", part, PARTS)
    return PARTS.index(part)


def _variant_index(part: str, variant: str | int) -> int:
    variants = VARIANTS.get(part)
    if variants is None:
        raise UnknownName("part with variants", part, VARIANTS)
    if isinstance(variant, int):
        if not 0 <= variant < len(variants):
            raise BadOption(f"swap[{part!r}]", variant, f"a variant from 0 to {len(variants) - 1}")
        return variant
    if variant not in variants:
        raise UnknownName(f"{part} variant", variant, variants)
    return variants.index(variant)
