"""Run a study: what is missing of its cells, then one CSV, one figure and where they come from.

    python studies/run.py studies/caap.toml                               # all of it
    python studies/run.py studies/caap.toml --limit 8 --device cpu        # a quick look
    python studies/run.py studies/shortcut.toml --real DIR --minutes 9    # again to go on
    python studies/run.py studies/heads.toml --draw                       # the figure, of the CSV

A study is a TOML file: its question, cells, columns and figure. A cell is one call of a function
with one choice of its grid; its rows are kept under a digest of all that decides them, so a run
that was stopped goes on, and a changed line of the file does only its own cells again. A cell that
fails stays a hole, with its reason in the JSON beside the CSV. The exit code is 1 while something
is missing.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import itertools
import json
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1]))

import seecause as sc
from seecause._files import digest, digest_file, digest_json, write_atomic, write_json
from seecause.bench.store import ShardStore
from seecause.data import open_data
from seecause.engine.machine import machine
from seecause.errors import DataMissing, SeecauseError
from seecause.metrics import bootstrap_interval, paired_difference, summarise

Row = dict[str, Any]
LIBRARIES = ("torch", "timm", "transformers")
STATISTICS = (
    "metric", "mean", "standard error", "low 95%", "high 95%", "n", "missing",
    "difference", "error of difference",
)  # fmt: skip
FAILURES = (SeecauseError, RuntimeError, ValueError, OSError)


@dataclass(frozen=True)
class Cell:
    """One call. `label` are columns that its rows get and the function does not."""

    group: str
    call: str
    options: Mapping[str, Any]
    label: Mapping[str, Any]
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join(map(str, [self.group, *self.label.values(), *self.options.values()]))

    @property
    def function(self) -> Callable[..., list[Row]]:
        module, _, name = self.call.rpartition(".")
        return getattr(importlib.import_module(f"studies.{module}"), name)

    def columns(self) -> Row:
        """What the grid says of every row; lists and tables are no columns."""
        choices = {**self.label, **self.options}
        return {
            name: value for name, value in choices.items() if not isinstance(value, list | dict)
        }


@dataclass(frozen=True)
class Study:
    """A file that was read. `quick` stands in for settings where there is a limit."""

    file: Path
    name: str
    question: str
    cells: tuple[Cell, ...]
    settings: Row
    quick: Row
    files: tuple[str, ...]
    output: Row
    figure: Row


@dataclass
class Context:
    """What a function may ask of its run, beside its own options."""

    device: str
    work: Path
    real: Path | None = None
    models: Path | None = None
    limit: int | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)

    def load(self, name: str, **options: Any) -> Any:
        """A wrapped model, once in a process."""
        model = _models(name, self.device, tuple(sorted(options.items())))
        self.fingerprints[name] = model.fingerprint()
        return model

    def data(self, spec: str, limit: int | None = None) -> Any:
        data = open_data(spec, limit=limit)
        self.fingerprints[data.name] = data.fingerprint
        return data

    def fill(self, value: Any) -> Any:
        """Options with the folders of this run in the place of {real} and {models}."""
        if isinstance(value, str) and ("{real}" in value or "{models}" in value):
            for name in ("real", "models"):
                if f"{{{name}}}" in value and getattr(self, name) is None:
                    raise DataMissing(value, "no folder is given", f"give --{name} DIR")
            return value.format(real=self.real, models=self.models)
        return value


_LOADED: dict[Any, Any] = {}
_source = lru_cache(inspect.getsource)


def _models(name: str, device: str, options: tuple[tuple[str, Any], ...]) -> Any:
    key = (name, device, options)
    if key not in _LOADED:
        if len(_LOADED) > 3:
            _LOADED.clear()
        _LOADED[key] = sc.load(name, device=device, **dict(options))
    return _LOADED[key]


def read_study(file: Path) -> Study:
    """A study file, its grids multiplied out in the order they are written."""
    text = tomllib.loads(file.read_text(encoding="utf-8"))
    cells = []
    for entry in text["cells"]:
        grid = {name: as_list(value) for name, value in entry.get("grid", {}).items()}
        for choice in itertools.product(*grid.values()):
            options = {**entry.get("set", {}), **dict(zip(grid, choice, strict=True))}
            needs = tuple(entry.get("needs", ()))
            cells.append(
                Cell(entry["group"], entry["call"], options, entry.get("label", {}), needs)
            )
    return Study(
        file, text["name"], text["question"], tuple(cells), text.get("settings", {}),
        text.get("quick", {}), tuple(text.get("files", ())), text["output"], text.get("figure", {}),
    )  # fmt: skip


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class Run:
    """A study and how far it is: keys of cells, what is finished, what failed."""

    def __init__(self, study: Study, context: Context):
        self.study, self.context = study, context
        self.store = ShardStore(context.work / study.name, "study")
        self.files = self._digests()
        groups: dict[str, list[str]] = {}
        self.keys = {cell.name: self._key(cell, groups) for cell in study.cells}
        self.records = self.store.condition(self.keys.values()).metadata  # of finished cells
        self.failed: dict[str, str] = {}

    def _digests(self) -> dict[str, str]:
        if self.study.files and self.context.real is None:
            raise DataMissing("--real", "no folder is given", f"one with {self.study.files}")
        paths = {name: Path(str(self.context.real)) / name for name in self.study.files}
        for path in paths.values():
            if not path.is_file():
                raise DataMissing(str(path), "no such file", "give --real the folder that holds it")
        return {name: digest_file(path) for name, path in paths.items()}

    def arguments(self, cell: Cell) -> Row:
        """Options of a call: its own, and of the study's settings those that the function takes."""
        settings = {**self.study.settings, **(self.study.quick if self.context.limit else {})}
        settings["limit"] = self.context.limit
        takes = inspect.signature(cell.function).parameters
        return {name: v for name, v in settings.items() if name in takes} | dict(cell.options)

    def _key(self, cell: Cell, groups: dict[str, list[str]]) -> str:
        """A digest of all that decides the rows; what it needs comes before it in the file."""
        needed = [groups[name] for name in cell.needs]
        context = [self.files, self.context.device.partition(":")[0], sc.__version__]
        source = digest(_source(cell.function))
        key = digest_json([cell.call, source, self.arguments(cell), needed, context])
        groups.setdefault(cell.group, []).append(key)
        return key

    def is_done(self, cell: Cell) -> bool:
        return self.keys[cell.name] in self.records

    def finish(self, cell: Cell, record: Row) -> None:
        self.store.save(self.keys[cell.name], metadata=record)
        self.records[self.keys[cell.name]] = record

    def fail(self, cell: Cell, reason: Exception) -> None:
        self.failed[cell.name] = f"{type(reason).__name__}: {reason}"
        self.store.log("failed", self.keys[cell.name], reason=self.failed[cell.name])

    def rows(self, *groups: str) -> list[Row]:
        """Of finished cells, in the order of the study."""
        wanted = [cell for cell in self.study.cells if not groups or cell.group in groups]
        done = [cell for cell in wanted if self.is_done(cell)]
        return [row for cell in done for row in self.records[self.keys[cell.name]]["rows"]]

    def ready(self, cell: Cell) -> bool:
        """Whether a cell is to be done, and all that it needs is there."""
        if self.is_done(cell) or cell.name in self.failed:
            return False
        needed = [other for other in self.study.cells if other.group in cell.needs]
        broken = [other.name for other in needed if other.name in self.failed]
        if broken:
            self.failed[cell.name] = f"it needs {broken[0]}, which failed"
        return all(self.is_done(other) for other in needed)

    def job(self, cell: Cell) -> tuple[Cell, Context, Row, dict[str, list[Row]]]:
        earlier = {group: self.rows(group) for group in cell.needs}
        return cell, self.context, self.arguments(cell), earlier


def perform(cell: Cell, context: Context, options: Row, earlier: dict[str, list[Row]]) -> Row:
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
        "versions": {"seecause": sc.__version__, **{name: version(name) for name in LIBRARIES}},
        "fingerprints": context.fingerprints,
    }


def carry_out(run: Run, *, minutes: float, workers: int = 0, only: str = "") -> None:
    """Do what is missing, until no cell may begin any more: after `minutes`, or nothing is ready.
    However little time there is, one cell is done."""
    ends = time.monotonic() + 60 * minutes
    wanted = [cell for cell in run.study.cells if only.lower() in cell.name.lower()]
    running: dict[Future[Row], Cell] = {}
    begun = 0
    with run.store.alone(), _pool(workers) as pool, Progress(transient=True) as bar:
        todo = [cell for cell in wanted if not run.is_done(cell)]
        task = bar.add_task(run.study.name, total=len(todo))
        while True:
            free = max(1, workers) - len(running)
            ready = [cell for cell in wanted if cell not in running.values() and run.ready(cell)]
            for cell in ready[:free]:
                if minutes > 0 and (time.monotonic() < ends or not begun):
                    bar.update(task, description=cell.name[:60])
                    running[pool.submit(perform, *run.job(cell))] = cell
                    begun += 1
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(done)
                try:
                    run.finish(cell, done.result())
                except FAILURES as reason:  # the others go on
                    run.fail(cell, reason)
                bar.advance(task)


def _pool(workers: int) -> Executor:
    if workers < 2:
        return _Here()
    threads = {"initializer": torch.set_num_threads, "initargs": (1,)}
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), **threads)


class _Here(Executor):
    """Runs what it is given at once, in this process."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **options))
        except FAILURES as reason:
            done.set_exception(reason)
        return done


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
    """Values by what they are paired over; a row that has an empty one is undefined."""
    known = [(row.get(pair, place), row[metric]) for place, row in enumerate(rows) if metric in row]
    return {name: torch.nan if value in (None, "") else float(value) for name, value in known}


def write_results(run: Run, out: Path, command: str) -> Path:
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
    lines = [",".join(map(_quoted, columns))]
    lines += [",".join(_quoted(row.get(name)) for name in columns) for row in rows]
    write_atomic(path, "\n".join(lines) + "\n")
    done = [run.records[run.keys[c.name]] for c in run.study.cells if run.is_done(c)]
    missing = [c.name for c in run.study.cells if not run.is_done(c) and c.name not in run.failed]
    record = {
        "study": run.study.name,
        "question": run.study.question,
        "command": command,
        "versions": sorted({json.dumps(one["versions"], sort_keys=True) for one in done}),
        "machines": sorted({one["machine"] for one in done}),
        "seconds": round(sum(one["seconds"] for one in done), 1),
        "settings": {**run.study.settings, **(run.study.quick if run.context.limit else {})},
        "files": run.files,
        "fingerprints": {k: v for one in done for k, v in one["fingerprints"].items()},
        "cells": len(run.study.cells),
        "holes": run.failed,
        "not done yet": missing,
    }
    write_json(path.with_suffix(".json"), record)
    return path


def _quoted(value: Any) -> str:
    text = (
        ""
        if value is None or value != value
        else f"{value:.7g}"
        if isinstance(value, float)
        else str(value)
    )
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n') else text


def read_csv(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main(
    file: Annotated[Path, typer.Argument(help="A study: studies/NAME.toml.")],
    limit: Annotated[int | None, typer.Option(help="So many pictures: a quick look.")] = None,
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    minutes: Annotated[float, typer.Option(help="Begin no cell after so many; 0: none.")] = 1e9,
    workers: Annotated[int, typer.Option(help="Cells at once, each a process.")] = 0,
    only: Annotated[str, typer.Option(help="Only cells with this text in their name.")] = "",
    real: Annotated[Path | None, typer.Option(help="Folder with real weights and photos.")] = None,
    models: Annotated[Path | None, typer.Option(help="Folder of trained checkpoints.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of CSV, JSON and figure.")] = Path(
        "docs/results"
    ),
    work: Annotated[Path, typer.Option(help="Where finished cells are kept.")] = Path(
        "out/studies"
    ),
    draw: Annotated[bool, typer.Option(help="Only draw the figure of the CSV in --out.")] = False,
) -> None:
    from studies.figure import draw_figure

    try:
        study = read_study(file)
        if draw:
            typer.echo(draw_figure(study.figure, out / f"{study.name}.csv"))
            return
        run = Run(study, Context(device, work, real, models, limit))
        carry_out(run, minutes=minutes, workers=workers, only=only)
        given = "" if limit is None else f" --limit {limit}"
        path = write_results(run, out, f"python studies/run.py studies/{file.name}{given}")
    except SeecauseError as refused:
        typer.echo(str(refused), err=True)
        raise typer.Exit(2) from None
    typer.echo(path)
    if study.figure and not limit and path.stat().st_size:
        typer.echo(draw_figure(study.figure, path))
    for name, reason in run.failed.items():
        typer.echo(f"hole: {name}: {reason}", err=True)
    left = [cell for cell in study.cells if not run.is_done(cell)]
    if left:
        typer.echo(f"{len(left)} of {len(study.cells)} cells are missing; run it again", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    from studies.run import main as imported  # one module, whether it is run or imported

    typer.run(imported)
