"""Experiments: a function that computes rows, the grid of arguments it is called with, and the
table that is made of all rows. Other packages add theirs by the entry point `seecause.experiments`.

The tables and figures of a paper are named PAPER/table-N and PAPER/figure-N. What a paper printed
is in `published/PAPER.toml`, which lists all its tables and figures: the table of an experiment
shows those values beside ours. Names of models that papers use are in `MODELS`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow as pa
import torch
from torch import Tensor

from seecause._software import plugin_digest, versions
from seecause.bench.runner import Cell, Evaluate, Status, read_cell, run_cells, state_of
from seecause.bench.tables import Table, TableCell, table_of, write_tables
from seecause.data.batch import Batch, class_places, to_batch
from seecause.data.dataset import Dataset, Sample, datasets, is_data, open_data, path_and_split
from seecause.engine.chunks import machine, plain_logits
from seecause.errors import BadOption, UnknownName
from seecause.files import digest_file, digest_json, write_json
from seecause.loading import load
from seecause.metrics.registry import Direction
from seecause.models.base import ImageModel
from seecause.options import Count, check_options, checked, keyword_options
from seecause.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])
Row = dict[str, Any]
Drawn = Literal["", "lines", "bars", "radar", "heat"]
CHUNK = 25  # images of a cell
RESULT = "experiment.json"
SPLITS = ("train", "val", "trainval", "test", "test-all", "robust", "non-robust")
QUICK = {
    "models": {"critters-vit": "builtin:critters-vit"},
    "data": {"critters": "critters:clean:test"},
    "limit": 4,
}


def _read(name: str) -> dict[str, Any]:
    path = Path(__file__).parent / "published" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


PAPERS = {name: _read(name) for name in ("caap", "cigma", "hear", "ifam", "critters", "ours")}
MODELS: dict[str, dict[str, str]] = _read("models")  # keywords of `sc.load` by name
PRINTED: dict[str, dict[str, Any]] = {  # tables and figures: titles, values, what computes them
    f"{paper}/{place}": about
    for paper, known in PAPERS.items()
    for place, about in known.items()
    if isinstance(about, dict)
}
HOMES = {  # where the function of each is
    name: f"seecause.experiments.{about.get('file', name.partition('/')[0])}"
    for name, about in PRINTED.items()
    if "run" in about
}
_registry: Registry[Experiment] = Registry("experiment", group="seecause.experiments", homes=HOMES)


@dataclass(frozen=True)
class Experiment:
    """One table or figure: what it asks, how its rows are computed and how they are summed up.

    Attributes:
        name: What `run` is called with.
        question: What the table answers, in one sentence.
        run: A function that returns rows. Its keywords are those of a cell, and options. With
            `data` it is called with a `Part`, without with the keywords `limit` and `device`.
        by: The column of the rows, or keyword of the cells, that names the lines of the table.
        values: Columns of numbers, and which direction is better.
        cells: Keywords of each call, which must be JSON.
        against: The line that others are compared with, by the "image" of rows. None is the first.
        models: Names in `MODELS` that the paper uses.
        data: Datasets that the paper uses, by the first word of their names, or whole names where
            nothing has to be downloaded.
        x: A column or keyword that lines go along, as in a figure.
        limit: Images of each dataset.
        figure: How the values are drawn.
        options: Options that are not the defaults of the function.
        quick: Options, and `models`, `data` or `limit`, of a run in a minute without downloads.
        printed: Options that restore the paper's settings.
        differs: What else differs from the paper.
        hours: GPU hours, about.
        prepare: A function (model, data, folder, device, **options) that trains what has to be
            trained and returns the keywords of `sc.load` for it.
        whole: Whether a cell gets all images, because something is fitted to them.
    """

    name: str
    question: str
    run: Callable[..., list[Row]]
    by: str
    values: Mapping[str, Direction]
    cells: Sequence[Mapping[str, Any]] = ({},)
    against: str | None = None
    models: Sequence[str] = ()
    data: Sequence[str] = ()
    x: str = ""
    limit: int | None = None
    figure: Drawn = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    printed: Mapping[str, Any] = field(default_factory=dict)
    differs: str = ""
    hours: float = 0
    prepare: Callable[..., dict[str, Any]] | None = None
    whole: bool = False


def experiment(name: str, **about: Any) -> Callable[[F], F]:
    """Register a function as an experiment.

    Args:
        name: What `run` is called with.
        **about: The other fields of `Experiment`.

    Returns:
        A decorator of a function with the keywords of a cell, `limit` and `device`, which returns
        rows such as `{"image": ..., "aupr1": ...}`. `docs/bench.md` has an example.

    Example:
        >>> @experiment("ones", question="How many?", by="method", values={"count": "higher"})
        ... def ones(*, limit, device):
        ...     return [{"image": "a", "method": "ours", "count": 1.0}]
    """

    def register(function: F) -> F:
        _registry.add(name, Experiment(name=name, run=function, **about))
        return function

    return register


def register_published(
    module: str, functions: Mapping[str, Any], lower: Collection[str], **usual: Any
) -> None:
    """Register the entries of `published` that a module computes.

    Args:
        module: Its name.
        functions: Its functions by name, for `run`, `prepare` and `cells`.
        lower: Values of which less is better, unless an entry lists its own.
        **usual: Fields of `Experiment` for entries that do not have them.
    """
    for name, about in PRINTED.items():
        if HOMES.get(name) != module:
            continue
        given: dict[str, Any] = {"by": "method", "cells": [{}], "limit": 500, **usual}
        if methods := about.get("methods"):
            given["cells"] = [{"method": method, "asked": {"method": method}} for method in methods]
        given |= {key.name: about[key.name] for key in fields(Experiment) if key.name in about}
        given["run"] = functions[about["run"]]
        if "prepare" in given:
            given["prepare"] = functions[given["prepare"]]
        if isinstance(given["cells"], str):
            given["cells"] = functions[given["cells"]]()
        values, low = (*about["values"], *about.get("also", ())), about.get("lower", lower)
        given["values"] = {value: "lower" if value in low else "higher" for value in values}
        _registry.add(name, Experiment(name=name, **given))


def experiments() -> dict[str, Experiment]:
    """Return all experiments by name, those of other packages included.

    Returns:
        An `Experiment` for each name.

    Example:
        >>> experiments()["caap/table-1"].by
        'method'
    """
    return _registry.all()


def find_experiment(name: str) -> Experiment:
    """The experiment of this name; raises `UnknownName` with the nearest names."""
    if name not in _registry and "command" in (entry := PRINTED.get(name, {})):
        raise BadOption("experiment", name, f"the command that draws it: {entry['command']}")
    return _registry.get(name)


def listing() -> list[dict[str, Any]]:
    """A row for each experiment, and for what a paper shows and no experiment computes."""
    known, rows = experiments(), []
    for name in dict.fromkeys([*PRINTED, *sorted(known)]):
        entry, printed = known.get(name), PRINTED.get(name, {})
        row = {"experiment": name, "shows": printed.get("title")}
        row |= {"data": "", "models": "", "GPU hours": ""}
        row["note"] = printed.get("command", "not built yet")
        if entry is not None:
            row |= {"shows": row["shows"] or entry.question, "data": ", ".join(entry.data)}
            row |= {"models": ", ".join(entry.models), "GPU hours": f"{entry.hours:g}"}
            row["note"] = "printed values" if "rows" in printed else ""
        rows.append(row)
    return rows


def setting_of(
    found: Experiment,
    *,
    quick: bool = False,
    as_printed: bool = False,
    options: Mapping[str, Any] | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """What one call of `run` computes, with nothing left open: models and data by their names in
    the table, limit, target, and options of the experiment and of its training. `asked` are models,
    weights, data and limit as in `run`."""
    small = {**QUICK, **found.quick} if quick else {}
    given = {**found.options, **(found.printed if as_printed else {}), **small, **(options or {})}
    usual = {name: given.pop(name, None) for name in ("models", "weights", "data", "limit")}
    own = {name: asked.get(name) or value for name, value in usual.items()}
    models, weights = own["models"] or found.models, own["weights"] or {}
    whole = {spec.partition(":")[0]: spec for spec in found.data if ":" in spec}
    data, target = own["data"] or whole, given.pop("target", "label")
    named = models if isinstance(models, Mapping) else {name: name for name in models}
    if not found.data:
        data = named = weights = {}
    elif not data:
        forms = {form.partition(":")[0]: form for form in datasets()}
        needed = " ".join(f"--data {name}=PATH" for name in found.data)
        raise BadOption("data", None, f"{needed} ({', '.join(forms[n] for n in found.data)})")
    if unknown := {*weights} - {*named}:
        raise BadOption("weights", ", ".join(unknown), f"one of the models: {', '.join(named)}")
    prepare = found.prepare or (lambda: None)
    trained = {name: given.pop(name) for name in keyword_options(prepare) if name in given}
    check_options(found.name, found.run, given, leave_out={*chain(*found.cells), "device"})
    return {
        "models": {name: _model(spec, weights.get(name)) for name, spec in named.items()},
        "data": {n: spec if is_data(spec) else f"{n}:{spec}" for n, spec in data.items()},
        "limit": own["limit"] or found.limit,
        "target": target,
        "options": given,
        "trained": trained,
    }


def _model(spec: str, weights: str | None) -> dict[str, Any]:
    """Keywords of `sc.load` for a name of MODELS, or for a model of a library."""
    if ":" not in spec and spec not in MODELS and not Path(spec).is_dir():
        raise UnknownName("model", spec, (*MODELS, f"timm:{spec}"))
    known = MODELS.get(spec, {"spec": spec})
    return known if weights is None else {**known, "weights": weights}


@dataclass(frozen=True)
class Part:
    """Some images of a dataset for one model.

    Attributes:
        model: Keywords of `sc.load`.
        data: The name of the dataset.
        limit: Images of it that are used.
        start: The first image of this part; `stop` is the one after the last.
        target: Whether the true class or the predicted one is explained.
        device: Where the model runs.
    """

    model: Mapping[str, Any]
    data: str
    limit: int | None
    start: int
    stop: int
    target: str
    device: str

    @property
    def view(self) -> ImageModel:
        """The model; it stays open for the next part."""
        return _open_model(json.dumps(self.model, sort_keys=True), self.device)

    @cached_property
    def samples(self) -> list[Sample]:
        """The images and what is known about them."""
        data = opened_data(self.data, self.limit)
        return [data[place] for place in range(self.start, self.stop)]

    @cached_property
    def batch(self) -> Batch:
        """The images in the model's frame; labels are the classes that are explained."""
        batch = to_batch(self.view, self.samples)
        if self.target == "predicted" or batch.labels is None:
            return batch._replace(labels=plain_logits(self.view, batch.images).argmax(dim=-1))
        places = class_places(self.view, opened_data(self.data, self.limit))
        return batch._replace(labels=torch.tensor(places, device=self.view.device)[batch.labels])


@lru_cache(maxsize=1)
def _open_model(model: str, device: str) -> ImageModel:
    torch.manual_seed(0)  # of random weights
    return load(**json.loads(model), device=device)


@lru_cache(maxsize=1)
def _part(part: str, device: str) -> Part:
    """The images of a cell; they stay in memory for the next cell of the same images."""
    return Part(**json.loads(part), device=device)


@lru_cache(maxsize=2)
def opened_data(data: str, limit: int | None) -> Dataset:
    """A dataset, opened once in each worker."""
    return open_data(data, limit=limit)


def base_of(data: str) -> tuple[str, str]:
    """Kind of a dataset, and its name without the split."""
    kind, _, rest = data.partition(":")
    if kind == "folder":
        return kind, data.removesuffix("/test")
    return kind, f"{kind}:{path_and_split(rest, SPLITS, default='')[0]}"


@checked
def run(
    name: str,
    folder: str | Path,
    *,
    data: Mapping[str, str] | None = None,
    models: Mapping[str, str] | Sequence[str] | None = None,
    weights: Mapping[str, str] | None = None,
    limit: Count | None = None,
    quick: bool = False,
    as_printed: bool = False,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    workers: int | None = None,
    ray: str | None = None,
    resources: Mapping[str, float] | None = None,
    progress: Callable[[int], None] = lambda cells: None,
    count: Callable[[int], None] = lambda cells: None,
) -> Status:
    """Run what is missing of an experiment, and write its table from what is finished.

    Args:
        name: An experiment of `experiments()`.
        folder: Where finished cells are kept, in `cells`, for all experiments that share them.
            FOLDER/NAME gets table.csv, table.md, table.tex, rows.csv, figure-N.svg, index.html
            and experiment.json. The same call again continues.
        data: Paths by name: `{"imagenet-s": PATH}`, or names that `open_data` takes.
        models: Names in `experiments.base.MODELS`, or models of a library by the name in the table.
        weights: Checkpoints by the name of the model in the table.
        limit: Use this many images. None is the paper's number, or all.
        quick: Use an embedded model and few generated images: does the command work?
        as_printed: Use the paper's settings where our defaults differ.
        options: Options of the experiment's function.
        device: Where models run.
        workers: Processes, as for `sc.bench.run`.
        ray: The Ray cluster, as for `sc.bench.run`.
        resources: What Ray sets aside for each task, as for `sc.bench.run`.
        progress: Called with 1 after each cell.
        count: Called with the number of cells before the first one.

    Returns:
        A `Status`; `failed` has the traceback of each cell that failed.

    Raises:
        UnknownName: If there is no such experiment or model.
        BadOption: If data is missing, or an option does not exist.

    Example:
        >>> import tempfile, seecause as sc
        >>> status = sc.experiments.run("caap/table-2", tempfile.mkdtemp(), quick=True, limit=1)
        >>> status.complete
        True
    """
    found, folder = find_experiment(name), Path(folder)
    asked: dict[str, Any] = {"data": data, "models": models, "weights": weights, "limit": limit}
    asked |= {"quick": quick, "as_printed": as_printed, "options": options}
    setting = setting_of(found, **asked)
    cells = cells_of(found, setting, folder, device)
    count(len(cells))
    if device.startswith("cuda"):
        resources = {"num_gpus": 1, **(resources or {})}
    where: dict[str, Any] = {"workers": workers, "ray": ray, "resources": resources}
    record = {"experiment": name, "question": found.question, "as printed": as_printed}
    record |= {"title": PRINTED.get(name, {}).get("title"), "setting": setting, "device": device}
    record |= {"machine": machine(device), "versions": versions()}
    try:
        run_cells(folder, cells, ExperimentJob(name, device), progress=progress, **where)
    finally:  # also of a run that was stopped
        status = _write(found, folder, cells, record)
    return status


def _write(
    found: Experiment, folder: Path, cells: Sequence[Cell], record: dict[str, Any]
) -> Status:
    """Write the table of all finished cells."""
    rows = _finished(folder, cells)
    status = state_of(folder, cells, set(rows))
    record |= {"cells": len(cells), "done": status.done, "failed": len(status.failed)}
    home = folder / found.name
    home.mkdir(parents=True, exist_ok=True)
    write_json(home / RESULT, record)
    if every := _rows_of(found, rows.values()):
        from seecause.report.experiments import write_results

        table = table_of_rows(found, every)
        write_tables(table, home)
        write_results(home, found, table, every, record)
    return status


def read_table(folder: str | Path, name: str) -> Table:
    """Read the table of an experiment.

    Args:
        folder: A folder that `run` was called with.
        name: The experiment.

    Returns:
        A `Table` of the cells that are finished.

    Raises:
        BadOption: If the folder holds no finished cells of this version.

    Example:
        >>> import tempfile, seecause as sc
        >>> folder = tempfile.mkdtemp()
        >>> status = sc.experiments.run("caap/table-2", folder, quick=True, limit=1)
        >>> sc.experiments.read_table(folder, "caap/table-2").metrics
        ['AUPR_1', 'AUPR_0', 'PG']
    """
    folder, found = Path(folder), find_experiment(name)
    try:
        record = json.loads((folder / name / RESULT).read_text(encoding="utf-8"))
        cells = cells_of(found, record["setting"], folder, record["device"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadOption("folder", str(folder), f"a folder that {name} was run in") from None
    if not (rows := _rows_of(found, _finished(folder, cells).values())):
        raise BadOption("folder", str(folder), "a folder with finished cells of this version")
    return table_of_rows(found, rows)


def _rows_of(found: Experiment, finished: Iterable[list[Row]]) -> list[Row]:
    """The rows that have a value of `by`: the others belong to other tables."""
    return [row for row in chain(*finished) if row.get(found.by) is not None]


def _finished(folder: Path, cells: Sequence[Cell]) -> dict[str, list[Row]]:
    """The rows of finished cells, by their names, with model and data as the table calls them."""
    rows = {}
    for cell in cells:
        if (table := read_cell(folder, cell.name)) is not None:
            rows[cell.name] = [{**cell.arguments["line"], **row} for row in table.to_pylist()]
    return rows


def line_of(experiment: Experiment, row: Row) -> str:
    """The name of the line of the table that a row belongs to."""
    parts = [row.get(name) for name in ("model", "data", experiment.by, experiment.x)]
    return ", ".join(str(part) for part in parts if part not in (None, ""))


def table_of_rows(experiment: Experiment, rows: Sequence[Row]) -> Table:
    """Means, errors, intervals and paired differences of rows. Lines are compared within a model
    and a dataset."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.get("model"), row.get("data")), []).append(row)
    cells: dict[str, dict[str, TableCell]] = {}
    tables = [_table_of_group(experiment, group) for group in groups.values()]
    for table in tables:
        cells |= table.cells
    metrics = [*experiment.values]
    reference = experiment.against or tables[0].reference
    return Table([*cells], metrics, reference, cells, experiment.values)


def _table_of_group(experiment: Experiment, rows: Sequence[Row]) -> Table:
    places = {image: i for i, image in enumerate(dict.fromkeys(row["image"] for row in rows))}
    columns: dict[str, dict[str, Tensor]] = {}
    firsts: dict[str, Row] = {}
    for row in rows:
        firsts.setdefault(line := line_of(experiment, row), row)
        for value in experiment.values:
            unknown = torch.full((len(places),), torch.nan, dtype=torch.float64)
            column = columns.setdefault(line, {}).setdefault(value, unknown)
            if row.get(value) is not None:
                column[places[row["image"]]] = row[value]
    like = [line for line, row in firsts.items() if row[experiment.by] == experiment.against]
    table = table_of(columns, against=next(iter(like), None), better=experiment.values)
    printed = PRINTED.get(experiment.name, {})
    for line, row in firsts.items():
        known = printed.get("rows", {}).get(row[experiment.by])
        heads = printed.get("columns")  # None: means over all models and data
        column = [0] if heads is None else [i for i, c in enumerate(heads) if c in row.values()]
        for place, value in enumerate(printed.get("values", ()) if known and column else ()):
            pair = known[column[0] * len(printed["values"]) + place]
            cell = table.cells[line][value]
            table.cells[line][value] = replace(cell, published=tuple(pair))
    return table


def cells_of(
    experiment: Experiment, setting: Mapping[str, Any], folder: Path, device: str
) -> list[Cell]:
    """The cells of an experiment: of each model and dataset, some images at a time. What has to be
    trained is trained first, and kept in FOLDER/trained."""
    function, limit = experiment.run, setting["limit"]
    kind, code = device.partition(":")[0], [function.__qualname__, plugin_digest(function)]
    common = [function.__module__, code, limit, kind, versions()]
    several = max(len(setting["data"]), len(experiment.data)) > 1
    grid: list[tuple[dict[str, str], dict[str, Any], list[str]]] = []
    for label, spec in setting["data"].items():
        data = open_data(spec, limit=limit)
        for name, model in setting["models"].items():
            if (prepare := experiment.prepare) is not None:
                where = (folder / "trained", device)
                model = prepare(model, spec, *where, **setting["trained"])
            weights = Path(model.get("weights", ""))
            facts = [data.fingerprint, digest_file(weights) if weights.is_file() else ""]
            line = {"model": name, "data": label if several else ""}
            own = {"model": model, "data": spec, "limit": limit, "target": setting["target"]}
            each = len(data) if experiment.whole else CHUNK
            for start in range(0, len(data), each):
                part = {**own, "start": start, "stop": min(start + each, len(data))}
                grid.append((line, part, facts))
    cells, known = [], keyword_options(function)
    for line, part, facts in grid or [({}, {}, [])]:
        for given in experiment.cells:
            call = {**setting["options"], **{n: v for n, v in given.items() if n in known}}
            words = {**line, "images": part.get("start"), **given}
            title = ", ".join(f"{n}={v}" for n, v in words.items() if v not in (None, ""))
            named = {n: given[n] for n in (experiment.by, experiment.x) if n in given}
            arguments = {"part": part, "call": call, "limit": limit, "line": {**line, **named}}
            identity = digest_json([*common, facts, part, call], length=24)
            cells.append(Cell(identity, title, arguments))
    return cells


@dataclass(frozen=True)
class ExperimentJob:
    """Cells of an experiment, in a worker."""

    name: str
    device: str

    @property
    def key(self) -> str:
        return f"{self.name} {self.device}"

    def open(self) -> Evaluate:
        found = find_experiment(self.name)

        def evaluate(cell: Cell) -> pa.Table:
            part, call, limit = (cell.arguments[key] for key in ("part", "call", "limit"))
            given = {} if part else {"limit": limit, "device": self.device}
            rows = found.run(
                *[_part(json.dumps(part), self.device)] if part else [], **call, **given
            )
            columns = dict.fromkeys(chain(*rows))  # rows may have other columns than the first
            return pa.table({name: [row.get(name) for row in rows] for name in columns})

        return evaluate
