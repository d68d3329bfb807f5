"""Who does the work of a job: this process, several, or actors of a Ray cluster. One loop for all.

A job is opened once in each worker, which then is handed items, few at a time: nobody waits for
thousands of answers, and little is left to end when it is enough. What a worker answers goes to the
process that runs the job, which alone writes: workers need not see its folder.

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
Take = Callable[[], Any]  # the next item, or None if there is none now
Do = Callable[[Any], Any]
Share = Callable[[bytes], Callable[[], bytes]]  # bytes for all workers -> how one gets them


@dataclass(frozen=True, kw_only=True)
class Workers:
    """How many, where, and what each may use."""

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

    def placed(self) -> Workers:
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

    def open(self) -> Do:
        """Load models and data, once in each worker."""
        ...


@dataclass(frozen=True, eq=False)
class ItemResult:
    """What came of an item: a value, or why there is none."""

    value: Any = None
    failure: str = ""
    kind: str = ""  # of the failure
    process: int = 0


def attempt(do: Do, item: Any, failures: tuple[type[Exception], ...]) -> ItemResult:
    try:
        return ItemResult(do(item), process=os.getpid())
    except failures as failure:
        kind = type(failure).__name__
        reason = " ".join(str(failure).split()) or kind
        return ItemResult(failure=reason, kind=kind, process=os.getpid())


def record(store: ShardStore, shard: str, answer: ItemResult) -> None:
    """What came of a shard, in the store and its log."""
    if answer.failure:
        store.log("failed", shard, reason=answer.failure)
    else:
        store.write(shard, answer.value)
        store.log("done", shard, process=answer.process)


def opened(job: WorkerJob) -> Do:
    """In a worker: the job, unless its software is another."""
    check_versions(job.versions)
    torch.set_num_threads(job.threads)
    return job.open()


def refused(failure: BaseException) -> str:
    """Why a worker could not open the job, and where: its machine may be at fault, not the job."""
    kind = "" if isinstance(failure, SeecauseError) else f"{type(failure).__name__}: "
    return f"{kind}{' '.join(str(failure).split())} (on {socket.gethostname()})"


class Hand(Protocol):
    """One worker elsewhere."""

    opening: Future[str]  # why it refuses; empty if it is ready

    def submit(self, item: Any) -> Future[ItemResult]: ...
    def is_lost(self, failure: BaseException) -> bool: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class _Ticket:
    item: Any
    losses: int = 0


@dataclass(eq=False)
class _Slot:
    hand: Hand
    ready: bool = False
    tickets: dict[Future[ItemResult], _Ticket] = field(default_factory=dict)

    def has_room(self, depth: int) -> bool:
        suspect = any(ticket.losses for ticket in self.tickets.values())
        return self.ready and not suspect and len(self.tickets) < depth


class Alone:
    """This process."""

    def __init__(self, job: WorkerJob, do: Do | None = None):
        self.job, self.do = job, do

    def perform(self, take: Take) -> Iterator[tuple[Any, ItemResult]]:
        while (item := take()) is not None:
            if self.do is None:
                self.do = self.job.open()
            yield item, attempt(self.do, item, self.job.failures)


class Crew:
    """Workers elsewhere, begun by `start`; each holds at most `depth` items."""

    def __init__(
        self,
        start: Callable[[], Hand],
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
        self.again: deque[_Ticket] = deque()
        self.refusal, self.stillborn = "they were stopped", 0

    def perform(self, take: Take) -> Iterator[tuple[Any, ItemResult]]:
        """Items and their answers as they end, in any order."""
        ended = not self._begin(take)
        if ended:
            return
        try:
            while True:
                for slot in self.slots:
                    self._fill(slot, take)
                waiting = self._handed_out()
                if not waiting and (left := self._next(take)) is not None:
                    if not self.slots:
                        raise WorkersFailed(f"no worker is left: {self.refusal}")
                    self.again.appendleft(left)
                elif not waiting:
                    ended = True
                    return
                openings: dict[Future[Any], _Slot] = {
                    slot.hand.opening: slot for slot in self.slots if not slot.ready
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

    def _begin(self, take: Take) -> bool:
        """Begin workers with the first item; False if there is none."""
        first = self._next(take)
        if first is None:
            return False
        self.again.appendleft(first)
        if not self.begun:
            self.begun = True
            for _ in range(self.count):
                self.slots.append(_Slot(self.start()))
        return True

    def close(self) -> None:
        for slot in self.slots:
            slot.hand.close()
        self.slots = []

    def _handed_out(self) -> dict[Future[Any], _Slot]:
        futures: dict[Future[Any], _Slot] = {}
        for slot in self.slots:
            futures |= dict.fromkeys(slot.tickets, slot)
        return futures

    def _next(self, take: Take) -> _Ticket | None:
        if self.again:
            return self.again.popleft()
        item = take()
        return None if item is None else _Ticket(item)

    def _fill(self, slot: _Slot, take: Take) -> None:
        while slot.has_room(self.depth):
            if self.again and slot.tickets:
                return  # it takes a suspect when it is empty
            ticket = self._next(take)
            if ticket is None:
                return
            slot.tickets[slot.hand.submit(ticket.item)] = ticket

    def _opened(self, slot: _Slot) -> None:
        failure = slot.hand.opening.exception()
        if failure is None:
            refusal = slot.hand.opening.result()
            slot.ready, self.stillborn = not refusal, 0
        elif slot.hand.is_lost(failure):
            self.stillborn += 1
            refusal = LOST if self.stillborn > RETRIES else ""
        else:
            refusal = refused(_cause(failure))
        if refusal:
            log.warning("a worker is refused: %s", refusal)
            self.refusal = refusal
            slot.hand.close()
            self.slots.remove(slot)
        elif not slot.ready:
            self._replace(slot)

    def _answered(
        self, slot: _Slot, future: Future[ItemResult]
    ) -> Iterator[tuple[Any, ItemResult]]:
        if future not in slot.tickets:
            return  # lost with its worker, a moment ago
        failure = future.exception()
        if failure is None:
            yield slot.tickets.pop(future).item, future.result()
        elif not slot.hand.is_lost(failure):
            raise _cause(failure)
        else:
            yield from self._lost(slot)

    def _lost(self, slot: _Slot) -> Iterator[tuple[Any, ItemResult]]:
        """A worker died: what it held is done again, or given up."""
        tickets = list(slot.tickets.values())
        slot.tickets.clear()
        self._replace(slot)
        for ticket in tickets:
            ticket.losses += 1
            if ticket.losses > RETRIES:
                yield ticket.item, ItemResult(failure=LOST, kind="Lost")
            else:
                self.again.append(ticket)

    def _replace(self, slot: _Slot) -> None:
        slot.hand.close()
        self.slots[self.slots.index(slot)] = _Slot(self.start())


def _cause(failure: BaseException) -> BaseException:
    """What a worker raised; Ray wraps it."""
    cause = getattr(failure, "cause", None)
    return cause if isinstance(cause, Exception) else failure


@contextmanager
def crew_for(
    job: WorkerJob, workers: Workers | int | None, *, most: int | None = None, do: Do | None = None
) -> Iterator[Alone | Crew]:
    """Those who do a job of at most `most` items; `do` is the job opened here, which is all there
    is for one worker."""
    wanted = Workers(count=workers) if isinstance(workers, int) else workers or Workers()
    wanted.placed()
    bound = 1 << 30 if most is None else max(most, 1)
    count = min(wanted.count or 1, bound)
    if count < 2 and (wanted.ray is None or most == 0):
        yield Alone(job, do)
        return
    from seecause.bench.cluster import process_crew, ray_crew

    alone = wanted.ray is None
    with process_crew(job, count) if alone else ray_crew(job, wanted, most=bound) as crew:
        yield crew
