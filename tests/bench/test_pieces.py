"""Audits, scores of heads and discoveries in pieces: the same bits, kept, gone on with, and done by
others."""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torchvision
from typer.testing import CliRunner

import seecause as sc
from seecause._pieces import in_pieces
from seecause.background import score
from seecause.background.images import logits_piece
from seecause.background.masks import mask_files
from seecause.bench import pieces
from seecause.bench.pieces import pack_model, resumable
from seecause.bench.store import ShardStore
from seecause.bench.workers import SerialPool, Workers
from seecause.cli import app
from seecause.cli.progress import Incomplete
from seecause.cli.workers import _beside, with_pieces
from seecause.errors import BadOption, SeecauseError
from tests.background.repair_toys import fitted, plain_vit, scenes, wrapped
from tests.bench.toy import killing
from tests.lvlm.test_classifier import NAMES, QUESTION, lvlm


@pytest.fixture(scope="module")
def ready():
    pictures = scenes(40)
    return fitted(pictures), pictures


def audited(model, pictures) -> dict[str, float]:
    return sc.audit(model, pictures).numbers()


def scored(model, pictures) -> dict[str, float]:
    scores = score(model, pictures.images, pictures.truth)
    return {"mean": scores.value.tolist(), "error": scores.error.tolist()}


def discovered(model, pictures) -> list[str]:
    found = sc.discover(model, pictures, kinds=3, trials=8, layers=[1], top=2, method="caap")
    return [finding.sentence() for finding in found.findings]


def masked(model, pictures) -> list[float]:
    return sc.background.discover_masks(model, pictures.images[:4], steps=2, grid=4).soft.tolist()


JOBS = [audited, scored, discovered, masked]


def plain_results(ready) -> list:
    return [job(*ready) for job in JOBS]


@pytest.mark.parametrize("job", JOBS)
def test_kept_pieces_give_the_same_bits_and_are_not_done_again(ready, tmp_path, monkeypatch, job):
    plain = job(*ready)
    with resumable(tmp_path / "work", "toy"):
        assert job(*ready) == plain
    ids = ShardStore(tmp_path / "work", "toy --work").ids()
    assert ids
    monkeypatch.setattr(
        "seecause.bench.pieces._perform_here", lambda item: pytest.fail("it was finished")
    )
    with resumable(tmp_path / "work", "toy"):
        assert job(*ready) == plain


def test_a_job_that_was_stopped_goes_on(ready, tmp_path):
    plain, pictures = scored(*ready), ready[1]
    heard: list[int] = []

    def stop(done: int) -> None:
        heard.append(done)
        if len(heard) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), resumable(tmp_path, "toy"):
        score(ready[0], pictures.images, pictures.truth, progress=stop)
    store = ShardStore(tmp_path, "toy --work")
    assert len(store.ids()) == 2
    store.file(store.ids()[0], "safetensors").write_bytes(b"damaged")
    with resumable(tmp_path, "toy"):
        assert scored(*ready) == plain
    assert len(store.ids()) == 5  # of eight pictures each


def test_other_weights_are_other_pieces(ready, tmp_path):
    model, pictures = ready
    with resumable(tmp_path, "toy"):
        audited(model, pictures)
    before = set(ShardStore(tmp_path, "toy --work").ids())
    with resumable(tmp_path, "toy"):
        audited(fitted(pictures, seed=1), pictures)
    assert len(ShardStore(tmp_path, "toy --work").ids()) == 2 * len(before)


def test_a_function_in_a_piece_is_called_here_and_not_kept(ready, tmp_path):
    model, pictures = ready

    def margin(logits):
        return logits[:, 0] - logits[:, 1]

    plain = score(model, pictures.images, response=margin, guard=False).value
    with resumable(tmp_path, "toy"):
        again = score(model, pictures.images, response=margin, guard=False).value
    assert torch.equal(plain, again) and not ShardStore(tmp_path, "toy --work").ids()


def test_an_error_in_a_piece_is_the_job_s_own(ready, tmp_path):
    with pytest.raises(BadOption, match="temperature"), resumable(tmp_path, "toy"):
        score(ready[0], ready[1].images, ready[1].truth, temperature=-1.0)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SeecauseError, match="a new folder"), resumable(tmp_path, "toy"):
        pass


def prompted():
    with torch.no_grad():
        model = sc.lvlm.classifier(lvlm("llava"), NAMES, question=QUESTION)
        model(torch.zeros(1, 3, *model.preprocess.size, dtype=model.dtype))  # installs its hooks
    return model


def staged():
    module = torchvision.models.resnet18(weights=None, num_classes=3)
    return sc.wrap(module.eval(), mean=(0.5,) * 3, std=(0.5,) * 3, size=(64, 64))


@pytest.mark.parametrize("make", [lambda: wrapped(plain_vit()), staged, prompted])
def test_models_of_every_architecture_travel(make):
    pytest.importorskip("cloudpickle")
    model = make()
    model.memo["lock"] = threading.Lock()  # what is kept between calls stays here
    there = pieces._unpack_model(pack_model(model), "cpu")
    assert there.fingerprint() == model.fingerprint()
    images = torch.rand(1, 3, *model.preprocess.size, dtype=model.dtype)
    with torch.no_grad(), model.eval_mode(), there.eval_mode():
        assert torch.equal(there(images), model(images))


def test_gates_travel_too(ready):
    pytest.importorskip("cloudpickle")
    model = copy.copy(ready[0])
    model.gates = torch.rand(2, 4)
    assert torch.equal(pieces._unpack_model(pack_model(model), "cpu").gates, model.gates)


def test_a_model_that_cannot_travel_is_refused_before_any_work(tmp_path, monkeypatch):
    pytest.importorskip("cloudpickle")
    pictures = scenes(8)
    model = fitted(pictures)
    model.module.lock = threading.Lock()
    monkeypatch.setattr(
        "seecause.bench.cluster.ProcessWorker", lambda job: pytest.fail("a worker was begun")
    )
    with (
        pytest.raises(BadOption, match="can be sent to other processes"),
        resumable(tmp_path / "work", "toy", 2),
    ):
        scored(model, pictures)
    assert not (tmp_path / "work").exists()


def facts(model, device: str = "cpu", **piece) -> str:
    return pieces._PieceKeys.of(logits_piece, model, device, pieces.arithmetic()).key(piece)


def test_a_piece_is_named_by_all_that_decides_it(ready, tmp_path, monkeypatch):
    model = ready[0]
    names = {facts(model), facts(model, "cuda")}
    frame = dataclasses.replace(model.preprocess, mean=(0.0,) * 3)
    names.add(facts(dataclasses.replace(model, preprocess=frame, memo={})))
    names |= {facts(model, a={"b": 1}, c=2), facts(model, a={"b": 1, "c": 2})}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
        names.add(facts(model))
    names.add(facts(model, method="caap"))
    with monkeypatch.context() as patch:
        patch.setattr(
            pieces, "plugin_digest", lambda run: "" if run is logits_piece else "of a plug-in"
        )
        names.add(facts(model, method="caap"))
    assert len(names) == 8


def test_pieces_made_on_a_gpu_are_kept_as_such(ready, monkeypatch):
    devices = []

    @contextmanager
    def pool(job, workers, *, perform):
        devices.append(job.device)
        yield SerialPool(job, perform)

    plain = pieces._PieceKeys.of
    of = staticmethod(lambda *about: devices.append(about[2]) or plain(*about))
    monkeypatch.setattr(pieces, "open_pool", pool)
    monkeypatch.setattr(pieces._PieceKeys, "of", of)
    with resumable(None, "toy", Workers(ray="auto", gpus=0.5)):
        scored(*ready)
    assert set(devices) == {"cuda"} and len(devices) > 1


def test_workers_have_one_thread_or_as_many_as_cores_are_set_aside(ready, monkeypatch):
    threads = []

    @contextmanager
    def pool(job, workers, *, perform):
        threads.append(job.threads)
        yield SerialPool(job, perform)

    monkeypatch.setattr(pieces, "open_pool", pool)
    monkeypatch.setattr(pieces, "arithmetic", lambda: [16, "highest", False])
    for workers in (None, 4, Workers(ray="auto"), Workers(ray="auto", cpus=2), Workers(count=1)):
        with resumable(None, "toy", workers):
            results = in_pieces(logits_piece, ready[0], [{"images": ready[1].images[:1]}])
        assert len(results) == 1
    assert threads == [16, 1, 1, 2, 16]


def test_other_software_makes_other_files_of_eyes_and_masks(ready, tmp_path, monkeypatch):
    model, pictures = ready

    def names() -> set[str]:
        eye = sc.eye("own", model=model, cache=tmp_path)
        (file,) = mask_files(tmp_path, model, {}, pictures.images[:1], None, "mean")
        return {eye._file(pictures.images, (4, 4)).stem, file.stem}

    before = names()
    monkeypatch.setattr("seecause.background.objects.versions", lambda: {"torch": "other"})
    monkeypatch.setattr("seecause.background.masks.versions", lambda: {"torch": "other"})
    assert not before & names()


def test_pieces_are_kept_beside_a_folder_that_has_a_name(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", "./", "../here"):
        assert _beside(Path(out)) == tmp_path / "here.work"
    with pytest.raises(BadOption, match="--out"):
        _beside(Path("/"))


def test_nothing_stays_behind_where_some_pictures_could_not_be_read(ready, tmp_path):
    @with_pieces
    def toy(*, out: Path) -> None:
        scored(*ready)
        assert (tmp_path / "result.work").is_dir()
        raise Incomplete

    with pytest.raises(Incomplete):
        toy(out=tmp_path / "result")
    assert not (tmp_path / "result.work").exists()


WORDS = ["heads", "score", "--limit", "6", "--masks", "oracle", "--device", "cpu", "--quiet"]


def test_a_killed_command_goes_on_and_leaves_nothing_behind(tmp_path, monkeypatch):
    out, work = tmp_path / "scores", tmp_path / "scores.work"
    straight = CliRunner().invoke(app, [*WORDS, "--out", str(tmp_path / "straight")])
    assert straight.exit_code == 0, straight.output
    assert not (tmp_path / "straight.work").exists()
    with monkeypatch.context() as patch:
        patch.setattr("seecause.cli.heads_prune._write_scores", lambda *_, **__: os.abort.missing)
        assert CliRunner().invoke(app, [*WORDS, "--out", str(out)]).exit_code != 0
    assert list((work / "shards").glob("*.json"))
    with monkeypatch.context() as patch:
        patch.setattr("seecause.bench.pieces._perform_here", lambda item: pytest.fail("finished"))
        done = CliRunner().invoke(app, [*WORDS, "--out", str(out)])
    assert done.exit_code == 0, done.output
    table = "scores.csv"
    assert (out / table).read_bytes() == (tmp_path / "straight" / table).read_bytes()
    assert not work.exists()
    shutil.rmtree(out)


@pytest.mark.slow
def test_processes_give_the_same_bits(ready, tmp_path):
    with resumable(tmp_path, "toy", 2):
        assert [job(*ready) for job in JOBS] == plain_results(ready)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::ray.*")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_two_of_four_actors_killed_give_the_same_bits(ready, tmp_path, cluster):
    store = ShardStore(tmp_path, "toy --work")
    with (
        killing(2) as victims,
        resumable(tmp_path, "toy", Workers(count=4, ray=cluster)),
    ):
        assert [job(*ready) for job in JOBS] == plain_results(ready)
    assert len(victims) == 2 and os.getpid() not in victims and store.ids()
