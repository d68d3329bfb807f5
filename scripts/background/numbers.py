"""Arithmetic of the background study's page: means, ratios and their changes, with 95 % bootstrap
intervals over photos.

Changes are paired: the same photos with and without heads. All intervals come from the same
resamplings of the photos. What a conclusion hangs on is compared as it is printed: the last bits of
a sum decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from scripts.background.removal import AFTER, SWAP, Heads, best, measured, methods

Row = dict[str, Any]
DRAWS = 4000
DIGITS = 3  # behind the point, in print
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
        return f"{self.value:.{DIGITS}f} [{self.low:.{DIGITS}f}, {self.high:.{DIGITS}f}]"

    @property
    def signed(self) -> str:
        return f"{self.value:+.{DIGITS}f} [{self.low:+.{DIGITS}f}, {self.high:+.{DIGITS}f}]"

    @property
    def printed(self) -> tuple[float, float, float]:
        """As a reader sees it."""
        return round(self.value, DIGITS), round(self.low, DIGITS), round(self.high, DIGITS)


@dataclass(frozen=True)
class Effect:
    """A measure without some heads, and how far that is from the whole model."""

    value: float
    change: Estimate


@dataclass(frozen=True)
class Removal:
    """Which heads went, and every measure without them."""

    heads: Heads
    effects: dict[str, Effect]


@dataclass(frozen=True)
class Removals:
    """All that were measured: as methods chose them, by lot, and each head alone."""

    chosen: dict[tuple[str, int], Removal]  # by method and K
    lots: dict[int, list[Removal]]  # random sets, by how many heads they have
    singles: list[Removal]
    unseen: list[Heads]  # heads whose removal alone is not measured yet

    def rivals(self, one: Removal) -> list[Removal]:
        """Other sets of as many heads: all single heads there are, or random sets. Never the set
        itself, which cannot fall further than itself."""
        some = self.singles if len(one.heads) == 1 else self.lots.get(len(one.heads), [])
        return list({other.heads: other for other in some if other.heads != one.heads}.values())


def tensor(values: str | Sequence[float]) -> Tensor:
    """[N], from a list or from a string of 0 and 1."""
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


def counts(shares: Sequence[float], draws: int) -> Tensor:
    """[N]: in how many of `draws` it was so. Whole numbers, however many digits a share was kept
    with."""
    return (tensor(shares) * draws).round()


@cache
def resamplings(count: int) -> Tensor:
    """[DRAWS, count]: how often each of `count` things is drawn."""
    drawn = torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(0))
    return torch.zeros(DRAWS, count, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(DRAWS, count, dtype=torch.float64)
    )


def mean(values: Tensor) -> Estimate:
    """Sums of whole numbers are exact, and so is an interval that ends at 0."""
    return _estimate(values.sum() / len(values), (resamplings(len(values)) @ values) / len(values))


def mean_by_group(values: Tensor, groups: Sequence[int]) -> Estimate:
    """The mean over photos, with an interval from drawing whole groups: what other groups would
    say."""
    kinds, places = torch.tensor(groups).unique(return_inverse=True)
    zeros = torch.zeros(len(kinds), dtype=torch.float64)
    sums, sizes = (
        zeros.index_add(0, places, values),
        zeros.index_add(0, places, torch.ones_like(values)),
    )
    weights = resamplings(len(kinds))
    return _estimate(values.sum() / len(values), (weights @ sums) / (weights @ sizes))


def ratio(top: Tensor, bottom: Tensor) -> Estimate:
    """Of two means."""
    weights = resamplings(len(top))
    return _estimate(top.mean() / bottom.mean(), (weights @ top) / (weights @ bottom))


def ratio_change(after: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor]) -> Estimate:
    """Of the ratio of two means, from `before` to `after`."""
    weights = resamplings(len(after[0]))
    (a, b), (c, d) = after, before
    return _estimate(
        a.mean() / b.mean() - c.mean() / d.mean(),
        (weights @ a) / (weights @ b) - (weights @ c) / (weights @ d),
    )


def _estimate(value: Tensor, drawn: Tensor) -> Estimate:
    known = drawn[~drawn.isnan()]  # a resampling may have nothing to divide by
    if len(known) == 0:
        return Estimate(float(value), float("nan"), float("nan"))
    low, high = known.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(value), low, high)


def gap_values(composites: Row, key: str, draws: int) -> tuple[Tensor, int]:
    """BG-gap of each photo, and what to divide it by: counts of answers stay whole."""
    same, other = (composites["kinds"][kind][key] for kind in ("mixed_same", "mixed_rand"))
    return (
        (tensor(same) - tensor(other), 1)
        if key == "probability"
        else (counts(same, draws) - counts(other, draws), draws)
    )


def gap_of(composites: Row, key: str, draws: int, groups: Sequence[int] | None = None) -> Estimate:
    """BG-gap of one measure, with an interval over photos, or over groups of them."""
    values, per = gap_values(composites, key, draws)
    found = mean(values) if groups is None else mean_by_group(values, groups)
    return Estimate(found.value / per, found.low / per, found.high / per)


def right_ones(found: Row) -> Tensor:
    return tensor(found["plain"]["pets"]["top 1"]).bool()


def bir(gains: Row, rows: Tensor) -> Estimate:
    """Ratio of means."""
    fig, big = (tensor(gains[key])[rows] for key in ("fig", "big"))
    return ratio(big, fig + big)


def bir_difference(one: Row, other: Row, rows: Tensor) -> Estimate:
    """BIR of one look less that of another, ratios of means, on the same photos."""
    return ratio_change(
        *(_shares([tensor(gains[key])[rows] for key in ("fig", "big")]) for gains in (one, other))
    )


def bir_by_photo(gains: Row, rows: Tensor) -> Estimate:
    """Mean of ratios (equation 41); one half where nothing matters."""
    fig, big = (tensor(gains[key])[rows] for key in ("fig", "big"))
    return mean(torch.where(fig + big < 1e-8, 0.5, big / (fig + big).clamp_min(1e-8)))


def effects(row: Row, whole: Row) -> dict[str, Effect]:
    """Every measure of a model without heads beside the whole model."""
    found = {}
    for name, key in zip(ACCURACIES, ("imagenet", "pets"), strict=True):
        after, before = tensor(row[key]), tensor(whole[key])
        found[name] = Effect(float(after.mean()), mean(after - before))
    after, before = (tensor(one["mixed_same"]) - tensor(one["mixed_rand"]) for one in (row, whole))
    found["BG-gap"] = Effect(float(after.mean()), mean(after - before))
    for name in (*AFTER, SWAP):
        parts = [_shares([tensor(values) for values in one["gains"][name]]) for one in (row, whole)]
        found[f"BIR, {name}"] = Effect(
            float(parts[0][0].mean() / parts[0][1].mean()), ratio_change(*parts)
        )
    return found


def _shares(gains: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Of FIG and BIG: BIG, and FIG + BIG."""
    fig, big = gains
    return big, fig + big


def removed(found: Row, ks: Iterable[int], every: Iterable[Heads]) -> Removals:
    """Of the pieces that are there; `every` head of the model alone."""
    rows, singles = measured(found), list(every)
    done = (
        {heads: Removal(heads, effects(row, rows[()])) for heads, row in rows.items()}
        if () in rows
        else {}
    )
    wanted = {(method, k): best(record, k) for method, record in methods(found).items() for k in ks}
    lots = {
        int(name.removeprefix("random ")): kept
        for name, kept in found.items()
        if name.startswith("random ")
    }
    return Removals(
        chosen={key: done[heads] for key, heads in wanted.items() if heads in done},
        lots={
            size: [
                done[heads]
                for heads in (
                    tuple((layer, head) for layer, head in row["heads"]) for row in lots[size]
                )
            ]
            for size in sorted(lots)
        },
        singles=[done[heads] for heads in singles if heads in done],
        unseen=[heads for heads in singles if heads not in done],
    )


def falls(one: Removal, measure: str) -> bool:
    """The measure falls by more than its interval, and accuracy, as estimated, is kept."""
    return one.effects[measure].change.printed[2] < 0 and all(
        one.effects[name].change.printed[0] >= -MAY_COST for name in ACCURACIES
    )


def surely_cheap(one: Removal) -> bool:
    """Accuracy is kept also at the low ends of its intervals."""
    return all(one.effects[name].change.printed[1] >= -MAY_COST for name in ACCURACIES)


def place(one: Removal, rivals: Iterable[Removal], measure: str) -> int:
    """1 if no rival falls as far or further."""
    return 1 + sum(
        other.effects[measure].change.value <= one.effects[measure].change.value for other in rivals
    )
