"""Where each token of a sequence comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


def span(tokens: Sequence[int]) -> slice | list[int]:
    """Neighbouring tokens as a slice: an index by a list is copied from the host."""
    start, stop = (tokens[0], tokens[0] + len(tokens)) if tokens else (0, 0)
    return slice(start, stop) if list(tokens) == list(range(start, stop)) else list(tokens)


def pair(side: int | Sequence[int]) -> tuple[int, int]:
    """Height and width as configs of transformers write them: one number is both."""
    return (side, side) if isinstance(side, int) else (side[0], side[1])


def pixel_cells(pixels: int, cells: int, device: torch.device | str = "cpu") -> Tensor:
    """Which of so many cells each pixel of a side lies in, [pixels]."""
    return torch.arange(pixels, device=device) * cells // pixels


def spread_out(patches: Tensor, size: tuple[int, int]) -> Tensor:
    """Values of patches [m, gh, gw] at their pixels [m, H, W]."""
    rows, columns = (
        pixel_cells(side, cells, patches.device)
        for cells, side in zip(patches.shape[1:], size, strict=True)
    )
    return patches[:, rows[:, None], columns]


@dataclass(frozen=True)
class TokenLayout:
    """The order of tokens: `prefix` special ones, then the patch grid row by row.

    Of a film the grid holds the frames' grids one below the other, at so many `times`.
    `class_index`, `distill_index` and `registers` are positions inside the prefix.
    """

    grid: tuple[int, int]
    prefix: int
    class_index: int | None = None
    distill_index: int | None = None
    registers: tuple[int, ...] = ()
    times: int = 1

    @property
    def cells(self) -> tuple[int, ...]:
        """The shape of maps: rows and columns; of a film times, rows and columns."""
        if self.times == 1:
            return self.grid
        return (self.times, self.grid[0] // self.times, self.grid[1])

    @property
    def n_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        return self.prefix + self.n_patches

    @property
    def patches(self) -> slice:
        return slice(self.prefix, self.tokens)

    @staticmethod
    def of_cells(cell: tuple[int, int]) -> Callable[[int, int], TokenLayout]:
        """`layout_at` of images that are cut into cells of so many pixels."""
        return lambda height, width: TokenLayout((height // cell[0], width // cell[1]), prefix=0)

    def at(self, device: torch.device | str = "cpu") -> At:
        """The positions of the whole sequence, in order."""
        return At(torch.arange(self.tokens, device=device), self)


@dataclass(frozen=True, eq=False)
class At:
    """Which tokens some rows are: index [R] or [B, R] into the sequence of `layout`.

    `memo` lets rotary tables be computed once per run; rows taken from one run share it. `facts`
    are what blocks may know about the tokens of each image beside their states (block.py).
    """

    index: Tensor
    layout: TokenLayout
    memo: dict[Any, Tensor] = field(default_factory=dict, repr=False)
    facts: Tensor | None = None  # [1|B, T, F], of the whole sequence

    def take(self, index: Tensor) -> At:
        """Other rows of the same run."""
        return replace(self, index=index)

    @cached_property
    def row_facts(self) -> Tensor:
        """The facts of these rows, [1|B, R, F]."""
        assert self.facts is not None, "blocks ask for facts, and the run has none"
        if self.index.ndim == 1:
            return self.facts[:, self.index]
        images = torch.arange(len(self.index), device=self.index.device) % len(self.facts)
        return self.facts[images[:, None], self.index]

    def with_facts(self, change: Callable[[Tensor], Tensor]) -> At:
        """These rows with other facts, if there are any."""
        return self if self.facts is None else replace(self, facts=change(self.facts))

    def of(self, images: Tensor | slice) -> At:
        """These rows of some of the images."""
        return self.with_facts(lambda facts: facts if len(facts) == 1 else facts[images])

    def copies(self, count: int) -> At:
        """These rows of `count` copies of all images, one copy after the other."""
        return self.with_facts(lambda facts: facts.repeat(count, 1, 1))

    def where(self, mark: Tensor, other: At) -> At:
        """The other run's facts for tokens that are marked [T] or [B, T]."""
        theirs = other.facts
        if theirs is None:
            return self
        return self.with_facts(lambda facts: torch.where(mark[..., None], theirs, facts))
