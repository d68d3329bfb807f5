"""Shards as tasks of a Ray cluster.

    ray start --head        # on the first machine; `ray start --address HOST:6379` on the others
    seecause bench run --cluster auto --out /shared/run ...

Every machine must have this version installed and must see the run folder, the data and the weights
at the same paths. A shard whose worker was lost is tried again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seecause.bench.plan import Plan, Shard, Store
from seecause.bench.runner import LOST, RETRIES, perform
from seecause.bench.work import Worker, open_worker
from seecause.errors import BadOption, MissingExtra

REACHED = 5.0  # seconds for a cluster to answer
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5)  # empty settings
HTTP2_SETTINGS = b"\4"  # the kind of the first frame that a server sends
UNSEEN = (
    "this machine of the cluster does not see the run folder and the folder the command was given"
    " in; put both on a shared disk"
)


def in_cluster(
    store: Store, plan: Plan, todo: Sequence[Shard], address: str, *, workers: int = 1
) -> Iterator[Shard]:
    """Shards as they end, in any order. `address`: auto for the cluster that is running, local for
    one of `workers` tasks on this machine, or HOST:PORT."""
    ray = _ray()
    store = Store(store.folder.resolve())
    threads = plan.request.threads
    with _connected(ray, address, cores=workers * threads):
        needs = {
            "num_cpus": threads,
            "num_gpus": int(plan.request.device.startswith("cuda")),
            "max_retries": RETRIES,
        }
        task, job = ray.remote(**needs)(_perform_task), ray.put((store, plan, Path.cwd()))
        waiting = {task.remote(job, shard): shard for shard in todo}
        try:
            while waiting:
                (ended, *_), _ = ray.wait(list(waiting))
                shard = waiting.pop(ended)
                problem = _outcome(ray, ended)
                if problem:
                    store.log("failed", shard.id, reason=problem)
                yield shard
        finally:
            for left in waiting:
                ray.cancel(left, force=True)


def _outcome(ray: Any, ended: Any) -> str:
    """Why the task did not do its work; empty if it did. An error in our own code is raised."""
    lost = (
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.NodeDiedError,
        ray.exceptions.OutOfMemoryError,
    )
    try:
        return ray.get(ended)
    except lost:
        return LOST


def _perform_task(job: tuple[Store, Plan, Path], shard: Shard) -> str:
    """In a worker of the cluster."""
    store, plan, home = job
    if not home.is_dir() or not store.shards.is_dir():
        return UNSEEN
    os.chdir(home)  # --data and --weights may be relative
    perform(store, lambda: _opened_for(plan), shard)
    return ""


# In a worker of the cluster: model and data of the run it works for, by that run's shards.

_open: dict[tuple[str, ...], Worker] = {}


def _opened_for(plan: Plan) -> Worker:
    shards = tuple(shard.id for shard in plan.shards)
    if shards not in _open:
        _open.clear()
        _open[shards] = open_worker(plan)
    return _open[shards]


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "cluster") from None
    return ray


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
    raise BadOption("--cluster", address, f"the HOST:PORT of a cluster; {reason}")


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
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    _need_ray(_resolved(address))
    local = {"num_cpus": cores, "include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **local)
    except (ConnectionError, ValueError, RuntimeError, SystemExit) as failure:
        raise BadOption(
            "--cluster",
            address,
            "local, auto for a cluster begun with `ray start --head`, or its HOST:PORT"
            f" ({' '.join(str(failure).split())})",
        ) from None
    try:
        yield
    finally:
        ray.shutdown()
