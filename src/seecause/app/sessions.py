"""What each user has: pictures of their own and jobs. Sessions do not see each other, and those
that nobody uses go. What is kept for a while, of one user or of all, has a number of bytes."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seecause.app.jobs import Job, Queue
from seecause.errors import SeecauseError

if TYPE_CHECKING:
    from seecause.app.state import OpenedPicture

IDLE = 30 * 60.0  # seconds until an unused session goes
SESSIONS = 200  # at once; the one that was unused longest makes room
RECENT = 60.0  # seconds in which a session that was used makes no room
PICTURES = 12  # of one session
PICTURE_BYTES = 512 << 20  # in memory, of all sessions
FILES = 2  # of one session
FILE_BYTES = 4 << 30  # on disk, of all sessions
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


class TooLarge(SeecauseError):
    """Something that alone is more than may be kept."""

    def __init__(self, size: int, most: int):
        super().__init__(
            f"this would be {size / 1e6:.0f} MB, and {most / 1e6:.0f} MB are kept here;"
            " copy it as Python or as a command and run that."
        )


class Recent(dict[Any, Any]):
    """The latest values by key, as many as `most` bytes hold. Threads may share it; what two of
    them need at once is made by both."""

    def __init__(self, most: int, size: Callable[[Any], int]):
        super().__init__()
        self.most, self.size, self.held = most, size, 0
        self.lock = threading.Lock()

    def get_or_make(self, key: Any, make: Callable[[], Any]) -> Any:
        with self.lock:
            if key in self:
                self[key] = value = self.pop(key)  # to the end: dictionaries are in order
                return value
        value = make()
        with self.lock:
            if key not in self:
                self.held += self.size(value)
                self[key] = value
            while self.held > self.most and len(self) > 1:
                self.held -= self.size(self.pop(next(iter(self))))
            return value


class Shelf:
    """Things of all sessions together, as many as `most` bytes hold: what was put there longest ago
    makes room, whoever has it; of one session the latest `each`. `drop` is called when a thing
    goes."""

    def __init__(self, most: int, each: int):
        self.most, self.each, self.held = most, each, 0
        self._things: dict[tuple[str, str], tuple[int, Callable[[], object]]] = {}
        self._lock = threading.Lock()

    def put(self, session: str, id: str, size: int, drop: Callable[[], object]) -> None:
        if size > self.most:
            drop()
            raise TooLarge(size, self.most)
        with self._lock:
            if (session, id) in self._things:  # the same once more: it becomes the latest
                self._pop((session, id))
            self._things[session, id] = (size, drop)
            self.held += size
            own = [key for key in self._things if key[0] == session]
            gone = [self._pop(key) for key in own[: -self.each]]
            while self.held > self.most:
                gone.append(self._pop(next(iter(self._things))))
        for leave in gone:
            leave()

    def take(self, session: str) -> None:
        """All things of a session go."""
        with self._lock:
            gone = [self._pop(key) for key in list(self._things) if key[0] == session]
        for leave in gone:
            leave()

    def _pop(self, key: tuple[str, str]) -> Callable[[], object]:
        size, drop = self._things.pop(key)
        self.held -= size
        return drop


class Storage:
    """What all sessions keep together: pictures in memory, files in a folder that goes with the
    server."""

    def __init__(self, pictures: int = PICTURE_BYTES, files: int = FILE_BYTES):
        self.pictures, self.files = Shelf(pictures, PICTURES), Shelf(files, FILES)
        self._folder: Path | None = None
        self._lock = threading.Lock()

    def new_path(self) -> Path:
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="seecause-"))
                self._remove = weakref.finalize(self, shutil.rmtree, self._folder, True)
            return self._folder / secrets.token_hex(12)

    def close(self) -> None:
        with self._lock:
            if self._folder is not None:
                self._remove()
            self._folder = None


@dataclass(eq=False)
class Session:
    """One user. `files` are what panels made for download: name and path by id."""

    id: str
    used: float
    storage: Storage = field(default_factory=Storage)
    pictures: dict[str, OpenedPicture] = field(default_factory=dict)
    jobs: dict[str, tuple[Job, Queue]] = field(default_factory=dict)
    files: dict[str, tuple[str, Path]] = field(default_factory=dict)
    over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_picture(self, picture: OpenedPicture) -> None:
        self.pictures[picture.id] = picture
        drop = partial(self.pictures.pop, picture.id, None)
        self._put(self.storage.pictures, picture.id, picture.bytes, drop)

    def add_file(self, name: str, file: Path) -> str:
        """Take a file to be downloaded, until newer ones need its place."""
        place, path = secrets.token_urlsafe(9), self.storage.new_path()
        size = file.stat().st_size
        shutil.move(file, path)
        self.files[place] = (name, path)
        self._put(self.storage.files, place, size, partial(self._drop_file, place))
        return place

    def _put(self, shelf: Shelf, id: str, size: int, drop: Callable[[], object]) -> None:
        """Keep a thing until the session ends; one that ended meanwhile keeps nothing."""
        shelf.put(self.id, id, size, drop)
        if self.over:
            shelf.take(self.id)
            raise NoSession

    def _drop_file(self, place: str) -> None:
        _, path = self.files.pop(place, ("", None))
        if path is not None:
            path.unlink(missing_ok=True)

    def end(self) -> None:
        """Everything of it goes."""
        self.over = True  # first: who puts something there now takes it away again
        for job, queue in list(self.jobs.values()):
            queue.cancel(job)
        self.storage.pictures.take(self.id)
        self.storage.files.take(self.id)

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
        storage: Storage | None = None,
    ):
        self.storage = storage or Storage()
        self._idle, self._most, self._clock = idle, most, clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self) -> Session:
        session = Session(secrets.token_urlsafe(18), self._clock(), self.storage)
        with self._lock:
            gone = self._expired()
            full = len(self._sessions) >= self._most
            oldest = next(iter(self._sessions.values()), None)
            refused = full and oldest is not None and self._clock() - oldest.used < RECENT
            if not refused:
                self._sessions[session.id] = session
                gone += self._expired()
        for other in gone:
            other.end()
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
        for other in gone:
            other.end()
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
