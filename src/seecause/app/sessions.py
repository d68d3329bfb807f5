"""What each user has: pictures of their own and jobs. Sessions do not see each other, and those
that nobody uses go."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from seecause.app.jobs import Job, Queue
from seecause.app.workshop import Picture
from seecause.errors import SeecauseError

IDLE = 30 * 60.0  # seconds until an unused session goes
SESSIONS = 200  # at once; the one that was unused longest makes room
RECENT = 60.0  # seconds in which a session that was used makes no room
PICTURES = 12  # of one session
JOBS = 48  # of one session that are remembered
REMEMBERED = 120.0  # seconds that a finished job waits to be fetched


class NoSession(SeecauseError):
    """A session that is over, or never was."""

    def __init__(self):
        super().__init__("this session is over; the page opens a new one.")


class NoJob(SeecauseError):
    """A job that another session has, or nobody."""

    def __init__(self):
        super().__init__("there is no such job; ask again.")


class Full(SeecauseError):
    """As many sessions as there may be, and all of them in use."""

    def __init__(self):
        super().__init__("too many people use this server at the moment; try again in a minute.")


@dataclass(eq=False)
class Session:
    """One user. `files` are what panels made for download: name and content by id."""

    id: str
    used: float
    pictures: OrderedDict[str, Picture] = field(default_factory=OrderedDict)
    jobs: OrderedDict[str, tuple[Job, Queue]] = field(default_factory=OrderedDict)
    files: OrderedDict[str, tuple[str, bytes]] = field(default_factory=OrderedDict)
    notes: dict[str, Any] = field(default_factory=dict)  # what a panel remembers between requests
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_picture(self, picture: Picture) -> None:
        with self.lock:
            self.pictures[picture.id] = picture
            self.pictures.move_to_end(picture.id)
            while len(self.pictures) > PICTURES:
                self.pictures.popitem(last=False)

    def add_file(self, name: str, content: bytes, *, most: int = 2) -> str:
        """Keep something to be downloaded; only the latest stay."""
        with self.lock:
            place = secrets.token_urlsafe(9)
            self.files[place] = (name, content)
            while len(self.files) > most:
                self.files.popitem(last=False)
        return place

    def add_job(self, job: Job, queue: Queue) -> None:
        with self.lock:
            now = time.monotonic()
            old = [id for id, (j, _) in self.jobs.items() if j.ended and now - j.ended > REMEMBERED]
            for id in old:
                del self.jobs[id]
            finished = [id for id, (j, _) in self.jobs.items() if j.done]
            for id in finished[: max(0, len(self.jobs) - JOBS)]:
                del self.jobs[id]
            self.jobs[job.id] = (job, queue)

    def job(self, id: str) -> tuple[Job, Queue]:
        if id not in self.jobs:
            raise NoJob
        return self.jobs[id]

    def drop_job(self, id: str) -> None:
        with self.lock:
            self.jobs.pop(id, None)


class Sessions:
    """All of them, the one used last at the end."""

    def __init__(
        self,
        *,
        idle: float = IDLE,
        most: int = SESSIONS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._idle, self._most, self._clock = idle, most, clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self) -> Session:
        session = Session(secrets.token_urlsafe(18), self._clock())
        with self._lock:
            gone = self._expired()
            full = len(self._sessions) >= self._most
            oldest = next(iter(self._sessions.values()), None)
            refused = full and oldest is not None and self._clock() - oldest.used < RECENT
            if not refused:
                self._sessions[session.id] = session
                gone += self._expired()
        self._end(gone)
        if refused:
            raise Full
        return session

    def get(self, id: str) -> Session:
        with self._lock:
            gone = self._expired()
            session = self._sessions.get(id)
            if session is not None:
                session.used = self._clock()
                self._sessions.move_to_end(id)
        self._end(gone)
        if session is None:
            raise NoSession
        return session

    def _expired(self) -> list[Session]:
        gone = []
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            unused = self._clock() - oldest.used > self._idle
            if not unused and len(self._sessions) <= self._most:
                break
            gone.append(self._sessions.pop(oldest.id))
        return gone

    def _end(self, gone: list[Session]) -> None:
        for session in gone:
            for job, queue in list(session.jobs.values()):
                queue.cancel(job)
