"""Sessions: uploaded images, files to download, and jobs of each user. Sessions are isolated from
each other, and unused ones end. The stored data of one user and of all users is bounded."""

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
from typing import TYPE_CHECKING, Any, NamedTuple

from seecause.app.jobs import Job, Queue, Refused

if TYPE_CHECKING:
    from seecause.app.state import OpenedPicture

IDLE = 30 * 60.0  # seconds until an unused session ends
SESSIONS = 200  # at once; the one that was unused longest makes room
PICTURES = 256  # uploads of all sessions: at most 2 MB each, and the inputs of models
FILES = 8  # to download, of all sessions
JOBS = 48  # finished ones of one session that wait to be fetched
FOLDERS = 4  # unpacked datasets, of all sessions
RESULTS = 64  # results of all sessions that name nothing private
LISTED = 32  # results of one session


class Record(NamedTuple):
    """A result under an id that links name: its job, and the request that it answers."""

    id: str
    panel: str
    action: str
    request: dict[str, Any]
    job: Job
    made: float  # seconds since 1970

    @property
    def usable(self) -> bool:
        """Whether its job is under way or has a result."""
        future = self.job.future
        return not self.job.stopped and not (future.done() and future.exception() is not None)


class Recent:
    """The latest `most` values by key. Threads may share it. `drop` is called with each value that
    is evicted."""

    def __init__(self, most: int, drop: Callable[[Any], object] = lambda value: None):
        self.most, self.drop = most, drop
        self._values: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> Any:
        """The value, which becomes the latest; None if there is none."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: Any) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            surplus = range(len(self._values) - self.most)
            gone = [self._values.popitem(last=False)[1] for _ in surplus]
        for old in gone:
            self.drop(old)

    def get_or_make(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value, made if there is none; two threads that need it at once both make it."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value

    def values(self) -> list[Any]:
        """All values, the latest first."""
        with self._lock:
            return [*self._values.values()][::-1]

    def discard(self, session: str) -> None:
        """Drop all values whose key begins with this session."""
        with self._lock:
            gone = [self._values.pop(key) for key in list(self._values) if key[0] == session]
        for value in gone:
            self.drop(value)


class Session:
    """One user: jobs, and this user's part of the shared storage."""

    def __init__(self, sessions: Sessions):
        self.id, self.used, self.sessions = secrets.token_urlsafe(18), sessions.clock(), sessions
        self.jobs: dict[str, tuple[Job, Queue]] = {}
        self.results = Recent(LISTED)  # by id
        self.data: dict[str, str] = {}  # its own datasets: names, and arguments of `open_data`

    def add_picture(self, picture: OpenedPicture) -> None:
        owner = "" if self.sessions.share else self.id
        self.sessions.pictures.put((owner, picture.id), picture)

    def picture(self, id: str) -> OpenedPicture | None:
        pictures = self.sessions.pictures
        return pictures.get((self.id, id)) or pictures.get(("", id))

    def owns(self, request: dict[str, Any], owner: str) -> bool:
        """Whether a request names an image, a dataset or a model (of `owner`) of this session."""
        named = [value for value in request.values() if isinstance(value, str)]
        pictures = self.sessions.pictures
        return bool(owner) or any(
            name in self.data or pictures.get((self.id, name)) is not None for name in named
        )

    def keep(self, record: Record, *, private: bool) -> None:
        """Store a result; others may open it unless it is private."""
        self.results.put(record.id, record)
        if not private:
            self.sessions.results.put(record.id, record)

    def result(self, id: str) -> Record | None:
        return self.results.get(id) or self.sessions.results.get(id)

    def add_folder(self) -> Path:
        """An empty folder for a dataset, until newer ones evict it."""
        folder = self.sessions.folder / secrets.token_hex(12)
        folder.mkdir()
        self.sessions.folders.put((self.id, folder.name), folder)
        return folder

    def add_file(self, name: str, file: Path) -> str:
        """Take a file to be downloaded, until newer ones evict it; returns its id."""
        id, path = secrets.token_urlsafe(9), self.sessions.folder / secrets.token_hex(12)
        shutil.move(file, path)
        self.sessions.files.put((self.id, id), (name, path))
        return id

    def file(self, id: str) -> tuple[str, Path] | None:
        """Name and path of a file."""
        return self.sessions.files.get((self.id, id))

    def end(self) -> None:
        """Cancel its jobs and drop its images and files."""
        for job, queue in self.jobs.values():
            queue.cancel(job)
        for stored in (self.sessions.pictures, self.sessions.files, self.sessions.folders):
            stored.discard(self.id)

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
    """All sessions, the one used last at the end, and their storage. Only the thread that
    serves requests opens and ends sessions."""

    def __init__(self, *, share: bool = False):
        self.share = share  # uploads open for whoever has their link
        self.clock, self.idle, self.most = time.monotonic, IDLE, SESSIONS
        self.results = Recent(RESULTS)
        self.folders = Recent(FOLDERS, drop=lambda folder: shutil.rmtree(folder, True))
        self.pictures = Recent(PICTURES)
        self.files = Recent(FILES, drop=lambda file: file[1].unlink(missing_ok=True))
        self.folder = Path(tempfile.mkdtemp(prefix="seecause-"))  # of files to download
        self.close = weakref.finalize(self, shutil.rmtree, self.folder, True)
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self) -> Session:
        self._end_unused()
        if len(self) >= self.most:
            self._sessions.popitem(last=False)[1].end()
        session = Session(self)
        self._sessions[session.id] = session
        return session

    def find(self, id: str) -> Session | None:
        """The session, if it is still there."""
        return self._sessions.get(id)

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
        for id in [id for id, each in self._sessions.items() if now - each.used > self.idle]:
            self._sessions.pop(id).end()
