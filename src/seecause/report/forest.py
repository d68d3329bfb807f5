"""Forest plots: differences with their intervals, one row each, around a line at zero. Inline SVG
like the other charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from seecause.report.charts import LETTER, Axis, padded
from seecause.report.page import fragment

WIDTH, ROW, TOP, BOTTOM, RIGHT = 520, 26, 10, 44, 16


@dataclass(frozen=True)
class Difference:
    """A row: what is compared, the mean difference, and half the width of its interval; NaN if that
    is not known."""

    name: str
    mean: float
    reach: float


def forest(rows: Sequence[Difference], *, title: str, x_title: str) -> Markup:
    """The first row stands at the top. Rows whose interval leaves out zero are filled; the others,
    which may be no difference at all, are hollow. Where nothing differs, the axis has no number but
    0."""
    left = 20 + LETTER * max(len(row.name) for row in rows)
    height = TOP + ROW * len(rows) + BOTTOM
    wide = [0.0 if math.isnan(row.reach) else row.reach for row in rows]
    x = Axis(
        *padded(
            [
                0.0,
                *(
                    row.mean + sign * reach
                    for row, reach in zip(rows, wide, strict=True)
                    for sign in (-1, 1)
                ),
            ]
        ),
        left,
        WIDTH - RIGHT,
    )
    ticks = (
        x.ticks()
        if any(row.mean or reach for row, reach in zip(rows, wide, strict=True))
        else [(x.at(0.0), "0")]
    )
    drawn = [
        {
            "name": row.name,
            "y": TOP + ROW * place + ROW / 2,
            "x": x.at(row.mean),
            "low": x.at(row.mean - reach),
            "high": x.at(row.mean + reach),
            "differs": abs(row.mean) > row.reach,
            "said": (
                f"{row.name}: {row.mean:+.3g}"
                + ("" if math.isnan(row.reach) else f" ± {reach:.2g}")
            ),
        }
        for place, (row, reach) in enumerate(zip(rows, wide, strict=True))
    ]
    return fragment(
        "forest.svg.j2", title=title, x_title=x_title, rows=drawn, ticks=ticks, zero=x.at(0.0),
        width=WIDTH, height=height, left=left,
        right=WIDTH - RIGHT, top=TOP, bottom=height - BOTTOM,
    )  # fmt: skip
