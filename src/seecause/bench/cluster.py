"""Workers elsewhere: processes of this machine, and actors of a Ray cluster.

    ray start --head        # on the first machine; `ray start --address HOST:6379` on the others
    seecause bench run --ray auto --out RUN ...

Of a cluster every machine must have this version installed and see the data and the weights at the
same paths; results come back to the process that runs the job. See docs/cluster.md.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from seecause.bench.workers import (
    ItemResult,
    WorkerJob,
    WorkerPool,
    Workers,
    attempt,
    open_job,
    refusal_of,
)
from seecause.errors import BadOption, MissingExtra
from seecause.files import digest

log = logging.getLogger(__name__)

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # On a busy machine a worker of niceness 15, which is Ray's choice, starves, and needs more than
    # a minute to begin: Ray would end it and begin another, for ever.
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "600",
}
DEPTH = 2  # items that an actor holds: it need not wait for the next one
REACHED = 5.0  # seconds for a cluster to answer
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5)  # empty settings
HTTP2_SETTINGS = b"\4"  # the kind of the first frame that a server sends


@contextmanager
def process_pool(job: WorkerJob, count: int) -> Iterator[WorkerPool]:
    with tempfile.TemporaryDirectory() as folder:
        share = partial(_share_by_file, Path(folder))
        workers = WorkerPool(lambda: ProcessWorker(job), count, depth=1, share=share)
        with closing(workers) as pool:
            yield pool


def _share_by_file(folder: Path, content: bytes) -> Callable[[], bytes]:
    path = folder / digest(content)
    path.write_bytes(content)
    return path.read_bytes


class ProcessWorker:
    """A process of this machine. Spawned, not forked: torch's threads and a GPU do not survive a
    fork."""

    def __init__(self, job: WorkerJob):
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, context, initializer=_begin, initargs=(job,))
        self.opening = self.pool.submit(_open)

    def submit(self, item: Any) -> Future[ItemResult]:
        try:
            return self.pool.submit(_perform, item)
        except BrokenProcessPool as broken:  # it died while it had nothing to do
            gone: Future[ItemResult] = Future()
            gone.set_exception(broken)
            return gone

    def is_lost(self, failure: BaseException) -> bool:
        return isinstance(failure, BrokenProcessPool)

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


# In a worker process: the job it works for, and what that opened.

_job_state: list[Any] = []


def _begin(job: WorkerJob) -> None:
    _job_state.append(job)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _open() -> str:
    try:
        _job_state.append(open_job(_job_state[0]))
    except Exception as failure:
        return refusal_of(failure)
    return ""


def _perform(item: Any) -> ItemResult:
    job, do = _job_state
    return attempt(do, item, job.failures)


@contextmanager
def ray_pool(job: WorkerJob, workers: Workers, *, most: int) -> Iterator[WorkerPool]:
    """Actors for a job of at most `most` items."""
    assert workers.ray is not None
    ray, needs = _ray(), _needs(job, workers)
    cores = (workers.count or os.cpu_count() or 1) * needs["num_cpus"]
    with _connected(ray, workers.ray, cores=max(1, round(cores))):
        _check_held(ray, needs)
        held = _holds(ray, needs)
        count = min(most, workers.count or held)
        if count > held:
            log.warning("the cluster holds %d of %d workers; the others wait for room", held, count)
        actor, parcel = ray.remote(**needs)(_Actor), ray.put((job, Path.cwd()))
        start, share = (lambda: _RayWorker(ray, actor.remote(parcel))), (lambda b: _Put(ray.put(b)))
        check = partial(_check_held, ray, needs)
        with closing(WorkerPool(start, count, depth=DEPTH, share=share, check=check)) as pool:
            yield pool


def _needs(job: WorkerJob, workers: Workers) -> dict[str, Any]:
    """What Ray is asked for, for each actor."""
    gpus = workers.gpus
    needs: dict[str, Any] = {
        "num_cpus": job.threads if workers.cpus is None else workers.cpus,
        "num_gpus": float(job.device.startswith("cuda")) if gpus is None else gpus,
        "max_restarts": 0,  # the pool begins another, so that items are not bound to a dead one
    }
    return needs if workers.memory is None else {**needs, "memory": workers.memory}


def _room(resources: dict[str, float], needs: dict[str, Any]) -> int:
    """How many workers these resources hold."""
    asked = {"CPU": needs["num_cpus"], "GPU": needs["num_gpus"], "memory": needs.get("memory", 0)}
    rooms = [int(resources.get(kind, 0) / amount) for kind, amount in asked.items() if amount]
    return min(rooms, default=1)


def _nodes(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _holds(ray: Any, needs: dict[str, Any]) -> int:
    return max(1, sum(_room(node, needs) for node in _nodes(ray)))


def _check_held(ray: Any, needs: dict[str, Any]) -> None:
    """An actor that fits nowhere would wait for ever."""
    if any(_room(node, needs) for node in _nodes(ray)):
        return
    asked = f"{needs['num_cpus']:g} CPU, {needs['num_gpus']:g} GPU"
    asked += f", {needs['memory']} bytes of memory" if "memory" in needs else ""
    raise BadOption(
        "--ray",
        f"{asked} for each worker",
        "less (--cpus-per-worker, --gpus-per-worker, --memory-per-worker), or a machine in the"
        " cluster that has so much",
    )


class _Actor:
    """In a worker of the cluster: opens the job once, then does items."""

    def __init__(self, parcel: tuple[WorkerJob, Path]):
        self.job, home = parcel
        if home.is_dir():
            os.chdir(home)  # --data and --weights may be relative

    def open(self) -> str:
        try:
            self.do = open_job(self.job)
        except Exception as failure:
            return refusal_of(failure)
        return ""

    def perform(self, item: Any) -> ItemResult:
        return attempt(self.do, item, self.job.failures)


@dataclass(frozen=True)
class _Put:
    """Bytes in the object store of the cluster."""

    reference: Any

    def __call__(self) -> bytes:
        return _ray().get(self.reference)


class _RayWorker:
    """An actor, as the pool sees it."""

    def __init__(self, ray: Any, actor: Any):
        self.ray, self.actor = ray, actor
        self.opening: Future[str] = actor.open.remote().future()

    def submit(self, item: Any) -> Future[ItemResult]:
        return self.actor.perform.remote(item).future()

    def is_lost(self, failure: BaseException) -> bool:
        """Whether it was the actor, its machine or its memory, and not our code."""
        errors = self.ray.exceptions
        return isinstance(failure, errors.RayError) and not isinstance(failure, errors.RayTaskError)

    def close(self) -> None:
        self.ray.kill(self.actor)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "cluster") from None
    return ray


def check_address(address: str) -> None:
    """Refuse a cluster that cannot be had, before anything is read or loaded."""
    if not _ray().is_initialized():
        _need_ray(_resolved(address))


def _need_ray(address: str) -> None:
    """Refuse HOST:PORT where no Ray answers: it would try for minutes, then end the process.

    Every port of Ray speaks HTTP/2, whose server says its settings as soon as it is greeted.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED) as line:
            line.settimeout(REACHED)
            line.sendall(HTTP2_GREETING)
            frame = line.recv(9, socket.MSG_WAITALL)
    except (OSError, OverflowError) as failure:
        reason = f"nobody answers there ({failure})"
    else:
        encrypted = os.environ.get("RAY_USE_TLS", "0") not in ("", "0")
        if encrypted or frame[3:4] == HTTP2_SETTINGS:
            return
        reason = "what answers there is not Ray"
    raise BadOption("--ray", address, f"the HOST:PORT of a cluster; {reason}")


def _resolved(address: str) -> str:
    """What Ray takes `auto` for: a cluster that was killed may still be written down."""
    if address != "auto":
        return address
    try:
        from ray._private.services import canonicalize_bootstrap_address

        return canonicalize_bootstrap_address(address) or address
    except (ImportError, TypeError, ValueError, ConnectionError):
        return address  # Ray itself says what is wrong


@contextmanager
def _connected(ray: Any, address: str, *, cores: int) -> Iterator[None]:
    """Leave a cluster as it was found: one that this process is already connected to stays
    connected."""
    if ray.is_initialized():
        yield
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    _need_ray(_resolved(address))
    local = {"num_cpus": cores, "include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **local)
    except (ConnectionError, ValueError, RuntimeError, SystemExit) as failure:
        raise BadOption(
            "--ray",
            address,
            "local, auto for a cluster begun with `ray start --head`, or its HOST:PORT"
            f" ({' '.join(str(failure).split())})",
        ) from None
    try:
        yield
    finally:
        ray.shutdown()
