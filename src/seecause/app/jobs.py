"""Jobs and the queue of a model: one worker, sessions in turn, a limit, and a way to stop.

A job is submitted, says how far it is, is cancelled or gives its answer. A newer job of the same
session and slot takes the place of the older one: who moves a slider wants the last position only.
"""

from __future__ import annotations

import contextvars
import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from seecause._stop import Stopped, stoppable
from seecause.errors import SeecauseError

log = logging.getLogger(__name__)
Answer = dict[str, Any]
Tell = Callable[[float, str], None]

PER_SESSION = 12  # jobs of one session that wait for one model
LIMIT = 256  # jobs that wait for one model


class TooBusy(SeecauseError):
    """More jobs wait than the queue takes."""

    def __init__(self, whose: str):
        super().__init__(f"{whose}: too many jobs are waiting; wait for one, or cancel one.")


class Job:
    """Something to be computed for one session. Its future holds the answer, or the error."""

    def __init__(self, session: str, run: Callable[[Tell], Answer], *, slot: str = ""):
        self.id, self.session, self.slot = secrets.token_urlsafe(9), session, slot
        self.future: Future[Answer] = Future()
        self.share, self.words, self.running = 0.0, "", False
        self.ended: float | None = None
        self._run, self._stop = run, threading.Event()
        self.future.add_done_callback(self._end)

    @property
    def done(self) -> bool:
        return self.future.done()

    def stop(self) -> None:
        """Waiting: never begin. Running: end at the next block."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def tell(self, share: float, words: str = "") -> None:
        """How far the job is, 0 to 1, and what it is at."""
        self.check()
        self.share, self.words = min(1.0, max(0.0, share)), words

    def check(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def work(self) -> None:
        """Run to the end, whichever it is."""
        self.running = True
        try:
            with stoppable(self.check):
                self.check()
                answer = self._run(self.tell)
        except BaseException as failure:  # the worker lives on; the waiting request hears of it
            if not isinstance(failure, Stopped | SeecauseError):
                log.error("job %s failed", self.id, exc_info=failure)
            self.future.set_exception(failure)
        else:
            self.future.set_result(answer)

    def _end(self, _: object) -> None:
        self.ended = time.monotonic()


class Queue:
    """Jobs of all sessions for one model. Sessions take turns, so that one with many jobs does not
    keep others waiting."""

    def __init__(self, name: str, *, limit: int = LIMIT, per_session: int = PER_SESSION):
        self.name, self.limit, self.per_session = name, limit, per_session
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._open = True
        context = contextvars.Context()  # nothing of whoever starts the server
        threading.Thread(
            target=context.run, args=(self._serve,), name=f"queue {name}", daemon=True
        ).start()

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
            jobs = [job for waiting in self._waiting.values() for job in waiting]
            self._waiting.clear()
            self._changed.notify()
        for job in [*jobs, *([self._running] if self._running else [])]:
            job.stop()
        for job in jobs:
            job.future.set_exception(Stopped())

    def _supersede(self, job: Job, jobs: deque[Job]) -> None:
        for older in [waiting for waiting in jobs if waiting.slot == job.slot]:
            jobs.remove(older)
            older.stop()
            older.future.set_exception(Stopped())
        current = self._running
        if current is not None and (current.session, current.slot) == (job.session, job.slot):
            current.stop()

    def _forget_empty(self, session: str) -> None:
        if not self._waiting.get(session, True):
            del self._waiting[session]

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._changed.wait_for(lambda: self._waiting or not self._open)
                if not self._open:
                    return
                session, jobs = self._waiting.popitem(last=False)
                job = self._running = jobs.popleft()
                if jobs:  # behind all others
                    self._waiting[session] = jobs
            job.work()
