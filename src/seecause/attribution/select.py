"""Which patches move together: the selection S(i) around patch i, clipped at the border."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from seecause.errors import BadOption

Select = Literal["none", "box1", "box2", "manhattan1"]


def selection(
    grid: tuple[int, ...], select: Select | Tensor = "box1", *, stride: int = 1
) -> Tensor:
    """Row i marks S(i): bool [N, N], or any given matrix of that shape (all false selects
    nothing). `stride` keeps the rows of every so many patches each way, [n, N]. In a film, times
    are neighbours as rows and columns are."""
    if not 1 <= stride <= min(grid):
        raise BadOption("stride", stride, f"a whole number from 1 to {min(grid)}")
    n = math.prod(grid)
    if isinstance(select, Tensor):
        if select.shape != (n, n):
            raise BadOption(
                "select",
                f"tensor {list(select.shape)}",
                f"bool [{n}, {n}] for a {' x '.join(map(str, grid))} grid",
            )
        chosen = select.bool().cpu()
        return chosen if stride == 1 else chosen[_lattice(grid, stride)]
    if select not in get_args(Select):
        raise BadOption(
            "select", select, f"one of {', '.join(get_args(Select))}, or a bool tensor [N, N]"
        )
    return _around(grid, select, stride)


@lru_cache(maxsize=32)
def _around(grid: tuple[int, ...], select: Select, stride: int) -> Tensor:
    """The same object for the same grid: what follows from it is kept."""
    if stride > 1:
        return _around(grid, select, 1)[_lattice(grid, stride)]
    if select == "none":
        return torch.eye(math.prod(grid), dtype=torch.bool)
    places = torch.cartesian_prod(*map(torch.arange, grid))  # [N, 2 or 3]
    apart = (places[:, None] - places).abs()
    if select == "manhattan1":
        return apart.sum(dim=-1) <= 1
    return apart.amax(dim=-1) <= {"box1": 1, "box2": 2}[select]


def interpolate(values: Tensor, grid: tuple[int, ...], stride: int) -> Tensor:
    """Values [B, n, ..] of every so many patches each way -> [B, N, ..]: linear between them, and
    the nearest beyond the last."""
    weights = [_weights(side, stride).to(values) for side in grid]  # [side, places] each
    values = values.unflatten(1, [weight.shape[1] for weight in weights])
    for axis, weight in enumerate(weights, start=1):
        values = torch.einsum("yi,bi...->by...", weight, values.movedim(axis, 1)).movedim(1, axis)
    return values.flatten(1, len(grid))


def _places(side: int, stride: int) -> Tensor:
    """Which of `side` patches are computed: as far from one border as from the other."""
    return torch.arange((side - 1) % stride // 2, side, stride)


def _lattice(grid: tuple[int, ...], stride: int) -> Tensor:
    """The patches that are computed, [n]."""
    places = torch.cartesian_prod(*(_places(side, stride) for side in grid))  # [n, 2 or 3]
    index = torch.zeros(len(places), dtype=torch.long)
    for side, place in zip(grid, places.unbind(1), strict=True):
        index = index * side + place
    return index


def _weights(side: int, stride: int) -> Tensor:
    """How much each computed place counts for each patch of a side, [side, places]: rows sum to
    one."""
    places = _places(side, stride)
    at = ((torch.arange(side, dtype=torch.float64) - places[0]) / stride).clamp(0, len(places) - 1)
    return (1 - (at[:, None] - torch.arange(len(places))).abs()).clamp_min(0)
