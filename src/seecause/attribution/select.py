"""Which patches move together: the selection S(i) around patch i, clipped at the border."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from seecause.errors import BadOption

Select = Literal["none", "box1", "box2", "manhattan1"]


def selection(grid: tuple[int, int], select: Select | Tensor = "box1") -> Tensor:
    """Row i marks S(i): bool [N, N], or any given matrix of that shape (all false selects
    nothing)."""
    n = grid[0] * grid[1]
    if isinstance(select, Tensor):
        if select.shape != (n, n):
            raise BadOption(
                "select",
                f"tensor {list(select.shape)}",
                f"bool [{n}, {n}] for a {grid[0]} x {grid[1]} grid",
            )
        return select.bool().cpu()
    if select not in get_args(Select):
        raise BadOption(
            "select", select, f"one of {', '.join(get_args(Select))}, or a bool tensor [N, N]"
        )
    row, column = (
        c.flatten()
        for c in torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    )
    down, across = (row[:, None] - row).abs(), (column[:, None] - column).abs()
    if select == "manhattan1":
        return down + across <= 1
    radius = {"none": 0, "box1": 1, "box2": 2}[select]
    return torch.maximum(down, across) <= radius
