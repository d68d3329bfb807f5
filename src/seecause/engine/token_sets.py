"""Which rows an intervention computes and what each of them sees: made once, kept on the device.

n token sets S(i) are put into a run, and each has its own copy of the special tokens. Everything
that follows from the sets alone (rows, groups, masks, the kernel's work lists) is worked out on the
CPU when it is first asked for, sent to the device once, and stays in the model's memo: a sweep
itself copies nothing from the host. Which sets there are is a selection: S(i) is patch i and some
around it, clipped at the border.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.attend import Groups, Mask
from seecause.errors import BadOption
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel

Select = Literal["none", "box1", "box2", "manhattan1"]
_KEPT = 8


class TokenSets:
    """Sets chosen [n, N] (bool, over patches, on the CPU) beside the special tokens that are alive
    in every set."""

    def __init__(
        self, chosen: Tensor, layout: TokenLayout, special: tuple[int, ...], device: torch.device
    ):
        self.layout, self.special, self.device = layout, special, device
        self.sets = F.pad(chosen, (layout.prefix, 0))  # [n, T], on the CPU
        self._parts: dict[tuple[int, int], TokenSets] = {}
        self._even: dict[int, Groups] = {}
        self._seen: dict[tuple[int, int], tuple[Tensor, Groups] | None] = {}

    def __len__(self) -> int:
        return len(self.sets)

    def part(self, start: int, stop: int) -> TokenSets:
        """Some of the sets, one after the other."""
        if (start, stop) == (0, len(self)):
            return self
        if (start, stop) not in self._parts:
            chosen = self.sets[start:stop, self.layout.prefix :]
            self._parts[start, stop] = TokenSets(chosen, self.layout, self.special, self.device)
        return self._parts[start, stop]

    @cached_property
    def marked(self) -> Tensor:
        """The chosen tokens of each set, [n, T]."""
        return self._send(self.sets)

    @cached_property
    def is_special(self) -> Tensor:
        """[T]."""
        mark = torch.zeros(self.sets.shape[1], dtype=torch.bool)
        mark[list(self.special)] = True
        return self._send(mark)

    @cached_property
    def class_rows(self) -> RowGroups:
        """The special tokens alone, set by set: what each sees of the context and the donor."""
        n, p = len(self), len(self.special)
        tokens = torch.tensor(self.special, dtype=torch.long).repeat(n)
        return RowGroups(self.even_groups(p), self._send(tokens), self._send(torch.arange(n * p)))

    @cached_property
    def grouped_rows(self) -> RowGroups:
        """Its special tokens, then its chosen ones, set by set."""
        p, (n, tokens) = len(self.special), self.sets.shape
        present = torch.cat([torch.ones(n, p, dtype=torch.bool), self.sets], dim=1)  # [n, p + T]
        column = present.nonzero()[:, 1]
        named = torch.cat([torch.tensor(self.special, dtype=torch.long), torch.arange(tokens)])
        return RowGroups(
            Groups(present.sum(dim=1), self.device),
            self._send(named[column]),
            self._send((column < p).nonzero()[:, 0]),
        )

    @cached_property
    def origin(self) -> Tensor:
        """Where each grouped row comes from, [R]: the donor's tokens, or behind all of those the
        special rows."""
        rows = self.grouped_rows
        origin = rows.tokens.clone()
        special = torch.arange(len(rows.special_rows), device=self.device)
        origin[rows.special_rows] = self.sets.shape[1] + special
        return origin

    @cached_property
    def donor_mask(self) -> Mask:
        """Class rows on the donor's tokens: those of their set."""
        return Mask(self._class_keep)

    @cached_property
    def context_mask(self) -> Mask:
        """Class rows on the context's tokens, beside the donor's."""
        return Mask(~self.is_special & ~self._class_keep)

    @cached_property
    def whole_mask(self) -> Mask:
        """Class rows on all of the context's tokens, special ones aside."""
        return Mask((~self.is_special).expand_as(self._class_keep))

    @cached_property
    def outside_mask(self) -> Mask:
        """Grouped rows on the context's tokens outside their group."""
        return Mask(self._outside[self.grouped_rows.groups.owner.long()][None, None])

    @cached_property
    def special_outside_mask(self) -> Mask:
        """The same of their special rows alone."""
        return Mask(self._outside[self.class_rows.groups.owner.long()][None, None])

    def seen_rows(self, rows: RowGroups, skipped: int) -> tuple[Tensor, Groups] | None:
        """Of each group the rows behind its first `skipped`, and their groups; None where no row
        is left."""
        key = (len(rows.tokens), skipped)
        if key not in self._seen:
            sizes = rows.groups.sizes
            seen = torch.ones(rows.groups.rows, dtype=torch.bool)
            seen[((sizes.cumsum(0) - sizes)[:, None] + torch.arange(skipped)).flatten()] = False
            left = (self._send(seen.nonzero()[:, 0]), Groups(sizes - skipped, self.device))
            self._seen[key] = left if seen.any() else None
        return self._seen[key]

    def even_groups(self, size: int) -> Groups:
        """As many groups as sets, all of one size."""
        if size not in self._even:
            self._even[size] = Groups.even(len(self), size, self.device)
        return self._even[size]

    @property
    def _class_keep(self) -> Tensor:
        return self.marked.repeat_interleave(len(self.special), dim=0)[None, None]  # [1, 1, n*p, T]

    @property
    def _outside(self) -> Tensor:
        return ~(self.marked | self.is_special)  # [n, T]

    def _send(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Rows packed set by set: which token each is [R], where the special ones are [n * p]."""

    groups: Groups
    tokens: Tensor
    special_rows: Tensor


def token_sets(
    model: VisionModel, chosen: Tensor, layout: TokenLayout, special: tuple[int, ...]
) -> TokenSets:
    """The sets of a selection [n, N] on the model's device: the same object as long as neither
    changes."""
    known: dict[object, tuple[Tensor, TokenSets]] = model.memo.setdefault("token sets", {})
    key = (id(chosen), chosen._version, layout, special, model.device)
    if key not in known:
        while len(known) >= _KEPT:
            known.pop(next(iter(known)))
        known[key] = (chosen, TokenSets(chosen, layout, special, model.device))
    return known[key][1]


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
