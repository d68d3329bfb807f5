"""The numbers of a run, read from its shards in one pass: each file is read once, checked and let
go, so that a run of 50,000 pictures takes the memory of its numbers. Parquet files are not opened:
tensors hold their numbers, too. Of the maps, those of some pictures are kept to be compared; others
are read again where one is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load
from torch import Tensor

from seecause.bench.evaluate import ANSWERS
from seecause.bench.plan import Plan, Shard, Store
from seecause.bench.store import Condition, Damaged
from seecause.data.dataset import evenly

COMPARED = 2000  # pictures whose maps are kept and compared, spread evenly
CURVES = ("insertion", "deletion")
PARTS = (
    "correctness",
    "contrastivity",
    "csdc",
    "preservation",
    "deletion",
    "distractibility",
    "right",
)
BY_SAMPLE = {"maps", *CURVES, *(f"parts.{name}" for name in PARTS)}  # tensors with a row for each
MISSING = ("holes", "undefined")  # of a shard's metadata, that `runner.inspect` tells
Arrays = Mapping[str, np.ndarray]
UNREADABLE = (
    SafetensorError,
    AssertionError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
)
Values = dict[str, dict[str, Tensor]]  # [images] by method and metric


@dataclass(frozen=True, eq=False)
class SampleMaps(Mapping[int, Tensor]):
    """Maps [gh, gw] by sample, of those that are kept: rows of one tensor [kept, gh, gw]."""

    maps: Tensor
    rows: Mapping[int, int]  # sample -> row, of samples that have a map

    def __getitem__(self, sample: int) -> Tensor:
        return self.maps[self.rows[sample]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class RunResults:
    """All that a page shows."""

    values: Values
    answers: dict[str, Tensor]  # [images] label, target and predicted class; -1 where not known
    maps: dict[str, SampleMaps]  # by method, of `COMPARED` samples
    curves: dict[str, dict[str, Tensor]]  # insertion and deletion [images, n + 1] by method
    shares: Tensor  # [n + 1] of the picture, along the curves
    seconds: dict[str, list[float]]  # for one image, by method: one number a shard
    parts: dict[str, dict[str, Tensor]]  # by method
    condition: Condition  # of the shards
    store: Store
    plan: Plan

    def map_of(self, method: str, sample: int) -> Tensor | None:
        """The map [gh, gw] of any sample, read again where it is not kept; None if there is
        none."""
        if sample in self.maps[method]:
            return self.maps[method][sample]
        for shard in self.plan.shards:
            if shard.method == method and shard.start <= sample < shard.stop:
                with suppress(Damaged):
                    return _map_in(self.store.tensors(shard.id), sample)
        return None


def _map_in(tensors: Mapping[str, Tensor], sample: int) -> Tensor | None:
    """The map of one sample of a shard."""
    rows = (tensors["index"] == sample).nonzero()[:, 0].tolist() if "maps" in tensors else []
    return tensors["maps"][rows[0]] if rows else None


@dataclass(eq=False)
class _MethodTensors:
    """What the shards of one method hold: rows by sample, and what is the same in all of them. In
    numpy, whose small copies take a tenth of the time: a run has thousands of shards."""

    known: np.ndarray  # [samples] bool
    kept: np.ndarray  # [samples] the row of the sample's map, -1 where it is not kept
    rows: dict[str, np.ndarray] = field(default_factory=dict)  # [samples, ...]; maps [kept, ...]
    shared: dict[str, Tensor] = field(default_factory=dict)

    def put(self, arrays: Arrays) -> None:
        index = arrays["index"]
        self.known[index] = True
        for name, values in arrays.items():
            if name not in BY_SAMPLE:
                if name not in self.shared and not name.startswith("rows."):
                    self.shared[name] = torch.from_numpy(values.copy())
                continue
            place = self.kept[index] if name == "maps" else index
            if name not in self.rows:
                count = self.kept.max() + 1 if name == "maps" else len(self.known)
                self.rows[name] = np.zeros((count, *values.shape[1:]), values.dtype)
            if name == "maps":
                values, place = values[place >= 0], place[place >= 0]
            self.rows[name][place] = values

    def maps(self) -> SampleMaps:
        if "maps" not in self.rows:
            return SampleMaps(torch.zeros(0), {})
        samples = np.flatnonzero((self.kept >= 0) & self.known).tolist()
        rows = {sample: int(self.kept[sample]) for sample in samples}
        return SampleMaps(torch.from_numpy(self.rows["maps"]), rows)

    def curves(self) -> dict[str, Tensor]:
        return {kind: self._known(kind) for kind in CURVES if kind in self.rows}

    def part_scores(self) -> dict[str, Tensor] | None:
        if "parts.csdc" not in self.rows:
            return None
        return {name: self._known(f"parts.{name}") for name in PARTS}

    def _known(self, name: str) -> Tensor:
        """Rows of the samples that were done."""
        rows = self.rows[name]
        return torch.from_numpy(rows if self.known.all() else rows[self.known])


@dataclass(frozen=True, eq=False)
class _Numbers:
    """What the rows of all shards say, without the rows."""

    values: np.ndarray  # [methods, metrics, samples]
    answers: dict[str, np.ndarray]  # [samples], -1 where not known

    def put(self, method: int, shard: Shard, arrays: Arrays) -> None:
        place, values = slice(shard.start, shard.stop), arrays["rows.value"].T  # [metrics, images]
        assert values.shape == (self.values.shape[1], len(shard))
        self.values[method, :, place] = values
        for name, known in self.answers.items():
            np.maximum(known[place], arrays[f"rows.{name}"], out=known[place])


def read_results(store: Store, plan: Plan) -> RunResults:
    """Everything the finished shards of a plan hold."""
    samples, methods = len(plan.samples), list(plan.request.methods)
    condition, planned = Condition({}, {}), {shard.id: shard for shard in plan.shards}
    numbers = _Numbers(
        np.full((len(methods), len(plan.request.metrics), samples), np.nan),
        {name: np.full(samples, -1) for name in ANSWERS},
    )
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    kept, compared = np.full(samples, -1), np.array(evenly(range(samples), COMPARED))
    kept[compared] = np.arange(len(compared))
    tensors = {name: _MethodTensors(np.zeros(samples, bool), kept) for name in methods}
    for shard, metadata, contents in store.files(planned, condition):
        method = planned[shard].method
        try:
            arrays = load(contents["safetensors"])
            numbers.put(methods.index(method), planned[shard], arrays)
            tensors[method].put(arrays)
            if metadata["images"]:
                spent = metadata["seconds"]["attribute"]
                seconds[method].append(spent / metadata["images"])
            missing = {name: metadata[name] for name in MISSING if metadata.get(name)}
            condition.metadata[shard] = missing
        except UNREADABLE as odd:  # written by something else, whose checksums are right
            del condition.metadata[shard]
            condition.damaged[shard] = f"{shard} is no shard of this plan ({odd!r})"
    shares = [part.shared["shares"] for part in tensors.values() if "shares" in part.shared]
    scores = {name: part.part_scores() for name, part in tensors.items()}
    return RunResults(
        values=_by_name(torch.from_numpy(numbers.values), plan),
        answers={name: torch.from_numpy(known) for name, known in numbers.answers.items()},
        maps={name: part.maps() for name, part in tensors.items()},
        curves={name: part.curves() for name, part in tensors.items()},
        shares=shares[0] if shares else torch.zeros(0),
        seconds=seconds,
        parts={name: of_method for name, of_method in scores.items() if of_method is not None},
        condition=condition,
        store=store,
        plan=plan,
    )


def _by_name(grid: Tensor, plan: Plan) -> Values:
    """[methods, metrics, images], taken apart."""
    metrics = plan.request.metrics
    by_method = zip(plan.request.methods, grid, strict=True)
    return {method: dict(zip(metrics, row, strict=True)) for method, row in by_method}
