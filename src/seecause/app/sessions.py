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

from seecause.app.jobs import Job, Queue, Refused
from seecause.errors import SeecauseError

if TYPE_CHECKING:
    from seecause.app.state import OpenedPicture

IDLE = 30 * 60.0  # seconds until an unused session ends
SESSIONS = 200  # at once; the one that was unused longest makes room
PICTURE_BYTES = 512 << 20  # in memory, of all sessions
FILE_BYTES = 4 << 30  # on disk, of all sessions
JOBS = 48  # finished ones of one session that wait to be fetched


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
            raise SeecauseError(
                f"this would be {size / 1e6:.0f} MB, and {self.most / 1e6:.0f} MB are kept here;"
                " copy it as Python and run that."
            )
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
        self.id, self.used, self.sessions = secrets.token_urlsafe(18), sessions.clock(), sessions
        self.jobs: dict[str, tuple[Job, Queue]] = {}

    def add_picture(self, picture: OpenedPicture) -> None:
        self.sessions.pictures.put((self.id, picture.id), picture, picture.bytes)

    def picture(self, id: str) -> OpenedPicture | None:
        return self.sessions.pictures.get((self.id, id))

    def add_file(self, name: str, file: Path) -> str:
        """Take a file to be downloaded, until newer ones need its place; returns its id."""
        id, path = secrets.token_urlsafe(9), self.sessions.folder / secrets.token_hex(12)
        size = file.stat().st_size
        shutil.move(file, path)
        self.sessions.files.put((self.id, id), (name, path), size)
        return id

    def file(self, id: str) -> tuple[str, Path] | None:
        """Name and path of a file."""
        return self.sessions.files.get((self.id, id))

    def end(self) -> None:
        """Cancel its jobs and drop its images and files."""
        for job, queue in self.jobs.values():
            queue.cancel(job)
        self.sessions.pictures.discard(self.id)
        self.sessions.files.discard(self.id)

    def add_job(self, job: Job, queue: Queue) -> None:
        finished = [id for id, (older, _) in self.jobs.items() if older.future.done()]
        for id in finished[:-JOBS]:
            del self.jobs[id]
        self.jobs[job.id] = (job, queue)

    def job(self, id: str) -> tuple[Job, Queue]:
        if id not in self.jobs:
            raise Refused("there is no such job; ask again.", 404)
        return self.jobs[id]


class Sessions:
    """All sessions, the one used last at the end, and what is kept for them. Only the thread that
    answers requests opens and ends sessions."""

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
        self.folder = Path(tempfile.mkdtemp(prefix="seecause-"))  # of files to download
        self.close = weakref.finalize(self, shutil.rmtree, self.folder, True)
        self._idle, self._most = idle, most
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self) -> Session:
        self._end_unused()
        if len(self) >= self._most:
            self._sessions.popitem(last=False)[1].end()
        session = Session(self)
        self._sessions[session.id] = session
        return session

    def get(self, id: str) -> Session:
        self._end_unused()
        if id not in self._sessions:
            raise Refused("this session has ended; the page opens a new one.", 440)
        self._sessions.move_to_end(id)
        self._sessions[id].used = self.clock()
        return self._sessions[id]

    def _end_unused(self) -> None:
        """End the sessions that were not used for too long."""
        now = self.clock()
        for id in [id for id, each in self._sessions.items() if now - each.used > self._idle]:
            self._sessions.pop(id).end()
