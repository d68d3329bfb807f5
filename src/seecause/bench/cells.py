"""The content of a benchmark: a request, its cells, and the rows of one cell.

A cell is one method on a few neighbouring images. Its name is a digest of all that decides its
rows (method, metrics, the bytes of its images, model, code, libraries) and of nothing else: not of
the other images, the folder or the number of workers. So a finished cell is valid as long as its
name is requested, and a longer run uses the cells of a shorter one.

Metrics are columns of groups that share their work. Two words stand for several columns:

paper   insertion, deletion and their difference, AUPR_1, AUPR_0, pointing game
all     everything; sanity checks and truth explain every image some dozens of times
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

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
from seecause.bench.runner import Cell, Evaluate
from seecause.data.batch import Batch, class_places, framed_batch, need_images, read_samples
from seecause.data.dataset import (
    Dataset,
    Sample,
    SkippedImage,
    as_data,
    capabilities,
    open_data,
    sample_digests,
    sample_ids,
)
from seecause.engine.chunks import budget, plain_logits
from seecause.errors import BadOption, DataMissing, NotDefined, UnknownName
from seecause.files import digest, digest_json
from seecause.loading import as_view, load
from seecause.metrics import MetricInputs, Scores, metrics
from seecause.metrics.parts import PartTruth, measure_truth
from seecause.metrics.registry import METRICS
from seecause.models.base import ImageModel
from seecause.models.preprocess import ALPHA, EXIF
from seecause.options import Count, check_options, checked, keyword_options, with_options
from seecause.target import Spec

HERE = "in memory: "  # begins names of models and data that are no names for `open_...`
SCHEMA = 7  # version of the rows; another number invalidates every cell
# bytes of activations; fixed, because chunk sizes change the last bits of results
MEMORY = {"cpu": 64 << 20, "cuda": 8 << 30}
CLASSES = ("label", "target", "predicted")  # columns; null where not known
PAPER = ("insertion", "deletion", "ins-del", "aupr1", "aupr0", "pointing")
UNDEFINED = "not defined for this image"  # recorded if a metric returns NaN without an error
PARTS = (
    *("correctness", "contrastivity", "csdc"),
    *("preservation", "deletion", "distractibility"),
)
DETAILS = {  # details of a metric that are kept for each image, beside its columns
    "insertion-deletion": ("insertion curve", "deletion curve", "shares"),
    "parts": PARTS,
}
NOT_OPTIONS = ("truth",)  # keywords for callers in Python
Options = Mapping[str, Mapping[str, Any]]  # by method, or by group of metrics


@checked
@dataclass(frozen=True)
class Request:
    """What a benchmark compares: a model, data, methods with their options, and metrics.

    Args:
        model: A name that `sc.load` takes, "FILE.py:FUNCTION" for one of your own; or a model,
            which is computed with in this process only.
        data: A dataset, such as "critters:clean:test" or "folder:PATH"; or a dataset of torch of
            (image, label), likewise.
        methods: Options by method; a list of names means their defaults. With the option "method",
            the name is free: `{"black": {"method": "caap", "blank": "black"}}`.
        metrics: Names of columns (`sc.metrics.metrics()`) or of sets ("paper", "all").
        measures: Options of metrics: `{"insertion-deletion": {"steps": "patch"}}`.
        weights: A checkpoint, as `sc.load` takes it.
        limit: Use this many images, spread evenly. None uses all.
        target: Explain the true class ("label") or the predicted one.
        seed: Decides random weights and methods that draw.
        dtype: The dtype of the model.
        device: Where the model runs.
        cell_size: Images in one cell.
        memory: Bytes of activations in one worker. None is 64 MiB, and 8 GiB on a GPU.
        threads: Threads of one worker.
        reading: Options of `sc.load`: size, mean, std, classes.

    Example:
        >>> Request("builtin:critters-vit", "critters:clean", ["caap", "gae"], limit=8).methods
        {'caap': {}, 'gae': {}}
    """

    model: Any
    data: Any
    methods: Any
    metrics: Sequence[str] = ("insertion", "deletion", "ins-del")
    measures: Options = field(default_factory=dict)
    weights: str | None = None
    limit: int | None = None
    target: Literal["label", "predicted"] = "label"
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    cell_size: Count = 16
    memory: Count | None = None
    threads: Count = 1
    reading: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.methods, Mapping):
            object.__setattr__(self, "methods", {name: {} for name in self.methods})

    def method(self, name: str) -> str:
        """The registered method behind a name in the table."""
        return self.methods[name].get("method", name)


@dataclass(frozen=True)
class Plan:
    """A resolved request, the fingerprints of model and data, and the cells to compute.

    It is the `Job` of its cells: a worker opens model and data with it.
    """

    request: Request
    model: Mapping[str, Any]  # fingerprint, random_weights, architecture, classes, frame
    data: Mapping[str, Any]  # name, fingerprint, classes, images
    places: Sequence[int]  # the model's class of each label; empty if the prediction is explained
    versions: Mapping[str, str]
    plugins: Mapping[str, str]  # digests of code of other packages, by kind and name
    columns: Mapping[str, Mapping[str, Any]]  # which direction is better, and what a column means
    controls: Mapping[str, bool]  # by method: whether it runs no model
    summaries: Mapping[str, str]  # by method; reports need no plug-in
    cells: Sequence[Cell] = ()

    def record(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Plan:
        """The plan from `record()`; raises KeyError, TypeError or ValueError if it is not valid."""
        if record["schema"] != SCHEMA:
            raise ValueError("written by another version")
        request, cells = Request(**record["request"]), [Cell(**cell) for cell in record["cells"]]
        known = {name: value for name, value in record.items() if name != "schema"}
        return cls(**{**known, "request": request, "cells": cells})

    @cached_property
    def key(self) -> str:
        """A digest of the plan without its cells."""
        return digest_json(replace(self, cells=()).record())

    def open(self) -> Evaluate:
        """Open model and data in a worker; raises if they differ from those of the plan."""
        check_versions(self.versions)
        for what, name in (("model", self.request.model), ("data", self.request.data)):
            if name.startswith(HERE):
                expected = "this process (workers=None, no ray): it is an object in memory"
                remedy = ", and a worker opens things by name; name a function: FILE.py:FUNCTION"
                raise BadOption(what, name, expected + (remedy if what == "model" else ""))
        model, data = (
            open_model(self.request),
            open_data(self.request.data, limit=self.request.limit),
        )
        facts = {"model": self.model["fingerprint"], "data": self.data["fingerprint"]}
        here = {"model": model.fingerprint(), "data": data.fingerprint}
        check_versions({**facts, **self.plugins}, here | _plugins(self.request, model, data))
        return Prepared(self, model, data).run


@dataclass(eq=False)
class Loaded:
    """The images of a cell, which are shared by all methods."""

    samples: dict[int, Sample]  # by index; those that could be read
    reasons: dict[int, str]  # why the others could not
    batch: Batch | None  # None if nothing could be read
    predicted: Tensor | None
    truth: PartTruth | None = None  # of the metric "parts"


@dataclass(eq=False)
class Prepared:
    """A plan with its model and data, opened once in each process; `run` evaluates a cell.

    `left_out` has the metrics of a set that model or data cannot have, and why.
    """

    plan: Plan
    model: ImageModel
    data: Dataset
    left_out: Mapping[str, str] = field(default_factory=dict)
    last: tuple[range, Loaded] | None = None  # the images read last
    # index of the next image, and all from it on, which are read ahead where `reading_with` says so
    ahead: tuple[int, Iterator[list[Sample] | SkippedImage]] = (-1, iter(()))

    def run(self, cell: Cell) -> pa.Table:
        """One row for each image; the same numbers in every process on the same kind of machine.

        Columns: image, index, label, target, predicted, one for each metric, reasons (JSON by
        metric), seconds (of attribution), map, and what is kept of the metrics' details. Options
        and protocols are in the metadata of the schema.
        """
        request, kept, indices = self.plan.request, arithmetic(), indices_of(cell)
        columns: dict[str, Tensor] = {}
        protocols: dict[str, Any] = {}
        # threads and the precision of products change last bits, so the plan fixes them
        set_arithmetic([request.threads, "highest", False])
        try:
            with budget(request.memory), torch.no_grad():
                loaded = self.read(indices, cell.arguments["data"])
                reasons = {i: dict.fromkeys(request.metrics, w) for i, w in loaded.reasons.items()}
                if loaded.batch is not None:
                    columns, scores = self._measured(cell, loaded)
                    for group, found in scores.items():
                        protocols[group] = found.protocol
                        _keep(group, found, request.metrics, [*loaded.samples], columns, reasons)
        finally:
            set_arithmetic(kept)
        kinds = number_kinds(request.metrics)
        table: dict[str, Any] = {"image": sample_ids(self.data)[indices.start : indices.stop]}
        table["index"] = list(indices)
        for name in (*kinds, *(name for name in columns if name not in kinds)):
            values = columns[name].tolist() if name in columns else []
            by_index = dict(zip(loaded.samples, values, strict=name in columns))
            table[name] = pa.array([by_index.get(index) for index in indices], kinds.get(name))
        table["reasons"] = [json.dumps(reasons.get(index, {})) for index in indices]
        about = {"method": request.methods[cell.title], "metrics": protocols}
        return pa.table(table).replace_schema_metadata({"seecause": json.dumps(about)})

    def read(self, indices: range, data: str) -> Loaded:
        """Images in the model's frame and their predictions; `data` is their expected digest."""
        if self.last is not None and self.last[0] == indices:
            return self.last[1]
        samples, reasons, predicted = dict[int, Sample](), dict[int, str](), None
        start, rest = self.ahead
        if start != indices.start:
            places = range(indices.start, len(self.data))
            rest = read_samples(self.model.preprocess, self.data, places)
        self.ahead = (-1, iter(()))  # if an error ends the loop
        for index, found in zip(indices, rest, strict=False):
            if isinstance(found, SkippedImage):
                reasons[index] = found.reason
            else:
                samples[index] = found[0]
        self.ahead = (indices.stop, rest)
        if digest(*sample_digests(self.data, indices.start, indices.stop)) != data:
            what = f"images {indices.start} to {indices.stop - 1} of {self.data.name}"
            raise DataMissing(what, "they changed after the run began", "run the command again")
        batch = framed_batch(self.model, list(samples.values())) if samples else None
        if batch is not None:
            self.model.memo["shared images"] = {"images": batch.images}
            predicted = plain_logits(self.model, batch.images).argmax(dim=-1)
        self.last = (indices, Loaded(samples, reasons, batch, predicted))
        return self.last[1]

    def _measured(self, cell: Cell, loaded: Loaded) -> tuple[dict[str, Tensor], dict[str, Scores]]:
        """Classes, seconds and maps [n, ...] by column, and scores by group. Some metrics explain
        changed images, or a changed model, again."""
        request, batch, indices = self.plan.request, loaded.batch, indices_of(cell)
        assert batch is not None and loaded.predicted is not None
        options, target, columns = request.methods[cell.title], loaded.predicted, {}
        if batch.labels is not None:
            columns["label"] = batch.labels
        if request.target == "label":
            if batch.labels is None:
                raise BadOption("target", "label", "samples with labels; give --target predicted")
            target = torch.tensor(self.plan.places, device=self.model.device)[batch.labels]
        began = self._now()
        found = attribute(self.model, batch.images, target, **options)
        seconds = torch.full((len(target),), (self._now() - began) / len(target))
        # maps of patches are stored; maps of pixels are measured but are too large to store
        columns |= {"target": target, "predicted": loaded.predicted}
        columns |= {"seconds": seconds, "map": found.maps}

        def again(model: ImageModel, images: Tensor, target: Spec) -> Tensor:
            other = attribute(model, images, target, **options)
            return other.maps if other.native is None else other.native

        latents = None
        if "counterfactuals" in capabilities(self.data):
            drawn: Any = self.data
            latents = drawn.latents(indices.start, indices.stop, device=self.model.device)
            if "parts" in request.measures and loaded.truth is None:
                loaded.truth = measure_truth(self.model, latents)
        inputs = MetricInputs(
            self.model,
            batch.images,
            found.maps if found.native is None else found.native,
            target,
            batch.masks,
            explain=lambda images, target: again(self.model, images, target),
            attribute=again,
            latents=latents,
        )
        measures = request.measures.items()
        return columns, {g: run_group(g, inputs, own, truth=loaded.truth) for g, own in measures}

    def _now(self) -> float:
        """The time after pending work is done, also on a GPU."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def number_kinds(metrics: Sequence[str]) -> dict[str, pa.DataType]:
    """Columns of classes, metrics and seconds, and their types."""
    numbers = dict.fromkeys([*metrics, "seconds"], pa.float64())
    return dict.fromkeys(CLASSES, pa.int64()) | numbers


def indices_of(cell: Cell) -> range:
    """The indices of the images of a cell."""
    return range(cell.arguments["start"], cell.arguments["stop"])


def _keep(
    group: str,
    scores: Scores,
    metrics: Sequence[str],
    indices: Sequence[int],
    columns: dict[str, Tensor],
    reasons: dict[int, dict[str, str]],
) -> None:
    """Add the values and details of a group, and why values are missing."""
    for metric in (metric for metric in scores.columns if metric in metrics):
        columns[metric] = scores.columns[metric].double()
        nothing = columns[metric].isnan().tolist()
        for index, is_nan, why in zip(indices, nothing, scores.details["reasons"], strict=True):
            if why or is_nan:
                reasons.setdefault(index, {})[metric] = why or UNDEFINED
    for name in DETAILS.get(group, ()):
        if (values := scores.details.get(name)) is not None:
            shared = name == "shares"  # of all images
            columns[f"{group}: {name}"] = values.expand(len(indices), -1) if shared else values


def prepare(
    request: Request, *, options: Options | None = None, model: ImageModel | None = None
) -> Prepared:
    """Open model and data, check the request against them, and cut the work into cells.

    Cells of the same images stand together, so that images are read once for all methods, and a
    run that was stopped has compared all methods on the same ones.

    Args:
        request: What is compared. `metrics` may be names of sets.
        options: Further options by method or group of metrics; with the name "", of all methods
            that have them.
        model: The model of the request, if it is open already.

    Returns:
        A `Prepared` benchmark for `run`; `left_out` has the metrics of a set that model or data
        cannot have, and why.

    Raises:
        UnknownName: If a method or metric does not exist.
        BadOption: If an option does not exist, or model or data cannot have what is asked.

    Example:
        >>> request = Request("builtin:critters-vit", "critters:clean", ["caap", "gae"], limit=8)
        >>> len(prepare(request, options={"caap": {"tail": "all"}}).plan.cells)
        2
    """
    for word in request.metrics:
        if word not in metric_sets():
            group_of(word)
    names = dict[str, str]()
    if not isinstance(request.model, str):
        model = as_view(request.model)
        names["model"] = f"{HERE}{model.name}"
    model = model or open_model(request)
    data = as_data(request.data, limit=request.limit)
    if not isinstance(request.data, str):
        names["data"] = f"{HERE}{data.name}"
    request = replace(request, **names)
    need_images(model)
    picked, left_out = list[str](), dict[str, str]()
    for word in request.metrics:
        for metric in metric_sets().get(word, (word,)):
            why = lacking(group_of(metric), model, data)
            if why and metric == word:
                raise BadOption("metric", word, f"another metric: {why}")
            if why:
                left_out[metric] = why
            else:
                picked.append(metric)
    request = replace(request, metrics=tuple(dict.fromkeys(picked)))
    request = _complete(request, options or {}, model, data)
    methods = {name: find(request.method(name), model.architecture) for name in request.methods}
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
        columns={m: asdict(METRICS.get(group_of(m)).columns[m]) for m in request.metrics},
        controls={name: entry.forwards == "0" for name, entry in methods.items()},
        summaries={name: entry.summary.replace("`", "") for name, entry in methods.items()},
    )
    digests, names, cells = sample_digests(data), sample_ids(data), []
    for start in range(0, len(data), request.cell_size):
        stop = min(start + request.cell_size, len(data))
        images = digest(*digests[start:stop])
        for method in request.methods:
            name = cell_name(plan, method, start, names[start:stop], images)
            arguments = {"start": start, "stop": stop, "data": images}
            cells.append(Cell(name, method, arguments, stop - start))
    return Prepared(replace(plan, cells=cells), model, data, left_out)


def open_model(request: Request) -> ImageModel:
    """The model of a request; the seed decides random weights."""
    torch.manual_seed(request.seed)
    reading: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in request.reading.items()
    }
    where = {"device": request.device, "dtype": request.dtype}
    return load(request.model, weights=request.weights, **where, **reading)


def cell_name(plan: Plan, method: str, start: int, names: Sequence[str], data: str) -> str:
    """A digest of everything that decides the rows of a cell; `data` is that of its images."""
    request = plan.request
    code = [f"method {method}", *(f"metric {group}" for group in request.measures), "data", "code"]
    decisive = [
        [SCHEMA, plan.versions, plan.model["fingerprint"], plan.model["frame"]],
        [name for name in (EXIF, ALPHA) if os.environ.get(name)],
        [request.model, method, request.methods[method], list(request.metrics), request.measures],
        [plan.data["name"], data, start, list(names), request.target, list(plan.places)],
        [request.seed, request.dtype, request.device, request.memory, request.threads],
        [plan.plugins.get(name, "") for name in code],
    ]
    return digest_json(decisive, length=24)


def _plugins(request: Request, model: ImageModel, data: Dataset) -> dict[str, str]:
    """Digests of the code of methods, metrics, data and models of other packages."""
    groups = {f"metric {group}": METRICS.get(group).run for group in groups_of(request.metrics)}
    methods = {
        f"method {name}": find(request.method(name), model.architecture).run
        for name in request.methods
    }
    sources = {"data": type(data), **groups, **methods}
    digests = {name: plugin_digest(source) for name, source in sources.items()}
    digests["code"] = model_code_digest(model)
    return {name: value for name, value in digests.items() if value}


def _complete(request: Request, options: Options, model: ImageModel, data: Dataset) -> Request:
    """The request with `options` and all defaults of methods and metrics filled in."""
    if not request.methods or not request.metrics:
        given = [list(request.methods), list(request.metrics)]
        raise BadOption("methods and metrics", given, "at least one of each")
    if request.target == "label" and not data.classes:
        expected = f"predicted (--target predicted): {data.name} has no labels"
        raise BadOption("target", "label", expected)
    entries = {name: find(request.method(name), model.architecture) for name in request.methods}
    groups = {
        group: keyword_options(METRICS.get(group).run, leave_out=NOT_OPTIONS)
        for group in groups_of(request.metrics)
    }
    known = {name: entry.options for name, entry in entries.items()}
    of_metrics = {name: own for name, own in options.items() if name in groups}
    others = {name: own for name, own in options.items() if name not in groups}
    methods, measures = {}, {}
    for name, given in with_options(request.methods, others, known).items():
        method, entry = given.pop("method", name), entries[name]
        check_options(method, entry.run, given)
        seed = {"seed": request.seed} if "seed" in entry.options else {}
        methods[name] = {"method": method, **entry.options, **seed, **given}
    for group, given in with_options(request.measures, of_metrics, groups).items():
        check_options(group, METRICS.get(group).run, given, leave_out=NOT_OPTIONS)
        if group in groups:
            seed = {"seed": request.seed} if "seed" in groups[group] else {}
            measures[group] = {**groups[group], **seed, **given}
    memory = request.memory or MEMORY.get(request.device.partition(":")[0], MEMORY["cpu"])
    return replace(request, methods=methods, measures=measures, memory=memory)


def run_group(
    group: str, inputs: MetricInputs, options: Mapping[str, Any], *, truth: PartTruth | None = None
) -> Scores:
    """Measure one group. `details["reasons"]` says why an image has no value, "" elsewhere.

    A value that a method or model does not define is a reason and not an error. `truth` is shared
    between methods, because the metric "parts" would compute it for each.
    """
    metric, protocol = METRICS.get(group), {"metric": group, **options}
    count = 0 if inputs.images is None else len(inputs.images)
    why = "no object mask: this dataset has none" if "masks" in metric.missing(inputs) else ""
    try:
        if not why:
            more = {"truth": truth} if group == "parts" else {}
            result = metric.scores(inputs, **options, **more)
            reasons = result.details.get("reasons") or [""] * count
            details = {**result.details, "reasons": reasons}
            return Scores(result.columns, details, {**protocol, **result.protocol})
    except NotDefined as refused:
        why = str(refused)
    nothing = torch.full((count,), torch.nan, dtype=torch.float64)
    return Scores(dict.fromkeys(metric.columns, nothing), {"reasons": [why] * count}, protocol)


def metric_groups() -> dict[str, str]:
    """The group of every column, those of plug-ins included."""
    return {column: group for group, entry in metrics().items() for column in entry.columns}


def metric_sets() -> dict[str, tuple[str, ...]]:
    """Columns that one word stands for."""
    return {"paper": PAPER, "all": tuple(metric_groups())}


def group_of(metric: str) -> str:
    """The group that has this column; raises `UnknownName` with the nearest names."""
    groups = metric_groups()
    if metric not in groups:
        raise UnknownName("metric", metric, (*groups, *metric_sets()))
    return groups[metric]


def groups_of(names: Iterable[str]) -> list[str]:
    """The groups that some columns need, each once."""
    return list(dict.fromkeys(group_of(metric) for metric in names))


def lacking(group: str, model: ImageModel, data: Dataset) -> str:
    """The requirement of a group of metrics that model or data do not meet; "" if none."""
    needs, known = METRICS.get(group).needs, capabilities(data)
    if "masks" in needs and "masks" not in known:
        return f"it needs object masks, and {data.name} has none"
    if "latents" in needs and "counterfactuals" not in known:
        return f"it needs images that can be rendered again (critters:REGIME), not {data.name}"
    if "latents" in needs and tuple(model.classes) != tuple(data.classes):
        return f"it needs a classifier of Critters, and {model.name} is none"
    return ""
