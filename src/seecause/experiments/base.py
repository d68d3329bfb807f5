"""Experiments: a function that computes rows, the grid of arguments it is called with, and the
table that is made of all rows. Other packages add theirs by the entry point `seecause.experiments`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import torch
from torch import Tensor

from seecause._software import plugin_digest, versions
from seecause.bench.runner import Cell, Evaluate, Status, read_cell, run_cells, state_of
from seecause.bench.tables import Table, table_of, write_tables
from seecause.engine.chunks import machine
from seecause.errors import BadOption
from seecause.files import digest_json, write_json
from seecause.metrics.registry import Direction
from seecause.options import Count, checked
from seecause.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])
Row = dict[str, Any]
HOMES = {
    "caap": "seecause.experiments.caap",
    "methods-critters": "seecause.experiments.caap",
}


@dataclass(frozen=True)
class Experiment:
    """One table: what it asks, how its rows are computed and how they are summed up.

    Attributes:
        name: What `run` is called with.
        question: What the table answers, in one sentence.
        run: A function of keywords: those of a cell, `limit` and `device`. It returns rows.
        cells: Keywords of each call, which must be JSON.
        by: The column of the rows, or keyword of the cells, that names the lines of the table.
        values: Columns of numbers, and which direction is better.
        against: The line that others are compared with, by the "image" of rows. None is the first.
    """

    name: str
    question: str
    run: Callable[..., list[Row]]
    cells: Sequence[Mapping[str, Any]]
    by: str
    values: Mapping[str, Direction]
    against: str | None = None


_registry: Registry[Experiment] = Registry("experiment", group="seecause.experiments", homes=HOMES)


def experiment(name: str, **about: Any) -> Callable[[F], F]:
    """Register a function as an experiment.

    Args:
        name: What `run` is called with.
        **about: The other fields of `Experiment`.

    Returns:
        A decorator of a function with the keywords of a cell, `limit` and `device`, which returns
        rows such as `{"image": ..., "aupr1": ...}`. `docs/bench.md` has an example.
    """

    def register(function: F) -> F:
        _registry.add(name, Experiment(name=name, run=function, **about))
        return function

    return register


def experiments() -> dict[str, Experiment]:
    """Return all experiments by name, those of other packages included.

    Example:
        >>> experiments()["caap"].by
        'method'
    """
    return _registry.all()


def find_experiment(name: str) -> Experiment:
    """The experiment of this name; raises `UnknownName` with the nearest names."""
    return _registry.get(name)


@checked
def run(
    name: str,
    folder: str | Path,
    *,
    limit: Count | None = None,
    device: str = "cpu",
    workers: int | None = None,
    ray: str | None = None,
    resources: Mapping[str, float] | None = None,
    progress: Callable[[int], None] = lambda cells: None,
) -> Status:
    """Run what is missing of an experiment, and write its table from what is finished.

    Args:
        name: An experiment of `experiments()`.
        folder: Where finished cells are kept, and table.csv, table.md, table.tex and
            experiment.json are written. The same call again goes on.
        limit: Use this many images in each cell: a quick look. None uses all.
        device: Where models run.
        workers: Processes, as for `sc.bench.run`; likewise `ray` and `resources`.
        progress: Called with 1 after each cell.

    Returns:
        A `Status`; `failed` has the traceback of each cell that failed.

    Raises:
        UnknownName: If there is no such experiment.
    """
    found, folder = find_experiment(name), Path(folder)
    job, cells = ExperimentJob(name, limit, device), cells_of(found, limit, device)
    where: dict[str, Any] = {"workers": workers, "ray": ray, "resources": resources}
    run_cells(folder, cells, job, progress=progress, **where)
    finished = _finished(folder, cells)
    status = state_of(folder, cells, set(finished))
    if finished:
        write_tables(table_of_rows(found, [*chain(*finished.values())]), folder)
    record = {"experiment": name, "question": found.question, "limit": limit, "device": device}
    record |= {"machine": machine(device), "versions": versions(), "cells": len(cells)}
    record |= {"done": status.done, "failed": len(status.failed)}
    write_json(folder / "experiment.json", record)
    return status


def read_table(folder: str | Path) -> Table:
    """Read the table of an experiment.

    Args:
        folder: A folder that `run` made.

    Returns:
        A `Table` of the cells that are finished.

    Raises:
        BadOption: If the folder holds no finished cells of this version.
    """
    folder = Path(folder)
    try:
        record = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
        found = find_experiment(record["experiment"])
        cells = cells_of(found, record["limit"], record["device"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadOption("folder", str(folder), "a folder that an experiment was run in") from None
    if not (finished := _finished(folder, cells)):
        raise BadOption("folder", str(folder), "a folder with finished cells of this version")
    return table_of_rows(found, [*chain(*finished.values())])


def _finished(folder: Path, cells: Sequence[Cell]) -> dict[str, list[Row]]:
    """The rows of finished cells, by their names."""
    tables = {cell.name: read_cell(folder, cell.name) for cell in cells}
    return {name: table.to_pylist() for name, table in tables.items() if table is not None}


def table_of_rows(experiment: Experiment, rows: Sequence[Row]) -> Table:
    """Means, errors, intervals and paired differences of rows."""
    images = dict.fromkeys(row["image"] for row in rows)
    places = {image: place for place, image in enumerate(images)}
    columns: dict[str, dict[str, Tensor]] = {}
    for row in rows:
        line = columns.setdefault(str(row[experiment.by]), {})
        for value in experiment.values:
            unknown = torch.full((len(places),), torch.nan, dtype=torch.float64)
            column = line.setdefault(value, unknown)
            if row.get(value) is not None:
                column[places[row["image"]]] = row[value]
    against = experiment.against if experiment.against in columns else None
    return table_of(columns, against=against, better=experiment.values)


def cells_of(experiment: Experiment, limit: int | None, device: str) -> list[Cell]:
    """The cells of an experiment: their order is that of its grid."""
    kind, code = device.partition(":")[0], plugin_digest(experiment.run)
    common = [experiment.name, limit, kind, versions(), code]
    cells = []
    for arguments in experiment.cells:
        title = ", ".join(f"{name}={value}" for name, value in arguments.items())
        cells.append(Cell(digest_json([*common, arguments], length=24), title, arguments))
    return cells


@dataclass(frozen=True)
class ExperimentJob:
    """Cells of an experiment, in a worker."""

    name: str
    limit: int | None
    device: str

    @property
    def key(self) -> str:
        return f"{self.name} {self.limit} {self.device}"

    def open(self) -> Evaluate:
        found = find_experiment(self.name)

        def evaluate(cell: Cell) -> pa.Table:
            rows = found.run(**cell.arguments, limit=self.limit, device=self.device)
            named = {found.by: cell.arguments[found.by]} if found.by in cell.arguments else {}
            return pa.Table.from_pylist([{**named, **row} for row in rows])

        return evaluate
