"""Shards on a real Ray cluster: the same bits as here, also when a worker is lost."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest
from typer.testing import CliRunner

from seecause.bench import cluster as cluster_module
from seecause.bench.plan import Store
from seecause.bench.runner import run
from seecause.cli import app
from seecause.errors import BadOption
from tests.bench.toy import worker

ray = pytest.importorskip(
    "ray", reason="the cluster extra is not installed: pip install 'seecause[cluster]'"
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:::ray.*"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    """One cluster of one core for this file; the runs find it and leave it running."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    yield "local"
    ray.shutdown()


def same_bits(here: Store, there: Store) -> bool:
    files = [
        f"{shard.id}.{kind}"
        for shard in worker().plan.shards
        for kind in ("parquet", "safetensors")
    ]
    return all(
        (there.shards / file).read_bytes() == (here.shards / file).read_bytes() for file in files
    )


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A finished run in this process."""
    store = Store(tmp_path_factory.mktemp("here"))
    assert run(store, worker()).complete
    return store


def test_a_cluster_gives_the_same_bits(cluster, here, tmp_path):
    there, heard = Store(tmp_path / "there"), []
    assert run(there, worker(), cluster=cluster, advance=heard.append).complete
    assert sum(heard) == 18 and ray.is_initialized()
    assert os.getpid() not in {event["process"] for event in there.events()}
    assert same_bits(here, there)


@pytest.mark.slow
def test_a_killed_worker_is_nobodys_loss(cluster, here, tmp_path):
    there, heard = Store(tmp_path / "there"), []

    def kill_one(images: int) -> None:
        heard.append(images)
        if len(heard) == 1:
            os.kill(there.events()[-1]["process"], signal.SIGKILL)

    assert run(there, worker(), cluster=cluster, advance=kill_one).complete
    assert len({event["process"] for event in there.events()}) == 2
    assert same_bits(here, there)


def test_a_machine_that_does_not_see_the_folder_says_so(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("seecause.bench.cluster.Path.cwd", lambda: tmp_path / "elsewhere")
    status = run(Store(tmp_path / "run"), worker(limit=2, methods={"random": {}}), cluster=cluster)
    assert not status.complete and "shared disk" in next(iter(status.failed.values()))


def test_a_cluster_that_is_not_there_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(
        ray,
        "init",
        lambda address, **_: (_ for _ in ()).throw(ConnectionError(f"nothing at {address}")),
    )
    with pytest.raises(BadOption, match="ray start --head"):
        run(Store(tmp_path), worker(limit=2), cluster="auto")


def test_the_command_line_runs_on_the_cluster(cluster, tmp_path):
    words = [
        "bench",
        "run",
        "--method",
        "sobel",
        "--metric",
        "aupr1",
        "--limit",
        "2",
        "--device",
        "cpu",
        "--cluster",
        cluster,
        "--out",
        str(tmp_path / "run"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "1 of 1 shards done" in done.output, done.output


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_a_cluster_that_cannot_be_reached_is_refused_in_seconds(tmp_path, monkeypatch, address):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would try for minutes"))
    with pytest.raises(BadOption, match="nobody answers"):
        run(Store(tmp_path), worker(limit=2), cluster=address)


@pytest.fixture(params=[b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
def stranger(request):
    """The port of a server that is no Ray: it says something else, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        lines = []

        def answer() -> None:
            while True:
                try:
                    lines.append(server.accept()[0])
                except OSError:
                    return
                lines[-1].sendall(request.param)

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for line in lines:
        line.close()


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_answer_that_is_not_rays_is_refused_in_seconds(tmp_path, monkeypatch, stranger, form):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would try for minutes"))
    monkeypatch.setattr(cluster_module, "REACHED", 0.5)
    with pytest.raises(BadOption, match=r"not Ray|nobody answers"):
        run(Store(tmp_path), worker(limit=2), cluster=form.format(stranger))


def test_auto_refuses_a_cluster_that_is_no_more(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{gone}")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would try for minutes"))
    with pytest.raises(BadOption, match="nobody answers"):
        run(Store(tmp_path), worker(limit=2), cluster="auto")


def test_a_real_cluster_is_not_refused(cluster):
    cluster_module._need_ray(ray.get_runtime_context().gcs_address)


def test_rays_way_to_give_up_is_an_error_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: (_ for _ in ()).throw(SystemExit(15)))
    with pytest.raises(BadOption, match="ray start --head"):
        run(Store(tmp_path), worker(limit=2), cluster="auto")
