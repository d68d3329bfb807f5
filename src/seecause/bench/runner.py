"""What is still to do, in this process or in several. Shards are independent, so there is nothing
to agree on: who finishes one, writes it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

from seecause.bench.plan import ROWS, Plan, Shard, Store
from seecause.bench.work import Worker, open_worker, run_shard
from seecause.errors import SeecauseError

DIED = (
    "a worker process died (killed, or out of memory); run the same command again to go on, with"
    " fewer --workers or less --memory"
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


def inspect(store: Store, plan: Plan, *, stopped: str = "") -> Status:
    """Read from the folder alone, so it can be asked while a run is going on. Every byte of the
    finished shards is looked at, no row is."""
    condition = store.condition(shard.id for shard in plan.shards)
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
        stopped=stopped,
    )


def run(
    store: Store,
    worker: Worker,
    *,
    workers: int = 1,
    cluster: str | None = None,
    advance: Callable[[int], None] = lambda images: None,
    enough: Callable[[], str] = lambda: "",
) -> Status:
    """Do every unfinished shard of `worker.plan`; `advance` hears of the images of each one that
    ended.

    A failed shard is logged with its reason and tried again by the next run. `worker` works itself
    if it is the only one. With `cluster` (auto, local or an address) shards are Ray tasks. `enough`
    is asked before every shard; a reason that it gives ends the run early. Worker processes end the
    shard they are at.
    """
    plan = worker.plan
    store.check()
    with store.alone():
        store.prepare(plan)
        done = {shard.id for shard in store.finished(plan)}
        todo = [shard for shard in plan.shards if shard.id not in done]
        workers = min(workers, len(todo))
        try:
            reason = enough()
            for shard in [] if reason else _ended(store, worker, todo, workers, cluster):
                advance(len(shard))
                if reason := enough():
                    break
        except BrokenProcessPool:
            return inspect(store, plan, stopped=DIED)
        found = inspect(store, plan)
        return replace(found, stopped=reason) if found.pending else found


def perform(store: Store, open_it: Callable[[], Worker], shard: Shard) -> Shard:
    """One shard, from its first line in the log to its last."""
    store.log("start", shard.id)
    try:
        result = run_shard(open_it(), shard)
    except (
        SeecauseError,
        RuntimeError,
        MemoryError,
    ) as failure:  # torch's out of memory is a RuntimeError
        store.log(
            "failed", shard.id, reason=" ".join(str(failure).split()) or type(failure).__name__
        )
        return shard
    store.save(
        shard.id,
        rows=result.rows,
        schema=ROWS,
        tensors=result.tensors,
        metadata=result.metadata,
    )
    store.log("done", shard.id)
    return shard


def _ended(
    store: Store, worker: Worker, todo: Sequence[Shard], workers: int, cluster: str | None
) -> Iterator[Shard]:
    """Shards as they end, wherever they run."""
    if cluster is not None and todo:
        from seecause.bench.cluster import in_cluster

        return in_cluster(store, worker.plan, todo, cluster, workers=workers)
    return (
        _here(store, worker, todo)
        if workers <= 1
        else _in_processes(store, worker.plan, todo, workers)
    )


def _here(store: Store, worker: Worker, todo: Sequence[Shard]) -> Iterator[Shard]:
    return (perform(store, lambda: worker, shard) for shard in todo)


def _in_processes(store: Store, plan: Plan, todo: Sequence[Shard], workers: int) -> Iterator[Shard]:
    """Spawned, not forked: torch's threads and a GPU do not survive a fork. A worker is handed one
    shard at a time, so that few are left when it is enough."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin, initargs=(store, plan)
    )
    try:
        left = iter(todo)
        going = {pool.submit(_perform, shard) for shard in islice(left, workers)}
        while going:
            ended, going = wait(going, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()
                going |= {pool.submit(_perform, shard) for shard in islice(left, 1)}
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
