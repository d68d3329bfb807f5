"""Two families of generated backgrounds, in any colour: painted boards (stripes of one direction) and leaves (overlapping blades).

Both take the same numbers and draw their two colours from the same distribution, so a family is told by its texture and by nothing else.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

FAMILIES = ("boards", "leaves")
LEAVES = 150
_COLOURS, _SHAPE, _WARP = 6, 4, 8  # numbers: two colours, how boards lie, a grid of 8 x 8 that bends them
NUMBERS = _COLOURS + _SHAPE + _WARP**2 + 6 * LEAVES  # uniform in [0, 1), for one picture


def texture(family: int, numbers: Tensor, size: int) -> Tensor:
    """Raw pictures [n, 3, size, size] in [0, 1] from uniform numbers [n, NUMBERS]."""
    colours, shape, warp, blades = numbers.split([_COLOURS, _SHAPE, _WARP**2, 6 * LEAVES], dim=1)
    first, second = _rgb(colours[:, :3]), _rgb(colours[:, 3:])
    return (_boards(first, second, shape, warp, size) if family == 0 else _leaves(first, second, blades, size)).clamp(0, 1)


def _boards(first: Tensor, second: Tensor, shape: Tensor, warp: Tensor, size: int) -> Tensor:
    """Boards side by side at any angle, each with a shade and a grain of its own, and dark seams between them."""
    angle, count, fine, chance = (shape[:, i, None, None] for i in range(_SHAPE))
    y, x = _places(size, shape)
    bend = F.interpolate(warp.unflatten(1, (1, _WARP, _WARP)), (size, size), mode="bicubic", align_corners=True)[:, 0] - 0.5
    across = (x * (math.pi * angle).cos() + y * (math.pi * angle).sin() + 0.04 * bend) * (4 + 4 * count)  # in boards
    shade = torch.frac((torch.sin((across.floor() + 97 * chance) * 12.9898) * 437.585).abs())
    grain = 0.5 + 0.5 * torch.sin(2 * math.pi * (across * (3 + 3 * fine) + 2 * bend))
    seam = torch.where(torch.frac(across.abs()) < 0.07, 0.45, 1.0)
    return torch.lerp(first[..., None, None], second[..., None, None], 0.6 * grain[:, None]) * ((0.8 + 0.35 * shade) * seam)[:, None]


def _leaves(first: Tensor, second: Tensor, blades: Tensor, size: int) -> Tensor:
    """Blades on top of each other, each with a place, a size, a direction and a mixture of the two colours, darker towards its edge."""
    y, x = _places(size, blades)
    canvas = (0.35 * first)[..., None, None].expand(-1, -1, size, size).clone()
    for one in blades.unflatten(1, (LEAVES, 6)).unbind(dim=1):
        left, top, large, turn, mixture, light = (value[:, None, None] for value in one.unbind(dim=1))
        dx, dy, length = x - left, y - top, 0.05 + 0.09 * large
        along, aside = dx * (2 * math.pi * turn).cos() + dy * (2 * math.pi * turn).sin(), dy * (2 * math.pi * turn).cos() - dx * (2 * math.pi * turn).sin()
        far = (along / length).square() + (aside / (0.45 * length)).square()
        colour = torch.lerp(first[..., None, None], second[..., None, None], mixture[:, None]) * (0.55 + 0.6 * light)[:, None]
        canvas = torch.where((far < 1)[:, None], colour * (1 - 0.4 * far[:, None]), canvas)
    return canvas


def _places(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of pixel centres in [0, 1], to be broadcast to [n, size, size]."""
    line = (torch.arange(size, device=like.device, dtype=like.dtype) + 0.5) / size
    return line[:, None], line


def _rgb(numbers: Tensor) -> Tensor:
    """[n, 3]: any hue, saturation 0.15-0.65, value 0.4-0.95."""
    hue, saturation, value = numbers[:, :1], 0.15 + 0.5 * numbers[:, 1:2], 0.4 + 0.55 * numbers[:, 2:3]
    turn = (torch.tensor([5.0, 3.0, 1.0], device=numbers.device) + 6 * hue) % 6
    return value * (1 - saturation * torch.minimum(turn, 4 - turn).clamp(0, 1))
