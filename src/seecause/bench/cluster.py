"""Shards as Ray tasks, on this machine or on many.

    ray start --head                                                     # on the first machine;
    `ray start --address HOST:6379` on the others
    seecause bench run --cluster auto --out /shared/run ...

Ray places the tasks and repeats one whose worker was lost. Everything else is as in the process
pool: the same shards, the same run folder, the same bits on machines of the same kind. Every
machine must have this version installed and must see the run folder, the data and the weights at
the same paths.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seecause.bench.plan import Plan, Shard, Store
from seecause.bench.runner import perform
from seecause.bench.work import Worker, open_worker
from seecause.errors import BadOption, MissingExtra

RETRIES = 3  # of a task whose worker was lost
LOST = (
    f"its worker was lost {RETRIES + 1} times (killed, or out of memory); give --cluster machines"
    " with more memory, or less --memory"
)
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
        task, held = ray.remote(**needs)(_perform), ray.put((store, plan, Path.cwd()))
        waiting = {task.remote(held, shard): shard for shard in todo}
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


def _perform(held: tuple[Store, Plan, Path], shard: Shard) -> str:
    """In a worker of the cluster."""
    store, plan, home = held
    if not home.is_dir() or not store.shards.is_dir():
        return UNSEEN
    os.chdir(home)  # --data and --weights may be relative
    perform(store, lambda: _opened(plan), shard)
    return ""


# In a worker of the cluster: model and data of the run it works for, by the shards that run asks
# for.

_open: dict[tuple[str, ...], Worker] = {}


def _opened(plan: Plan) -> Worker:
    asked = tuple(shard.id for shard in plan.shards)
    if asked not in _open:
        _open.clear()
        _open[asked] = open_worker(plan)
    return _open[asked]


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "cluster") from None
    return ray


@contextmanager
def _connected(ray: Any, address: str, *, cores: int) -> Iterator[None]:
    """Leave a cluster as it was found: one that this process is already connected to stays
    connected."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local: dict[str, Any] = (
        {"num_cpus": cores, "include_dashboard": False} if address == "local" else {}
    )
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **local)
    except (ConnectionError, ValueError, RuntimeError) as failure:
        said = " ".join(str(failure).split())
        raise BadOption(
            "--cluster",
            address,
            f"local, auto for a cluster begun with `ray start --head`, or its HOST:PORT ({said})",
        ) from None
    try:
        yield
    finally:
        ray.shutdown()
