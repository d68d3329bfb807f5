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
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

from seecause.errors import SeecauseError, Stopped, stoppable

log = logging.getLogger(__name__)
Reply = dict[str, Any]
Progress = Callable[[float, str], None]

PER_SESSION = 12  # jobs of one session that wait for one model
WORKERS = 6  # jobs of one model that run at once
OWN_WORKERS = 2  # jobs of one session that run at once


class Refused(SeecauseError):
    """A request that the server refuses for now, with its HTTP status."""

    def __init__(self, reason: str, status: int):
        super().__init__(reason)
        self.status = status


class Job:
    """Something to compute for one session. Its future holds the result, or the error."""

    def __init__(self, session: str, run: Callable[[Progress], Reply], *, slot: str = ""):
        self.id, self.session, self.slot = secrets.token_urlsafe(9), session, slot
        self.future: Future[Reply] = Future()
        self.share, self.words = 0.0, ""
        self.running = False
        self.stopped = False  # a waiting job never starts, a running one ends at its next block
        self._run = run

    def progress(self, share: float, words: str = "") -> None:
        """Report how far the job is, from 0 to 1, and what it is doing."""
        self.check()
        self.share, self.words = min(1.0, max(0.0, share)), words

    def check(self) -> None:
        if self.stopped:
            raise Stopped

    def work(self) -> None:
        """Run the job and set the result or the error of its future."""
        self.running = True
        try:
            with stoppable(self.check):
                self.check()
                result = self._run(self.progress)
        except BaseException as failure:  # raised by the waiting request; the worker continues
            if not isinstance(failure, Stopped | SeecauseError):
                log.error("job %s failed", self.id, exc_info=failure)
            self.future.set_exception(failure)
        else:
            self.future.set_result(result)
        self.running = False


class Queue:
    """Jobs of all sessions for one model, in threads of its own. Sessions take turns, so that one
    with many jobs does not keep others waiting."""

    def __init__(self, name: str):
        self.name = name
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._turns, self._served = count(1), Counter[str]()  # the last turn of each session
        self._changed = threading.Condition()
        self._open = True
        for number in range(WORKERS):
            context = (
                contextvars.Context()
            )  # empty: no variables of the thread that starts the server
            label = f"queue {name} {number}"
            args = (self._serve,)
            threading.Thread(target=context.run, args=args, name=label, daemon=True).start()

    def submit(self, job: Job) -> Job:
        with self._changed:
            for older in [*self._waiting, *self._running]:
                if job.slot and (older.session, older.slot) == (job.session, job.slot):
                    self.cancel(older)
            if sum(other.session == job.session for other in self._waiting) >= PER_SESSION:
                raise Refused("too many of your jobs wait; wait for one, or cancel one.", 429)
            self._waiting.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """A waiting job leaves the queue at once, a running one ends at its next block."""
        with self._changed:
            job.stopped = True
            if job in self._waiting:
                self._waiting.remove(job)
                job.future.set_exception(Stopped())

    def close(self) -> None:
        """Stop the jobs that run and drop those that wait."""
        with self._changed:
            self._open = False
            for job in [*self._waiting, *self._running]:
                self.cancel(job)
            self._changed.notify_all()

    def _next(self) -> Job | None:
        """The oldest job of the session whose last turn is longest ago, without sessions that have
        the maximum number of running jobs."""
        running = Counter(job.session for job in self._running)
        free = [job for job in self._waiting if running[job.session] < OWN_WORKERS]
        return min(free, key=lambda job: self._served[job.session], default=None)

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
            self._changed.wait_for(lambda: self._next() is not None or not self._open)
            job = self._next()
            if job is not None:
                self._waiting.remove(job)
                self._running.append(job)
                self._served[job.session] = next(self._turns)
            return job
