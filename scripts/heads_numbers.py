"""Arithmetic of the heads study: K chosen on validation pictures, means over draws, as many random
heads, intervals over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scipy.stats import t as student

if TYPE_CHECKING:
    from scripts.heads_study import Study

Row = dict[str, Any]
ERM, DFR, RANDOM = "none (ERM)", "retrained last layer (DFR)", "random"
AS_MANY = (  # where that is no K: heads with scores of 0 or less stay
    "random, as many as some method removed"
)


def choose(study: Study, name: str) -> list[Row]:
    """For each seed, the row whose K is best on validation pictures; random draws are averaged
    first."""
    found = []
    for seed in study.about["seeds"]:
        none = next(row for row in study.rows if row["seed"] == seed and row["method"] == ERM)
        mine = averaged(
            [row for row in study.rows if row["seed"] == seed and row["method"] == name]
        )
        rows = mine if name in (ERM, DFR) else [none, *mine]
        found.append(
            max(rows, key=lambda row: (row["val worst group"], row["val accuracy"], -row["K"]))
        )
    return found


def averaged(rows: Sequence[Row]) -> list[Row]:
    """One row for each K: means over the draws that have a number."""
    found = []
    for k in sorted({row["K"] for row in rows}):
        same = [row for row in rows if row["K"] == k]
        numbers = [key for key, value in same[0].items() if isinstance(value, int | float)]
        found.append(
            {
                **same[0],
                **{
                    key: statistics.fmean(row[key] for row in same if key in row) for key in numbers
                },
                "K": k,
            }
        )
    return found


def as_many(study: Study, row: Row) -> list[Row]:
    """Random sets of as many heads as a row's method removed from the same model; the whole model
    where nothing was."""
    mine = [
        one for one in study.rows if one["seed"] == row["seed"] and one["removed"] == row["removed"]
    ]
    return [
        one for one in mine if one["method"] in ((RANDOM, AS_MANY) if row["removed"] else (ERM,))
    ]


def lot(study: Study, row: Row, key: str) -> float:
    """The mean of a number over as many random heads."""
    return statistics.fmean(one[key] for one in as_many(study, row))


def interval(values: Sequence[float], digits: int = 3) -> str:
    known = [v for v in values if v == v]
    if not known:
        return "-"
    return f"{statistics.fmean(known):.{digits}f}" + (
        f" ± {reach(known):.{digits}f}" if len(known) > 1 else ""
    )


def reach(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean (Student)."""
    return (
        float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
        if len(values) > 1
        else float("nan")
    )
