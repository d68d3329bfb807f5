"""Run a study: what is missing of its cells, then one CSV and where it comes from.

    status = sc.bench.run_study("studies/caap.toml", limit=8, device="cpu")
    status.csv, status.holes, status.missing

A study is a TOML file: its question, cells, columns and figure. A cell is one call of a function
with one choice of its grid; `call = "cells.maps"` is `maps` in cells.py beside the file, or any
function that can be imported. Its rows are kept under a digest of all that decides them, so a run
that was stopped goes on, and a changed line of the file does only its own cells again. A cell that
fails stays a hole, with its reason in the JSON beside the CSV.

    [lists]       names for lists: grid.variant = "cheap"
    [settings]    options of every call that takes them; [quick] replaces some under a limit
    [[cells]]     group, call, set (options), grid (each choice is a cell), each (a list of tables
                  of options, a cell each), label (columns; "ablate {setting}" is filled from the
                  options), needs (groups whose rows the function gets as `earlier`)
    [output]      columns; or by and values, of which means are written; groups (default all)
    [figure]      see report/study.py
"""

from __future__ import annotations

import ast
import csv
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch

from seecause import __version__
from seecause._software import versions
from seecause.bench.store import ShardStore
from seecause.bench.study_file import Row, StudyCell, StudyContext, StudyFile, as_list, read_study
from seecause.bench.workers import Workers, open_pool
from seecause.engine.chunks import machine
from seecause.errors import DataMissing, SeecauseError
from seecause.files import (
    csv_text,
    digest,
    digest_file,
    digest_json,
    is_local,
    place,
    write_atomic,
    write_json,
)  # fmt: skip
from seecause.metrics import bootstrap_interval, paired_difference, summarise

LIBRARIES = ("torch", "timm", "transformers")
WORK = "out/studies"
STATISTICS = (
    "metric", "mean", "standard error", "low 95%", "high 95%", "n", "missing",
    "difference", "error of difference",
)  # fmt: skip

__all__ = [
    "Row",
    "StudyContext",
    "StudyRun",
    "StudyStatus",
    "as_list",
    "read_csv",
    "read_study",
    "run_cells",
    "run_study",
    "summarised",
    "write_results",
]  # fmt: skip


class StudyRun:
    """A study and how far it is: keys of cells, what is finished, what failed."""

    def __init__(self, study: StudyFile, context: StudyContext, folder: Path | None = None):
        self.study, self.context = study, context
        self.store = ShardStore((folder or context.work) / study.name, "study")
        self.files = self._digests()
        groups: dict[str, list[str]] = {}
        self.keys = {cell.name: self._key(cell, groups) for cell in study.cells}
        self.records = self.store.condition(self.keys.values()).metadata  # of finished cells
        self.failed: dict[str, str] = {}

    @property
    def settings(self) -> Row:
        """With a limit, the quick ones; of a table, what `quick` has of it."""
        settings, quick = self.study.settings, self.study.quick if self.context.limit else {}
        merged = {**settings, **quick}
        for name in settings.keys() & quick.keys():
            if isinstance(settings[name], dict):
                merged[name] = {**settings[name], **quick[name]}
        return merged

    @property
    def missing(self) -> list[str]:
        """Names of cells that are not done, failed ones too."""
        return [cell.name for cell in self.study.cells if not self.is_done(cell)]

    def _digests(self) -> dict[str, str]:
        if self.study.files and self.context.real is None:
            raise DataMissing("--real", "no folder is given", f"one with {self.study.files}")
        paths = {name: Path(str(self.context.real)) / name for name in self.study.files}
        for path in paths.values():
            if not path.is_file():
                raise DataMissing(str(path), "no such file", "give --real the folder that holds it")
        return {name: digest_file(path) for name, path in paths.items()}

    def arguments(self, cell: StudyCell) -> Row:
        """Options of a call: its own, and of the study's settings those that the function takes."""
        settings = {**self.settings, "limit": self.context.limit}
        takes = inspect.signature(cell.function).parameters
        return {name: v for name, v in settings.items() if name in takes} | dict(cell.options)

    def _key(self, cell: StudyCell, groups: dict[str, list[str]]) -> str:
        """A digest of all that decides the rows; what it needs comes before it in the file."""
        needed = [groups[name] for name in cell.needs]
        kind, limit = self.context.device.partition(":")[0], self.context.limit
        context = [self.files, kind, limit, __version__]
        source = _source_digest(Path(inspect.getfile(cell.function)))
        key = digest_json([cell.call, source, self.arguments(cell), needed, context])
        groups.setdefault(cell.group, []).append(key)
        return key

    def is_done(self, cell: StudyCell) -> bool:
        return self.keys[cell.name] in self.records

    def finish(self, cell: StudyCell, record: Row) -> None:
        self.store.save(self.keys[cell.name], metadata=record)
        self.records[self.keys[cell.name]] = record

    def fail(self, cell: StudyCell, reason: str) -> None:
        self.failed[cell.name] = reason
        self.store.log("failed", self.keys[cell.name], reason=reason)

    def rows(self, *groups: str) -> list[Row]:
        """Of finished cells, in the order of the study."""
        wanted = [cell for cell in self.study.cells if not groups or cell.group in groups]
        done = [cell for cell in wanted if self.is_done(cell)]
        return [row for cell in done for row in self.records[self.keys[cell.name]]["rows"]]

    def ready(self, cell: StudyCell) -> bool:
        """Whether a cell is to be done, and all that it needs is there."""
        if self.is_done(cell) or cell.name in self.failed:
            return False
        needed = [other for other in self.study.cells if other.group in cell.needs]
        broken = [other.name for other in needed if other.name in self.failed]
        if broken:
            self.failed[cell.name] = f"it needs {broken[0]}, which failed"
        return all(self.is_done(other) for other in needed)

    def job(self, cell: StudyCell) -> tuple[StudyCell, StudyContext, Row, dict[str, list[Row]]]:
        earlier = {group: self.rows(group) for group in cell.needs}
        return cell, self.context, self.arguments(cell), earlier


@cache
def _source_digest(file: Path) -> str:
    """Of a file of functions and of those beside it that it imports: their helpers decide, too."""
    files = [file]
    for each in files:
        for node in ast.walk(ast.parse(each.read_bytes())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            beside = [file.parent / f"{name}.py" for name in names]
            files += [path for path in beside if path.is_file() and path not in files]
    return digest(*(f"{path.name} {digest_file(path)}" for path in sorted(files)))


def perform(
    cell: StudyCell, context: StudyContext, options: Row, earlier: dict[str, list[Row]]
) -> Row:
    """Call the function of a cell; its rows, and what they come from."""
    began, context.fingerprints = time.perf_counter(), {}
    options = {name: context.fill(value) for name, value in options.items()}
    if cell.needs:
        options["earlier"] = earlier
    rows = cell.function(context, **options)
    return {
        "cell": cell.name,
        "rows": [{**cell.columns(), **row} for row in rows],
        "seconds": time.perf_counter() - began,
        "machine": machine(context.device),
        "versions": {"seecause": __version__, **{name: version(name) for name in LIBRARIES}},
        "fingerprints": context.fingerprints,
    }


@dataclass(frozen=True)
class StudyJob:
    """Cells of a study, as workers do them."""

    device: str
    threads: int
    versions: Mapping[str, str] = field(default_factory=versions)
    failures: ClassVar[tuple[type[Exception], ...]] = (
        SeecauseError,
        RuntimeError,
        ValueError,
        OSError,
    )

    def open(self) -> Callable[[Any], Row]:
        return _perform_item


def _perform_item(item: tuple[Any, ...]) -> Row:
    return perform(*item)


def run_cells(
    run: StudyRun,
    *,
    minutes: float,
    workers: Workers | int | None = None,
    only: str = "",
    advance: Callable[[str], None] = lambda cell: None,
) -> None:
    """Do what is missing, until no cell may begin any more: after `minutes`, or nothing is ready.
    However little time there is, one cell is done. `advance` hears the name of each."""
    ends = time.monotonic() + 60 * minutes
    wanted = [cell for cell in run.study.cells if only.lower() in cell.name.lower()]
    begun: set[str] = set()

    def next_item() -> tuple[Any, ...] | None:
        if minutes <= 0 or (begun and time.monotonic() >= ends):
            return None
        for cell in wanted:
            if cell.name not in begun and run.ready(cell):
                begun.add(cell.name)
                return run.job(cell)
        return None

    job = StudyJob(run.context.device, threads=1)
    with (
        run.store.locked(),
        open_pool(job, workers, most=len(wanted), perform=_perform_item) as pool,
    ):
        for (cell, *_), answer in pool.run(next_item):
            if answer.failure:  # the others go on
                run.fail(cell, f"{answer.kind}: {answer.failure}")
            else:
                run.finish(cell, answer.value)
            advance(cell.name)


def summarised(
    rows: Sequence[Row],
    by: Sequence[str],
    values: Sequence[str],
    *,
    against: Mapping[str, Any] | None = None,
    pair: str = "picture",
) -> list[Row]:
    """Mean, error and interval of each value for each choice of `by`; where `against` names a
    choice, also the difference from its rows with the same `pair`."""
    table, groups = [], dict(_grouped(rows, by))
    for key, members in groups.items():
        other_key = _changed(key, by, against or {})
        rivals = groups.get(other_key, []) if other_key != key else []
        for metric in values:
            own = _column(members, metric, pair)
            if not own:
                continue
            column = torch.tensor(list(own.values()), dtype=torch.float64)
            total, interval = summarise(column), bootstrap_interval(column)
            row = dict(zip(by, key, strict=True)) | dict(
                zip(
                    STATISTICS,
                    (metric, total.mean, total.standard_error, *interval, total.n, total.skipped),
                    strict=False,
                )
            )
            other = _column(rivals, metric, pair)
            both = [name for name in own if name in other]
            if both:
                first, second = (torch.tensor([c[n] for n in both]) for c in (own, other))
                gap = paired_difference(first.double(), second.double())
                row |= {"difference": gap.mean, "error of difference": gap.standard_error}
            table.append(row)
    return table


def _grouped(rows: Sequence[Row], by: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name, "") for name in by), []).append(row)
    yield from groups.items()


def _changed(key: tuple[Any, ...], by: Sequence[str], to: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(to.get(name, value) for name, value in zip(by, key, strict=True))


def _column(rows: Sequence[Row], metric: str, pair: str) -> dict[Any, float]:
    """Values by what they are paired over, and by how often it came before; a row that has an
    empty one is undefined."""
    column: dict[Any, float] = {}
    times: Counter[Any] = Counter()
    for number, row in enumerate(rows):
        if metric in row:
            name, value = row.get(pair, number), row[metric]
            column[name, times[name]] = torch.nan if value in (None, "") else float(value)
            times[name] += 1
    return column


def write_results(run: StudyRun, out: Path, command: str) -> Path:
    """The CSV, and the JSON that says where it comes from."""
    output = run.study.output
    rows = run.rows(*output.get("groups", ()))
    if "by" in output:
        options = {name: output[name] for name in ("against", "pair") if name in output}
        rows = summarised(rows, output["by"], output["values"], **options)
        columns = [*output["by"], *STATISTICS]
    else:
        columns = output["columns"]
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{run.study.name}.csv"
    cells = ([_text(row.get(name)) for name in columns] for row in rows)
    write_atomic(path, csv_text([columns, *cells]))
    done = [run.records[run.keys[c.name]] for c in run.study.cells if run.is_done(c)]
    record = {
        "study": run.study.name,
        "question": run.study.question,
        "command": command,
        "versions": sorted({json.dumps(cell["versions"], sort_keys=True) for cell in done}),
        "machines": sorted({cell["machine"] for cell in done}),
        "seconds": round(sum(cell["seconds"] for cell in done), 1),
        "settings": run.settings,
        "files": run.files,
        "fingerprints": {k: v for cell in done for k, v in cell["fingerprints"].items()},
        "cells": len(run.study.cells),
        "holes": run.failed,
        "not done yet": [name for name in run.missing if name not in run.failed],
    }
    write_json(path.with_suffix(".json"), record)
    return path


def _text(value: Any) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def read_csv(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class StudyStatus:
    """What there is after a run of a study: the table, cells that failed and why, and all that are
    missing."""

    csv: Path
    holes: dict[str, str]
    missing: list[str]
    total: int
    figure: Row  # what the study says of it, for `report.study.draw_figure`


def run_study(
    file: str | Path,
    *,
    limit: int | None = None,
    device: str = "cpu",
    minutes: float = 1e9,
    workers: Workers | int | None = None,
    only: str = "",
    real: Path | None = None,
    models: Path | None = None,
    out: str | Path = "docs/results",
    work: str | Path = WORK,
    begin: Callable[[int], Callable[[str], None]] = lambda todo: lambda cell: None,
) -> StudyStatus:
    """Do what is missing of a study and write its table into `out`.

    `limit`: so many pictures and the quick settings. `minutes`: no cell begins after so many.
    `workers`: cells at once, each a process or a Ray actor. `only`: cells with this text in their
    name. `real` and `models` are folders that a study asks for as {real} and {models}; `work` keeps
    finished cells, and may be a URL. `begin` hears how many cells are to do, and gives what hears
    the name of each.
    """
    folder = place(work)
    scratch = folder if is_local(folder) else Path(WORK)  # where cells keep what they share
    context = StudyContext(device, scratch, real, models, limit)
    run = StudyRun(read_study(file), context, folder)
    todo = [name for name in run.missing if only.lower() in name.lower()]
    run_cells(run, minutes=minutes, workers=workers, only=only, advance=begin(len(todo)))
    own = "" if limit is None else f" --limit {limit}"
    csv_file = write_results(run, Path(out), f"seecause study {Path(file).name}{own}")
    return StudyStatus(csv_file, run.failed, run.missing, len(run.study.cells), run.study.figure)
