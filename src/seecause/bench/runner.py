"""What is still to do, in this process, in several, or on a Ray cluster. Shards are independent, so
there is nothing to agree on: who finishes one, writes it.

Wherever it runs: the same shards, the same folder, and on machines of the same kind the same bits.
A shard whose worker was lost is tried again.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from seecause.attribution.registry import find
from seecause.bench.ablate import with_settings
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
from seecause.bench.store import Condition
from seecause.bench.work import Worker, open_model, open_worker, run_shard
from seecause.data.registry import open_data
from seecause.errors import SeecauseError

RETRIES = 3  # of a shard whose worker was lost
LOST = (
    f"its worker was lost {RETRIES + 1} times (killed, or out of memory); run the same command"
    " again with fewer --workers or less --memory, or give --cluster machines with more memory"
)


@dataclass(frozen=True)
class Hole:
    """A number that is not there."""

    method: str
    image: str
    metric: str
    reason: str


@dataclass(frozen=True)
class Status:
    """Where a run stands."""

    total: int
    done: int
    failed: dict[str, str]  # reason by shard
    damaged: dict[str, str]  # what is wrong, by shard; they are pending again
    pending: Sequence[Shard]
    stale: Sequence[str]
    holes: Sequence[Hole]  # in finished shards
    undefined: dict[str, int]  # values by metric that a picture cannot have; no holes
    stopped: str = ""  # why the run ended early

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
    store = Store(Path(folder))
    return inspect(store, store.plan())


def inspect(store: Store, plan: Plan, condition: Condition | None = None) -> Status:
    """Read from the folder alone, so it can be asked while a run is going on. Every byte of the
    finished shards is looked at, no row is; where that was just done, its result is `condition`."""
    condition = condition or store.condition(shard.id for shard in plan.shards)
    holes: list[Hole] = []
    undefined: Counter[str] = Counter()
    for shard in plan.shards:
        metadata = condition.metadata.get(shard.id, {})
        holes += [Hole(shard.method, *hole) for hole in metadata.get("holes", ())]
        undefined.update(metadata.get("undefined", {}))
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
    )


def prepare(
    request: Request, *, options: Sequence[Named] = (), metric_options: Sequence[Named] = ()
) -> Worker:
    """Model, data and plan for a request, whose metrics may be names of sets. Which options and
    metrics there are depends on model and data; `Worker.left_out` says what a set had to leave
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
    plan = make_plan(with_settings(request, model), model, data)
    return Worker(plan, model, data, left_out=left_out)


def run(
    folder: Store | Path | str,
    request: Request | Worker,
    *,
    workers: int = 1,
    cluster: str | None = None,
    advance: Callable[[int], None] = lambda images: None,
    enough: Callable[[], str] = lambda: "",
) -> Status:
    """Do every unfinished shard of a request; `advance` hears of the images of each one that ended.

    A failed shard is logged with its reason and tried again by the next run. A prepared worker
    works itself if it is the only one. With `cluster` (auto, local or an address) shards are Ray
    tasks. `enough` is asked before every shard; a reason that it gives ends the run early. Worker
    processes end the shard they are at.
    """
    store = folder if isinstance(folder, Store) else Store(Path(folder))
    store.check()
    worker = request if isinstance(request, Worker) else prepare(request)
    plan = worker.plan
    with store.alone():
        store.prepare(plan)
        done = store.condition(shard.id for shard in plan.shards).metadata
        todo = [shard for shard in plan.shards if shard.id not in done]
        reason = enough()
        for shard in (
            [] if reason else _ended(store, worker, todo, min(workers, len(todo)), cluster)
        ):
            advance(len(shard))
            if reason := enough():
                break
        result = inspect(store, plan)
        return replace(result, stopped=reason) if result.pending else result


def perform(store: Store, open_it: Callable[[], Worker], shard: Shard) -> Shard:
    """One shard, from its first line in the log to its last."""
    store.log("start", shard.id)
    try:
        result = run_shard(open_it(), shard)
    except (SeecauseError, RuntimeError, MemoryError) as failure:
        # torch's out of memory is a RuntimeError
        reason = " ".join(str(failure).split()) or type(failure).__name__
        store.log("failed", shard.id, reason=reason)
        return shard
    store.save(
        shard.id, rows=result.rows, schema=ROWS, tensors=result.tensors, metadata=result.metadata
    )
    store.log("done", shard.id)
    return shard


def _ended(
    store: Store, worker: Worker, todo: Sequence[Shard], workers: int, cluster: str | None
) -> Iterator[Shard]:
    """Shards as they end, wherever they run."""
    if cluster is not None and todo:
        from seecause.bench.cluster import in_cluster

        yield from in_cluster(store, worker.plan, todo, cluster, workers=workers)
    elif workers > 1:
        yield from _in_processes(store, worker.plan, todo, workers)
    else:
        for shard in todo:
            yield perform(store, lambda: worker, shard)


def _in_processes(store: Store, plan: Plan, todo: Sequence[Shard], workers: int) -> Iterator[Shard]:
    """A process that dies takes the whole pool with it: what it was at is done again. A shard whose
    worker died is tried alone, so that it takes no other with it, and given up after some tries."""
    waiting = {shard.id: shard for shard in todo}
    lost: Counter[str] = Counter()
    while waiting:
        suspects = [shard for shard in waiting.values() if lost[shard.id]]
        going: dict[Future[Shard], Shard] = {}
        try:
            batch = suspects[:1] or list(waiting.values())
            for shard in _in_pool(store, plan, batch, 1 if suspects else workers, going):
                del waiting[shard.id]
                yield shard
        except BrokenProcessPool:
            for shard in going.values():
                lost[shard.id] += 1
                if lost[shard.id] > RETRIES:
                    store.log("failed", shard.id, reason=LOST)
                    del waiting[shard.id]
                    yield shard


def _in_pool(
    store: Store,
    plan: Plan,
    todo: Sequence[Shard],
    workers: int,
    going: dict[Future[Shard], Shard],
) -> Iterator[Shard]:
    """Spawned, not forked: torch's threads and a GPU do not survive a fork. A worker is handed one
    shard at a time, so that few are left when it is enough; `going` holds those that are out."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin, initargs=(store, plan)
    )
    left = list(reversed(todo))
    try:
        while left or going:
            while left and len(going) < workers:
                going[pool.submit(_perform, left[-1])] = left[-1]
                left.pop()
            ended, _ = wait(going, return_when=FIRST_COMPLETED)
            for future in ended:
                shard = future.result()
                del going[future]
                yield shard
    finally:
        pool.shutdown(cancel_futures=True)


# In a worker process: which run it works for, and the model it has opened.

_work_for: list[tuple[Store, Plan]] = []


def _begin(store: Store, plan: Plan) -> None:
    _work_for.append((store, plan))
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever, or finish a shard that the
    next run has begun."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _perform(shard: Shard) -> Shard:
    return perform(_work_for[0][0], _opened, shard)


@cache
def _opened() -> Worker:
    return open_worker(_work_for[0][1])
