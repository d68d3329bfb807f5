"""Pools of workers that do the items of a job: this process, several, or actors of a Ray cluster.

    with open_pool(job, Workers(count=4)) as pool:
        for item, result in pool.run(next_item): ...

A job is opened once in each worker, which then gets items, few at a time: little is left to end
when it is enough. Results go to the process that runs the job, which alone writes: workers need
not see its folder.

A worker that dies is replaced, and what it held is done again. An item whose worker died is tried
with a worker of its own, so that it takes no other with it, and given up after `RETRIES` more.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from seecause._software import check_versions
from seecause.bench.store import ShardStore
from seecause.errors import BadOption, SeecauseError

log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds without a worker before we say so, and ask whether one can come
RETRIES = 3  # of an item whose worker was lost
LOST = (
    f"its worker was lost {RETRIES + 1} times (killed, or out of memory); run the same command"
    " again with fewer --workers, less --memory, or machines with more of it"
)
NextItem = Callable[[], Any]  # the next item, or None if there is none now
Perform = Callable[[Any], Any]  # an item -> its value
Share = Callable[[bytes], Callable[[], bytes]]  # bytes for all workers -> how one gets them


@dataclass(frozen=True, kw_only=True)
class Workers:
    """How many workers, where, and what each may use.

    >>> Workers.of(4)
    Workers(count=4, ray=None, cpus=None, gpus=None, memory=None)
    """

    count: int | None = None  # None: this process; on a cluster, as many as it holds
    ray: str | None = None  # auto for the cluster that is running, local, or HOST:PORT
    cpus: float | None = None  # of one worker; None: its threads, of which it has one
    gpus: float | None = None  # None: one if the job runs on a GPU; fractions share one
    memory: int | None = None  # bytes that a cluster sets aside for one worker

    def __post_init__(self) -> None:
        for name in ("count", "cpus", "memory"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise BadOption(name, value, "a number above 0")
        if self.gpus is not None and self.gpus < 0:
            raise BadOption("gpus", self.gpus, "0 or more")

    @classmethod
    def of(cls, workers: Workers | int | None) -> Workers:
        """As functions take them: a number of processes, or None for this one."""
        return workers if isinstance(workers, Workers) else cls(count=workers)

    @property
    def elsewhere(self) -> bool:
        """Whether anybody but this process works."""
        return self.ray is not None or (self.count or 1) > 1

    def checked(self) -> Workers:
        """Refuse what only a cluster can set aside, where there is none."""
        for name in ("cpus", "gpus", "memory"):
            if self.ray is None and getattr(self, name) is not None:
                raise BadOption(
                    f"--{name}-per-worker",
                    getattr(self, name),
                    "--ray with it: processes of this machine share what it has",
                )
        return self


class WorkersFailed(SeecauseError):
    """Workers were lost or refused, and the work with them."""

    def __init__(self, reason: str):
        super().__init__(f"the work could not be done: {reason.rstrip('.')}.")


class WorkerJob(Protocol):
    """Work in items, which travels to workers and gives the same everywhere."""

    # what an item may raise without ending the job
    failures: ClassVar[tuple[type[Exception], ...]]

    @property
    def threads(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def versions(self) -> Mapping[str, str]:
        """What it was planned with; a worker with others is refused."""
        ...

    def open(self) -> Perform:
        """Load models and data, once in each worker."""
        ...


@dataclass(frozen=True, eq=False)
class ItemResult:
    """What came of an item: a value, or why there is none."""

    value: Any = None
    failure: str = ""
    kind: str = ""  # of the failure
    process: int = 0


def attempt(perform: Perform, item: Any, failures: tuple[type[Exception], ...]) -> ItemResult:
    try:
        return ItemResult(perform(item), process=os.getpid())
    except failures as failure:
        kind = type(failure).__name__
        reason = " ".join(str(failure).split()) or kind
        return ItemResult(failure=reason, kind=kind, process=os.getpid())


def record_result(store: ShardStore, shard: str, answer: ItemResult) -> None:
    """What came of a shard, in the store and its log."""
    if answer.failure:
        store.log("failed", shard, reason=answer.failure)
    else:
        store.write(shard, answer.value)
        store.log("done", shard, process=answer.process)


def open_job(job: WorkerJob) -> Perform:
    """In a worker: the job, unless its software is another."""
    check_versions(job.versions)
    torch.set_num_threads(job.threads)
    return job.open()


def refusal_of(failure: BaseException) -> str:
    """Why a worker could not open the job, and where: its machine may be at fault, not the job."""
    kind = "" if isinstance(failure, SeecauseError) else f"{type(failure).__name__}: "
    return f"{kind}{' '.join(str(failure).split())} (on {socket.gethostname()})"


class RemoteWorker(Protocol):
    """One worker elsewhere."""

    opening: Future[str]  # why it refuses; empty if it is ready

    def submit(self, item: Any) -> Future[ItemResult]: ...
    def is_lost(self, failure: BaseException) -> bool: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class _Task:
    item: Any
    losses: int = 0


@dataclass(eq=False)
class _Slot:
    worker: RemoteWorker
    ready: bool = False
    tasks: dict[Future[ItemResult], _Task] = field(default_factory=dict)

    def has_room(self, depth: int) -> bool:
        suspect = any(task.losses for task in self.tasks.values())
        return self.ready and not suspect and len(self.tasks) < depth


class SerialPool:
    """This process alone."""

    def __init__(self, job: WorkerJob, perform: Perform | None = None):
        self.job, self.perform = job, perform

    def run(self, next_item: NextItem) -> Iterator[tuple[Any, ItemResult]]:
        while (item := next_item()) is not None:
            if self.perform is None:
                self.perform = self.job.open()
            yield item, attempt(self.perform, item, self.job.failures)


class WorkerPool:
    """Workers elsewhere, begun by `start`; each holds at most `depth` items."""

    def __init__(
        self,
        start: Callable[[], RemoteWorker],
        count: int,
        *,
        depth: int,
        share: Share,
        check: Callable[[], None] = lambda: None,
    ):
        """Nobody is begun before there is an item; `check` raises if a worker can never begin."""
        self.start, self.count, self.depth = start, count, depth
        self.share, self.check = share, check
        self.slots: list[_Slot] = []
        self.begun = False
        self.retries: deque[_Task] = deque()
        self.refusal, self.failed_starts = "they were stopped", 0

    def run(self, next_item: NextItem) -> Iterator[tuple[Any, ItemResult]]:
        """Items and their answers as they end, in any order."""
        ended = not self._begin(next_item)
        if ended:
            return
        try:
            while True:
                for slot in self.slots:
                    self._fill(slot, next_item)
                waiting = self._handed_out()
                if not waiting and (left := self._next(next_item)) is not None:
                    if not self.slots:
                        raise WorkersFailed(f"no worker is left: {self.refusal}")
                    self.retries.appendleft(left)
                elif not waiting:
                    ended = True
                    return
                openings: dict[Future[Any], _Slot] = {
                    slot.worker.opening: slot for slot in self.slots if not slot.ready
                }
                done = wait([*waiting, *openings], PATIENCE, return_when=FIRST_COMPLETED).done
                if not done and not waiting:
                    self.check()
                    log.warning("no worker has begun yet; waiting for %d", len(openings))
                for future in done:
                    if future in openings:
                        self._opened(openings[future])
                    else:
                        yield from self._answered(waiting[future], future)
        finally:
            if not ended:
                self.close()

    def _begin(self, next_item: NextItem) -> bool:
        """Begin workers with the first item; False if there is none."""
        first = self._next(next_item)
        if first is None:
            return False
        self.retries.appendleft(first)
        if not self.begun:
            self.begun = True
            for _ in range(self.count):
                self.slots.append(_Slot(self.start()))
        return True

    def close(self) -> None:
        for slot in self.slots:
            slot.worker.close()
        self.slots = []

    def _handed_out(self) -> dict[Future[Any], _Slot]:
        futures: dict[Future[Any], _Slot] = {}
        for slot in self.slots:
            futures |= dict.fromkeys(slot.tasks, slot)
        return futures

    def _next(self, next_item: NextItem) -> _Task | None:
        if self.retries:
            return self.retries.popleft()
        item = next_item()
        return None if item is None else _Task(item)

    def _fill(self, slot: _Slot, next_item: NextItem) -> None:
        while slot.has_room(self.depth):
            if self.retries and slot.tasks:
                return  # it takes a suspect when it is empty
            task = self._next(next_item)
            if task is None:
                return
            slot.tasks[slot.worker.submit(task.item)] = task

    def _opened(self, slot: _Slot) -> None:
        failure = slot.worker.opening.exception()
        if failure is None:
            refusal = slot.worker.opening.result()
            slot.ready, self.failed_starts = not refusal, 0
        elif slot.worker.is_lost(failure):
            self.failed_starts += 1
            refusal = LOST if self.failed_starts > RETRIES else ""
        else:
            refusal = refusal_of(_cause(failure))
        if refusal:
            log.warning("a worker is refused: %s", refusal)
            self.refusal = refusal
            slot.worker.close()
            self.slots.remove(slot)
        elif not slot.ready:
            self._replace(slot)

    def _answered(
        self, slot: _Slot, future: Future[ItemResult]
    ) -> Iterator[tuple[Any, ItemResult]]:
        if future not in slot.tasks:
            return  # lost with its worker, a moment ago
        failure = future.exception()
        if failure is None:
            yield slot.tasks.pop(future).item, future.result()
        elif not slot.worker.is_lost(failure):
            raise _cause(failure)
        else:
            yield from self._lost(slot)

    def _lost(self, slot: _Slot) -> Iterator[tuple[Any, ItemResult]]:
        """A worker died: what it held is done again, or given up."""
        tasks = list(slot.tasks.values())
        slot.tasks.clear()
        self._replace(slot)
        for task in tasks:
            task.losses += 1
            if task.losses > RETRIES:
                yield task.item, ItemResult(failure=LOST, kind="Lost")
            else:
                self.retries.append(task)

    def _replace(self, slot: _Slot) -> None:
        slot.worker.close()
        self.slots[self.slots.index(slot)] = _Slot(self.start())


def _cause(failure: BaseException) -> BaseException:
    """What a worker raised; Ray wraps it."""
    cause = getattr(failure, "cause", None)
    return cause if isinstance(cause, Exception) else failure


@contextmanager
def open_pool(
    job: WorkerJob,
    workers: Workers | int | None,
    *,
    most: int | None = None,
    perform: Perform | None = None,
) -> Iterator[SerialPool | WorkerPool]:
    """Workers for a job of at most `most` items; `perform` is the job as it is opened here, for a
    pool of this process alone."""
    wanted = Workers.of(workers).checked()
    most = 1 << 30 if most is None else most
    count = min(wanted.count or 1, most)
    if most == 0 or (wanted.ray is None and count < 2):
        yield SerialPool(job, perform)
        return
    from seecause.bench.cluster import process_pool, ray_pool

    on_cluster = wanted.ray is not None
    with ray_pool(job, wanted, most=most) if on_cluster else process_pool(job, count) as pool:
        yield pool
