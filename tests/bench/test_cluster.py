"""Shards on a real Ray cluster: the same bits as here, also when a worker is lost."""

from __future__ import annotations

import os
import shutil
import socket
import threading

import pytest
from typer.testing import CliRunner

import seecause as sc
from seecause.bench import cluster as cluster_module
from seecause.bench.cluster import ray_pool
from seecause.bench.lvlm_study import StudyOptions, run_lvlm_study
from seecause.bench.lvlm_table import to_csv
from seecause.bench.plan import Store
from seecause.bench.runner import run
from seecause.bench.study import run_study
from seecause.bench.workers import Workers
from seecause.cli import app
from seecause.data import open_data
from seecause.data.images import to_pil
from seecause.errors import BadOption
from tests.bench import test_study
from tests.bench.toy import killing, worker

ray = pytest.importorskip(
    "ray", reason="the cluster extra is not installed: pip install 'seecause[cluster]'"
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:::ray.*"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]


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
    assert run(
        there, worker(), workers=Workers(count=1, ray=cluster), advance=heard.append
    ).complete
    assert sum(heard) == 18 and ray.is_initialized()
    done = [event for event in there.events() if event["event"] == "done"]
    assert os.getpid() not in {event["process"] for event in done}
    assert same_bits(here, there)


@pytest.mark.slow
def test_two_of_four_workers_killed_are_nobodys_loss(cluster, here, tmp_path):
    there = Store(tmp_path / "there")
    with killing(2) as victims:
        assert run(there, worker(), workers=Workers(count=4, ray=cluster)).complete
    assert len(victims) == 2
    assert same_bits(here, there)


def test_more_than_any_machine_has_is_refused(cluster, tmp_path):
    for asked in ({"cpus": 5}, {"gpus": 1}, {"memory": 1 << 60}):
        with pytest.raises(BadOption, match="for each worker"):
            run(Store(tmp_path), worker(limit=2), workers=Workers(ray=cluster, **asked))


def test_a_cluster_says_how_many_workers_it_holds(cluster, caplog):
    class Job:
        threads, device = 1, "cpu"

    with ray_pool(Job(), Workers(ray=cluster, count=6, cpus=2), most=100) as pool:
        assert pool.count == 6
    assert "the cluster holds 2 of 6 workers" in caplog.text
    with ray_pool(Job(), Workers(ray=cluster, cpus=2), most=100) as pool:
        assert pool.count == 2


def test_a_cluster_that_is_not_there_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(
        ray,
        "init",
        lambda address, **_: (_ for _ in ()).throw(ConnectionError(f"nothing at {address}")),
    )
    with pytest.raises(BadOption, match="ray start --head"):
        run(Store(tmp_path), worker(limit=2), workers=Workers(ray="auto"))


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
        "--ray",
        cluster,
        "--workers",
        "1",
        "--cpus-per-worker",
        "0.5",
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
        run(Store(tmp_path), worker(limit=2), workers=Workers(ray=address))


@pytest.mark.parametrize("command", [["audit"], ["bench", "run"], ["study", "none.toml"]])
def test_commands_refuse_it_before_they_load_anything(tmp_path, monkeypatch, command):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("seecause.loading.load", lambda *_, **__: pytest.fail("a model was loaded"))
    done = CliRunner().invoke(app, [*command, "--ray", "127.0.0.1:1", "--out", str(tmp_path / "o")])
    assert isinstance(done.exception, BadOption) or done.exit_code == 2
    assert "nobody answers" in f"{done.output} {done.exception}" and not list(tmp_path.iterdir())


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
        run(Store(tmp_path), worker(limit=2), workers=Workers(ray=form.format(stranger)))


def test_auto_refuses_a_cluster_that_is_no_more(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{gone}")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray would try for minutes"))
    with pytest.raises(BadOption, match="nobody answers"):
        run(Store(tmp_path), worker(limit=2), workers=Workers(ray="auto"))


def test_a_real_cluster_is_not_refused(cluster):
    cluster_module._need_ray(ray.get_runtime_context().gcs_address)


def test_rays_way_to_give_up_is_an_error_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: (_ for _ in ()).throw(SystemExit(15)))
    with pytest.raises(BadOption, match="ray start --head"):
        run(Store(tmp_path), worker(limit=2), workers=Workers(ray="auto"))


@pytest.mark.slow
def test_studies_run_on_the_cluster_and_two_of_four_workers_may_die(cluster, tmp_path):
    text = test_study.TOML.replace("tests.bench.study_toy", "cells_beside_it")
    (tmp_path / "toy.toml").write_text(text.format(seeds=[1, 2, 3, 4]))
    shutil.copy(test_study.toy.__file__, tmp_path / "cells_beside_it.py")
    lvlm, data = sc.lvlm.load("builtin:critters-llava"), open_data("critters:clean:test", limit=6)
    bank = sc.lvlm.make_bank(lvlm, [to_pil(data[index].image) for index in range(2)])
    options = StudyOptions("Which critter is this?", masks=8, token_masks=8, floor=None)

    def tables(name: str, workers: Workers | None) -> tuple[str, str]:
        place = tmp_path / name
        cells = run_study(tmp_path / "toy.toml", workers=workers, out=place, work=place / "cells")
        study = run_lvlm_study(lvlm, bank, data, options, place / "lvlm", workers=workers)
        return cells.csv.read_text(), to_csv(study)

    with killing(2) as victims:
        there = tables("there", Workers(count=4, ray=cluster))
    assert there == tables("here", None) and len(victims) == 2
