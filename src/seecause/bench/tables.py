"""The numbers of a run: for each method and metric a mean, its error and interval, and the paired
difference to a chosen method. Read from the Parquet files of finished cells; CSV, LaTeX, Markdown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import torch
from torch import Tensor

from seecause.bench.cells import ANSWERS, Cell, Plan
from seecause.bench.measures import PARTS, group_of, metric_groups
from seecause.bench.runner import (
    MissingValue,
    Status,
    missing_values,
    read_cell,
    read_plan,
    state_of,
)
from seecause.errors import UnknownName
from seecause.files import atomic_file, csv_text, safe_cell
from seecause.metrics.parts import part_completeness
from seecause.metrics.registry import FAMILIES, METRICS, Direction
from seecause.metrics.statistics import (
    Summary,
    bootstrap_interval,
    error_text,
    paired_difference,
    summarise,
)

WIDE = 8  # columns of a table; one with more is cut by families of metrics
SATURATED = 1e-3  # share of the largest mean within which means lie for none to be the best
CURVES = {name: f"insertion-deletion: {name} curve" for name in ("insertion", "deletion")}
SHARES = "insertion-deletion: shares"
UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, pa.ArrowException)
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "#$%&_{}"},
}


@dataclass(frozen=True)
class TableCell:
    """One method by one metric.

    `difference` is to the reference method, image by image; `missing` counts images without a
    value.
    """

    mean: float
    error: float
    interval: tuple[float, float]
    n: int
    missing: int
    difference: Summary | None
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Methods by metrics: `table.cells["caap"]["insertion"].mean`."""

    methods: Sequence[str]
    metrics: Sequence[str]
    reference: str
    cells: dict[str, dict[str, TableCell]]
    better: Mapping[str, Direction]  # by metric

    def numbers(self) -> dict[str, dict[str, float]]:
        """Means by method and metric."""
        return {m: {k: cell.mean for k, cell in row.items()} for m, row in self.cells.items()}

    def records(self) -> list[dict[str, Any]]:
        """One row for each method and metric, as in table.csv."""
        compared = f"difference to {self.reference}"
        rows = []
        for method in self.methods:
            for metric, cell in self.cells[method].items():
                gap = cell.difference
                rows.append({
                    "method": method,
                    "metric": metric,
                    "mean": cell.mean,
                    "standard error": cell.error,
                    "low 95%": cell.interval[0],
                    "high 95%": cell.interval[1],
                    "n": cell.n,
                    "missing": cell.missing,
                    compared: "" if gap is None else gap.mean,
                    "error of difference": "" if gap is None else gap.standard_error,
                    "best": int(cell.best),
                })  # fmt: skip
        return rows

    def to_pandas(self) -> Any:
        """`records()` as a pandas.DataFrame."""
        import pandas

        return pandas.DataFrame(self.records())

    def digits(self, metric: str) -> int:
        """Decimals that show two digits of the largest standard error, 3 to 6."""
        errors = [cells[metric].error for cells in self.cells.values()]
        error = max((error for error in errors if 0 < error < math.inf), default=1.0)
        return min(6, max(3, 1 - math.floor(math.log10(error))))

    def column_groups(self) -> list[tuple[str, list[str]]]:
        """Columns that stand together, under a title: all if they are few, else by family."""
        if len(self.metrics) <= WIDE:
            return [("", list(self.metrics))]
        known = metric_groups()
        family = {m: METRICS.get(known[m]).family if m in known else "other" for m in self.metrics}
        groups = [(name, [m for m in self.metrics if family[m] == name]) for name in FAMILIES]
        return [(name, metrics) for name, metrics in groups if metrics]


@dataclass(frozen=True, eq=False)
class Results:
    """The rows of a run by method, without maps and curves, which are read when asked for.

    Attributes:
        rows: By method, one row for each image of finished cells, in order.
        info: Metadata of finished cells by name: seconds, images, shapes ...
        status: What is finished and what is missing.
    """

    folder: Path
    plan: Plan
    rows: dict[str, pa.Table]
    info: dict[str, dict[str, Any]]
    status: Status

    @cached_property
    def values(self) -> dict[str, dict[str, Tensor]]:
        """Values [images] float64 by method and metric; NaN where there is none."""
        count, by_name = self.plan.data["images"], dict[str, dict[str, Tensor]]()
        for method, rows in self.rows.items():
            index = rows["index"].to_numpy()
            by_name[method] = {}
            for metric in self.plan.request.metrics:
                values = np.full(count, np.nan)
                values[index] = rows[metric].to_numpy()
                by_name[method][metric] = torch.from_numpy(values)
        return by_name

    @cached_property
    def answers(self) -> dict[str, Tensor]:
        """Classes [images] by name (label, target, predicted); -1 where not known."""
        found = {name: np.full(self.plan.data["images"], -1) for name in ANSWERS}
        for rows in self.rows.values():
            for name, known in found.items():
                place = rows["index"].to_numpy()
                known[place] = np.maximum(known[place], rows[name].fill_null(-1).to_numpy())
        return {name: torch.from_numpy(known) for name, known in found.items()}

    def details(
        self, method: str, name: str, samples: Iterable[int] | None = None
    ) -> dict[int, Tensor]:
        """Tensors by sample, such as name="map" [gh, gw]; images without one are left out."""
        wanted = None if samples is None else set(samples)
        found: dict[int, Tensor] = {}
        for cell in self._finished(method):
            inside = wanted is None or any(cell.start <= each < cell.stop for each in wanted)
            shape = self.info[cell.name]["shapes"].get(name)
            table = (
                read_cell(self.folder, cell.name, ["index", name])
                if inside and shape is not None
                else None
            )
            if table is None:
                continue
            values = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            values = torch.from_numpy(values.reshape(len(cell), *shape).copy())
            for sample, value in zip(table["index"].to_pylist(), values, strict=True):
                if (wanted is None or sample in wanted) and not value.isnan().all():
                    found[sample] = value
        return found

    def curves(self) -> dict[str, dict[str, Tensor]]:
        """Insertion and deletion curves [images, n + 1] by method, where they were measured."""
        by_method = {}
        for method in self.rows:
            found = {kind: self.details(method, name) for kind, name in CURVES.items()}
            if all(found.values()):
                by_method[method] = {k: torch.stack(list(c.values())) for k, c in found.items()}
        return by_method

    def shares(self) -> Tensor:
        """Share of the image [n + 1] along the curves; empty if there are none."""
        known = (info["shared"][SHARES] for info in self.info.values() if SHARES in info["shared"])
        return torch.tensor(next(known, []), dtype=torch.float64)

    def seconds(self) -> dict[str, list[float]]:
        """Seconds of attribution for one image, by method: one number for each cell."""
        return {
            method: [
                self.info[cell.name]["seconds"]["attribute"] / self.info[cell.name]["images"]
                for cell in self._finished(method)
                if self.info[cell.name]["images"]
            ]
            for method in self.rows
        }

    def truth(self) -> dict[str, dict[str, float]]:
        """Scores against the truth (metric "parts", FunnyBirds), over all images of each method.

        Completeness is at the threshold that is best over all images, so no image has one of its
        own. Empty if it was not measured.
        """
        rows = {}
        for method in self.rows:
            found = {name: self.details(method, f"parts: {name}") for name in PARTS}
            if all(found.values()):
                details = {name: list(each.values()) for name, each in found.items()}
                rows[method] = part_completeness({n: torch.stack(v) for n, v in details.items()})
        return rows

    def _finished(self, method: str) -> list[Cell]:
        cells = (cell for cell in self.plan.cells if cell.method == method)
        return [cell for cell in cells if cell.name in self.info]


def read_results(folder: str | Path) -> Results:
    """The results of a run, finished or not."""
    folder = Path(folder)
    plan = read_plan(folder)
    metrics = plan.request.metrics
    columns = ["image", "index", *ANSWERS, *metrics, "reasons"]
    parts: dict[str, list[pa.Table]] = {method: [] for method in plan.request.methods}
    info: dict[str, dict[str, Any]] = {}
    missing: list[MissingValue] = []
    for cell in plan.cells:
        table = read_cell(folder, cell.name, columns)
        if table is None:
            continue
        try:
            about = _check_cell(cell, table, metrics)
            missing += missing_values(cell, table)
        except UNREADABLE:  # a file of somebody else
            continue
        info[cell.name] = about
        parts[cell.method].append(table.replace_schema_metadata(None))
    kinds = [
        ("image", pa.string()),
        ("index", pa.int64()),
        *((name, pa.int64()) for name in ANSWERS),
    ]
    schema = pa.schema([*kinds, *((m, pa.float64()) for m in metrics), ("reasons", pa.string())])
    rows = {m: pa.concat_tables([schema.empty_table(), *found]) for m, found in parts.items()}
    status = state_of(folder, plan.cells, set(info))
    return Results(folder, plan, rows, info, replace(status, missing=missing))


def _check_cell(cell: Cell, table: pa.Table, metrics: Sequence[str]) -> dict[str, Any]:
    """The metadata of a cell; raises one of `UNREADABLE` if the table is not that of the cell."""
    about = json.loads(table.schema.metadata[b"seecause"])
    if table["index"].to_pylist() != list(range(cell.start, cell.stop)):
        raise ValueError("other images")
    for name in (*ANSWERS, *metrics):
        if table.schema.field(name).type != (pa.float64() if name in metrics else pa.int64()):
            raise TypeError(name)
    float(about["seconds"].get("attribute", 0)), int(about["images"])
    dict(about["shapes"]), dict(about["shared"])
    return about


def table(folder: str | Path, *, against: str | None = None) -> Table:
    """The table of a run.

    Args:
        folder: A folder that `sc.bench.run` made; unfinished cells are missing values.
        against: Every method is compared with this one, image by image. None is the first.

    Returns:
        A `Table` with means, errors, intervals and paired differences.
    """
    return table_of(read_results(folder).values, against=against)


def table_of(
    columns: Mapping[str, Mapping[str, Tensor]],
    *,
    against: str | None = None,
    unranked: Collection[str] = (),
    better: Mapping[str, Direction] | None = None,
) -> Table:
    """The table of values [images] by method and metric.

    Methods that saw other images than the rest are `unranked`: never marked as the best. `better`
    says which direction of each column is good; None looks it up in the metrics.
    """
    methods = list(columns)
    metrics = list(columns[methods[0]])
    reference = against or methods[0]
    if reference not in methods:
        raise UnknownName("method of this run", reference, methods)
    cells: dict[str, dict[str, TableCell]] = {}
    for method in methods:
        cells[method] = {}
        for metric, values in columns[method].items():
            total, other = summarise(values), columns[reference][metric]
            gap = None if method == reference else paired_difference(values, other)
            interval = bootstrap_interval(values)
            cells[method][metric] = TableCell(
                total.mean, total.standard_error, interval, total.n, total.skipped, gap
            )
    if better is None:
        better = {m: METRICS.get(group_of(m)).columns[m].better for m in metrics}
    plain = Table(methods, metrics, reference, cells, better)
    for metric in metrics:
        for method in _best(plain, metric, [m for m in methods if m not in unranked]):
            cells[method][metric] = replace(cells[method][metric], best=True)
    return plain


def to_csv(table: Table) -> str:
    """table.csv."""
    records = table.records()
    return csv_text([list(records[0]), *(list(record.values()) for record in records)])


def write_rows(results: Results, path: Path) -> None:
    """Every number of a run as CSV, one line for each image, method and metric that was computed,
    with the reason where there is no number. Written method by method, to save memory."""
    with atomic_file(path) as file:
        for place, (method, rows) in enumerate(results.rows.items()):
            metrics = list(results.plan.request.metrics)
            lines = np.repeat(np.arange(len(rows)), len(metrics))
            values = np.stack([rows[m].to_numpy() for m in metrics], axis=1).ravel()
            reasons = [json.loads(text) for text in rows["reasons"].to_pylist()]
            columns = {
                "image": pa.array(
                    [_cell_text(name) for name in rows["image"].to_pylist()], pa.string()
                ).take(lines),
                **{name: rows[name].combine_chunks().take(lines) for name in ANSWERS},
                "method": pa.array([_cell_text(method)] * len(lines), pa.string()),
                "metric": pa.array([*map(_cell_text, metrics)] * len(rows), pa.string()),
                "value": pa.array(values, mask=np.isnan(values)),  # an empty field
                "reason": pa.array(
                    [_cell_text(str(why.get(m, ""))) for why in reasons for m in metrics],
                    pa.string(),
                ),
            }
            header = pa_csv.WriteOptions(include_header=place == 0)
            pa_csv.write_csv(pa.table(columns), file, header)


def _cell_text(text: str) -> str:
    """As a CSV may hold it: no formula, no bytes that are not UTF-8."""
    return safe_cell(text.encode("utf-8", "backslashreplace").decode())


def to_latex(table: Table) -> str:
    """Booktabs tables, mean and standard error, the best in bold; one for each group of columns."""
    lines = ["% needs \\usepackage{booktabs}; mean and standard error over images"]
    for title, metrics in table.column_groups():
        arrows = {"higher": r"$\uparrow$", "lower": r"$\downarrow$"}
        up = {metric: arrows[table.better[metric]] for metric in metrics}
        head = ["method", *(f"{_escaped(metric)} {up[metric]}" for metric in metrics)]
        lines += [f"% {title}"] if title else []
        lines += [rf"\begin{{tabular}}{{l{'r' * len(metrics)}}}", r"\toprule"]
        lines += [" & ".join(head) + r" \\", r"\midrule"]
        for method in table.methods:
            cells = [
                _latex_cell(table.cells[method][metric], table.digits(metric)) for metric in metrics
            ]
            lines.append(" & ".join([_escaped(method), *cells]) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def to_markdown(table: Table) -> str:
    """Tables for a page: mean and standard error, the best in bold; one for each column group."""
    lines = []
    for title, metrics in table.column_groups():
        head = [f"{m} {'↑' if table.better[m] == 'higher' else '↓'}" for m in metrics]
        lines += [f"**{title[0].upper()}{title[1:]}**", ""] if title else []
        lines += ["| method | " + " | ".join(head) + " |", "|---|" + "---|" * len(head)]
        for method in table.methods:
            row = table.cells[method]
            cells = [_plain_cell(row[metric], table.digits(metric)) for metric in metrics]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _plain_cell(cell: TableCell, digits: int) -> str:
    if cell.n == 0:
        return "no value"
    text = f"{cell.mean:.{digits}f} ± {error_text(cell.error, digits)}"
    return f"**{text}**" if cell.best else text


def _latex_cell(cell: TableCell, digits: int) -> str:
    if cell.n == 0:
        return "--"
    mean = rf"\mathbf{{{cell.mean:.{digits}f}}}" if cell.best else f"{cell.mean:.{digits}f}"
    return rf"${mean} \pm {error_text(cell.error, digits)}$"


def _best(table: Table, metric: str, ranked: Sequence[str]) -> set[str]:
    """The methods whose mean is best as shown. None if nothing is known, or if all are nearly
    equal: the metric is saturated, or depends on the model alone."""
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
    top = (max if table.better[metric] == "higher" else min)(shown.values())
    return {method for method, mean in shown.items() if mean == top}


def _escaped(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)
