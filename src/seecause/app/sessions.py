"""What each user has: uploaded images, files to download, and jobs. Sessions do not see each other,
and sessions that nobody uses end. What is kept, of one user or of all, is bounded in bytes."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seecause.app.jobs import Job, Queue
from seecause.errors import SeecauseError

if TYPE_CHECKING:
    from seecause.app.state import OpenedPicture

IDLE = 30 * 60.0  # seconds until an unused session ends
SESSIONS = 200  # at once; the one that was unused longest makes room
RECENT = 60.0  # seconds in which a session that was used makes no room
PICTURE_BYTES = 512 << 20  # in memory, of all sessions
FILE_BYTES = 4 << 30  # on disk, of all sessions
JOBS = 48  # of one session that are remembered
REMEMBERED = 120.0  # seconds that a finished job waits to be fetched


class NoSession(SeecauseError):
    """A session that has ended, or never was."""

    def __init__(self):
        super().__init__("this session has ended; the page opens a new one.")


class NoJob(SeecauseError):
    """A job of another session, or of nobody."""

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
            " copy it as Python and run that."
        )


class Recent:
    """The latest values by key, as many as `most` bytes hold. Threads may share it. `drop` is
    called with each value that leaves."""

    def __init__(self, most: int, drop: Callable[[Any], object] = lambda value: None):
        self.most, self.drop, self.held = most, drop, 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """The value, which becomes the latest; None if there is none."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: Any, size: int) -> None:
        if size > self.most:
            self.drop(value)
            raise TooLarge(size, self.most)
        with self._lock:
            gone = [self._pop(key)] if key in self._values else []
            self._values[key] = (value, size)
            self.held += size
            while self.held > self.most:
                gone.append(self._pop(next(iter(self._values))))
        for old in gone:
            if old is not value:
                self.drop(old)

    def get_or_make(
        self, key: Hashable, make: Callable[[], Any], size: Callable[[Any], int]
    ) -> Any:
        """The value, made if there is none; what two threads need at once is made by both."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value, min(size(value), self.most))
        return value

    def discard(self, session: str) -> None:
        """Drop all values whose key begins with this session."""
        with self._lock:
            keys = [key for key in self._values if isinstance(key, tuple) and key[0] == session]
            gone = [self._pop(key) for key in keys]
        for value in gone:
            self.drop(value)

    def _pop(self, key: Hashable) -> Any:
        value, size = self._values.pop(key)
        self.held -= size
        return value


class Session:
    """One user: jobs, and what the storage of all sessions holds for this one."""

    def __init__(self, sessions: Sessions):
        self.id, self.used, self.over = secrets.token_urlsafe(18), sessions.clock(), False
        self.sessions = sessions
        self.jobs: dict[str, tuple[Job, Queue]] = {}
        self.lock = threading.Lock()

    def add_picture(self, picture: OpenedPicture) -> None:
        self._put(self.sessions.pictures, picture.id, picture, picture.bytes)

    def picture(self, id: str) -> OpenedPicture | None:
        return self.sessions.pictures.get((self.id, id))

    def add_file(self, name: str, file: Path) -> str:
        """Take a file to be downloaded, until newer ones need its place; returns its id."""
        id, path = secrets.token_urlsafe(9), self.sessions.folder() / secrets.token_hex(12)
        size = file.stat().st_size
        shutil.move(file, path)
        self._put(self.sessions.files, id, (name, path), size)
        return id

    def file(self, id: str) -> tuple[str, Path] | None:
        """Name and path of a file."""
        return self.sessions.files.get((self.id, id))

    def _put(self, storage: Recent, id: str, value: Any, size: int) -> None:
        storage.put((self.id, id), value, size)
        if self.over:  # it ended meanwhile
            storage.discard(self.id)
            raise NoSession

    def end(self) -> None:
        """Cancel its jobs and drop its images and files."""
        self.over = True  # first, so that nothing is added from now on
        for job, queue in list(self.jobs.values()):
            queue.cancel(job)
        self.sessions.pictures.discard(self.id)
        self.sessions.files.discard(self.id)

    def add_job(self, job: Job, queue: Queue) -> None:
        with self.lock:
            now = time.monotonic()
            ended = [id for id, (j, _) in self.jobs.items() if j.ended is not None]
            old = [id for id in ended if now - (self.jobs[id][0].ended or now) > REMEMBERED]
            surplus = ended[: max(0, len(self.jobs) - JOBS)]
            for id in {*old, *surplus}:
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
    """All sessions, the one used last at the end, and what is kept for them."""

    def __init__(
        self,
        *,
        idle: float = IDLE,
        most: int = SESSIONS,
        pictures: int = PICTURE_BYTES,
        files: int = FILE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.clock = clock
        self.pictures = Recent(pictures)
        self.files = Recent(files, drop=lambda file: file[1].unlink(missing_ok=True))
        self._idle, self._most = idle, most
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._folder: Path | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def folder(self) -> Path:
        """Where files wait for their download; it is removed with the server."""
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="seecause-"))
                self._remove = weakref.finalize(self, shutil.rmtree, self._folder, True)
            return self._folder

    def open(self) -> Session:
        with self._lock:
            gone = self._expired()
            oldest = next(iter(self._sessions.values()), None)
            full = len(self._sessions) >= self._most
            refused = full and oldest is not None and self.clock() - oldest.used < RECENT
            if full and not refused:
                gone.append(self._sessions.popitem(last=False)[1])
            session = Session(self)
            if not refused:
                self._sessions[session.id] = session
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
                session.used = self.clock()
                self._sessions.move_to_end(id)
        for other in gone:
            other.end()
        if session is None:
            raise NoSession
        return session

    def close(self) -> None:
        if self._folder is not None:
            self._remove()

    def _expired(self) -> list[Session]:
        """Remove and return the sessions that were not used for too long."""
        now = self.clock()
        old = [id for id, session in self._sessions.items() if now - session.used > self._idle]
        return [self._sessions.pop(id) for id in old]
