"""Which patches move together: the selection S(i) around patch i, clipped at the border."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from seecause.errors import BadOption

Select = Literal["none", "box1", "box2", "manhattan1"]


def selection(
    grid: tuple[int, int], select: Select | Tensor = "box1", *, stride: int = 1
) -> Tensor:
    """Row i marks S(i): bool [N, N], or any given matrix of that shape (all false selects
    nothing). `stride` keeps the rows of every so many patches each way, [n, N]."""
    if not 1 <= stride <= min(grid):
        raise BadOption("stride", stride, f"a whole number from 1 to {min(grid)}")
    n = grid[0] * grid[1]
    if isinstance(select, Tensor):
        if select.shape != (n, n):
            raise BadOption(
                "select",
                f"tensor {list(select.shape)}",
                f"bool [{n}, {n}] for a {grid[0]} x {grid[1]} grid",
            )
        chosen = select.bool().cpu()
        return chosen if stride == 1 else chosen[_lattice(grid, stride)]
    if select not in get_args(Select):
        raise BadOption(
            "select", select, f"one of {', '.join(get_args(Select))}, or a bool tensor [N, N]"
        )
    return _around(grid, select, stride)


@lru_cache(maxsize=32)
def _around(grid: tuple[int, int], select: Select, stride: int) -> Tensor:
    """The same object for the same grid: what follows from it is kept."""
    if stride > 1:
        return _around(grid, select, 1)[_lattice(grid, stride)]
    row, column = (
        c.flatten()
        for c in torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    )
    down, across = (row[:, None] - row).abs(), (column[:, None] - column).abs()
    if select == "manhattan1":
        return down + across <= 1
    radius = {"none": 0, "box1": 1, "box2": 2}[select]
    return torch.maximum(down, across) <= radius


def interpolate(values: Tensor, grid: tuple[int, int], stride: int) -> Tensor:
    """Values [B, n, ..] of every so many patches each way -> [B, N, ..]: linear between them, and
    the nearest beyond the last."""
    down, across = (_weights(side, stride).to(values) for side in grid)  # [side, places]
    places = values.unflatten(1, (down.shape[1], across.shape[1]))
    return torch.einsum("yi,xj,bij...->byx...", down, across, places).flatten(1, 2)


def _places(side: int, stride: int) -> Tensor:
    """Which of `side` patches are computed: as far from one border as from the other."""
    return torch.arange((side - 1) % stride // 2, side, stride)


def _lattice(grid: tuple[int, int], stride: int) -> Tensor:
    """The patches that are computed, [n]."""
    down, across = (_places(side, stride) for side in grid)
    return (down[:, None] * grid[1] + across).flatten()


def _weights(side: int, stride: int) -> Tensor:
    """How much each computed place counts for each patch of a side, [side, places]: rows sum to
    one."""
    places = _places(side, stride)
    at = ((torch.arange(side, dtype=torch.float64) - places[0]) / stride).clamp(0, len(places) - 1)
    return (1 - (at[:, None] - torch.arange(len(places))).abs()).clamp_min(0)
