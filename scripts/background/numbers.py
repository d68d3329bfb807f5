"""Arithmetic of the background study's page: means, ratios and their changes, with 95 % bootstrap intervals over photos.

Changes are paired: the same photos with and without heads. All intervals come from the same resamplings of the photos.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from scripts.background.removal import AFTER, SWAP

Row = dict[str, Any]
DRAWS = 4000
ACCURACIES = ("ImageNet accuracy", "pets accuracy")
BACKGROUND = ("BG-gap", *(f"BIR, {name}" for name in (*AFTER, SWAP)))  # lower is better
MEASURES = (*ACCURACIES, *BACKGROUND)
MAY_COST = 0.01  # accuracy that a removal may cost on either set of photos


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def signed(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class Effect:
    """A measure without some heads, and how far that is from the whole model."""

    value: float
    change: Estimate


@dataclass(frozen=True)
class Removal:
    """Which heads went, and every measure without them."""

    heads: tuple[tuple[int, int], ...]
    effects: dict[str, Effect]


Removals = dict[tuple[str, int], Removal]  # by method and K
Lots = dict[int, list[dict[str, Effect]]]  # random sets, by how many heads they have


def tensor(values: str | Sequence[float]) -> Tensor:
    """[N], from a list or from a string of 0 and 1."""
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


@cache
def resamplings(count: int) -> Tensor:
    """[DRAWS, count]: how often each photo is drawn, as shares."""
    drawn = torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(0))
    return torch.zeros(DRAWS, count, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(DRAWS, count, dtype=torch.float64)) / count


def mean(values: Tensor) -> Estimate:
    return _estimate(values.mean(), resamplings(len(values)) @ values)


def ratio(top: Tensor, bottom: Tensor) -> Estimate:
    """Of two means."""
    weights = resamplings(len(top))
    return _estimate(top.mean() / bottom.mean(), (weights @ top) / (weights @ bottom))


def ratio_change(after: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor]) -> Estimate:
    """Of the ratio of two means, from `before` to `after`."""
    weights = resamplings(len(after[0]))
    (a, b), (c, d) = after, before
    return _estimate(a.mean() / b.mean() - c.mean() / d.mean(), (weights @ a) / (weights @ b) - (weights @ c) / (weights @ d))


def _estimate(value: Tensor, drawn: Tensor) -> Estimate:
    known = drawn[~drawn.isnan()]  # a resampling may have nothing to divide by
    if len(known) == 0:
        return Estimate(float(value), float("nan"), float("nan"))
    low, high = known.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(value), low, high)


def effects(row: Row, whole: Row) -> dict[str, Effect]:
    """Every measure of a model without heads beside the whole model."""
    found = {}
    for name, key in zip(ACCURACIES, ("imagenet", "pets"), strict=True):
        after, before = tensor(row[key]), tensor(whole[key])
        found[name] = Effect(float(after.mean()), mean(after - before))
    after, before = (tensor(one["mixed_same"]) - tensor(one["mixed_rand"]) for one in (row, whole))
    found["BG-gap"] = Effect(float(after.mean()), mean(after - before))
    for name in (*AFTER, SWAP):
        parts = [_shares(one["gains"][name]) for one in (row, whole)]
        found[f"BIR, {name}"] = Effect(float(parts[0][0].mean() / parts[0][1].mean()), ratio_change(*parts))
    return found


def removed(found: Row, ks: Iterable[int]) -> Removals:
    """Of the pieces that are there."""
    return {
        (name.removeprefix("removed by "), k): Removal(tuple((layer, head) for layer, head in row["heads"]), effects(row, found["nothing removed"][0]))
        for name, kept in found.items()
        if name.startswith("removed by ")
        for k, row in zip(ks, kept, strict=True)
    }


def by_lot(found: Row) -> Lots:
    """The same of random sets."""
    sizes = sorted(int(name.removeprefix("random ")) for name in found if name.startswith("random "))
    return {size: [effects(row, found["nothing removed"][0]) for row in found[f"random {size}"]] for size in sizes}


def _shares(gains: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """BIG, and FIG + BIG."""
    fig, big = (tensor(values) for values in gains)
    return big, fig + big


def falls(found: dict[str, Effect], measure: str) -> bool:
    """The measure falls by more than its interval, and accuracy is kept."""
    return found[measure].change.high < 0 and all(found[name].change.value >= -MAY_COST for name in ACCURACIES)


def beyond(found: dict[str, Effect], lots: Iterable[dict[str, Effect]], measure: str) -> bool:
    """It falls further than with any random set of as many heads."""
    changes = [lot[measure].change.value for lot in lots]
    return bool(changes) and found[measure].change.value < min(changes)
