"""Cells about a real model's background, continued: what single photos say, as means, ratios and
paired changes with 95 % bootstrap intervals over photos, or over whole breeds.

All ratios over the same number of photos share their resamplings, so a difference is paired. With
groups, whole groups are drawn: photos of one breed are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from cells_background import AFTER, SWAP, Earlier
from torch import Tensor

from seecause.bench.study import Row, StudyContext

MEANS = "BIR, ratio of means"
DRAWS = 4000


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class ResampledRatio:
    value: Tensor
    drawn: Tensor  # [DRAWS], what it is in every resampling


@cache
def resamplings(count: int) -> Tensor:
    """[DRAWS, count]: how often each of `count` things is drawn; the same for all intervals."""
    places = torch.randint(count, (DRAWS, count), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(DRAWS, count, dtype=torch.float64)
    return torch.zeros(DRAWS, count, dtype=torch.float64).scatter_add_(1, places, ones)


def resampled_ratio(
    top: Tensor, bottom: Tensor | None = None, groups: Sequence[Any] | None = None
) -> ResampledRatio:
    """mean(top) / mean(bottom) of float64 [N], or mean(top) alone; images are drawn, or whole
    groups."""
    bottom = torch.ones_like(top) if bottom is None else bottom
    value = top.sum() / bottom.sum()
    if groups is not None:
        kinds, places = torch.tensor(groups).unique(return_inverse=True)
        zeros = torch.zeros(len(kinds), dtype=torch.float64)
        top, bottom = (zeros.index_add(0, places, values) for values in (top, bottom))
    weights = resamplings(len(top))
    return ResampledRatio(value, (weights @ top) / (weights @ bottom))


def estimate(ratio: ResampledRatio) -> Estimate:
    defined = ratio.drawn[~ratio.drawn.isnan()]  # a resampling may have nothing to divide by
    low, high = defined.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(ratio.value), low, high)


def ratio_difference(first: ResampledRatio, second: ResampledRatio) -> Estimate:
    """first - second over the same resamplings of the same images."""
    return estimate(ResampledRatio(first.value - second.value, first.drawn - second.drawn))


def bir(fig: Tensor, big: Tensor) -> ResampledRatio:
    return resampled_ratio(big, fig + big)


def effects(row: Row, whole: Row) -> dict[str, tuple[float, Estimate]]:
    """Every measure of a model without heads, and how far it is from the whole model's."""
    first, second = _measures(row), _measures(whole)
    return {n: (float(r.value), ratio_difference(r, second[n])) for n, r in first.items()}


def _measures(row: Row) -> dict[str, ResampledRatio]:
    own = {name: tensor(values) for name, values in row.items() if isinstance(values, list)}
    means = {"ImageNet accuracy": own["imagenet"], "pets accuracy": own["pets"]}
    means["BG-gap"] = own["mixed_same"] - own["mixed_rand"]
    ratios = {name: resampled_ratio(values) for name, values in means.items()}
    gains = {f"BIR, {n}": bir(own[f"FIG, {n}"], own[f"BIG, {n}"]) for n in (*AFTER, SWAP)}
    return ratios | gains


def tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def intervals(context: StudyContext, *, earlier: Earlier) -> list[Row]:
    """One row for each number of the page: table, row, measure, value and its interval."""
    rows: list[Row] = []

    def add(
        table: str, row: str, measure: str, one: Estimate | ResampledRatio, **more: Any
    ) -> None:
        one = estimate(one) if isinstance(one, ResampledRatio) else one
        ends = {"value": one.value, "low": one.low, "high": one.high}
        rows.append({"table": table, "row": row, "measure": measure, **ends, **more})

    kinds = _columns(earlier["answers"], "kind")
    for kind, columns in kinds.items():
        for name in ("right", "top 5", "right among breeds", "probability"):
            if name in columns:
                add("composites", kind, name, resampled_ratio(tensor(columns[name])))
    for name in ("right", "right among breeds", "probability"):
        gap = tensor(kinds["mixed_same"][name]) - tensor(kinds["mixed_rand"][name])
        breeds = kinds["mixed_same"]["breed"]
        add("composites", "BG-gap", name, resampled_ratio(gap))
        add("composites", "BG-gap, breeds drawn", name, resampled_ratio(gap, groups=breeds))
    birs = {}
    for look, columns in _columns(earlier["audit"], "look").items():
        if "iou" in columns:
            add("audit", look, "IoU", resampled_ratio(tensor(columns["iou"])))
        if "fig" in columns:
            sure = tensor(columns["right"]).bool()
            fig, big = (tensor(columns[name])[sure] for name in ("fig", "big"))
            birs[look] = bir(fig, big)
            add("audit", look, "FIG", resampled_ratio(fig))
            add("audit", look, "BIG", resampled_ratio(big))
            add("audit", look, MEANS, birs[look])
    for look in ("discovered masks, grey", "true masks, grey"):
        for control in ("control: another photo's true mask, grey", "control: centre, grey"):
            less = ratio_difference(birs[look], birs[control])
            add("audit", f"{look} less {control}", MEANS, less)
    whole = next(row for row in earlier["removals"] if row["row"] == "the whole model")
    for row in earlier["removals"]:
        labels = {name: row.get(name) for name in ("K", "removed", "draw", "heads")}
        for measure, (value, change) in effects(row, whole).items():
            add("removal", row["row"], f"change of {measure}", change, after=value, **labels)
    return rows


def _columns(rows: Sequence[Row], by: str) -> dict[str, dict[str, list[float]]]:
    table: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            table.setdefault(row[by], {}).setdefault(name, []).append(value)
    return table
