"""Rows that come in groups of different sizes, packed one group after another."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class Groups:
    """`sizes` [G] (on the CPU) of consecutive groups; everything else follows and is made once, on
    `device`."""

    def __init__(self, sizes: Tensor, device: torch.device | str):
        self.sizes, self.device = sizes.long().cpu(), torch.device(device)

    @classmethod
    def even(cls, count: int, size: int, device: torch.device | str) -> Groups:
        return cls(torch.full((count,), size), device)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def rows(self) -> int:
        return int(self.sizes.sum())

    @property
    def width(self) -> int:
        return int(self.sizes.max()) if len(self.sizes) else 0

    @cached_property
    def single(self) -> bool:
        """Every group is one row."""
        return bool((self.sizes == 1).all())

    @cached_property
    def starts(self) -> Tensor:
        """First row of each group, and the end: int32 [G + 1]."""
        return self._send(torch.cat([torch.zeros(1, dtype=torch.long), self.sizes.cumsum(0)]).int())

    @cached_property
    def owner(self) -> Tensor:
        """The group of each row, int32 [R]."""
        return self._send(self._owner.int())

    @cached_property
    def padded(self) -> Tensor:
        """Rows of each group, [G, width]; padding repeats row 0 of the sequence."""
        grid = torch.zeros(len(self), self.width, dtype=torch.long)
        grid[self._owner, self._place] = torch.arange(self.rows)
        return self._send(grid)

    @cached_property
    def valid(self) -> Tensor:
        """False on padding, [G, width]."""
        return self._send(torch.arange(self.width)[None] < self.sizes[:, None])

    @cached_property
    def unpadded(self) -> Tensor:
        """Where each row sits in the flattened padding, [R]."""
        return self._send(self._owner * self.width + self._place)

    @property
    def _owner(self) -> Tensor:
        return torch.arange(len(self)).repeat_interleave(self.sizes)

    @property
    def _place(self) -> Tensor:
        first = self.sizes.cumsum(0) - self.sizes
        return torch.arange(self.rows) - first.repeat_interleave(self.sizes)

    def _send(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)
