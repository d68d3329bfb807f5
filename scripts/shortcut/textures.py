"""Two families of generated backgrounds, in any colour: painted boards (stripes of one direction)
and leaves (overlapping blades).

Both take the same numbers and draw their two colours from the same distribution. Leaves are shaded
more and so darker: `brightness` says by how much.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

FAMILIES = ("boards", "leaves")
LEAVES = 150
_COLOURS, _SHAPE, _WARP = (
    6,
    4,
    8,
)  # numbers: two colours, how boards lie, a grid of 8 x 8 that bends them
_AT_ONCE = 8  # pictures: every blade is compared with every pixel
NUMBERS = _COLOURS + _SHAPE + _WARP**2 + 6 * LEAVES  # uniform in [0, 1), for one picture


def texture(family: int, numbers: Tensor, size: int) -> Tensor:
    """Raw pictures [n, 3, size, size] in [0, 1] from uniform numbers [n, NUMBERS]."""
    colours, shape, warp, blades = numbers.split([_COLOURS, _SHAPE, _WARP**2, 6 * LEAVES], dim=1)
    first, second = _rgb(colours[:, :3]), _rgb(colours[:, 3:])
    return (
        _boards(first, second, shape, warp, size)
        if family == 0
        else _leaves(first, second, blades, size)
    ).clamp(0, 1)


def brightness(*, draws: int = 256, size: int = 32) -> tuple[float, float, float]:
    """Mean pixel of boards, of leaves, and the share of pairs of one of each in which the boards
    are brighter."""
    numbers = torch.rand(draws, NUMBERS, generator=torch.Generator().manual_seed(0))
    boards, leaves = (texture(family, numbers, size).mean(dim=(1, 2, 3)) for family in range(2))
    return (
        float(boards.mean()),
        float(leaves.mean()),
        float((boards[:, None] > leaves).double().mean()),
    )


def _boards(first: Tensor, second: Tensor, shape: Tensor, warp: Tensor, size: int) -> Tensor:
    """Boards side by side at any angle, each with a shade and a grain of its own, and dark seams
    between them."""
    angle, count, fine, chance = (shape[:, i, None, None] for i in range(_SHAPE))
    y, x = _places(size, shape)
    bend = (
        F.interpolate(
            warp.unflatten(1, (1, _WARP, _WARP)), (size, size), mode="bicubic", align_corners=True
        )[:, 0]
        - 0.5
    )
    across = (x * (math.pi * angle).cos() + y * (math.pi * angle).sin() + 0.04 * bend) * (
        4 + 4 * count
    )  # in boards
    shade = torch.frac((torch.sin((across.floor() + 97 * chance) * 12.9898) * 437.585).abs())
    grain = 0.5 + 0.5 * torch.sin(2 * math.pi * (across * (3 + 3 * fine) + 2 * bend))
    seam = torch.where(torch.frac(across.abs()) < 0.07, 0.45, 1.0)
    return (
        torch.lerp(first[..., None, None], second[..., None, None], 0.6 * grain[:, None])
        * ((0.8 + 0.35 * shade) * seam)[:, None]
    )


def _leaves(first: Tensor, second: Tensor, blades: Tensor, size: int) -> Tensor:
    """Blades on top of each other, each with a place, a size, a direction and a mixture of the two
    colours, darker towards its edge."""
    left, top, large, turn, mixture, light = blades.unflatten(1, (LEAVES, 6)).unbind(
        dim=2
    )  # [n, L] each
    length, (sine, cosine) = (
        0.05 + 0.09 * large,
        (
            (2 * math.pi * turn).sin(),
            (2 * math.pi * turn).cos(),
        ),
    )
    width = 0.45 * length
    xx, yy = (
        (cosine / length).square() + (sine / width).square(),
        (sine / length).square() + (cosine / width).square(),
    )
    xy = cosine * sine * (length**-2 - width**-2)
    ellipse = [
        xx,
        2 * xy,
        yy,
        -2 * (xx * left + xy * top),
        -2 * (xy * left + yy * top),
        xx * left**2 + 2 * xy * left * top + yy * top**2,
    ]
    y, x = (line.flatten() for line in torch.broadcast_tensors(*_places(size, blades)))
    terms = torch.stack([x * x, x * y, y * y, x, y, torch.ones_like(x)])  # [6, P]
    colours = (
        torch.lerp(first[:, None], second[:, None], mixture[..., None])
        * (0.55 + 0.6 * light)[..., None]
    )  # [n, L, 3]
    made = [
        _stacked(*part, terms)
        for part in zip(
            *(t.split(_AT_ONCE) for t in (torch.stack(ellipse, dim=2), colours, 0.35 * first)),
            strict=True,
        )
    ]
    return torch.cat(made).unflatten(2, (size, size))


def _stacked(ellipses: Tensor, colours: Tensor, ground: Tensor, terms: Tensor) -> Tensor:
    """The last blade that covers a pixel is seen, else the ground: [n, 3, P]. A pixel is inside an
    ellipse [n, L, 6] where its value is below 1."""
    far = ellipses @ terms  # [n, L, P]
    number = torch.arange(1, LEAVES + 1, device=far.device, dtype=torch.uint8)
    seen = ((far < 1) * number[:, None]).amax(dim=1).long()  # [n, P], 0 where there is none
    place = (seen - 1).clamp_min(0)
    shade = 1 - 0.4 * far.gather(1, place[:, None])[:, 0]
    painted = colours.gather(1, place[..., None].expand(-1, -1, 3)) * shade[..., None]  # [n, P, 3]
    return torch.where(seen[..., None] > 0, painted, ground[:, None]).transpose(1, 2)


def _places(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of pixel centres in [0, 1], to be broadcast to [n, size, size]."""
    line = (torch.arange(size, device=like.device, dtype=like.dtype) + 0.5) / size
    return line[:, None], line


def _rgb(numbers: Tensor) -> Tensor:
    """[n, 3]: any hue, saturation 0.15-0.65, value 0.4-0.95."""
    hue, saturation, value = (
        numbers[:, :1],
        0.15 + 0.5 * numbers[:, 1:2],
        0.4 + 0.55 * numbers[:, 2:3],
    )
    turn = (torch.tensor([5.0, 3.0, 1.0], device=numbers.device) + 6 * hue) % 6
    return value * (1 - saturation * torch.minimum(turn, 4 - turn).clamp(0, 1))
