"""Workers that are processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from seecause._files import digest
from seecause.bench.hands import Answer, Crew, Job, attempt, opened, refused


@contextmanager
def process_crew(job: Job, count: int) -> Iterator[Crew]:
    with tempfile.TemporaryDirectory() as folder:
        share = partial(_share_by_file, Path(folder))
        crew = Crew(lambda: ProcessHand(job), count, depth=1, share=share)
        try:
            yield crew
        finally:
            crew.close()


def _share_by_file(folder: Path, content: bytes) -> Callable[[], bytes]:
    path = folder / digest(content)
    path.write_bytes(content)
    return path.read_bytes


class ProcessHand:
    """A process of this machine. Spawned, not forked: torch's threads and a GPU do not survive a
    fork."""

    def __init__(self, job: Job):
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, initializer=_begin, initargs=(job,))
        self.opening = self.pool.submit(_open)

    def submit(self, item: Any) -> Future[Answer]:
        try:
            return self.pool.submit(_perform, item)
        except BrokenProcessPool as broken:  # it died while it had nothing to do
            gone: Future[Answer] = Future()
            gone.set_exception(broken)
            return gone

    def is_lost(self, failure: BaseException) -> bool:
        return isinstance(failure, BrokenProcessPool)

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


# In a worker process: the job it works for, and what that opened.

_work_for: list[Any] = []


def _begin(job: Job) -> None:
    _work_for.append(job)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _open() -> str:
    try:
        _work_for.append(opened(_work_for[0]))
    except Exception as failure:
        return refused(failure)
    return ""


def _perform(item: Any) -> Answer:
    job, do = _work_for
    return attempt(do, item, job.failures)
