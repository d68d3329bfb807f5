"""Charts as inline SVG: small, sharp at any size, and in the colours of the page, light or dark.

A series of several points is a line with a band of its errors; a series of one point is a dot with
an error bar and its name beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup
from matplotlib.ticker import LogLocator, MaxNLocator
from torch import Tensor

from seecause.metrics.statistics import standard_error
from seecause.report.page import fragment

# Okabe and Ito's colours, which the colour-blind tell apart (yellow, unreadable on white, is a
# brown here); GREY is for controls.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5c2e", "#777777")
GREY = COLOURS[7]
# neighbours differ in these too, for eyes and printers without colour
DASHES = ("", "8 3", "2 3", "9 3 2 3")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 320, 64, 16, 12, 46
LINE, LETTER, DOT = 14, 7, 5  # height of a label, width of a letter, half a dot


@dataclass(frozen=True)
class Series:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] = ()  # NaN where it is not known: no band there
    colour: str = COLOURS[0]
    dash: str = ""

    @property
    def reach(self) -> list[float]:
        """What the band or bar covers on either side of each point."""
        return [0.0 if math.isnan(error) else error for error in self.error or [0.0] * len(self.y)]


def mean_series(
    name: str, values: Tensor, look: tuple[str, str], *, x: Sequence[float] | None = None
) -> Series:
    """Rows [N, P] -> their mean, with its standard error where there are several; along `x`, or
    their places."""
    along = range(values.shape[1]) if x is None else x
    return Series(name, along, values.mean(dim=0).tolist(), standard_error(values).tolist(), *look)


@dataclass(frozen=True)
class Axis:
    """Values to pixels between `start` and `stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False
    whole: bool = False  # only whole numbers have a meaning

    def at(self, value: float) -> float:
        low, high, value = (
            (math.log(v) for v in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        return round(self.start + (value - low) / (high - low) * (self.stop - self.start), 1)

    def ticks(self) -> list[tuple[float, str]]:
        wide = self.log and self.high / self.low > 30
        ticks = (
            LogLocator(10).tick_values(self.low, self.high)
            if wide
            else MaxNLocator(5, integer=self.whole).tick_values(self.low, self.high)
        )
        rounding = (
            0.0 if self.log else 1e-9 * (self.high - self.low)
        )  # 0.3 is a tick of a range up to 0.3, and no tick is 1e-17
        return [
            (self.at(float(tick)), f"{tick if abs(tick) > rounding else 0.0:.6g}")
            for tick in ticks
            if self.low - rounding <= tick <= self.high + rounding
        ]


@dataclass(frozen=True)
class _Drawn:
    """A series in pixels."""

    series: Series
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()  # around a line, or the two ends of an error bar
    label: tuple[float, float, str] = (0, 0, "start")

    @property
    def single(self) -> bool:
        return len(self.points) == 1


def styled(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a dash for each name, the same in every chart of a page."""
    return {
        name: (COLOURS[place % len(COLOURS)], DASHES[(place + place // len(COLOURS)) % len(DASHES)])
        for place, name in enumerate(names)
    }


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x_title: str,
    y_title: str,
    log: bool = False,
    share: bool = False,
    beside: Sequence[Series] = (),
    dots: Sequence[tuple[float, float]] = (),
) -> Markup:
    """All series on one pair of axes, and `dots` without names under them; `log` is for x. A chart
    that stands `beside` others shares their range of y. A `share` is drawn from 0, which is always
    seen, and to 1 where all of them are 0."""
    reach = [(y - e, y + e) for s in (*series, *beside) for y, e in zip(s.y, s.reach, strict=True)]
    reach += [(y, y) for _, y in dots]
    along = [v for s in series for v in s.x] + [x for x, _ in dots]
    x = Axis(
        *padded(along, log=log),
        LEFT,
        WIDTH - RIGHT,
        log,
        whole=all(isinstance(v, int) for v in along),
    )
    values = [v for pair in reach for v in pair]
    y = Axis(*(from_zero(values) if share else padded(values)), HEIGHT - BOTTOM, TOP)
    drawn = [_draw(s, x, y) for s in series]
    return fragment(
        "chart.svg.j2",
        title=title, x_title=x_title, y_title=y_title, x_ticks=x.ticks(), y_ticks=y.ticks(),
        drawn=_apart(drawn), dots=[(x.at(a), y.at(b)) for a, b in dots],
        width=WIDTH, height=HEIGHT, left=LEFT, right=WIDTH - RIGHT, top=TOP, bottom=HEIGHT - BOTTOM,
    )  # fmt: skip


def _draw(series: Series, x: Axis, y: Axis) -> _Drawn:
    points = [(x.at(a), y.at(b)) for a, b in zip(series.x, series.y, strict=True)]
    if all(map(math.isnan, series.error)):  # or there is none
        return _Drawn(series, points)
    upper, lower = (
        [
            (x.at(a), y.at(b + sign * e))
            for a, b, e in zip(series.x, series.y, series.reach, strict=True)
        ]
        for sign in (1, -1)
    )
    return _Drawn(series, points, [*upper, *reversed(lower)])


def _apart(drawn: Sequence[_Drawn]) -> list[_Drawn]:
    """Names of single points beside them, as near as they can stand without covering a point or
    another name."""
    dots = [mark.points[0] for mark in drawn if mark.single]
    taken = [(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in dots]
    placed = []
    for mark in sorted(drawn, key=lambda d: d.points[0][1]):
        if mark.single:
            label, box = next(
                (
                    place
                    for place in _places(mark)
                    if not any(_overlap(place[1], other) for other in taken)
                ),
                next(_places(mark)),
            )
            taken.append(box)
            mark = replace(mark, label=label)
        placed.append(mark)
    return placed


def _places(
    mark: _Drawn,
) -> Iterator[tuple[tuple[float, float, str], tuple[float, float, float, float]]]:
    """Where a name could stand, the nearest first: its anchor, and the box it covers."""
    (x, y), wide = mark.points[0], LETTER * len(mark.series.name)
    for step in range(2 * HEIGHT // LINE):
        down = y + (step + 1) // 2 * (1 if step % 2 else -1) * LINE / 2
        for side, anchor in ((1, "start"), (-1, "end")):
            start = x + side * 10
            box = (
                min(start, start + side * wide),
                down - LINE / 2,
                max(start, start + side * wide),
                down + LINE / 2,
            )
            if box[0] > LEFT and box[2] < WIDTH and TOP <= down <= HEIGHT - BOTTOM:
                yield (start, down, anchor), box
    yield (x + 10, y, "start"), (x, y, x, y)


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def padded(values: Sequence[float], *, log: bool = False) -> tuple[float, float]:
    """The range of some values with a little air. Values that are all the same have a range from
    zero, or to it."""
    low, high = min(values), max(values)
    if log:
        return low / 1.5, high * 1.5
    if low == high:
        low, high = min(low, 0.0), max(high, 0.0)
    air = 0.04 * (high - low) or 0.5
    return low - air, high + air


def from_zero(values: Sequence[float]) -> tuple[float, float]:
    """The range of shares: zero is in it, air is only where it means something (no share is above
    1), and a tiny share is not stretched."""
    low, high = min(0.0, *values), max(values)
    if high <= 0.0:
        return low, 1.0
    return low, max(high, min(1.0, 1.05 * high))


# Forest plots: differences with their intervals, one row each, around a line at zero.

FOREST_ROW, FOREST_TOP, FOREST_BOTTOM = 26, 10, 44


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
    height = FOREST_TOP + FOREST_ROW * len(rows) + FOREST_BOTTOM
    wide = [0.0 if math.isnan(row.reach) else row.reach for row in rows]
    low = [row.mean - reach for row, reach in zip(rows, wide, strict=True)]
    high = [row.mean + reach for row, reach in zip(rows, wide, strict=True)]
    x = Axis(*padded([0.0, *low, *high]), left, WIDTH - RIGHT)
    ticks = x.ticks() if any(low) or any(high) else [(x.at(0.0), "0")]
    drawn = [
        {
            "name": row.name,
            "y": FOREST_TOP + FOREST_ROW * place + FOREST_ROW / 2,
            "x": x.at(row.mean),
            "low": x.at(row.mean - reach),
            "high": x.at(row.mean + reach),
            "differs": abs(row.mean) > row.reach,
            "title": (
                f"{row.name}: {row.mean:+.3g}"
                + ("" if math.isnan(row.reach) else f" ± {reach:.2g}")
            ),
        }
        for place, (row, reach) in enumerate(zip(rows, wide, strict=True))
    ]
    return fragment(
        "forest.svg.j2", title=title, x_title=x_title, rows=drawn, ticks=ticks, zero=x.at(0.0),
        width=WIDTH, height=height, left=left,
        right=WIDTH - RIGHT, top=FOREST_TOP, bottom=height - FOREST_BOTTOM,
    )  # fmt: skip
