"""Runs: what is still to do of a plan is done in this process, in several, or on a Ray cluster.

Wherever it runs: the same shards, the same folder, and on machines of the same kind the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from seecause.attribution.registry import find
from seecause.bench.evaluate import PreparedRun, open_model, open_prepared, round_of, run_shard
from seecause.bench.measures import (
    Named,
    group_of,
    group_options,
    groups_of,
    metric_sets,
    pick_metrics,
    with_options,
)
from seecause.bench.plan import ROWS, Plan, Request, Shard, Store, make_plan
from seecause.bench.shard_files import EncodedShard, encoded
from seecause.bench.store import Condition
from seecause.bench.workers import Workers, open_pool, record_result
from seecause.data.registry import open_data
from seecause.errors import SeecauseError
from seecause.files import place


@dataclass(frozen=True)
class MissingValue:
    """A number that is not there."""

    method: str
    image: str
    metric: str
    reason: str


@dataclass(frozen=True)
class Status:
    """Where a run stands: how many of its shards are done, which failed and why, and which values
    are missing in those that are done. `complete` where nothing is."""

    total: int
    done: int
    failed: dict[str, str]  # reason by shard
    damaged: dict[str, str]  # what is wrong, by shard; they are pending again
    pending: Sequence[Shard]
    stale: Sequence[str]
    holes: Sequence[MissingValue]  # in finished shards
    undefined: dict[str, int]  # values by metric that a picture cannot have; no holes
    stopped: str = ""  # why the run ended early
    gone: Sequence[str] = ()  # samples that earlier runs into the folder had; the data has no more

    def not_run(self) -> dict[str, int]:
        """Images that are still to do, by method."""
        images: Counter[str] = Counter()
        for shard in self.pending:
            images[shard.method] += len(shard)
        return dict(images)

    @property
    def complete(self) -> bool:
        return self.done == self.total and not self.holes


def status(folder: Path | str) -> Status:
    """Where the run in a folder stands; `seecause bench status`."""
    store = Store(place(folder))
    return inspect(store, store.plan())


def inspect(store: Store, plan: Plan, condition: Condition | None = None) -> Status:
    """Read from the folder alone, so it can be asked while a run is going on. Every byte of the
    finished shards is looked at, no row is; where that was just done, its result is `condition`."""
    condition = condition or store.condition(shard.id for shard in plan.shards)
    holes: list[MissingValue] = []
    undefined: Counter[str] = Counter()
    for shard in plan.shards:
        metadata = condition.metadata.get(shard.id, {})
        try:
            missing = [
                MissingValue(shard.method, *map(str, hole)) for hole in metadata.get("holes", ())
            ]
            undefined.update(Counter(metadata.get("undefined", {})))
        except (TypeError, ValueError):  # written by something else, whose checksum is right
            del condition.metadata[shard.id]
            condition.damaged[shard.id] = f"{shard.id}.json does not say what is missing"
        else:
            holes += missing
    open_shards = [shard for shard in plan.shards if shard.id not in condition.metadata]
    failed = store.failures(shard.id for shard in open_shards)
    return Status(
        total=len(plan.shards),
        done=len(condition.metadata),
        failed=failed,
        damaged=condition.damaged,
        pending=[shard for shard in open_shards if shard.id not in failed],
        stale=store.stale(plan),
        holes=holes,
        undefined=dict(undefined),
        gone=plan.gone,
    )


def prepare(
    request: Request, *, options: Sequence[Named] = (), metric_options: Sequence[Named] = ()
) -> PreparedRun:
    """Model, data and plan for a request, whose metrics may be names of sets. Which options and
    metrics there are depends on model and data; `PreparedRun.left_out` says what a set had to leave
    out."""
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
    plan = make_plan(request, model, data)
    return PreparedRun(plan, model, data, left_out=left_out)


def run(
    folder: Store | Path | str,
    request: Request | PreparedRun,
    *,
    workers: Workers | int | None = None,
    advance: Callable[[int], None] = lambda images: None,
    enough: Callable[[], str] = lambda: "",
) -> Status:
    """Do every unfinished shard of a request, and say where the run stands.

    `folder` may be a URL that fsspec knows. `workers`: a number of processes, or `Workers` on a
    cluster. A failed shard is logged with its reason and tried again by the next run. `advance`
    hears of the images of each shard that ended. `enough` is asked before every shard; a reason
    that it gives ends the run early, with the shards that are begun.

    >>> import tempfile
    >>> import seecause as sc
    >>> request = sc.bench.Request(
    ...     "builtin:critters-vit", "critters:clean:test", methods={"rollout": {}, "center": {}},
    ...     metrics=("aupr1", "pointing"), limit=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     status = sc.bench.run(folder, request)
    ...     table = sc.bench.table(folder)
    >>> status.complete, status.done, table.cells["rollout"]["aupr1"].n
    (True, 2, 4)
    """
    store = folder if isinstance(folder, Store) else Store(place(folder))
    store.check()
    prepared = request if isinstance(request, PreparedRun) else prepare(request)
    reason = ""
    with store.locked():
        plan = store.prepare(prepared.plan)
        done = store.condition(shard.id for shard in plan.shards).metadata
        todo = [shard for shard in plan.shards if shard.id not in done]
        left = iter(sorted(todo, key=round_of))

        def next_item() -> Shard | None:
            nonlocal reason
            reason = reason or enough()
            shard = None if reason else next(left, None)
            if shard is not None:
                store.log("start", shard.id)
            return shard

        perform = _shard_function(prepared)
        with open_pool(BenchJob(plan), workers, most=len(todo), perform=perform) as pool:
            for shard, answer in pool.run(next_item):
                record_result(store, shard.id, answer)
                advance(len(shard))
        result = inspect(store, plan)
        return replace(result, stopped=reason) if result.pending else result


@dataclass(frozen=True)
class BenchJob:
    """Shards of a plan."""

    plan: Plan
    # torch's out of memory, too
    failures: ClassVar[tuple[type[Exception], ...]] = (SeecauseError, RuntimeError, MemoryError)

    @property
    def threads(self) -> int:
        return self.plan.request.threads

    @property
    def device(self) -> str:
        return self.plan.request.device

    @property
    def versions(self) -> Mapping[str, str]:
        return self.plan.versions

    def open(self) -> Callable[[Shard], EncodedShard]:
        return _shard_function(open_prepared(self.plan))


def _shard_function(prepared: PreparedRun) -> Callable[[Shard], EncodedShard]:
    return lambda shard: encoded(run_shard(prepared, shard), ROWS)
