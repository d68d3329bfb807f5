"""Where each token of a sequence comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLayout:
    """The order of tokens: `prefix` special ones, then the patch grid row by row.

    `class_index`, `distill_index` and `registers` are positions inside the prefix.
    """

    grid: tuple[int, int]
    prefix: int
    class_index: int | None = None
    distill_index: int | None = None
    registers: tuple[int, ...] = ()

    @property
    def n_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        return self.prefix + self.n_patches

    @property
    def patches(self) -> slice:
        return slice(self.prefix, self.tokens)

    def at(self, device: torch.device | str = "cpu") -> At:
        """The positions of the whole sequence, in order."""
        return At(torch.arange(self.tokens, device=device), self)


@dataclass(frozen=True, eq=False)
class At:
    """Which tokens some rows are: index [R] or [B, R] into the sequence of `layout`.

    `memo` lets rotary tables be computed once per run; rows taken from one run share it.
    """

    index: Tensor
    layout: TokenLayout
    memo: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    def take(self, index: Tensor) -> At:
        """Other rows of the same run."""
        return At(index, self.layout, self.memo)
