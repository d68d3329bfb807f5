"""Jobs, and the queue of a model: a few workers, sessions in turn, a limit, and a way to stop.

A job is submitted, reports its progress, and is cancelled or returns its result. A newer job of the
same session and slot replaces the older one: when somebody moves a slider, only the last position
matters. Several jobs of one model run at the same time, so that an audit of minutes does not delay
a brush stroke. Whatever a job changes while it runs must therefore be its own
(`ServedModel.borrow`).
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

from seecause.errors import SeecauseError, Stopped, stoppable

log = logging.getLogger(__name__)
Reply = dict[str, Any]
Progress = Callable[[float, str], None]

PER_SESSION = 12  # jobs of one session that wait for one model
LIMIT = 256  # jobs that wait for one model
WORKERS = 6  # jobs of one model that run at once
OWN_WORKERS = 2  # those of one session; its next jobs wait for them


class TooBusy(SeecauseError):
    """More jobs wait than the queue takes."""

    def __init__(self, whose: str):
        super().__init__(f"{whose}: too many jobs are waiting; wait for one, or cancel one.")


class Job:
    """Something to compute for one session. Its future holds the result, or the error."""

    def __init__(self, session: str, run: Callable[[Progress], Reply], *, slot: str = ""):
        self.id, self.session, self.slot = secrets.token_urlsafe(9), session, slot
        self.future: Future[Reply] = Future()
        self.share, self.words = 0.0, ""
        self.running = False
        self.ended: float | None = None
        self._run, self._stop = run, threading.Event()
        self.future.add_done_callback(self._end)

    @property
    def done(self) -> bool:
        return self.future.done()

    def stop(self) -> None:
        """A waiting job never starts, a running one ends at its next block."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def progress(self, share: float, words: str = "") -> None:
        """Report how far the job is, from 0 to 1, and what it is doing."""
        self.check()
        self.share, self.words = min(1.0, max(0.0, share)), words

    def check(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def work(self) -> None:
        """Run the job and set the result or the error of its future."""
        self.running = True
        try:
            with stoppable(self.check):
                self.check()
                result = self._run(self.progress)
        except BaseException as failure:  # the worker goes on; the request that waits raises it
            if not isinstance(failure, Stopped | SeecauseError):
                log.error("job %s failed", self.id, exc_info=failure)
            self.future.set_exception(failure)
        else:
            self.future.set_result(result)

    def _end(self, _: object) -> None:
        self.running, self.ended = False, time.monotonic()


class Queue:
    """Jobs of all sessions for one model, in threads of its own. Sessions take turns, so that one
    with many jobs does not keep others waiting."""

    def __init__(self, name: str, *, limit: int = LIMIT, per_session: int = PER_SESSION):
        self.name, self.limit, self.per_session = name, limit, per_session
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._running: list[Job] = []
        self._changed = threading.Condition()
        self._open = True
        for number in range(WORKERS):
            context = contextvars.Context()  # nothing of whoever starts the server
            label = f"queue {name} {number}"
            args = (self._serve,)
            threading.Thread(target=context.run, args=args, name=label, daemon=True).start()

    def submit(self, job: Job) -> Job:
        with self._changed:
            jobs = self._waiting.setdefault(job.session, deque())
            if job.slot:
                self._supersede(job, jobs)
            if len(jobs) >= self.per_session or len(self) >= self.limit:
                self._forget_empty(job.session)
                raise TooBusy("you" if len(jobs) >= self.per_session else self.name)
            jobs.append(job)
            self._changed.notify()
        return job

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
        """The number of jobs that wait."""
        return sum(map(len, self._waiting.values()))

    def close(self) -> None:
        """Stop the jobs that run and drop those that wait."""
        with self._changed:
            self._open = False
            waiting = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
            self._changed.notify_all()
            for job in [*waiting, *self._running]:
                job.stop()
        for job in waiting:
            job.future.set_exception(Stopped())

    def _supersede(self, job: Job, jobs: deque[Job]) -> None:
        for older in [waiting for waiting in jobs if waiting.slot == job.slot]:
            jobs.remove(older)
            older.stop()
            older.future.set_exception(Stopped())
        for current in self._running:
            if (current.session, current.slot) == (job.session, job.slot):
                current.stop()

    def _forget_empty(self, session: str) -> None:
        if not self._waiting.get(session, True):
            del self._waiting[session]

    def _next_session(self) -> str | None:
        """Whose turn it is: not that of a session with as many running jobs as it may have."""
        running = Counter(job.session for job in self._running)
        return next((name for name in self._waiting if running[name] < OWN_WORKERS), None)

    def _serve(self) -> None:
        """One worker: job after job until the queue is closed."""
        while (job := self._take()) is not None:
            job.work()
            with self._changed:
                self._running.remove(job)
                self._changed.notify()

    def _take(self) -> Job | None:
        """The next job, when there is one; None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._next_session() is not None or not self._open)
            session = self._next_session()
            if session is None or not self._open:
                return None
            jobs = self._waiting.pop(session)
            job = jobs.popleft()
            self._running.append(job)
            if jobs:  # behind all other sessions
                self._waiting[session] = jobs
            return job
