"""Run a grid of cells: in this process, in processes of this machine, or as tasks of a Ray cluster.

    status = run("RUN", Request("builtin:critters-vit", "critters:clean:test", ["caap", "rollout"]))

Each finished cell is one Parquet file, FOLDER/cells/NAME.parquet, written whole or not at all by
the process that runs the grid, so workers need not see the folder. A cell whose file is there is
not computed again. A cell that fails leaves NAME.error.txt with its traceback and is tried again by
the next run; the other cells go on. A cell whose worker is killed is repeated, `RETRIES` times.
"""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import socket
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from seecause.bench.cells import Cell, Plan, Prepared, Request, open_prepared, prepare
from seecause.bench.measures import UNDEFINED
from seecause.errors import BadOption, MissingExtra
from seecause.files import digest, digest_json, write_atomic, write_json

log = logging.getLogger(__name__)

MANIFEST = "run.json"
RETRIES = 3  # of a cell whose worker was killed
LOST = (
    f"its worker was killed {RETRIES + 1} times (perhaps out of memory). Run the same command again"
    " with fewer workers, less memory for each, or on a larger machine."
)
REACHED = 5.0  # seconds for a cluster to answer
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # workers of Ray's niceness, 15, starve on a busy machine and are given up while they start
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "600",
}
Evaluate = Callable[[Any], pa.Table]  # a cell -> its rows


class Job(Protocol):
    """What each worker opens once, to evaluate cells. It can be pickled; `key` identifies it.

    Cells are any objects that can be pickled, with a length, and with a `name` that is a digest of
    all that decides their rows.
    """

    @property
    def key(self) -> str: ...
    def open(self) -> Evaluate: ...


@dataclass(frozen=True)
class MissingValue:
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
        missing: Values that are not there, in finished cells.
    """

    total: int
    done: int
    failed: dict[str, str]
    pending: Sequence[Any]
    missing: Sequence[MissingValue] = ()

    @property
    def holes(self) -> list[MissingValue]:
        """Missing values that could be there, such as those of images that cannot be read."""
        return [value for value in self.missing if value.reason != UNDEFINED]

    @property
    def undefined(self) -> dict[str, int]:
        """Number of values by metric that an image cannot have; these are no holes."""
        return dict(Counter(v.metric for v in self.missing if v.reason == UNDEFINED))

    @property
    def complete(self) -> bool:
        """Whether every cell is finished and no value is missing."""
        return self.done == self.total and not self.holes

    def not_run(self) -> dict[str, int]:
        """Number of images that are still to do, by method."""
        images: Counter[str] = Counter()
        for cell in self.pending:
            images[cell.method] += len(cell)
        return dict(images)


def run(
    folder: str | Path,
    request: Request | Prepared,
    *,
    workers: int | None = None,
    ray: str | None = None,
    resources: Mapping[str, float] | None = None,
    progress: Callable[[int], None] = lambda images: None,
) -> Status:
    """Run a benchmark: every cell of a request that is not finished in `folder`.

    Args:
        folder: Where finished cells are kept. The same call again continues in it; another
            request adds its cells.
        request: What is compared, or `prepare(request)`.
        workers: Processes, or Ray tasks at a time. None is this process; on a cluster, all it
            has room for. The number changes no result.
        ray: A Ray cluster: "auto" for the one that is running, "local", or HOST:PORT.
        resources: Of each Ray task: num_cpus, num_gpus, memory (bytes).
        progress: Called with the number of images of each cell that ended.

    Returns:
        A `Status`. `complete` is False if any number is missing; `failed` and `holes` say why.

    Example:
        >>> import tempfile
        >>> import seecause as sc
        >>> request = sc.bench.Request(
        ...     "builtin:critters-vit", "critters:clean:test", methods=["rollout", "center"],
        ...     metrics=("aupr1", "pointing"), limit=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     status = sc.bench.run(folder, request)
        ...     table = sc.bench.table(folder)
        >>> status.complete, status.done, table.cells["rollout"]["aupr1"].n
        (True, 2, 4)
    """
    folder = Path(folder)
    check_folder(folder)
    prepared = request if isinstance(request, Prepared) else prepare(request)
    plan = prepared.plan
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / MANIFEST, plan.record())
    shared = replace(plan, cells=())
    job = BenchJob(shared, digest_json(shared.record()))
    if plan.request.device.startswith("cuda"):
        resources = {"num_gpus": 1, **(resources or {})}
    options: dict[str, Any] = {"ray": ray, "resources": resources, "progress": progress}
    run_cells(folder, plan.cells, job, workers=workers, evaluate=prepared.run, **options)
    return inspect(folder, plan)


def status(folder: str | Path) -> Status:
    """How far the benchmark in a folder is."""
    return inspect(Path(folder), read_plan(Path(folder)))


def check_folder(folder: Path) -> None:
    """Refuse, before any work, a folder that holds something else than a run."""
    if folder.exists() and not folder.is_dir():
        raise BadOption("--out", str(folder), "a folder; this is a file")
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if held and not held & {MANIFEST, "cells"}:
        expected = "a new folder, an empty one, or one that `seecause bench run` made"
        raise BadOption("--out", str(folder), expected)


def read_plan(folder: Path) -> Plan:
    """The plan of the last request that was run in a folder."""
    expected = "a folder that `seecause bench run --out` made with this version"
    try:
        return Plan.read(json.loads((folder / MANIFEST).read_bytes()))
    except FileNotFoundError:
        raise BadOption("run", str(folder), expected) from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as odd:
        raise BadOption(
            "run", str(folder), f"{expected}; its {MANIFEST} is no plan ({odd})"
        ) from None


def inspect(folder: Path, plan: Plan) -> Status:
    """What is finished of a plan, and what is missing in it."""
    tables = {cell.name: read_cell(folder, cell.name, ["image", "reasons"]) for cell in plan.cells}
    found = {name: table for name, table in tables.items() if table is not None}
    missing = [missing_values(c, found[c.name]) for c in plan.cells if c.name in found]
    state = state_of(folder, plan.cells, set(found))
    return replace(state, missing=[value for values in missing for value in values])


def missing_values(cell: Cell, table: pa.Table) -> Iterator[MissingValue]:
    """The values of a cell that are not there."""
    images, reasons = table["image"].to_pylist(), table["reasons"].to_pylist()
    for image, text in zip(images, reasons, strict=True):
        for metric, reason in json.loads(text).items():
            yield MissingValue(cell.method, image, metric, str(reason))


def state_of(folder: Path, cells: Sequence[Any], done: set[str]) -> Status:
    """A status by the names of finished cells; tracebacks are read from the folder."""
    unfinished = [cell for cell in cells if cell.name not in done]
    failed = {}
    for cell in unfinished:
        error = _error_file(folder, cell.name)
        if error.is_file():
            failed[cell.name] = error.read_text(encoding="utf-8", errors="replace")
    pending = [cell for cell in unfinished if cell.name not in failed]
    return Status(len(cells), len(cells) - len(unfinished), failed, pending)


def cell_file(folder: Path, name: str) -> Path:
    """Where the rows of a cell are kept."""
    return folder / "cells" / f"{name}.parquet"


def read_cell(folder: Path, name: str, columns: Sequence[str] | None = None) -> pa.Table | None:
    """The rows of a finished cell; None if there are none, or if the disk damaged them."""
    path = cell_file(folder, name)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as failure:
        log.warning("%s cannot be read (%s); it counts as not finished", path, failure)
        return None
    try:
        table = pq.read_table(pa.BufferReader(content), columns=columns)
        known = json.loads(table.schema.metadata[b"checksums"])
        wanted = known if columns is None else columns
        if {name: _checksum(table[name]) for name in wanted} == {n: known[n] for n in wanted}:
            return table
        reason = "its checksums do not match"
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError) as failure:
        reason = str(failure)
    log.warning("%s is damaged (%s); run the same command again", path, " ".join(reason.split()))
    return None


def _checksum(column: pa.ChunkedArray) -> str:
    """Of the values: Parquet's own checksums do not cover everything."""
    values = column.combine_chunks()
    if pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    if pa.types.is_floating(values.type) and not values.null_count:
        return digest(values.to_numpy().tobytes())
    return digest(repr(values.to_pylist()))


def run_cells(
    folder: Path,
    cells: Sequence[Any],
    job: Job,
    *,
    workers: int | None = None,
    ray: str | None = None,
    resources: Mapping[str, float] | None = None,
    progress: Callable[[int], None] = lambda count: None,
    evaluate: Evaluate | None = None,
) -> None:
    """Compute the cells that are not finished in `folder`, in their order.

    `evaluate` is the job as it is opened in this process, if it is. A `BadOption` is a mistake of
    the command and ends the run; any other error of a cell is kept as its traceback.
    """
    todo = [cell for cell in cells if read_cell(folder, cell.name) is None]
    if not todo:
        return
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    if ray is not None:
        results = _on_ray(job, todo, ray, workers, dict(resources or {}))
    elif (workers or 1) > 1:
        results = _in_processes(job, todo, min(workers or 1, len(todo)))
    else:
        results = _here(evaluate or job.open(), todo)
    for cell, content, error in results:
        failure = _error_file(folder, cell.name)
        if content is None:
            write_atomic(failure, error)
        else:
            write_atomic(cell_file(folder, cell.name), content)
            failure.unlink(missing_ok=True)
        progress(len(cell))


Result = tuple[Any, bytes | None, str]  # a cell, its Parquet file, or why there is none


@dataclass(frozen=True)
class BenchJob:
    """Cells of a benchmark, in a worker; `key` is a digest of the plan."""

    plan: Plan
    key: str

    def open(self) -> Evaluate:
        return open_prepared(self.plan).run


def _error_file(folder: Path, name: str) -> Path:
    return folder / "cells" / f"{name}.error.txt"


def _attempt(evaluate: Evaluate, cell: Any) -> tuple[bytes | None, str]:
    """The Parquet file of a cell, or its traceback."""
    try:
        table, file = evaluate(cell), io.BytesIO()
        sums = {name: _checksum(table[name]) for name in table.column_names}
        about = {**(table.schema.metadata or {}), "checksums": json.dumps(sums)}
        pq.write_table(table.replace_schema_metadata(about), file)
        return file.getvalue(), ""
    except BadOption:
        raise
    except Exception:
        return None, traceback.format_exc()


def _here(evaluate: Evaluate, cells: Iterable[Any]) -> Iterator[Result]:
    for cell in cells:
        yield cell, *_attempt(evaluate, cell)


_opened: dict[str, Evaluate] = {}  # in a worker: the job it works for


def _perform(job: Job, cell: Any) -> tuple[bytes | None, str]:
    """In a worker: one cell of a job, which is opened with the first."""
    if job.key not in _opened:
        _opened.clear()
        _opened[job.key] = job.open()
    return _attempt(_opened[job.key], cell)


def _leave_with_parent() -> None:
    """In a process: end with the parent. One whose parent was killed would wait for ever."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _in_processes(job: Job, cells: Sequence[Any], count: int) -> Iterator[Result]:
    """Spawned, not forked: torch's threads and a GPU do not survive a fork.

    A worker that is killed breaks the pool. A new one repeats the cells that were being computed,
    one at a time, so that one that kills its worker takes no other with it.
    """
    todo, losses, broken = deque(cells), Counter[str](), 0
    while todo and broken <= 2 * RETRIES:  # pools in a row without a result
        others = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(count, context, initializer=_leave_with_parent)
        running: dict[Future[Any], Any] = {}
        whole = False
        try:
            while todo or running:
                while todo and len(running) < count:
                    suspects = [cell for cell in running.values() if losses[cell.name]]
                    if suspects or (running and losses[todo[0].name]):
                        break
                    running[pool.submit(_perform, job, todo[0])] = todo[0]
                    todo.popleft()
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    result, broken = future.result(), 0
                    yield running.pop(future), *result
            whole = True
        except BrokenProcessPool:
            log.warning("a worker was killed; its cell is computed again")
            for cell in reversed(running.values()):
                losses[cell.name] += 1
                if losses[cell.name] <= RETRIES:
                    todo.appendleft(cell)
            whole, broken = True, broken + 1
            yield from ((c, None, LOST) for c in running.values() if losses[c.name] > RETRIES)
        finally:
            if not whole:  # interrupted: do not wait for cells that nobody will read
                for child in set(multiprocessing.active_children()) - others:
                    child.terminate()
            pool.shutdown(cancel_futures=True)
    yield from ((cell, None, LOST) for cell in todo)


def _on_ray(
    job: Job, cells: Sequence[Any], address: str, count: int | None, resources: dict[str, Any]
) -> Iterator[Result]:
    """Plain tasks, at most `count` at a time; Ray repeats those whose worker or machine died."""
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "cluster") from None
    needs = {"num_cpus": 1, **resources}
    with _connected(
        ray, address, max(1, round((count or os.cpu_count() or 1) * needs["num_cpus"]))
    ):
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(node.get("CPU", 0) >= needs["num_cpus"] for node in nodes):
            log.warning("no machine of the cluster has %s CPUs for a task", needs["num_cpus"])
        if not any(node.get("GPU", 0) >= needs.get("num_gpus", 0) for node in nodes):
            log.warning("no machine of the cluster has %s GPUs for a task", needs["num_gpus"])
        remote = ray.remote(max_retries=RETRIES, **needs)(_perform_there)
        shared, todo = ray.put((job, Path.cwd())), deque(cells)
        running: dict[Any, Any] = {}
        try:
            while todo or running:
                while todo and (count is None or len(running) < count):
                    cell = todo.popleft()
                    running[remote.remote(shared, cell)] = cell
                for done in ray.wait(list(running))[0]:
                    cell = running.pop(done)
                    try:
                        yield cell, *ray.get(done)
                    except ray.exceptions.RayTaskError as failure:
                        raise failure.cause from None
                    except ray.exceptions.RayError as failure:
                        yield cell, None, f"{LOST}\n{failure}"
        finally:
            for task in running:
                ray.cancel(task, force=True)


def _perform_there(shared: tuple[Job, Path], cell: Any) -> tuple[bytes | None, str]:
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
        if host:  # Ray itself tries for minutes
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
