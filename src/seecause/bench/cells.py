"""What a benchmark computes: a request, the cells it is cut into, and the rows of one cell.

A cell is one method on a few neighbouring images. Its name is a digest of all that decides its
rows (method, metrics, the bytes of its images, model, code, libraries) and of nothing else: not of
the other images, the folder or the number of workers. So a finished cell can be used for as long
as its name is asked for, and a longer run uses the cells of a shorter one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast, get_args

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from seecause._software import (
    arithmetic,
    check_versions,
    model_code_digest,
    plugin_digest,
    set_arithmetic,
    versions,
)
from seecause.attribution.attribute import attribute
from seecause.attribution.registry import find
from seecause.bench.measures import (
    DETAILS,
    UNDEFINED,
    Named,
    Options,
    group_of,
    group_options,
    groups_of,
    lacking,
    method_options,
    metric_options,
    metric_sets,
    pick_metrics,
    run_group,
    with_options,
)
from seecause.data.batch import Batch, class_places, need_images, sample_in_frame, to_batch
from seecause.data.dataset import (
    Dataset,
    Sample,
    capabilities,
    sample_digests,
    sample_ids,
)
from seecause.data.registry import open_data
from seecause.engine.chunks import budget, plain_logits
from seecause.errors import BadImage, BadOption, DataMissing
from seecause.files import digest, digest_json
from seecause.loading import load
from seecause.metrics import MetricInputs, Scores
from seecause.metrics.parts import PartTruth, measure_truth
from seecause.metrics.registry import METRICS
from seecause.models.base import ImageModel
from seecause.models.preprocess import Preprocess
from seecause.target import Spec

SCHEMA = 6  # of the rows; another number makes every cell new
# bytes of activations; fixed, because free memory would decide chunks, and so the last bits
MEMORY = {"cpu": 64 << 20, "cuda": 8 << 30}
ANSWERS = ("label", "target", "predicted")  # columns; null where not known
Explained = Literal["label", "predicted"]
Precision = Literal["highest", "high"]  # of float32 products, as torch calls it; high is TF32


@dataclass(frozen=True)
class Request:
    """What a benchmark compares: a model, data, methods with their options, and metrics.

    Attributes:
        model: A name that `sc.load` takes.
        data: A dataset, such as "critters:clean:test" or "folder:PATH".
        methods: Options by method; a list of names means their defaults.
        called: The method behind a name that is none itself: `{"black": "caap"}` lets "black" be
            CAAP with the options of `methods["black"]`.
        metrics: Names of columns (`sc.metrics.metrics()`) or of sets ("paper", "all").
        measures: Options of metrics: `{"insertion-deletion": {"steps": "patch"}}`.
        weights: A checkpoint, as `sc.load` takes it.
        limit: Use this many images, spread evenly. None uses all.
        target: Explain the true class ("label") or the predicted one.
        seed: Decides random weights and methods that draw.
        cell_size: Images in one cell.
        memory: Bytes of activations in one worker.
        threads: Threads of one worker.
        reading: Options of `sc.load`: size, mean, std, classes.
    """

    model: str
    data: str
    methods: Options
    called: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[str] = ("insertion", "deletion", "ins-del")
    measures: Options = field(default_factory=dict)
    weights: str | None = None
    limit: int | None = None
    target: Explained = "label"
    seed: int = 0
    dtype: str = "float32"
    precision: Precision = "highest"
    device: str = "cpu"
    cell_size: int = 16
    memory: int | None = None
    threads: int = 1
    reading: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        methods: Any = [self.methods] if isinstance(self.methods, str) else self.methods
        if not isinstance(methods, Mapping):
            object.__setattr__(self, "methods", {name: {} for name in methods})
        if isinstance(self.metrics, str):
            object.__setattr__(self, "metrics", (self.metrics,))

    def method(self, name: str) -> str:
        """The registered method behind a name in the table."""
        return self.called.get(name, name)


@dataclass(frozen=True)
class Cell:
    """One method on images `start` to `stop`, whose bytes have the digest `data`."""

    name: str
    method: str
    start: int
    stop: int
    data: str

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """A request with nothing left open, what model and data turned out to be, and the cells."""

    request: Request
    model: Mapping[str, Any]  # fingerprint, random_weights, architecture, classes, frame
    data: Mapping[str, Any]  # name, fingerprint, classes, images
    places: Sequence[int]  # the model's class of each label; empty if the prediction is explained
    versions: Mapping[str, str]
    plugins: Mapping[str, str]  # digests of code outside this package, by what it is
    cells: Sequence[Cell]

    def record(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Plan:
        """The plan of `record()`; raises KeyError, TypeError or ValueError if it is none."""
        known = {key: value for key, value in record.items() if key != "schema"}
        request = Request(**known["request"])
        cells = tuple(Cell(**cell) for cell in known["cells"])
        plan = cls(**{**known, "request": request, "cells": cells})
        count = plan.data["images"]
        for cell in cells:
            if not (cell.name.isalnum() and cell.method in request.methods):
                raise ValueError(f"cell {cell.name!r}")
            if not 0 <= cell.start < cell.stop <= count:
                raise ValueError(f"images of cell {cell.name}")
        if record["schema"] != SCHEMA or not request.methods or not request.metrics:
            raise ValueError("written by another version")
        return plan


class Prepared:
    """A plan with its model and data, opened once in each process; `run` evaluates a cell.

    `left_out` has the metrics of a set that model or data cannot have, and why.
    """

    def __init__(
        self, plan: Plan, model: ImageModel, data: Dataset, left_out: Mapping[str, str] = {}
    ):
        self.plan, self.model, self.data, self.left_out = plan, model, data, left_out
        self.last: tuple[tuple[int, int], Loaded] | None = None  # the images read last

    def run(self, cell: Cell) -> pa.Table:
        """One row for each image; the same numbers in every process on the same kind of machine.

        Columns: image, index, label, target, predicted, one for each metric, reasons (JSON by
        metric), map, and what is kept of the metrics' details. Options, protocols and seconds are
        in the metadata of the schema.
        """
        request, seconds = self.plan.request, {}
        with _arithmetic(request.threads, request.precision), budget(request.memory) as memory:
            with _clock(seconds, "read", self.model):
                loaded = self.read(cell)
            maps, target, predicted, measured = None, None, None, {}
            if loaded.batch is not None:
                images = loaded.batch.images
                with torch.no_grad():
                    predicted = plain_logits(self.model, images).argmax(dim=-1)
                target = predicted if request.target == "predicted" else self._places(loaded.batch)
                options = request.methods[cell.method]
                method = request.method(cell.method)
                with _clock(seconds, "attribute", self.model):
                    found = attribute(self.model, images, target, method, **options)
                maps = found.maps  # patches; pixels are measured, and too many to be kept
                with _clock(seconds, "measure", self.model):
                    finest = maps if found.native is None else found.native
                    measured = self._measure(cell, loaded, finest, target)
            about = {"seconds": seconds, "memory_halvings": list(memory.halvings)}
            return self._table(cell, loaded, maps, target, predicted, measured, about)

    def read(self, cell: Cell) -> Loaded:
        """The images of a cell in the model's frame, read once for all methods in turn."""
        bounds = (cell.start, cell.stop)
        if self.last is not None and self.last[0] == bounds:
            return self.last[1]
        samples, broken = read_samples(self.data, *bounds, frame=self.model.preprocess)
        if digest(*sample_digests(self.data, *bounds)) != cell.data:
            raise DataMissing(
                f"images {cell.start} to {cell.stop - 1} of {self.data.name}",
                "they changed after the run began",
                "run the same command again",
            )
        batch = to_batch(self.model, list(samples.values())) if samples else None
        loaded = Loaded(samples, broken, batch)
        self.last = (bounds, loaded)
        return loaded

    def _places(self, batch: Batch) -> Tensor:
        if batch.labels is None:
            raise BadOption("target", "label", "samples with labels; give --target predicted")
        return torch.tensor(self.plan.places, device=batch.labels.device)[batch.labels]

    def _measure(
        self, cell: Cell, loaded: Loaded, maps: Tensor, target: Tensor
    ) -> dict[str, Scores]:
        """Scores by group. Some metrics explain changed images, or a changed model, again."""
        request, batch = self.plan.request, loaded.batch
        assert batch is not None
        options, method = request.methods[cell.method], request.method(cell.method)

        def again(model: ImageModel, images: Tensor, target: Spec) -> Tensor:
            found = attribute(model, images, target, method, **options)
            return found.maps if found.native is None else found.native

        latents = None
        if "counterfactuals" in capabilities(self.data):
            drawn = cast(Any, self.data).latents
            latents = drawn(cell.start, cell.stop, device=self.model.device)
            if "parts" in request.measures and loaded.truth is None:
                loaded.truth = measure_truth(self.model, latents)
        inputs = MetricInputs(
            self.model,
            batch.images,
            maps,
            target,
            batch.masks,
            explain=lambda images, target: again(self.model, images, target),
            attribute=again,
            latents=latents,
        )
        return {
            group: run_group(group, inputs, options, truth=loaded.truth)
            for group, options in request.measures.items()
        }

    def _table(
        self,
        cell: Cell,
        loaded: Loaded,
        maps: Tensor | None,
        target: Tensor | None,
        predicted: Tensor | None,
        measured: Mapping[str, Scores],
        about: Mapping[str, Any],
    ) -> pa.Table:
        request, indices = self.plan.request, range(cell.start, cell.stop)
        rows = np.array([index - cell.start for index in loaded.samples], int)  # images read
        names = sample_ids(self.data)[cell.start : cell.stop]
        labels = [loaded.samples[i].label if i in loaded.samples else None for i in indices]
        columns: dict[str, Any] = {"image": names, "index": list(indices)}
        columns["label"] = pa.array(labels, pa.int64())
        for name, classes in (("target", target), ("predicted", predicted)):
            known = [] if classes is None else classes.tolist()
            by_index = dict(zip(loaded.samples, known, strict=True))
            columns[name] = pa.array([by_index.get(i) for i in indices], pa.int64())
        reasons = [dict.fromkeys(request.metrics, loaded.broken.get(i, "")) for i in indices]
        for metric in request.metrics:
            values = np.full(len(cell), np.nan)
            scores = measured.get(group_of(metric))
            if scores is not None:
                values[rows] = scores.columns[metric].double().cpu().numpy()
                for row, why in zip(rows, scores.details["reasons"], strict=True):
                    reasons[row][metric] = why or (UNDEFINED if np.isnan(values[row]) else "")
            columns[metric] = values
        columns["reasons"] = [json.dumps({m: r for m, r in why.items() if r}) for why in reasons]
        tensors: dict[str, Tensor] = {} if maps is None else {"map": maps}
        shared: dict[str, list[float]] = {}
        for group, scores in measured.items():
            kept = [name for name in DETAILS.get(group, ()) if name in scores.details]
            tensors |= {f"{group}: {name}": scores.details[name] for name in kept}
            if kept and "shares" in scores.details:
                shared[f"{group}: shares"] = scores.details["shares"].tolist()
        for name, tensor in tensors.items():
            exact = tensor if tensor.dtype == torch.float64 else tensor.float()
            known = exact.detach().reshape(len(rows), -1).cpu().numpy()
            whole = np.full((len(cell), known.shape[1]), np.nan, known.dtype)
            whole[rows] = known
            columns[name] = pa.FixedSizeListArray.from_arrays(whole.ravel(), whole.shape[1])
        metadata = {
            "method": {"name": request.method(cell.method), **request.methods[cell.method]},
            "metrics": {group: scores.protocol for group, scores in measured.items()},
            "model": {"name": request.model, "fingerprint": self.plan.model["fingerprint"]},
            "data": {"name": self.plan.data["name"], "digest": cell.data},
            "run": {"seed": request.seed, "dtype": request.dtype, "device": request.device},
            "shapes": {name: list(tensor.shape[1:]) for name, tensor in tensors.items()},
            "shared": shared,
            "images": len(loaded.samples),
            **about,
        }
        table = pa.table(columns)
        return table.replace_schema_metadata({"seecause": json.dumps(metadata)})


@dataclass(eq=False)
class Loaded:
    """The images of a cell: samples by index, and reasons for those that cannot be read."""

    samples: dict[int, Sample]
    broken: dict[int, str]
    batch: Batch | None  # None if nothing could be read
    truth: PartTruth | None = None  # of the metric "parts": the same for all methods


def read_samples(
    data: Dataset, start: int, stop: int, *, frame: Preprocess
) -> tuple[dict[int, Sample], dict[int, str]]:
    """Samples by index, resized to a model's frame one by one; reasons for unreadable ones."""
    samples, broken = {}, {}
    for index in range(start, stop):
        try:
            samples[index] = sample_in_frame(frame, data[index])
        except (BadImage, DataMissing) as failure:
            broken[index] = str(failure)
    return samples, broken


def prepare(
    request: Request,
    *,
    options: Sequence[Named] = (),
    metric_options: Sequence[Named] = (),
) -> Prepared:
    """Open model and data, check the request against them, and cut the work into cells.

    Args:
        request: What is compared. `metrics` may be names of sets.
        options: Further options of methods: (method or "" for all that have it, key, value).
        metric_options: Likewise for groups of metrics.

    Raises:
        UnknownName: If a method or metric does not exist.
        BadOption: If an option does not exist, or model or data cannot have what is asked.
    """
    for word in request.metrics:
        if word not in metric_sets():
            group_of(word)
    data = open_data(request.data, limit=request.limit)
    model = open_model(request)
    metrics, left_out = pick_metrics(request.metrics, model, data)
    groups = {group: group_options(group) for group in groups_of(metrics)}
    entries = {name: find(request.method(name), model.architecture) for name in request.methods}
    methods = {name: entry.options for name, entry in entries.items()}
    request = replace(
        request,
        metrics=metrics,
        measures=with_options("--metric-option", request.measures, metric_options, groups),
        methods=with_options("--option", request.methods, options, methods),
    )
    return Prepared(make_plan(request, model, data), model, data, left_out)


def open_prepared(plan: Plan) -> Prepared:
    """Model and data in a worker; refused if they are not those of the plan."""
    check_versions(plan.versions)
    model, data = open_model(plan.request), open_data(plan.request.data, limit=plan.request.limit)
    facts = {"model": plan.model["fingerprint"], "data": plan.data["fingerprint"], **plan.plugins}
    here = {"model": model.fingerprint(), "data": data.fingerprint}
    check_versions(facts, here | _plugins(plan.request, model, data))
    return Prepared(plan, model, data)


def open_model(request: Request) -> ImageModel:
    """The model of a request; the seed decides random weights."""
    torch.manual_seed(request.seed)
    reading = {name: tuple(value) for name, value in request.reading.items()}
    where = {"device": request.device, "dtype": request.dtype}
    return load(request.model, weights=request.weights, **where, **reading)


def make_plan(request: Request, model: ImageModel, data: Dataset) -> Plan:
    """Check a request against model and data, fill in defaults, and cut it into cells.

    Cells of the same images stand together, so that images are read once for all methods, and a
    run that was stopped has compared all methods on the same ones.
    """
    need_images(model)
    request = _complete(request, model, data)
    plan = Plan(
        request=request,
        model={
            "fingerprint": model.fingerprint(),
            "random_weights": model.random_weights,
            "architecture": model.architecture,
            "classes": list(model.classes),
            "frame": asdict(model.preprocess),
        },
        data={
            "name": data.name,
            "fingerprint": data.fingerprint,
            "classes": list(data.classes),
            "images": len(data),
        },
        places=class_places(model, data) if request.target == "label" else (),
        versions=versions(),
        plugins=_plugins(request, model, data),
        cells=(),
    )
    digests, names, cells = sample_digests(data), sample_ids(data), []
    for start in range(0, len(data), request.cell_size):
        stop = min(start + request.cell_size, len(data))
        images, own = digest(*digests[start:stop]), names[start:stop]
        for method in request.methods:
            name = cell_name(plan, method, start, own, images)
            cells.append(Cell(name, method, start, stop, images))
    return replace(plan, cells=tuple(cells))


def cell_name(plan: Plan, method: str, start: int, names: Sequence[str], data: str) -> str:
    """A digest of everything that decides the rows of a cell; `data` is that of its images."""
    request = plan.request
    code = [f"method {method}", *(f"metric {group}" for group in request.measures), "data", "code"]
    decisive = {
        "schema": SCHEMA,
        "versions": plan.versions,
        "model": [request.model, plan.model["fingerprint"], plan.model["frame"]],
        "method": [method, request.method(method), request.methods[method]],
        "metrics": [list(request.metrics), request.measures],
        "data": [plan.data["name"], data, start, list(names)],
        "target": [request.target, list(plan.places)],
        "run": [request.seed, request.dtype, request.device, request.memory, request.threads],
        "precision": request.precision,
        "plugins": [plan.plugins.get(name, "") for name in code],
    }
    return digest_json(decisive, length=24)


def _plugins(request: Request, model: ImageModel, data: Dataset) -> dict[str, str]:
    """Digests of the code of methods, metrics, data and models of other packages."""
    sources: dict[str, Any] = {"data": type(data)}
    for group in groups_of(request.metrics):
        sources[f"metric {group}"] = METRICS.get(group).run
    for name in request.methods:
        sources[f"method {name}"] = find(request.method(name), model.architecture).run
    digests = {name: plugin_digest(source) for name, source in sources.items()}
    digests["code"] = model_code_digest(model)
    return {name: value for name, value in digests.items() if value}


def _complete(request: Request, model: ImageModel, data: Dataset) -> Request:
    """The same request with nothing left open."""
    for what, choices in (("target", Explained), ("precision", Precision)):
        if getattr(request, what) not in get_args(choices):
            expected = f"one of {', '.join(get_args(choices))}"
            raise BadOption(what, getattr(request, what), expected)
    for what in ("cell_size", "threads", "memory"):
        value = getattr(request, what)
        if value is not None and value < 1:
            raise BadOption(what, value, "1 or more")
    if not request.methods or not request.metrics:
        given = [list(request.methods), list(request.metrics)]
        raise BadOption("methods and metrics", given, "at least one of each")
    if request.target == "label" and not data.classes:
        expected = f"predicted (--target predicted): {data.name} has no labels"
        raise BadOption("target", "label", expected)
    for name in request.measures:
        METRICS.get(name)  # raises for a name that is no metric
    groups, seed = groups_of(request.metrics), request.seed
    for group in groups:
        if why := lacking(group, model, data):
            raise BadOption("metrics", group, f"other metrics: {why}")
    return replace(
        request,
        methods={
            name: method_options(request.method(name), given, seed, model)
            for name, given in request.methods.items()
        },
        metrics=tuple(dict.fromkeys(request.metrics)),
        measures={
            group: metric_options(group, request.measures.get(group, {}), seed) for group in groups
        },
        memory=request.memory or MEMORY.get(request.device.partition(":")[0], MEMORY["cpu"]),
    )


@contextmanager
def _arithmetic(threads: int, precision: Precision) -> Iterator[None]:
    """Threads and precision of float32 products change last bits, so the plan fixes them."""
    before = arithmetic()
    set_arithmetic([threads, precision, precision != "highest"])
    try:
        yield
    finally:
        set_arithmetic(before)


@contextmanager
def _clock(seconds: dict[str, float], what: str, model: ImageModel) -> Iterator[None]:
    """Add the seconds of the block; a GPU works on after a call returns, so it is waited for."""

    def now() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter()

    began = now()
    yield
    seconds[what] = seconds.get(what, 0.0) + now() - began
