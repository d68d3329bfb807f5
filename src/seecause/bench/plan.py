"""From what is asked to shards whose names say everything that decides their result.

A shard is one method on a few neighbouring images. Its id is a digest of method, metrics, the bytes
of its own samples, model, code and everything else that can change a bit of its rows, and of
nothing else: the other samples, the number of workers, the folder and the clock are not in it. So a
finished shard can be trusted for as long as its id is asked for, a changed input asks for another
id, and a longer run asks for the ids of a shorter one where they hold the same samples in the same
places.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import pyarrow as pa

from seecause._software import model_code_digest, plugin_digest, versions
from seecause.attribution.registry import find
from seecause.bench.measures import Options, groups_of, lacking, measure_options, method_options
from seecause.bench.store import MANIFEST, ShardStore
from seecause.data.batch import class_places, need_pictures
from seecause.data.dataset import Dataset, sample_digests, sample_ids
from seecause.errors import BadOption, SeecauseError
from seecause.files import digest
from seecause.metrics.registry import find_metric
from seecause.models.base import ImageModel

log = logging.getLogger(__name__)
LISTED = 20  # samples that a warning names
MODEL_FACTS = ("fingerprint", "random_weights", "architecture", "classes", "frame")
DATA_FACTS = ("name", "fingerprint", "classes")
SCHEMA = 5  # of rows and tensors; a new one makes every shard new
# bytes; fixed, because what is free at the moment would change chunks, and so the last bits
MEMORY = {"cpu": 64 << 20, "cuda": 8 << 30}
ROWS = pa.schema(
    [
        ("image", pa.string()),
        ("index", pa.int64()),
        ("label", pa.int64()),
        ("target", pa.int64()),
        ("predicted", pa.int64()),
        ("method", pa.string()),
        ("options", pa.string()),
        ("metric", pa.string()),
        ("value", pa.float64()),
        ("higher_is_better", pa.bool_()),
        ("reason", pa.string()),
        ("model", pa.string()),
        ("model_fingerprint", pa.string()),
        ("data", pa.string()),
        ("data_fingerprint", pa.string()),
        ("seed", pa.int64()),
        ("dtype", pa.string()),
        ("protocol", pa.string()),
        ("shard", pa.string()),
        ("memory_halvings", pa.string()),
    ]
)

Explained = Literal["label", "predicted"]
# of float32 products and convolutions, as torch calls it: high is TF32 where a GPU has it
Precision = Literal["highest", "high"]


@dataclass(frozen=True)
class Request:
    """What a run is asked for: model, data, methods with their options, and metrics.

    `metrics` are names of columns (`sc.metrics.metrics()`) or of sets: "paper", "all". `measures`
    are options of metrics, by group: {"insertion-deletion": {"steps": "patch"}}. What is left open
    has the defaults of methods and metrics.
    """

    model: str
    data: str
    methods: Options  # by the name it has in the table; names alone have their defaults
    # the method behind a name that is none itself: {"black": "caap"}
    called: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[str] = ("insertion", "deletion", "ins-del")
    measures: Options = field(default_factory=dict)  # options of the metrics, by group
    weights: str | None = None
    limit: int | None = None
    target: Explained = "label"
    seed: int = 0
    dtype: str = "float32"
    precision: Precision = "highest"
    device: str = "cpu"
    shard_size: int = 16
    memory: int | None = None  # bytes of activations in one worker
    threads: int = 1  # of one worker
    # how the model is read, as options of `load`: size, mean, std, classes
    reading: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        methods: Any = [self.methods] if isinstance(self.methods, str) else self.methods
        if not isinstance(methods, Mapping):
            object.__setattr__(self, "methods", {name: {} for name in methods})
        if isinstance(self.metrics, str):
            object.__setattr__(self, "metrics", (self.metrics,))

    def method(self, name: str) -> str:
        return self.called.get(name, name)


@dataclass(frozen=True)
class Shard:
    """One method on samples `start` to `stop`, whose bytes have the digest `data`."""

    id: str
    method: str
    start: int
    stop: int
    data: str

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """A request, what model and data turned out to be, and the shards."""

    request: Request
    # fingerprint, random_weights, architecture, classes, frame (its preprocessing)
    model: Mapping[str, Any]
    data: Mapping[str, Any]  # name, fingerprint, classes
    samples: Sequence[str]
    # of each label among the model's classes; empty if the predicted class is explained
    places: Sequence[int]
    versions: Mapping[str, str]
    shards: Sequence[Shard]
    # digests of code outside this package: "method NAME", "metric GROUP", "data", "model"
    plugins: Mapping[str, str] = field(default_factory=dict)
    # samples of earlier plans for the same data, in the same folder, that the data has no more
    gone: Sequence[str] = ()

    def record(self) -> dict[str, Any]:
        """What the manifest says."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Plan:
        """The plan a manifest tells."""
        known = {key: value for key, value in record.items() if key not in ("command", "schema")}
        shards = tuple(Shard(**shard) for shard in known["shards"])
        return cls(**{**known, "request": Request(**known["request"]), "shards": shards})


@dataclass(frozen=True)
class Store(ShardStore):
    """The folder of a benchmark run: a store whose manifest is a plan."""

    command: str = "bench run"

    def prepare(self, plan: Plan) -> Plan:
        """Put a plan in force, which then says what its data has lost. Shards of earlier plans
        stay: a plan that asks for them again finds them."""
        with suppress(SeecauseError):  # the first plan, or none that can be read
            plan = replace(plan, gone=_gone(self.plan(), plan))
        if plan.gone:
            names = ", ".join(plan.gone[:LISTED]) + (" ..." if len(plan.gone) > LISTED else "")
            log.warning("%d samples are gone from %s: %s", len(plan.gone), plan.data["name"], names)
        self.write_manifest(plan.record())
        return plan

    def plan(self) -> Plan:
        """The plan in force."""
        record = self.manifest()
        if record.get("schema") != SCHEMA:
            remedy = "a run folder of this version; give the same command again, which runs it anew"
            raise BadOption("run", str(self.folder), remedy)
        try:
            plan = Plan.read(record)
            _check_read(plan)
        except (KeyError, TypeError, ValueError, AttributeError) as odd:
            remedy = f"a run folder; its {MANIFEST} holds no plan of this version ({odd})"
            raise BadOption("run", str(self.folder), remedy) from None
        return plan

    def finished(self, plan: Plan) -> list[Shard]:
        """Shards that are done and intact, in the order of the plan."""
        intact = self.condition(shard.id for shard in plan.shards).metadata
        return [shard for shard in plan.shards if shard.id in intact]

    def stale(self, plan: Plan) -> list[str]:
        """Finished shards that the plan does not ask for."""
        wanted = {shard.id for shard in plan.shards}
        return [shard for shard in self.ids() if shard not in wanted]

    def rows(self, plan: Plan, columns: Sequence[str] | None = None) -> pa.Table:
        """All finished rows, in the order of the plan; long texts only if their columns are."""
        table = self.table((shard.id for shard in plan.shards), columns)
        if table is not None:
            return table
        empty = ROWS.empty_table()
        return empty if columns is None else empty.select(columns)


def _gone(before: Plan, plan: Plan) -> list[str]:
    """What an earlier plan had of the same data, and the data has no more. Where as many samples
    are there as before, a limit may have chosen others."""
    asked = [(part.request.data, part.request.limit) for part in (before, plan)]
    if asked[0] != asked[1]:
        return []
    fewer = len(plan.samples) < len(before.samples)
    present = set(plan.samples)
    known = (*before.gone, *(before.samples if fewer else ()))
    return [name for name in known if name not in present]


def _check_read(plan: Plan) -> None:
    """Whether a manifest, perhaps a stranger's, tells a plan; ValueError if not."""
    request, places = plan.request, len(plan.samples)
    texts = (*plan.samples, *plan.gone, *request.metrics)
    texts += (request.model, request.data, request.device)
    odd = [text for text in texts if not isinstance(text, str)]
    for name in (*request.metrics, *request.methods):
        str(name).encode()  # ValueError: it cannot be written down
    for shard in plan.shards:
        bounds = isinstance(shard.start, int) and isinstance(shard.stop, int)
        named = isinstance(shard.id, str) and shard.id.isalnum()
        if not (named and shard.method in request.methods and bounds):
            raise ValueError(f"shard {shard.id!r}")
        if not 0 <= shard.start < shard.stop <= places:
            raise ValueError(f"samples of shard {shard.id}")
    options = (request.methods, *request.methods.values(), request.measures, plan.versions)
    odd += [part for part in options if not isinstance(part, dict)]
    for part, names in ((plan.model, MODEL_FACTS), (plan.data, DATA_FACTS)):
        odd += [name for name in names if name not in part]
    if odd or not request.metrics or not request.methods:
        raise ValueError(f"{odd[:1] or 'no methods or metrics'}")


def make_plan(request: Request, model: ImageModel, data: Dataset) -> Plan:
    """Check what is asked against model and data, fill in defaults, and cut the work."""
    need_pictures(model)
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
        data={"name": data.name, "fingerprint": data.fingerprint, "classes": list(data.classes)},
        samples=sample_ids(data),
        places=class_places(model, data) if request.target == "label" else (),
        versions=versions(),
        shards=(),
        plugins=plugins(request, model, data),
    )
    bounds = [
        (start, min(start + request.shard_size, len(data)))
        for start in range(0, len(data), request.shard_size)
    ]
    digests = sample_digests(data)
    pieces = [(start, stop, digest(*digests[start:stop])) for start, stop in bounds]
    shards = [
        Shard(shard_id(plan, method, *piece), method, *piece)
        for method in request.methods
        for piece in pieces
    ]
    return replace(plan, shards=tuple(shards))


def shard_id(plan: Plan, method: str, start: int, stop: int, data: str) -> str:
    """A digest of everything that decides the rows and maps of a shard; `data` is that of its
    samples."""
    request = plan.request
    code = [f"method {method}", *(f"metric {group}" for group in request.measures), "data", "model"]
    decisive = {
        "schema": SCHEMA,
        "versions": plan.versions,
        "model": [request.model, plan.model["fingerprint"], plan.model["frame"]],
        "method": [method, request.method(method), request.methods[method]],
        "metrics": [list(request.metrics), request.measures],
        "data": [plan.data["name"], data, start, stop, list(plan.samples[start:stop])],
        "target": [request.target, list(plan.places)],
        "run": [request.seed, request.dtype, request.device, request.memory, request.threads],
        "precision": request.precision,
        "plugins": [plan.plugins.get(name, "") for name in code],
    }
    return digest(canonical(decisive), length=24)


def plugins(request: Request, model: ImageModel, data: Dataset) -> dict[str, str]:
    """Digests of what methods, metrics, data and models of other packages are made of."""
    sources: dict[str, Any] = {"data": type(data)}
    for group in groups_of(request.metrics):
        sources[f"metric {group}"] = find_metric(group).run
    for name in request.methods:
        sources[f"method {name}"] = find(request.method(name), model.architecture).run
    digests = {name: plugin_digest(source) for name, source in sources.items()}
    digests["model"] = model_code_digest(model)
    return {name: value for name, value in digests.items() if value}


def canonical(value: Any) -> str:
    """JSON with one spelling for each value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _complete(request: Request, model: ImageModel, data: Dataset) -> Request:
    """The same request with nothing left open."""
    if request.target not in get_args(Explained):
        raise BadOption("target", request.target, f"one of {', '.join(get_args(Explained))}")
    if request.precision not in get_args(Precision):
        raise BadOption("precision", request.precision, f"one of {', '.join(get_args(Precision))}")
    for what in ("shard_size", "threads", "memory"):
        value = getattr(request, what)
        if value is not None and value < 1:
            raise BadOption(what, value, "1 or more")
    if not request.methods or not request.metrics:
        raise BadOption(
            "methods and metrics",
            [list(request.methods), list(request.metrics)],
            "at least one of each",
        )
    if request.target == "label" and not data.classes:
        raise BadOption(
            "target", "label", f"predicted (--target predicted): {data.name} has no labels"
        )
    for name in request.measures:
        find_metric(name)  # a group of metrics, or an error that names the nearest
    groups = groups_of(request.metrics)
    for group in groups:
        if why := lacking(group, model, data):
            raise BadOption("metrics", group, f"other metrics: {why}")
    return replace(
        request,
        methods={
            name: method_options(request.method(name), given, request.seed, model)
            for name, given in request.methods.items()
        },
        metrics=tuple(dict.fromkeys(request.metrics)),
        measures={
            group: measure_options(group, request.measures.get(group, {}), request.seed, model)
            for group in groups
        },
        memory=request.memory or MEMORY.get(request.device.partition(":")[0], MEMORY["cpu"]),
    )
