"""What is still to do, in this process, in several, or on a Ray cluster. Shards are independent, so
there is nothing to agree on: who finishes one, writes it.

    ray start --head        # on the first machine; `ray start --address HOST:6379` on the others
    seecause bench run --cluster auto --out /shared/run ...

Every machine must have this version installed and must see the run folder, the data and the weights
at the same paths. Wherever it runs: the same shards, the same folder, and on machines of the same
kind the same bits. A shard whose worker was lost is tried again.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from seecause.attribution.registry import find
from seecause.bench.ablate import with_settings
from seecause.bench.measures import (
    Named,
    group_of,
    group_options,
    groups_of,
    metric_sets,
    pick_metrics,
    with_options,
)
from seecause.bench.plan import ROWS, Plan, Request, Shard, Store, make_plan
from seecause.bench.work import Worker, open_model, open_worker, run_shard
from seecause.data.registry import open_data
from seecause.errors import BadOption, MissingExtra, SeecauseError

REACHED = 5.0  # seconds for a cluster to answer
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5)  # empty settings
HTTP2_SETTINGS = b"\4"  # the kind of the first frame that a server sends
RETRIES = 3  # of a shard whose worker was lost
LOST = (
    f"its worker was lost {RETRIES + 1} times (killed, or out of memory); run the same command"
    " again with fewer --workers or less --memory, or give --cluster machines with more memory"
)
UNSEEN = (
    "this machine of the cluster does not see the run folder and the folder the command was given"
    " in; put both on a shared disk"
)


@dataclass(frozen=True)
class Hole:
    """A number that is not there."""

    method: str
    image: str
    metric: str
    reason: str


@dataclass(frozen=True)
class Status:
    """Where a run stands."""

    total: int
    done: int
    failed: dict[str, str]  # reason by shard
    damaged: dict[str, str]  # what is wrong, by shard; they are pending again
    pending: Sequence[Shard]
    stale: Sequence[str]
    holes: Sequence[Hole]  # in finished shards
    undefined: dict[str, int]  # values by metric that a picture cannot have; no holes
    stopped: str = ""  # why the run ended early

    def not_run(self) -> dict[str, int]:
        """Images that are still to do, by method."""
        images: Counter[str] = Counter()
        for shard in self.pending:
            images[shard.method] += len(shard)
        return dict(images)

    @property
    def complete(self) -> bool:
        return self.done == self.total and not self.holes


def status(folder: Path | str) -> Status:
    """Where the run in a folder stands; `seecause bench status`."""
    store = Store(Path(folder))
    return inspect(store, store.plan())


def inspect(store: Store, plan: Plan) -> Status:
    """Read from the folder alone, so it can be asked while a run is going on. Every byte of the
    finished shards is looked at, no row is."""
    condition = store.condition(shard.id for shard in plan.shards)
    holes: list[Hole] = []
    undefined: Counter[str] = Counter()
    for shard in plan.shards:
        metadata = condition.metadata.get(shard.id, {})
        holes += [Hole(shard.method, *hole) for hole in metadata.get("holes", ())]
        undefined.update(metadata.get("undefined", {}))
    open_shards = [shard for shard in plan.shards if shard.id not in condition.metadata]
    failed = store.failures(shard.id for shard in open_shards)
    return Status(
        total=len(plan.shards),
        done=len(condition.metadata),
        failed=failed,
        damaged=condition.damaged,
        pending=[shard for shard in open_shards if shard.id not in failed],
        stale=store.stale(plan),
        holes=holes,
        undefined=dict(undefined),
    )


def prepare(
    request: Request, *, options: Sequence[Named] = (), metric_options: Sequence[Named] = ()
) -> Worker:
    """Model, data and plan for a request, whose metrics may be names of sets. Which options and
    metrics there are depends on model and data; `Worker.left_out` says what a set had to leave
    out."""
    for word in request.metrics:
        if word not in metric_sets():
            group_of(word)
    data = open_data(request.data, limit=request.limit)
    model = open_model(request)
    metrics, left_out = pick_metrics(request.metrics, model, data)
    groups = {group: group_options(group) for group in groups_of(metrics)}
    entries = {name: find(request.method(name), model.architecture) for name in request.methods}
    methods = {name: entry.options for name, entry in entries.items()}
    request = replace(
        request,
        metrics=metrics,
        measures=with_options("--metric-option", request.measures, metric_options, groups),
        methods=with_options("--option", request.methods, options, methods),
    )
    plan = make_plan(with_settings(request, model), model, data)
    return Worker(plan, model, data, left_out=left_out)


def run(
    folder: Store | Path | str,
    request: Request | Worker,
    *,
    workers: int = 1,
    cluster: str | None = None,
    advance: Callable[[int], None] = lambda images: None,
    enough: Callable[[], str] = lambda: "",
) -> Status:
    """Do every unfinished shard of a request; `advance` hears of the images of each one that ended.

    A failed shard is logged with its reason and tried again by the next run. A prepared worker
    works itself if it is the only one. With `cluster` (auto, local or an address) shards are Ray
    tasks. `enough` is asked before every shard; a reason that it gives ends the run early. Worker
    processes end the shard they are at.
    """
    store = folder if isinstance(folder, Store) else Store(Path(folder))
    store.check()
    worker = request if isinstance(request, Worker) else prepare(request)
    plan = worker.plan
    with store.alone():
        store.prepare(plan)
        done = store.condition(shard.id for shard in plan.shards).metadata
        todo = [shard for shard in plan.shards if shard.id not in done]
        reason = enough()
        for shard in (
            [] if reason else _ended(store, worker, todo, min(workers, len(todo)), cluster)
        ):
            advance(len(shard))
            if reason := enough():
                break
        result = inspect(store, plan)
        return replace(result, stopped=reason) if result.pending else result


def perform(store: Store, open_it: Callable[[], Worker], shard: Shard) -> Shard:
    """One shard, from its first line in the log to its last."""
    store.log("start", shard.id)
    try:
        result = run_shard(open_it(), shard)
    except (SeecauseError, RuntimeError, MemoryError) as failure:
        # torch's out of memory is a RuntimeError
        reason = " ".join(str(failure).split()) or type(failure).__name__
        store.log("failed", shard.id, reason=reason)
        return shard
    store.save(
        shard.id, rows=result.rows, schema=ROWS, tensors=result.tensors, metadata=result.metadata
    )
    store.log("done", shard.id)
    return shard


def _ended(
    store: Store, worker: Worker, todo: Sequence[Shard], workers: int, cluster: str | None
) -> Iterator[Shard]:
    """Shards as they end, wherever they run."""
    if cluster is not None and todo:
        yield from in_cluster(store, worker.plan, todo, cluster, workers=workers)
    elif workers > 1:
        yield from _in_processes(store, worker.plan, todo, workers)
    else:
        for shard in todo:
            yield perform(store, lambda: worker, shard)


def _in_processes(store: Store, plan: Plan, todo: Sequence[Shard], workers: int) -> Iterator[Shard]:
    """A process that dies takes the whole pool with it: what it was at is done again. A shard whose
    worker died is tried alone, so that it takes no other with it, and given up after some tries."""
    waiting = {shard.id: shard for shard in todo}
    lost: Counter[str] = Counter()
    while waiting:
        suspects = [shard for shard in waiting.values() if lost[shard.id]]
        going: dict[Future[Shard], Shard] = {}
        try:
            batch = suspects[:1] or list(waiting.values())
            for shard in _in_pool(store, plan, batch, 1 if suspects else workers, going):
                del waiting[shard.id]
                yield shard
        except BrokenProcessPool:
            for shard in going.values():
                lost[shard.id] += 1
                if lost[shard.id] > RETRIES:
                    store.log("failed", shard.id, reason=LOST)
                    del waiting[shard.id]
                    yield shard


def _in_pool(
    store: Store,
    plan: Plan,
    todo: Sequence[Shard],
    workers: int,
    going: dict[Future[Shard], Shard],
) -> Iterator[Shard]:
    """Spawned, not forked: torch's threads and a GPU do not survive a fork. A worker is handed one
    shard at a time, so that few are left when it is enough; `going` holds those that are out."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin, initargs=(store, plan)
    )
    left = list(reversed(todo))
    try:
        while left or going:
            while left and len(going) < workers:
                going[pool.submit(_perform, left[-1])] = left[-1]
                left.pop()
            ended, _ = wait(going, return_when=FIRST_COMPLETED)
            for future in ended:
                shard = future.result()
                del going[future]
                yield shard
    finally:
        pool.shutdown(cancel_futures=True)


# In a worker process: which run it works for, and the model it has opened.

_work_for: list[tuple[Store, Plan]] = []


def _begin(store: Store, plan: Plan) -> None:
    _work_for.append((store, plan))
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever, or finish a shard that the
    next run has begun."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _perform(shard: Shard) -> Shard:
    return perform(_work_for[0][0], _opened, shard)


@cache
def _opened() -> Worker:
    return open_worker(_work_for[0][1])


# On a Ray cluster.


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
