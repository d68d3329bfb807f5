"""Four textures, told apart by pattern and by mood, in muted colours no creature wears.

Each texture is two fields in [0, 1]: `shade` runs from the dark to the light colour, `accent`
paints the third on top. A mix of colours with saturation (max - min) / max of at most s has
saturation of at most s too, so muted palettes guarantee muted pictures.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from seecause._random import lattice, sine, smooth_noise, uniform

BACKGROUNDS = ("dunes", "lagoon", "meadow", "starlight")
_PALETTES = {  # dark, light, accent
    "dunes": ((0.43, 0.35, 0.27), (0.95, 0.83, 0.63), (1.00, 0.93, 0.77)),
    "lagoon": ((0.22, 0.33, 0.35), (0.47, 0.67, 0.69), (0.86, 0.97, 0.94)),
    "meadow": ((0.13, 0.17, 0.12), (0.62, 0.77, 0.49), (0.92, 0.93, 0.80)),
    "starlight": ((0.11, 0.12, 0.18), (0.34, 0.30, 0.44), (0.97, 0.95, 0.88)),
}


def paint(code: Tensor, seed: Tensor, *, size: int, style: str) -> Tensor:
    """Backgrounds [B, 3, size, size] for codes [B]; everything but the kind of texture is hashed
    from the seeds [B]."""
    shade = torch.empty(len(seed), size, size, device=seed.device)
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
    return torch.tensor([_PALETTES[name] for name in BACKGROUNDS], device=device)


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
    one = sine(x * 2.9 + y * 1.3 + drift * 1.4).abs()
    two = sine(y * 3.1 - x * 1.2 + swell * 1.4).abs()
    net = 1 - torch.minimum(one, two)
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
