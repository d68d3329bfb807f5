"""One shard: read the samples, attribute, measure. A picture that cannot be read becomes rows that
say why."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from seecause._software import arithmetic, check_versions, set_arithmetic, versions
from seecause.attribution.attribute import attribute
from seecause.attribution.result import Attribution
from seecause.bench.measures import UNDEFINED, MeasuredMetric, group_of, higher_is_better, run_group
from seecause.bench.plan import Plan, Precision, Request, Shard, canonical, plugins
from seecause.bench.store import ShardResult
from seecause.data.batch import Batch, sample_in_frame, to_batch
from seecause.data.dataset import Dataset, Sample, has_counterfactuals, sample_digests
from seecause.data.registry import open_data
from seecause.engine.chunks import budget, plain_logits
from seecause.errors import BadImage, BadOption, DataMissing
from seecause.files import digest
from seecause.loading import load
from seecause.metrics import MetricInputs, measure_truth
from seecause.metrics.parts import PartTruth
from seecause.models.base import ImageModel
from seecause.models.preprocess import Preprocess
from seecause.target import Spec

if TYPE_CHECKING:
    from seecause.critters import Latents

KEPT_BYTES = 1 << 28  # bytes that a worker keeps between shards
ROUND = 256  # pictures that all methods explain before the next ones are read
ANSWERS = ("label", "target", "predicted")  # of a picture; in tensors -1 where there is none


@dataclass(frozen=True, eq=False)
class Loaded:
    """The pictures of one shard, read and cut: labels by index, reasons by index for those that
    cannot be read."""

    labels: dict[int, int | None]
    broken: dict[int, str]
    batch: Batch | None  # None if nothing could be read

    @property
    def bytes(self) -> int:
        return _bytes_of(*(self.batch or ()))


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """Plan, model and data, opened once in each process, and what is the same for all methods."""

    plan: Plan
    model: ImageModel
    data: Dataset
    # by the bounds of a shard: those of one round, as many as `KEPT_BYTES` bytes allow
    truths: dict[tuple[int, int], PartTruth] = field(default_factory=dict)
    loaded: dict[tuple[int, int], Loaded] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)  # metrics, and why

    @property
    def bytes(self) -> int:
        """What is held between shards."""
        truths = [_bytes_of(*vars(truth).values()) for truth in self.truths.values()]
        return sum(truths) + sum(loaded.bytes for loaded in self.loaded.values())

    def latents(self, shard: Shard) -> Latents | None:
        if not has_counterfactuals(self.data):
            return None
        return cast(Any, self.data).latents(shard.start, shard.stop, device=self.model.device)

    def read(self, shard: Shard) -> Loaded:
        """The pictures of a shard in the model's frame: read once for all methods, as long as there
        is room to keep them."""
        bounds = (shard.start, shard.stop)
        if bounds in self.loaded:
            return self.loaded[bounds]
        self._forget(round_of(shard))
        samples, broken = read_samples(self.data, *bounds, frame=self.model.preprocess)
        if digest(*sample_digests(self.data, *bounds)) != shard.data:
            raise BadOption(
                "data",
                f"samples {shard.start} to {shard.stop - 1} of {self.plan.data['name']}",
                "the pictures of the plan; they changed since, so run the same command again",
            )
        batch = to_batch(self.model, list(samples.values())) if samples else None
        labels = {index: sample.label for index, sample in samples.items()}
        loaded = Loaded(labels, broken, batch)
        if self.bytes + loaded.bytes <= KEPT_BYTES:
            self.loaded[bounds] = loaded
        return loaded

    def _forget(self, round: int) -> None:
        """All that other rounds left."""
        for held in (self.loaded, self.truths):
            for bounds in [each for each in held if each[0] // ROUND != round]:
                del held[bounds]

    def truth(self, shard: Shard) -> PartTruth | None:
        """What the model answers to every counterfactual, where they can be rendered."""
        latents, bounds = self.latents(shard), (shard.start, shard.stop)
        if latents is None or bounds in self.truths:
            return self.truths.get(bounds)
        truth = measure_truth(self.model, latents)
        if self.bytes + _bytes_of(*vars(truth).values()) <= KEPT_BYTES:
            self.truths[bounds] = truth
        return truth


def round_of(shard: Shard) -> int:
    """Shards are done round by round: what is read for one method serves the others, and is
    forgotten with its round. So memory does not grow with the pictures, and a run that was stopped
    has compared all methods on the same ones."""
    return shard.start // ROUND


def _bytes_of(*parts: Any) -> int:
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass
class Clock:
    """Seconds by what they were spent on. A GPU works on after a call returns, so it is waited for
    at both ends."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        began = self._now()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + self._now() - began

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def open_model(request: Request) -> ImageModel:
    """The seed decides random weights."""
    torch.manual_seed(request.seed)
    reading = {name: tuple(value) for name, value in request.reading.items()}
    return load(
        request.model,
        weights=request.weights,
        device=request.device,
        dtype=request.dtype,
        **reading,
    )


def open_prepared(plan: Plan) -> PreparedRun:
    """Model and data in a process of its own, refused if they are not those of the plan."""
    request = plan.request
    model, data = open_model(request), open_data(request.data, limit=request.limit)
    prints = (plan.model["fingerprint"], plan.data["fingerprint"])
    planned = _identity(*prints, plan.versions, plan.plugins)
    code = plugins(request, model, data)
    check_versions(planned, _identity(model.fingerprint(), data.fingerprint, versions(), code))
    return PreparedRun(plan, model, data)


def _identity(
    model: str, data: str, software: Mapping[str, str], code: Mapping[str, str]
) -> dict[str, str]:
    """All that must be alike in every worker, by what it is; `code` is that of plug-ins."""
    own = {f"code of {name}": value for name, value in code.items()}
    return {"model": model, "data": data, **software, **own}


def run_shard(prepared: PreparedRun, shard: Shard) -> ShardResult:
    """Rows and maps of one shard; the same bits in every process on the same kind of machine."""
    request, clock = prepared.plan.request, Clock(prepared.model.device)
    with _arithmetic(request.threads, request.precision), budget(request.memory) as memory:
        with clock.on("read"):
            loaded = prepared.read(shard)
        batch, answers, measured = loaded.batch, {}, {}
        tensors = {"index": torch.tensor(sorted(loaded.labels), dtype=torch.long)}
        if batch is not None:
            predicted = predict(prepared.model, batch.images)
            target = predicted if request.target == "predicted" else _places(prepared.plan, batch)
            with clock.on("attribute"):
                attribution = _explained(request, shard, prepared.model, batch.images, target)
            with clock.on("measure"):
                measured = _measure(prepared, shard, batch, _finest(attribution), target)
            answers = {
                index: (int(t), int(p))
                for index, t, p in zip(loaded.labels, target, predicted, strict=True)
            }
            # of patches; maps of pixels are measured only: they would be nearly all of a run folder
            tensors["maps"] = attribution.maps
            for group in measured.values():
                tensors |= group.tensors
        rows = _rows(prepared.plan, shard, loaded, answers, measured, "; ".join(memory.halvings))
        tensors |= _numbers(rows, len(request.metrics))
        metadata = {
            "seconds": clock.seconds,
            "images": len(loaded.labels),
            "memory_halvings": list(memory.halvings),
            **_missing(rows),
        }
        return ShardResult(rows, tensors, metadata)


def read_samples(
    data: Dataset, start: int, stop: int, *, frame: Preprocess | None = None
) -> tuple[dict[int, Sample], dict[int, str]]:
    """Samples by index, and for those that cannot be read the reason. With a model's `frame` each
    picture is brought into it as it is read, so that large ones do not pile up."""
    samples, broken = {}, {}
    for index in range(start, stop):
        try:
            sample = data[index]
        except (BadImage, DataMissing) as hole:
            broken[index] = str(hole)
            continue
        samples[index] = sample if frame is None else sample_in_frame(frame, sample)
    return samples, broken


@torch.no_grad()
def predict(model: ImageModel, images: Tensor) -> Tensor:
    """The class the model answers for each of [B, 3, h, w], [B]."""
    return plain_logits(model, images).argmax(dim=-1)


def _places(plan: Plan, batch: Batch) -> Tensor:
    if batch.labels is None:
        raise BadOption("target", "label", "samples with labels; give --target predicted")
    return torch.tensor(plan.places, device=batch.labels.device)[batch.labels]


def _measure(
    prepared: PreparedRun, shard: Shard, batch: Batch, maps: Tensor, target: Tensor
) -> dict[str, MeasuredMetric]:
    """By group. Some metrics explain changed pictures, or a changed model, by the same method
    again."""
    request = prepared.plan.request

    def again(model: ImageModel, images: Tensor, target: Spec) -> Tensor:
        return _finest(_explained(request, shard, model, images, target))

    inputs = MetricInputs(
        prepared.model,
        batch.images,
        maps,
        target,
        batch.masks,
        explain=lambda images, spec: again(prepared.model, images, spec),
        attribute=again,
        latents=prepared.latents(shard),
    )
    truth = prepared.truth(shard) if "parts" in request.measures else None
    return {
        group: run_group(group, inputs, options, truth=truth)
        for group, options in request.measures.items()
    }


def _explained(
    request: Request, shard: Shard, model: ImageModel, images: Tensor, target: Spec
) -> Attribution:
    """By the method of the shard and its options."""
    options = request.methods[shard.method]
    return attribute(model, images, target, request.method(shard.method), **options)


def _finest(attribution: Attribution) -> Tensor:
    """Metrics get the pixels of a method that has its own."""
    return attribution.maps if attribution.native is None else attribution.native


def _rows(
    plan: Plan,
    shard: Shard,
    loaded: Loaded,
    answers: dict[int, tuple[int, int]],  # by index: the explained and the predicted class
    measured: dict[str, MeasuredMetric],
    halvings: str,
) -> list[dict[str, Any]]:
    """One row for each image and metric, in that order, also for images that could not be read."""
    request = plan.request
    behind = {"method": request.method(shard.method)} if request.called else {}
    shared = {
        "method": shard.method,
        "options": canonical(behind | {**request.methods[shard.method]}),
        "model": request.model,
        "model_fingerprint": plan.model["fingerprint"],
        "data": plan.data["name"],
        "data_fingerprint": shard.data,  # of these samples: a longer run has the same rows
        "seed": request.seed,
        "dtype": request.dtype,
        "shard": shard.id,
        "memory_halvings": halvings,
    }
    places = {index: place for place, index in enumerate(loaded.labels)}  # in the batch
    rows = []
    for index in range(shard.start, shard.stop):
        target, predicted = answers.get(index, (None, None))
        about = {
            "image": plan.samples[index],
            "index": index,
            "target": target,
            "predicted": predicted,
        }
        for metric in request.metrics:
            group = group_of(metric)
            if index in loaded.broken:
                value, reason, label = float("nan"), loaded.broken[index], None
                protocol = request.measures[group]
            else:
                result, place = measured[group], places[index]
                value, reason = float(result.values[metric][place]), result.reason(metric, place)
                label, protocol = loaded.labels[index], result.protocol
            scored = {
                "metric": metric,
                "value": value,
                "higher_is_better": higher_is_better(metric),
                "reason": reason,
                "label": label,
                "protocol": canonical(protocol),
            }
            rows.append({**shared, **about, **scored})
    return rows


def _numbers(rows: list[dict[str, Any]], metrics: int) -> dict[str, Tensor]:
    """The numbers of the rows once more, [images, metrics] and [images]: a report of thousands of
    shards has no time to open their Parquet files."""
    values = torch.tensor([row["value"] for row in rows], dtype=torch.float64)
    numbers = {"rows.value": values.reshape(-1, metrics)}
    for name in ANSWERS:
        answers = [-1 if row[name] is None else row[name] for row in rows[::metrics]]
        numbers[f"rows.{name}"] = torch.tensor(answers)
    return numbers


def _missing(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `bench status` tells without reading the rows: values that are not there, and counts of
    those that cannot be."""
    empty = [row for row in rows if row["reason"] or row["value"] != row["value"]]
    holes = [row for row in empty if row["reason"] != UNDEFINED]
    undefined = Counter(row["metric"] for row in empty if row["reason"] == UNDEFINED)
    return {
        "holes": [(row["image"], row["metric"], row["reason"]) for row in holes],
        "undefined": dict(undefined),
    }


@contextmanager
def _arithmetic(threads: int, precision: Precision) -> Iterator[None]:
    """How sums are split among threads and how precise float32 products and convolutions are
    changes last bits, so the plan fixes it; every process is left as it was."""
    before = arithmetic()
    set_arithmetic([threads, precision, precision != "highest"])
    try:
        yield
    finally:
        set_arithmetic(before)
