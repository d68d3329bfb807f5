"""Run a benchmark, and read its numbers: for each method and metric a mean, its error and interval,
and the paired difference to a chosen method; CSV, LaTeX, Markdown.

    status = run("RUN", Request("builtin:critters-vit", "critters:clean:test", ["caap", "rollout"]))
    table("RUN", against="caap").to_pandas()
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from seecause.bench.cells import (
    PARTS,
    UNDEFINED,
    Plan,
    Prepared,
    Request,
    group_of,
    number_kinds,
    prepare,
)
from seecause.bench.runner import Cell, MissingValue, Status, read_cell, run_cells, state_of
from seecause.errors import BadOption, UnknownName
from seecause.files import csv_text, write_atomic, write_json
from seecause.metrics.parts import part_completeness
from seecause.metrics.registry import METRICS, Direction
from seecause.metrics.statistics import (
    Summary,
    bootstrap_interval,
    error_text,
    paired_difference,
    summarise,
)

MANIFEST = "run.json"
SATURATED = 1e-3  # if all means are this close, relative to the largest, none is the best
CURVES = ("insertion curve", "deletion curve", "shares")
FORMATS = tomllib.loads((Path(__file__).parent / "formats.toml").read_text(encoding="utf-8"))


def run(
    folder: str | Path,
    request: Request | Prepared,
    *,
    workers: int | None = None,
    ray: str | None = None,
    resources: Mapping[str, float] | None = None,
    progress: Callable[[int], None] = lambda images: None,
) -> Status:
    """Run a benchmark: every cell of a request that is not finished in `folder`.

    Args:
        folder: Where finished cells are kept. The same call resumes; another
            request adds its cells.
        request: What is compared, or `prepare(request)`.
        workers: Processes, or Ray tasks at a time. None is this process; on a cluster, all it
            has room for. The number changes no result.
        ray: A Ray cluster: "auto" for the one that is running, "local", or HOST:PORT.
        resources: Of each Ray task: num_cpus, num_gpus, memory (bytes).
        progress: Called with the number of images of each cell that ended.

    Returns:
        A `Status`. `complete` is False if any number is missing; `failed` and `missing` say why.

    Example:
        >>> import tempfile
        >>> import seecause as sc
        >>> request = sc.bench.Request(
        ...     "builtin:critters-vit", "critters:clean:test", methods=["rollout", "center"],
        ...     metrics=("aupr1", "pointing"), limit=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     status = sc.bench.run(folder, request)
        ...     table = sc.bench.table(folder)
        >>> status.complete, status.done, table.cells["rollout"]["aupr1"].n
        (True, 2, 4)
    """
    folder = Path(folder)
    check_folder(folder)
    prepared = request if isinstance(request, Prepared) else prepare(request)
    plan = prepared.plan
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / MANIFEST, plan.record())
    if plan.request.device.startswith("cuda"):
        resources = {"num_gpus": 1, **(resources or {})}
    where: dict[str, Any] = {"workers": workers, "ray": ray, "resources": resources}
    job: Any = replace(plan, cells=())
    run_cells(folder, plan.cells, job, progress=progress, evaluate=prepared.run, **where)
    return status(folder)


def status(folder: str | Path) -> Status:
    """How far the benchmark in a folder is.

    Args:
        folder: A folder that `run` made.

    Returns:
        A `Status`: finished, failed and pending cells, and missing values.

    Raises:
        BadOption: If the folder holds no run of this version.

    Example:
        >>> import seecause as sc, tempfile
        >>> few = {"methods": {"random": {}}, "metrics": ("pointing",), "limit": 2}
        >>> request = sc.bench.Request("builtin:critters-vit", "critters:clean:test", **few)
        >>> folder = tempfile.mkdtemp()
        >>> done = sc.bench.run(folder, request)
        >>> sc.bench.status(folder).complete
        True
    """
    return read_results(folder).status


def check_folder(folder: Path) -> None:
    """Raises, before any work, if a folder contains other files than a run."""
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = {name for name in held if name[0] != "."}  # hidden ones may be drafts
    if folder.is_file() or (others and not others & {MANIFEST, "cells"}):
        expected = "a new folder, an empty one, or one that `seecause bench run` made"
        raise BadOption("--out", str(folder), expected)


def read_plan(folder: Path) -> Plan:
    """The plan of the last request that was run in a folder."""
    try:
        return Plan.read(json.loads((folder / MANIFEST).read_bytes()))
    except (OSError, KeyError, TypeError, ValueError):
        expected = "the --out folder of `seecause bench run` of this version"
        raise BadOption("run", str(folder), expected) from None


@dataclass(frozen=True)
class TableCell:
    """One method by one metric.

    `difference` is to the reference method, image by image; `missing` counts images without a
    value; `published` is the mean that a paper printed, and its error if it did.
    """

    mean: float
    error: float
    interval: tuple[float, float]
    n: int
    missing: int
    difference: Summary | None
    best: bool = False
    published: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Table:
    """Methods by metrics, returned by `sc.bench.table`.

    Attributes:
        methods: The rows.
        metrics: The columns.
        reference: The method that the others are compared with.
        cells: A `TableCell` by method and metric, with `mean`, `error`, `difference` and `n`.
        better: "higher" or "lower", by metric.

    Example:
        >>> import tempfile, seecause as sc
        >>> request = sc.bench.Request(
        ...     "builtin:critters-vit", "critters:clean:test", ["random", "center"],
        ...     metrics=["aupr1"], limit=4)
        >>> folder = tempfile.mkdtemp()
        >>> status = sc.bench.run(folder, request)
        >>> table = sc.bench.table(folder, against="random")
        >>> table.cells["center"]["aupr1"].mean > table.cells["random"]["aupr1"].mean
        True
    """

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
        rows, beside = [], any(c.published for row in self.cells.values() for c in row.values())
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
                    f"difference to {self.reference}": "" if gap is None else gap.mean,
                    "error of difference": "" if gap is None else gap.standard_error,
                    "best": int(cell.best),
                })  # fmt: skip
                if beside:
                    names, printed = ("published", "published error"), cell.published or ()
                    rows[-1] |= dict(zip_longest(names, printed, fillvalue=""))
        return rows

    def to_pandas(self) -> Any:
        """`records()` as a pandas.DataFrame."""
        import pandas

        return pandas.DataFrame(self.records())

    def digits(self, metric: str) -> int:
        """Decimals that show two digits of the largest standard error, 3 to 6."""
        errors = [cells[metric].error for cells in self.cells.values()]
        error = max((error for error in errors if 0 < error < math.inf), default=1.0)
        percent = any(abs(cells[metric].mean) > 2 for cells in self.cells.values())
        return min(6, max(2 if percent else 3, 1 - math.floor(math.log10(error))))


def table(folder: str | Path, *, against: str | None = None) -> Table:
    """The table of a run.

    Args:
        folder: A folder that `sc.bench.run` made; unfinished cells are missing values.
        against: Every method is compared with this one, image by image. None is the first.

    Returns:
        A `Table` with means, errors, intervals and paired differences.

    Example:
        >>> import seecause as sc, tempfile
        >>> few = {"methods": {"random": {}}, "metrics": ("pointing",), "limit": 2}
        >>> request = sc.bench.Request("builtin:critters-vit", "critters:clean:test", **few)
        >>> folder = tempfile.mkdtemp()
        >>> done = sc.bench.run(folder, request)
        >>> [*sc.bench.table(folder).cells]
        ['random']
    """
    return read_results(folder).table(against)


def table_of(
    columns: Mapping[str, Mapping[str, Tensor]],
    *,
    against: str | None = None,
    better: Mapping[str, Direction] | None = None,
) -> Table:
    """The table of values [images] by method and metric. `better` says which direction of each
    column is good; None looks it up in the metrics."""
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
            counts = (total.n, total.skipped)
            interval = bootstrap_interval(values)
            cells[method][metric] = TableCell(
                total.mean, total.standard_error, interval, *counts, gap
            )
    if better is None:
        better = {m: METRICS.get(group_of(m)).columns[m].better for m in metrics}
    found = Table(methods, metrics, reference, cells, better)
    for metric in metrics:
        for method in _best(found, metric):
            cells[method][metric] = replace(cells[method][metric], best=True)
    return found


def _best(table: Table, metric: str) -> set[str]:
    """The methods whose mean is best as shown; none if all are nearly equal, because the metric is
    saturated or depends on the model alone."""
    cells = {method: row[metric] for method, row in table.cells.items() if row[metric].n}
    shown = {method: round(cell.mean, table.digits(metric)) for method, cell in cells.items()}
    low, high = min(shown.values(), default=0), max(shown.values(), default=0)
    if len(shown) > 1 and high - low <= SATURATED * max(abs(low), abs(high)):
        return set()
    top = high if table.better[metric] == "higher" else low
    return {method for method, mean in shown.items() if mean == top}


def write_tables(table: Table, folder: Path) -> list[Path]:
    """Write table.csv, table.tex and table.md into a folder."""
    records = table.records()
    rows = csv_text([list(records[0]), *(list(record.values()) for record in records)])
    texts = {"csv": rows, **{kind: written(table, kind) for kind in FORMATS}}
    for suffix, text in texts.items():
        write_atomic(folder / f"table.{suffix}", text)
    return [folder / f"table.{suffix}" for suffix in texts]


def written(table: Table, kind: str) -> str:
    """A table as "tex" (booktabs) or "md": mean and standard error, the best in bold."""
    form = FORMATS[kind]
    escape, looks = str.maketrans(form["escape"]), (form["arrows"], form["plain"], form["best"])
    head, *rows = (
        form["row"].replace("CELLS", form["between"].join(cells))
        for cells in texts_of(table, escape, *looks)
    )
    page = form["page"].replace("COLUMNS", form["column"] * len(table.metrics))
    return page.replace("HEAD", head).replace("ROWS", "".join(rows))


def texts_of(
    table: Table, escape: dict[int, str], arrows: Mapping[str, str], plain: str, best: str
) -> list[list[str]]:
    """The head and a row for each method; in brackets what a paper printed."""
    head = [f"{name.translate(escape)} {arrows[table.better[name]]}" for name in table.metrics]
    rows = [["method", *head]]
    for method, cells in table.cells.items():
        rows.append([method.translate(escape)])
        for metric, cell in cells.items():
            digits = table.digits(metric)
            mean, error = f"{cell.mean:.{digits}f}", error_text(cell.error, digits)
            text = (best if cell.best else plain).format(mean, error) if cell.n else "--"
            if cell.published:
                shown = f"{cell.published[0]:g}"
                if len(cell.published) > 1:
                    shown = plain.format(*(f"{value:.2f}" for value in cell.published))
                text += f" ({shown})"
            rows[-1].append(text)
    return rows


@dataclass(frozen=True, eq=False)
class Results:
    """The rows of a run by method, without maps and curves, which are read when asked for.

    Attributes:
        rows: By method, one row for each image of finished cells, in order.
        finished: The finished cells.
        status: What is finished and what is missing.
    """

    folder: Path
    plan: Plan
    rows: dict[str, pa.Table]
    finished: list[Cell]
    status: Status

    @cached_property
    def values(self) -> dict[str, dict[str, Tensor]]:
        """Values [images] float64 by method and metric; NaN where there is none."""
        by_method: dict[str, dict[str, Tensor]] = {}
        for method, rows in self.rows.items():
            index, by_method[method] = torch.tensor(rows["index"].to_pylist(), dtype=torch.long), {}
            for metric in self.plan.request.metrics:
                values = torch.full((self.plan.data["images"],), torch.nan, dtype=torch.float64)
                values[index] = torch.tensor(rows[metric].to_numpy().copy())
                by_method[method][metric] = values
        return by_method

    def table(self, against: str | None = None) -> Table:
        """The table of all methods, each compared with one of them."""
        better = {name: column["better"] for name, column in self.plan.columns.items()}
        return table_of(self.values, against=against, better=better)

    def details(self, method: str, name: str) -> dict[int, Tensor]:
        """Tensors by index of the image, such as name="map" [gh, gw]; images may have none."""
        found: dict[int, Tensor] = {}
        for cell in (cell for cell in self.finished if cell.title == method):
            rows = read_cell(self.folder, cell.name)
            if rows is not None and name in rows.column_names:
                pairs = zip(rows["index"].to_pylist(), rows[name].to_pylist(), strict=True)
                found |= {index: torch.tensor(value) for index, value in pairs if value is not None}
        return found

    def curves(self) -> dict[str, dict[str, Tensor]]:
        """Insertion and deletion curves [images, n + 1] by method, where they were measured, and
        "shares" of the image along them."""
        return self._stacked({name: f"insertion-deletion: {name}" for name in CURVES})

    def seconds(self) -> dict[str, list[float]]:
        """Seconds of attribution for each image, by method."""
        return {
            method: rows["seconds"].drop_null().to_pylist() for method, rows in self.rows.items()
        }

    def truth(self) -> dict[str, dict[str, float]]:
        """Scores against the truth (metric "parts", FunnyBirds), over all images of each method.

        Completeness is at the threshold that is best over all images, so no image has one of its
        own. Empty if it was not measured.
        """
        found = self._stacked({name: f"parts: {name}" for name in PARTS})
        return {method: part_completeness(details) for method, details in found.items()}

    def _stacked(self, names: Mapping[str, str]) -> dict[str, dict[str, Tensor]]:
        """Details of all images by method, of the methods that have them."""
        by_method = {}
        for method in self.rows:
            found = {key: self.details(method, name).values() for key, name in names.items()}
            if all(found.values()):
                by_method[method] = {key: torch.stack([*each]) for key, each in found.items()}
        return by_method


def read_results(folder: str | Path) -> Results:
    """Read the results of a run, finished or not.

    Args:
        folder: A folder that `sc.bench.run` made.

    Returns:
        A `Results` with `rows` and `values` by method, `details(method, "map")`, `curves()`,
        `seconds()` and `status`.

    Raises:
        BadOption: If the folder holds no run of this version.

    Example:
        >>> import seecause as sc, tempfile
        >>> few = {"methods": {"random": {}}, "metrics": ("pointing",), "limit": 2}
        >>> request = sc.bench.Request("builtin:critters-vit", "critters:clean:test", **few)
        >>> folder = tempfile.mkdtemp()
        >>> status = sc.bench.run(folder, request)
        >>> sc.bench.read_results(folder).status.complete
        True
    """
    folder = Path(folder)
    plan = read_plan(folder)
    kinds = {"image": pa.string(), "index": pa.int64(), **number_kinds(plan.request.metrics)}
    kinds["reasons"] = pa.string()
    nothing = pa.schema(kinds.items()).empty_table()
    parts, finished = {method: [nothing] for method in plan.request.methods}, list[Cell]()
    missing: list[MissingValue] = []
    for cell in plan.cells:
        rows = read_cell(folder, cell.name, list(kinds))
        if rows is not None:
            finished.append(cell)
            parts[cell.title].append(rows.replace_schema_metadata(None))
            missing += missing_values(cell, rows)
    joined = {method: pa.concat_tables(found) for method, found in parts.items()}
    state = state_of(folder, plan.cells, {cell.name for cell in finished}, missing)
    return Results(folder, plan, joined, finished, state)


def missing_values(cell: Cell, rows: pa.Table) -> Iterator[MissingValue]:
    """The missing values of a cell, without values that are undefined for an image."""
    images, reasons = rows["image"].to_pylist(), rows["reasons"].to_pylist()
    for image, text in zip(images, reasons, strict=True):
        for metric, reason in json.loads(text).items():
            if reason != UNDEFINED:
                yield MissingValue(cell.title, image, metric, reason)


def write_rows(results: Results, path: Path) -> None:
    """Write every number of a run as CSV: a line for each method and image, with the reasons of
    missing numbers as JSON."""
    names = next(iter(results.rows.values())).column_names
    lines = [["method", *names]]
    for method, rows in results.rows.items():
        lines += [[method, *row.values()] for row in rows.to_pylist()]
    write_atomic(path, csv_text(lines))
