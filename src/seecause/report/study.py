"""The figure of a study: one panel for each number, one line for each method, means with errors.

[figure]
label = "method"                      the column that names a line
values = { aupr1 = "AUPR_1" }         panels: a number and its title
where = { table = "maps" }            of which rows; rows = [...] orders lines, else the first
marked, controls                      lines in red and in grey; scale, title, zero, pair
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from seecause.bench.study import Row, as_list, read_csv, summarised

INK, MARKED, GREY, PALE = "#2b4c7e", "#c8553d", "#9aa0a6", "#e6e8eb"


def draw_figure(spec: Mapping[str, Any], path: Path) -> Path:
    """Draw NAME.png beside NAME.csv, as the study's [figure] says."""
    rows = read_csv(path)
    for name, wanted in spec.get("where", {}).items():
        rows = [row for row in rows if row.get(name, "") in map(str, as_list(wanted))]
    kind = "metric" if rows and "metric" in rows[0] else "measure"
    long = bool(rows) and kind in rows[0]
    label, values = spec["label"], spec["values"]
    table = rows if long else summarised(rows, [label], list(values), pair=spec.get("pair", "seed"))
    cells = {(row[label], row[kind if long else "metric"]): row for row in table}
    names = _order(spec, cells, next(iter(values)))
    size = (3.2 + 2.7 * len(values), 0.9 + 0.24 * len(names))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(values), sharey=True, squeeze=False)
    figure.set_layout_engine("constrained", w_pad=0.12)
    for axis, (metric, title) in zip(axes[0], values.items(), strict=True):
        points = {} if long else _points(rows, label, metric)
        _panel(axis, spec, names, {name: cells.get((name, metric)) for name in names}, points)
        axis.set_title(title, fontsize=9.5, loc="left")
    axes[0][0].set_yticks(range(len(names)), names)
    for tick, name in zip(axes[0][0].get_yticklabels(), names, strict=True):
        tick.set_color(_colour(spec, name))
        tick.set_fontsize(8.5)
    if "title" in spec:
        figure.suptitle(spec["title"], fontsize=10.5, x=0.01, ha="left")
    figure.savefig(path.with_suffix(".png"), dpi=130)
    return path.with_suffix(".png")


def _order(spec: Mapping[str, Any], cells: Mapping[Any, Row], first: str) -> list[str]:
    """Names as listed, or by the first number, the largest on top."""
    if "rows" in spec:
        return list(reversed(spec["rows"]))
    means = {
        name: _number(cell, "mean", "value")
        for (name, kind), cell in cells.items()
        if kind == first
    }
    return sorted(means, key=lambda name: means[name])


def _number(cell: Row, *names: str) -> float:
    return float(next((cell[n] for n in names if cell.get(n) not in (None, "")), "nan"))


def _points(rows: Sequence[Row], label: str, metric: str) -> dict[str, list[float]]:
    """Single values, such as those of seeds, by name."""
    points: dict[str, list[float]] = {}
    for row in rows:
        if row.get(metric):
            points.setdefault(row[label], []).append(float(row[metric]))
    return points


def _panel(
    axis: Any,
    spec: Mapping[str, Any],
    names: Sequence[str],
    cells: Mapping[str, Row | None],
    points: Mapping[str, Sequence[float]],
) -> None:
    scale = spec.get("scale", 1.0)
    for place, name in enumerate(names):
        cell, colour = cells[name], _colour(spec, name)
        if cell is None:
            continue
        mean = scale * _number(cell, "mean", "value")
        ends = [scale * _number(cell, *pair) for pair in (("low 95%", "low"), ("high 95%", "high"))]
        single = [scale * value for value in points.get(name, ())]
        axis.plot(single, [place] * len(single), "|", color=colour, alpha=0.6, ms=7)
        if not single:
            axis.plot(ends, [place, place], "-", color=colour, lw=1.3)
        axis.plot(mean, place, "o", color=colour, ms=4.5)
    axis.grid(axis="x", color=PALE)
    axis.set_axisbelow(True)
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(-0.7, len(names) - 0.3)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    if spec.get("zero"):
        axis.axvline(0, color=GREY, lw=1)


def _colour(spec: Mapping[str, Any], name: str) -> str:
    if name in spec.get("marked", ()):
        return MARKED
    return GREY if name in spec.get("controls", ()) else INK
