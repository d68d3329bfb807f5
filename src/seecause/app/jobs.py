"""Jobs and the queue of a model: one after the other, sessions in turn, a limit, and a way to stop.

A job is submitted, says how far it is, is cancelled or gives its answer. A newer job of the same
session and slot takes the place of the older one: who moves a slider wants the last position only.

Nobody can say beforehand which job is long: an audit is, and so is a map by a slow method, or any
map of a large model. So every job begins in the queue; one that has run for a moment while others
wait goes on beside it, in its own thread, and the next worker serves the others. Whatever a job
changes for its own time must therefore be its own (`ServedModel.borrow`).
"""

from __future__ import annotations

import contextvars
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from seecause._stop import Stopped, stoppable
from seecause.errors import SeecauseError

log = logging.getLogger(__name__)
Reply = dict[str, Any]
Progress = Callable[[float, str], None]

PER_SESSION = 12  # jobs of one session that wait for one model
LIMIT = 256  # jobs that wait for one model
MOMENT = 0.25  # seconds of processor time in which a job may keep others waiting
WHILES = 8  # as many moments by the clock: it waits for something, or for a processor
BESIDE = 8  # jobs that run beside one queue at once
OWN_BESIDE = 3  # those of one session; its next ones wait for them


class TooBusy(SeecauseError):
    """More jobs wait than the queue takes."""

    def __init__(self, whose: str):
        super().__init__(f"{whose}: too many jobs are waiting; wait for one, or cancel one.")


class Job:
    """Something to be computed for one session. Its future holds the answer, or the error."""

    def __init__(self, session: str, run: Callable[[Progress], Reply], *, slot: str = ""):
        self.id, self.session, self.slot = secrets.token_urlsafe(9), session, slot
        self.future: Future[Reply] = Future()
        self.share, self.words = 0.0, ""
        self.began: float | None = None
        self.ended: float | None = None
        self._clock: int | None = None  # of the thread that it runs in
        self._run, self._stop = run, threading.Event()
        self.future.add_done_callback(self._end)

    @property
    def done(self) -> bool:
        return self.future.done()

    @property
    def running(self) -> bool:
        return self.began is not None and not self.done

    @property
    def long(self) -> bool:
        """Whether it has computed for a moment. On a busy machine a small job takes long by the
        clock, and many at once would only make it longer."""
        if self.began is None:
            return False
        return self._computed() >= MOMENT or time.monotonic() - self.began >= WHILES * MOMENT

    def stop(self) -> None:
        """Waiting: never begin. Running: end at the next block."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def progress(self, share: float, words: str = "") -> None:
        """How far the job is, 0 to 1, and what it is at."""
        self.check()
        self.share, self.words = min(1.0, max(0.0, share)), words

    def check(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def work(self) -> None:
        """Run to the end, whichever it is."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._clock_began = time.clock_gettime(self._clock)
        self.began = time.monotonic()
        try:
            with stoppable(self.check):
                self.check()
                answer = self._run(self.progress)
        except BaseException as failure:  # the worker lives on; the waiting request hears of it
            if not isinstance(failure, Stopped | SeecauseError):
                log.error("job %s failed", self.id, exc_info=failure)
            self.future.set_exception(failure)
        else:
            self.future.set_result(answer)

    def _computed(self) -> float:
        """Processor time of its thread since it began; none where threads have no clock."""
        if self._clock is None or self.done:
            return 0.0
        return time.clock_gettime(self._clock) - self._clock_began

    def _end(self, _: object) -> None:
        self.ended = time.monotonic()


class Queue:
    """Jobs of all sessions for one model. Sessions take turns, so that one with many jobs does not
    keep others waiting; a long job goes on beside the queue."""

    def __init__(self, name: str, *, limit: int = LIMIT, per_session: int = PER_SESSION):
        self.name, self.limit, self.per_session = name, limit, per_session
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._running: Job | None = None
        self._beside: list[Job] = []
        self._changed = threading.Condition()  # who has its lock may take it again
        self._open = True
        self._start_worker()

    def submit(self, job: Job) -> Job:
        with self._changed:
            jobs = self._waiting.setdefault(job.session, deque())
            if job.slot:
                self._supersede(job, jobs)
            if len(jobs) >= self.per_session or len(self) >= self.limit:
                self._forget_empty(job.session)
                raise TooBusy("you" if len(jobs) >= self.per_session else self.name)
            jobs.append(job)
            self.relieve()
            self._changed.notify()
        return job

    def relieve(self) -> None:
        """Let a job that has run for a moment go on beside the queue, if others wait. Whoever waits
        calls this after a moment, so that nobody has to watch."""
        with self._changed:
            job = self._running
            if job is None or not job.long or self._next_session() is None:
                return
            if len(self._beside) < BESIDE:
                self._beside.append(job)
                self._running = None
                self._start_worker()

    def cancel(self, job: Job) -> None:
        """A waiting job leaves the queue at once, a running one ends at its next block."""
        job.stop()
        with self._changed:
            jobs = self._waiting.get(job.session, deque())
            if job in jobs:
                jobs.remove(job)
                self._forget_empty(job.session)
                job.future.set_exception(Stopped())

    def __len__(self) -> int:
        """Jobs that wait."""
        return sum(map(len, self._waiting.values()))

    def ahead(self, job: Job) -> int:
        """How many jobs run before this one, at most."""
        with self._changed:
            own = self._waiting.get(job.session, deque())
            if job not in own:
                return 0
            turn = own.index(job) + 1
            others = (min(turn, len(q)) for s, q in self._waiting.items() if s != job.session)
            return turn - 1 + sum(others) + (self._running is not None)

    def close(self) -> None:
        """Stop what runs and whatever waits."""
        with self._changed:
            self._open = False
            waiting = [job for jobs in self._waiting.values() for job in jobs]
            running = self._all_running()
            self._waiting.clear()
            self._changed.notify()
        for job in [*waiting, *running]:
            job.stop()
        for job in waiting:
            job.future.set_exception(Stopped())

    def _supersede(self, job: Job, jobs: deque[Job]) -> None:
        for older in [waiting for waiting in jobs if waiting.slot == job.slot]:
            jobs.remove(older)
            older.stop()
            older.future.set_exception(Stopped())
        for current in self._all_running():
            if (current.session, current.slot) == (job.session, job.slot):
                current.stop()

    def _all_running(self) -> list[Job]:
        return [*self._beside, *([] if self._running is None else [self._running])]

    def _forget_empty(self, session: str) -> None:
        if not self._waiting.get(session, True):
            del self._waiting[session]

    def _next_session(self) -> str | None:
        """Whose turn it is: not that of a session with as many long jobs as it may have."""
        many = Counter(job.session for job in self._beside)
        return next((name for name in self._waiting if many[name] < OWN_BESIDE), None)

    def _start_worker(self) -> None:
        context = contextvars.Context()  # nothing of whoever starts the server
        name = f"queue {self.name}"
        threading.Thread(target=context.run, args=(self._serve,), name=name, daemon=True).start()

    def _serve(self) -> None:
        """One worker: job after job, until one of them has gone beside the queue."""
        while (job := self._take()) is not None:
            job.work()
            with self._changed:
                if job in self._beside:  # another worker serves by now, and may wait for this
                    self._beside.remove(job)
                    self._changed.notify()
                    return
                self._running = None

    def _take(self) -> Job | None:
        """The next job, when there is one; None where the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._next_session() is not None or not self._open)
            session = self._next_session()
            if session is None or not self._open:
                return None
            jobs = self._waiting.pop(session)
            job = self._running = jobs.popleft()
            if jobs:  # behind all others
                self._waiting[session] = jobs
            return job
