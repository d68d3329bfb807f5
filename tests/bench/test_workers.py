"""Workers that cannot begin, or need not: the pool goes on with the others, and says why."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from seecause._software import versions
from seecause.bench import cluster, runner, workers
from seecause.bench.plan import Store
from seecause.bench.workers import ItemResult, WorkerPool, Workers, WorkersFailed, open_pool
from seecause.cli.workers import WorkerOptions
from seecause.errors import BadOption
from tests.bench.toy import worker


class FakeWorker:
    """A worker that opens with a failure, answers at once, or never opens."""

    def __init__(self, failure: Exception | None = None, *, opens: bool = True, dies: bool = False):
        self.opening, self.dies = Future(), dies
        if failure is not None:
            self.opening.set_exception(failure)
        elif opens:
            self.opening.set_result("")

    def submit(self, item):
        future = Future()
        if self.dies:
            future.set_exception(EOFError("node gone"))
        else:
            future.set_result(ItemResult(item))
        return future

    def is_lost(self, failure):
        return isinstance(failure, EOFError)

    def close(self):
        pass


def pool_of(*workers: FakeWorker, **more) -> WorkerPool:
    left = iter(workers)
    count = more.pop("count", len(workers))
    return WorkerPool(
        lambda: next(left), count, depth=1, share=lambda content: lambda: content, **more
    )


def performed(pool: WorkerPool, items=range(5)) -> list:
    left = iter(items)
    return sorted(answer.value for _, answer in pool.run(lambda: next(left, None)))


DRIVER = RuntimeError("Found no NVIDIA driver")


def test_a_worker_that_cannot_open_is_left_out(caplog):
    assert performed(pool_of(FakeWorker(DRIVER), FakeWorker())) == [0, 1, 2, 3, 4]
    assert "RuntimeError: Found no NVIDIA driver (on " in caplog.text
    with pytest.raises(WorkersFailed, match="no worker is left: RuntimeError: Found no NVIDIA"):
        performed(pool_of(FakeWorker(DRIVER), FakeWorker(DRIVER)))


def test_any_error_of_opening_is_a_refusal(monkeypatch):
    def broken(job):
        raise PermissionError("weights may not be read")

    monkeypatch.setattr(cluster, "open_job", broken)
    monkeypatch.setattr(cluster, "_job_state", [None])
    assert cluster._open().startswith("PermissionError: weights may not be read (on ")


def test_a_process_opens_its_job_once_and_then_does_items(monkeypatch):
    class Doubling:
        failures, threads, device, versions = (ValueError,), 1, "cpu", versions()
        opened = 0

        def open(self):
            Doubling.opened += 1
            return lambda item: 2 * item if item else int("none")

    monkeypatch.setattr(cluster, "_job_state", [])
    cluster._begin(Doubling())
    assert cluster._open() == "" and Doubling.opened == 1
    assert [cluster._perform(item).value for item in (1, 2)] == [2, 4] and Doubling.opened == 1
    lost = cluster._perform(0)
    assert lost.value is None and lost.kind == "ValueError" and "none" in lost.failure


@pytest.mark.parametrize(
    ("device", "workers", "needs"),
    [
        ("cpu", {}, {"num_cpus": 3, "num_gpus": 0.0}),
        ("cuda:1", {}, {"num_cpus": 3, "num_gpus": 1.0}),
        ("cuda", {"gpus": 0.25, "cpus": 1.5}, {"num_cpus": 1.5, "num_gpus": 0.25}),
        ("cpu", {"gpus": 2.0, "memory": 7}, {"num_cpus": 3, "num_gpus": 2.0, "memory": 7}),
    ],
)
def test_a_cluster_is_asked_for_what_the_job_or_the_user_says(device, workers, needs):
    job = SimpleNamespace(threads=3, device=device)
    assert cluster._needs(job, Workers(ray="auto", **workers)) == {**needs, "max_restarts": 0}


def test_room_on_a_cluster_is_that_of_the_scarcest():
    node = {"CPU": 8.0, "GPU": 1.0, "memory": 100.0}
    asked = {"num_cpus": 2, "num_gpus": 0.5, "memory": 30}
    assert cluster._room(node, asked) == 2
    assert cluster._room(node, {"num_cpus": 2, "num_gpus": 0, "memory": 30}) == 3
    assert cluster._room({"CPU": 8.0}, asked) == 0  # no GPU there
    nodes = [{"Alive": alive, "Resources": node} for alive in (True, False, True)]
    ray = SimpleNamespace(nodes=lambda: nodes)
    assert cluster._holds(ray, asked) == 4  # of the two that are alive
    with pytest.raises(BadOption, match="9 CPU, 0 GPU for each worker"):
        cluster._check_held(ray, {"num_cpus": 9, "num_gpus": 0})


def test_auto_is_the_address_that_ray_wrote_down(monkeypatch):
    services = pytest.importorskip("ray._private.services")
    written = {"canonicalize_bootstrap_address": lambda address: f"10.0.0.1:6379 for {address}"}
    monkeypatch.setattr(services, *next(iter(written.items())))
    assert cluster._resolved("auto") == "10.0.0.1:6379 for auto"
    assert cluster._resolved("10.0.0.2:1") == "10.0.0.2:1"


def test_a_replacement_that_fits_nowhere_ends_the_job_in_words(monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.01)

    def check():
        raise BadOption("--ray", "1 CPU for each worker", "a machine that has so much")

    with pytest.raises(BadOption, match="for each worker"):
        performed(pool_of(FakeWorker(dies=True), FakeWorker(opens=False), count=1, check=check))


def test_nobody_is_begun_for_nothing(monkeypatch):
    begun = []
    monkeypatch.setattr(cluster, "ProcessWorker", lambda job: begun.append(job) or FakeWorker())
    for most in (0, None):
        with open_pool(object(), 4, most=most) as pool:
            assert list(pool.run(lambda: None)) == []
    assert begun == []


def test_only_a_cluster_sets_something_aside(tmp_path):
    for asked in ({"cpus": 1}, {"gpus": 1}, {"memory": 1 << 30}):
        with (
            pytest.raises(BadOption, match=r"-per-worker=.*--ray"),
            open_pool(object(), Workers(**asked)),
        ):
            pass
    options = dict.fromkeys(("cpus_per_worker", "memory_per_worker"))
    with pytest.raises(BadOption, match="--gpus-per-worker"):
        WorkerOptions(workers=2, gpus_per_worker=0.5, **options).made()


def test_a_cluster_beside_workers_keeps_what_each_may_use(tmp_path, monkeypatch):
    asked = []

    def stop(job, workers, **_):
        asked.append(workers)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "open_pool", stop)
    with pytest.raises(KeyboardInterrupt):
        runner.run(Store(tmp_path), worker(limit=2), workers=Workers(count=3, cpus=2.0, ray="auto"))
    assert asked == [Workers(count=3, cpus=2.0, ray="auto")]
