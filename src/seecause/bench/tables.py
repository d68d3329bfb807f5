"""What a run says: for each method and metric a mean, its error and interval, and the paired
difference to a chosen method; and, where it was measured, every method against the truth."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import torch
from torch import Tensor

from seecause.bench.measures import UNDEFINED, family_of, higher_is_better
from seecause.bench.plan import Store
from seecause.bench.results import RunResults, read_results
from seecause.errors import UnknownName
from seecause.files import atomic_file, csv_text, place, safe_cell
from seecause.metrics import (
    bootstrap_interval,
    paired_difference,
    part_completeness,
    summarise,
)
from seecause.metrics.registry import FAMILIES
from seecause.metrics.statistics import Summary, error_text

WIDE = 8  # columns that one table can have; with more it is cut by families of metrics
SATURATED = 1e-3  # share of the largest mean within which means must lie for none to be the best
TRUTH_COLUMNS = (
    "completeness",
    "at threshold",
    "correctness",
    "contrastivity",
    "mean of the three",
)
Truth = dict[str, dict[str, float]]  # by method and column
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "#$%&_{}"},
}


@dataclass(frozen=True)
class Cell:
    """One method by one metric. `difference` is to the reference, image by image; `missing` counts
    images without a value."""

    mean: float
    error: float
    interval: tuple[float, float]
    n: int
    missing: int
    difference: Summary | None
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A cell for each method and metric: `table.cells["caap"]["insertion"].mean`."""

    methods: Sequence[str]
    metrics: Sequence[str]
    reference: str
    cells: dict[str, dict[str, Cell]]

    def digits(self, metric: str) -> int:
        """Decimals that show two digits of the largest standard error, 3 to 6."""
        errors = [cells[metric].error for cells in self.cells.values()]
        error = max((error for error in errors if 0 < error < math.inf), default=1.0)
        return min(6, max(3, 1 - math.floor(math.log10(error))))

    def column_groups(self) -> list[tuple[str, list[str]]]:
        """Columns that stand together, under a title: all of them if they are few, else one piece
        for each family."""
        if len(self.metrics) <= WIDE:
            return [("", list(self.metrics))]
        families = {
            family: [m for m in self.metrics if family_of(m) == family] for family in FAMILIES
        }
        return [(family, metrics) for family, metrics in families.items() if metrics]


def table(folder: Path | str, *, against: str | None = None) -> Table:
    """Means, errors and intervals of a run folder, every method compared image by image with
    `against` (the first if None)."""
    store = Store(place(folder))
    return table_of(read_results(store, store.plan()).values, against=against)


def table_of(
    columns: Mapping[str, Mapping[str, Tensor]],
    *,
    against: str | None = None,
    unranked: Collection[str] = (),
) -> Table:
    """The table of values [images] by method and metric, compared with `against` (the first if
    None). Methods that saw other images than the rest are `unranked`: never marked as the best."""
    methods = list(columns)
    metrics = list(columns[methods[0]])
    reference = against or methods[0]
    if reference not in methods:
        raise UnknownName("method of this run", reference, methods)
    cells = {m: _cells(columns[m], None if m == reference else columns[reference]) for m in methods}
    plain = Table(methods, metrics, reference, cells)
    best = {
        metric: _best(plain, metric, [m for m in methods if m not in unranked])
        for metric in metrics
    }
    return replace(
        plain,
        cells={
            m: {k: replace(cell, best=m in best[k]) for k, cell in row.items()}
            for m, row in cells.items()
        },
    )


def to_csv(table: Table) -> str:
    compared = f"difference to {table.reference}"
    head = ["method", "metric", "mean", "standard error", "low 95%", "high 95%", "n", "missing"]
    rows: list[list[Any]] = [[*head, compared, "error of difference", "best"]]
    for method in table.methods:
        for metric, cell in table.cells[method].items():
            gap = cell.difference
            difference = ["", ""] if gap is None else [gap.mean, gap.standard_error]
            numbers = [cell.mean, cell.error, *cell.interval, cell.n, cell.missing, *difference]
            rows.append([method, metric, *numbers, int(cell.best)])
    return csv_text(rows)


def write_rows(results: RunResults, path: Path) -> None:
    """Every number of a run as CSV: a line for each picture, method and metric that was done, and
    why where there is no number. Written method by method, so that a large run takes little
    memory."""
    names = pa.array([_cell_text(name) for name in results.plan.samples], pa.string())
    with atomic_file(path) as file:
        for place, method in enumerate(results.values):
            table = _method_rows(results, method, names)
            pa_csv.write_csv(table, file, pa_csv.WriteOptions(include_header=place == 0))


def _method_rows(results: RunResults, method: str, names: pa.Array) -> pa.Table:
    """Lines of one method, picture by picture."""
    shards = [shard for shard in results.plan.shards if shard.method == method]
    finished = [shard for shard in shards if shard.id in results.condition.metadata]
    pictures = [np.arange(shard.start, shard.stop) for shard in finished]
    index = np.concatenate([np.zeros(0, int), *pictures])
    metrics = list(results.values[method])
    values = torch.stack(list(results.values[method].values()), dim=1).numpy()[index]
    reasons = np.where(np.isnan(values), UNDEFINED, "").astype(object)  # [pictures, metrics]
    row_of = {results.plan.samples[each]: row for row, each in enumerate(index)}
    for shard in finished:
        for hole in results.condition.metadata[shard.id].get("holes", ()):
            image, metric, reason = map(str, hole)
            if image in row_of and metric in metrics:  # a stranger's metadata may say anything
                reasons[row_of[image], metrics.index(metric)] = _cell_text(reason)
    lines = np.repeat(index, len(metrics))
    columns = {
        "image": names.take(pa.array(lines)),
        **{name: _present(known.numpy()[lines]) for name, known in results.answers.items()},
        "method": pa.array([_cell_text(method)], pa.string()).take(pa.array(lines * 0)),
        "metric": pa.array(np.tile([*map(_cell_text, metrics)], len(index)), pa.string()),
        "value": pa.array(values.ravel(), mask=np.isnan(values.ravel())),  # an empty field
        "reason": pa.array(reasons.ravel(), pa.string()),
    }
    return pa.table(columns)


def _present(numbers: np.ndarray) -> pa.Array:
    return pa.array(numbers, mask=numbers < 0)


def _cell_text(text: str) -> str:
    """As a CSV may hold it: no formula, no bytes that are no UTF-8."""
    return safe_cell(text.encode("utf-8", "backslashreplace").decode())


def to_latex(table: Table) -> str:
    """Booktabs tables, mean and standard error, the best in bold; one for each piece."""
    head = "% needs \\usepackage{booktabs}; mean and standard error over images\n"
    return head + "\n".join(
        _latex(table, title, metrics) for title, metrics in table.column_groups()
    )


def to_markdown(table: Table) -> str:
    """Tables for a page: mean and standard error, the best in bold; one for each piece."""
    return "\n".join(_markdown(table, title, metrics) for title, metrics in table.column_groups())


def _latex(table: Table, title: str, metrics: Sequence[str]) -> str:
    arrows = {
        metric: r"$\uparrow$" if higher_is_better(metric) else r"$\downarrow$" for metric in metrics
    }
    lines = [
        *([f"% {title}"] if title else []),
        rf"\begin{{tabular}}{{l{'r' * len(metrics)}}}",
        r"\toprule",
        " & ".join(["method", *(f"{_escaped(metric)} {arrows[metric]}" for metric in metrics)])
        + r" \\",
        r"\midrule",
        *(
            " & ".join(
                [_escaped(m), *(_latex_cell(table.cells[m][k], table.digits(k)) for k in metrics)]
            )
            + r" \\"
            for m in table.methods
        ),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _markdown(table: Table, title: str, metrics: Sequence[str]) -> str:
    head = [f"{metric} {'↑' if higher_is_better(metric) else '↓'}" for metric in metrics]
    lines = [
        *([f"**{title[0].upper()}{title[1:]}**", ""] if title else []),
        "| method | " + " | ".join(head) + " |",
        "|---|" + "---|" * len(head),
    ]
    for method in table.methods:
        cells = [
            _plain_cell(table.cells[method][metric], table.digits(metric)) for metric in metrics
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _plain_cell(cell: Cell, digits: int) -> str:
    if cell.n == 0:
        return "no value"
    text = f"{cell.mean:.{digits}f} ± {error_text(cell.error, digits)}"
    return f"**{text}**" if cell.best else text


def _cells(mine: Mapping[str, Tensor], reference: Mapping[str, Tensor] | None) -> dict[str, Cell]:
    compared = reference or dict.fromkeys(mine)
    return {metric: _cell(values, compared[metric]) for metric, values in mine.items()}


def _cell(mine: Tensor, reference: Tensor | None) -> Cell:
    summary = summarise(mine)
    difference = None if reference is None else paired_difference(mine, reference)
    return Cell(
        summary.mean,
        summary.standard_error,
        bootstrap_interval(mine),
        summary.n,
        summary.skipped,
        difference,
    )


def _best(table: Table, metric: str, ranked: Sequence[str]) -> set[str]:
    """The methods whose mean is best as shown. None if nothing is known, or all are nearly equal:
    the metric is saturated, or tells of the model alone."""
    shown = {
        m: round(table.cells[m][metric].mean, table.digits(metric))
        for m in ranked
        if table.cells[m][metric].n
    }
    if not shown or (
        len(shown) > 1
        and max(shown.values()) - min(shown.values()) <= SATURATED * max(map(abs, shown.values()))
    ):
        return set()
    top = (max if higher_is_better(metric) else min)(shown.values())
    return {method for method, mean in shown.items() if mean == top}


def _latex_cell(cell: Cell, digits: int) -> str:
    if cell.n == 0:
        return "--"
    mean = rf"\mathbf{{{cell.mean:.{digits}f}}}" if cell.best else f"{cell.mean:.{digits}f}"
    return rf"${mean} \pm {error_text(cell.error, digits)}$"


def _escaped(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


# Against the truth, over all pictures of a run (FunnyBirds; `metrics.parts` says what each score
# is). Shards keep what each picture says (`parts.*`), and it is joined here: the threshold of
# completeness is chosen over all pictures, so that no picture has a completeness of its own.


def against_truth(results: RunResults) -> Truth:
    """The scores of every method that has some. Empty if the run did not measure them."""
    return {
        method: dict(zip(TRUTH_COLUMNS, part_completeness(scores).values(), strict=True))
        for method, scores in results.parts.items()
    }


def truth_csv(truth: Truth) -> str:
    rows = ([method, *row.values()] for method, row in truth.items())
    return csv_text([["method", *TRUTH_COLUMNS], *rows])


def score_texts(row: dict[str, float]) -> list[str]:
    """Numbers as pages print them; a dash where no picture asks the question."""
    return ["-" if value != value else f"{value:.3f}" for value in row.values()]
