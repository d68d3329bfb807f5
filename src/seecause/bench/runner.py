"""Run a grid of cells: in this process, in processes of this machine, or as tasks of a Ray cluster.

Each finished cell is one Parquet file, FOLDER/cells/NAME.parquet, written whole or not at all by
the process that runs the grid, so workers need not see the folder. A cell whose file is there is
not computed again. A cell that fails leaves NAME.error.txt with its traceback and is tried again by
the next run; the other cells go on. A cell whose worker is killed is repeated, `RETRIES` times.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import socket
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from seecause.errors import BadOption, MissingExtra
from seecause.files import clear_drafts, write_atomic

log = logging.getLogger(__name__)

RETRIES = 3  # repeats of a cell whose worker was killed
LOST = (
    f"its worker was killed {RETRIES + 1} times (perhaps out of memory). Run the same command again"
    " with fewer workers, less memory for each, or on a larger machine."
)
REACHED = 5.0  # timeout in seconds for connecting to a cluster
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray starts workers with niceness 15; on a busy machine they start too slowly, and it gives up
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "600",
}


@dataclass(frozen=True)
class Cell:
    """One piece of a grid of work.

    Attributes:
        name: A digest of all that decides its rows.
        title: Its title in a status: the method, or the arguments of an experiment.
        arguments: Arguments of the job for this cell, as JSON.
        images: Number of images, for progress.
    """

    name: str
    title: str
    arguments: Mapping[str, Any]
    images: int = 1


Evaluate = Callable[[Cell], pa.Table]


class Job(Protocol):
    """A job is opened once by each worker and then evaluates cells. It can be pickled; `key`
    identifies it."""

    @property
    def key(self) -> str: ...
    def open(self) -> Evaluate: ...


class MissingValue(NamedTuple):
    """A number that could not be computed, and why."""

    method: str
    image: str
    metric: str
    reason: str


@dataclass(frozen=True)
class Status:
    """How far a run is.

    Attributes:
        total: Cells of the run.
        done: Cells that are finished.
        failed: Tracebacks by name of cell.
        pending: Cells that are neither finished nor failed.
        missing: Values that finished cells should have and do not, such as those of images that
            cannot be read.
    """

    total: int
    done: int
    failed: dict[str, str]
    pending: Sequence[Cell]
    missing: Sequence[MissingValue] = ()

    @property
    def complete(self) -> bool:
        """Whether every cell is finished and no value is missing."""
        return self.done == self.total and not self.missing

    def not_run(self) -> dict[str, int]:
        """Number of images that are still to do, by the title of cells."""
        images: Counter[str] = Counter()
        for cell in self.pending:
            images[cell.title] += cell.images
        return dict(images)


def state_of(
    folder: Path, cells: Sequence[Cell], done: set[str], missing: Sequence[MissingValue] = ()
) -> Status:
    """A status by the names of finished cells; tracebacks are read from the folder."""
    failed, pending = {}, []
    for cell in cells:
        error = _error_file(folder, cell.name)
        if cell.name in done:
            continue
        if error.is_file():
            failed[cell.name] = error.read_text(encoding="utf-8", errors="replace")
        else:
            pending.append(cell)
    return Status(len(cells), len(cells) - len(failed) - len(pending), failed, pending, missing)


def cell_file(folder: Path, name: str) -> Path:
    """The file with the rows of a cell."""
    return folder / "cells" / f"{name}.parquet"


def _error_file(folder: Path, name: str) -> Path:
    return folder / "cells" / f"{name}.error.txt"


def read_cell(folder: Path, name: str, columns: Sequence[str] | None = None) -> pa.Table | None:
    """The rows of a finished cell; None if there are none, or if the disk damaged them."""
    path = cell_file(folder, name)
    try:
        content = pa.BufferReader(path.read_bytes())
        return pq.read_table(content, columns=columns, page_checksum_verification=True)
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, ValueError) as failure:
        reason = " ".join(str(failure).split())
        log.warning("%s is damaged (%s); run the same command again", path, reason)
        return None


def run_cells(
    folder: Path,
    cells: Sequence[Cell],
    job: Job,
    *,
    workers: int | None = None,
    ray: str | None = None,
    resources: Mapping[str, float] | None = None,
    progress: Callable[[int], None] = lambda images: None,
    evaluate: Evaluate | None = None,
) -> None:
    """Compute the cells that are not finished in `folder`, in their order.

    Args:
        folder: Where finished cells are kept.
        cells: The grid.
        job: The job that evaluates them.
        workers: Processes, or Ray tasks at a time. None is this process; on a cluster, all it has
            room for. The number changes no result.
        ray: A Ray cluster: "auto" for the one that is running, "local", or HOST:PORT.
        resources: Of each Ray task: num_cpus, num_gpus, memory (bytes).
        progress: Called with the number of images of each cell that ended.
        evaluate: The result of `job.open()`, if it was already called in this process.

    Raises:
        BadOption: If a cell raises it: a mistake of the command ends the run. Any other error of a
            cell is kept as its traceback.
    """
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    clear_drafts(folder)
    clear_drafts(folder / "cells")
    todo = [cell for cell in cells if read_cell(folder, cell.name) is None]
    if not todo:
        return
    if ray is not None:
        results = _on_ray(job, todo, ray, workers, dict(resources or {}))
    elif (workers or 1) > 1:
        results = _in_processes(job, todo, min(workers or 1, len(todo)))
    else:
        evaluate = evaluate or job.open()
        results = ((cell, *_attempt(evaluate, cell)) for cell in todo)
    for cell, content, error in results:
        failure = _error_file(folder, cell.name)
        if content is None:
            write_atomic(failure, error)
        else:
            write_atomic(cell_file(folder, cell.name), content)
            failure.unlink(missing_ok=True)
        progress(cell.images)


Result = tuple[Cell, bytes | None, str]  # a cell, its Parquet file, or why there is none


def _attempt(evaluate: Evaluate, cell: Cell) -> tuple[bytes | None, str]:
    """The Parquet file of a cell, or its traceback."""
    try:
        table, file = evaluate(cell), io.BytesIO()
        pq.write_table(table, file, write_page_checksum=True)
        return file.getvalue(), ""
    except BadOption:
        raise
    except Exception:
        return None, traceback.format_exc()


_opened: dict[str, Evaluate] = {}  # in a worker: the job it works for


def _perform(job: Job, cell: Cell) -> tuple[bytes | None, str]:
    """In a worker: one cell of a job, which is opened with the first."""
    if job.key not in _opened:
        _opened.clear()
        _opened[job.key] = job.open()
    return _attempt(_opened[job.key], cell)


def _leave_with_parent() -> None:
    """End this process when its parent ends; otherwise it would wait for ever."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _in_processes(job: Job, cells: Sequence[Cell], count: int) -> Iterator[Result]:
    """`count` threads, each with a worker process of its own, so that a cell that kills its worker
    takes no other with it. Processes are spawned: torch's threads and a GPU do not survive a
    fork."""
    context = multiprocessing.get_context("spawn")
    own, pools, stopped = threading.local(), list[ProcessPoolExecutor](), threading.Event()
    parts = [list(part) for _, part in groupby(cells, attrgetter("arguments"))]  # read the same
    parts = parts if len(parts) >= count else [[cell] for cell in cells]

    def compute(cell: Cell) -> Result:
        for _ in range(RETRIES + 1):
            if stopped.is_set():
                break
            if not hasattr(own, "pool"):
                own.pool = ProcessPoolExecutor(1, context, initializer=_leave_with_parent)
                pools.append(own.pool)
            try:
                file, failure = own.pool.submit(_perform, job, cell).result()
                return cell, file, failure
            except BrokenProcessPool:
                del own.pool
                if not stopped.is_set():
                    log.warning("a worker was killed; its cell is computed again")
        return cell, None, LOST

    with ThreadPoolExecutor(count) as threads:
        running = {threads.submit(lambda part: list(map(compute, part)), part) for part in parts}
        try:
            for future in as_completed(list(running)):
                running.remove(future)
                yield from future.result()
        finally:
            stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)
            for pool in pools:
                for process in list((pool._processes or {}).values() if running else ()):
                    process.terminate()  # interrupted: its result is not needed
                pool.shutdown(cancel_futures=True)


def usual_workers(images: int) -> int:
    """How many processes of one thread a CPU gets: as many as torch would use threads, at most 16,
    each with 32 images or more to do."""
    import torch  # not needed to start a worker, or to read a run

    return max(1, min(torch.get_num_threads(), images // 32, 16))


def _on_ray(
    job: Job, cells: Sequence[Cell], address: str, count: int | None, resources: dict[str, Any]
) -> Iterator[Result]:
    """Plain tasks, at most `count` at a time; Ray repeats those whose worker or machine died."""
    try:
        import ray
        from ray.exceptions import RayError, RayTaskError
    except ImportError:
        raise MissingExtra("ray", "cluster") from None
    needs = {"num_cpus": 1, **resources}
    cores = max(1, round((count or os.cpu_count() or 1) * needs["num_cpus"]))
    with _connected(ray, address, cores):
        have = ray.cluster_resources()
        for name, kind in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
            if have.get(kind, 0) < needs.get(name, 0):
                log.warning("the cluster has not the %s %ss of a task", needs[name], kind)
        remote = ray.remote(max_retries=RETRIES, **needs)(_perform_there)
        shared, todo = ray.put((job, Path.cwd())), deque(cells)
        running: dict[Any, Cell] = {}
        try:
            while todo or running:
                while todo and (count is None or len(running) < count):
                    cell = todo.popleft()
                    running[remote.remote(shared, cell)] = cell
                for done in ray.wait(list(running))[0]:
                    cell = running.pop(done)
                    try:
                        yield cell, *ray.get(done)
                    except RayTaskError as failure:
                        raise failure.cause from None
                    except RayError as failure:
                        yield cell, None, f"{LOST}\n{failure}"
        finally:
            for task in running:
                ray.cancel(task, force=True)


def _perform_there(shared: tuple[Job, Path], cell: Cell) -> tuple[bytes | None, str]:
    """In a worker of a cluster, where data and weights may be relative paths."""
    job, home = shared
    if home.is_dir():
        os.chdir(home)
    return _perform(job, cell)


@contextmanager
def _connected(ray: Any, address: str, cores: int) -> Iterator[None]:
    """Connect to a cluster, unless this process is; `cores` are those of a local one."""
    if ray.is_initialized():
        yield
        return
    host, _, port = address.rpartition(":")
    expected = "local, auto for a cluster begun with `ray start --head`, or its HOST:PORT"
    try:
        if host:  # Ray itself would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), REACHED).close()
        for name, value in RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
        local = {"num_cpus": cores, "include_dashboard": False} if address == "local" else {}
        ray.init(address=address, log_to_driver=False, logging_level="error", **local)
    except (OSError, OverflowError, ValueError, RuntimeError, SystemExit) as failure:
        reason = " ".join(str(failure).split())
        raise BadOption("--ray", address, f"{expected} ({reason})") from None
    try:
        yield
    finally:
        ray.shutdown()
