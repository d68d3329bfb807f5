"""Audits, scores of heads and discoveries in pieces: the same bits, kept, gone on with, and done by
others."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from typer.testing import CliRunner

import seecause as sc
from seecause.bench.carry import carrying
from seecause.bench.hands import Workers
from seecause.bench.store import ShardStore
from seecause.cli import app
from seecause.errors import BadOption, SeecauseError
from seecause.heads import score
from tests.bench.toy import killing
from tests.repair.toys import fitted, scenes


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
    return sc.heads.discover_masks(model, pictures.images[:4], steps=2, grid=4).soft.tolist()


JOBS = [audited, scored, discovered, masked]


def plain_results(ready) -> list:
    return [job(*ready) for job in JOBS]


@pytest.mark.parametrize("job", JOBS)
def test_kept_pieces_give_the_same_bits_and_are_not_done_again(ready, tmp_path, monkeypatch, job):
    plain = job(*ready)
    with carrying(tmp_path / "work", "toy"):
        assert job(*ready) == plain
    ids = ShardStore(tmp_path / "work", "toy --work").ids()
    assert ids
    monkeypatch.setattr(
        "seecause.bench.carry._perform_here", lambda item: pytest.fail("it was finished")
    )
    with carrying(tmp_path / "work", "toy"):
        assert job(*ready) == plain


def test_a_job_that_was_stopped_goes_on(ready, tmp_path):
    plain, pictures = scored(*ready), ready[1]
    heard: list[int] = []

    def stop(done: int) -> None:
        heard.append(done)
        if len(heard) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), carrying(tmp_path, "toy"):
        score(ready[0], pictures.images, pictures.truth, progress=stop)
    store = ShardStore(tmp_path, "toy --work")
    assert len(store.ids()) == 2
    store.file(store.ids()[0], "safetensors").write_bytes(b"damaged")
    with carrying(tmp_path, "toy"):
        assert scored(*ready) == plain
    assert len(store.ids()) == 5  # of eight pictures each


def test_other_weights_are_other_pieces(ready, tmp_path):
    model, pictures = ready
    with carrying(tmp_path, "toy"):
        audited(model, pictures)
    before = set(ShardStore(tmp_path, "toy --work").ids())
    with carrying(tmp_path, "toy"):
        audited(fitted(pictures, seed=1), pictures)
    assert len(ShardStore(tmp_path, "toy --work").ids()) == 2 * len(before)


def test_a_function_in_a_piece_is_called_here_and_not_kept(ready, tmp_path):
    model, pictures = ready

    def margin(logits):
        return logits[:, 0] - logits[:, 1]

    plain = score(model, pictures.images, response=margin, guard=False).value
    with carrying(tmp_path, "toy"):
        again = score(model, pictures.images, response=margin, guard=False).value
    assert torch.equal(plain, again) and not ShardStore(tmp_path, "toy --work").ids()


def test_an_error_in_a_piece_is_the_job_s_own(ready, tmp_path):
    with pytest.raises(BadOption, match="temperature"), carrying(tmp_path, "toy"):
        score(ready[0], ready[1].images, ready[1].truth, temperature=-1.0)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SeecauseError, match="a new folder"), carrying(tmp_path, "toy"):
        pass


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
        patch.setattr("seecause.bench.carry._perform_here", lambda item: pytest.fail("finished"))
        done = CliRunner().invoke(app, [*WORDS, "--out", str(out)])
    assert done.exit_code == 0, done.output
    table = "scores.csv"
    assert (out / table).read_bytes() == (tmp_path / "straight" / table).read_bytes()
    assert not work.exists()
    shutil.rmtree(out)


@pytest.mark.slow
def test_processes_give_the_same_bits(ready, tmp_path):
    with carrying(tmp_path, "toy", 2):
        assert [job(*ready) for job in JOBS] == plain_results(ready)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::ray.*")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_two_of_four_actors_killed_give_the_same_bits(ready, tmp_path, cluster):
    store = ShardStore(tmp_path, "toy --work")
    with (
        killing(2) as victims,
        carrying(tmp_path, "toy", Workers(count=4, ray=cluster)),
    ):
        assert [job(*ready) for job in JOBS] == plain_results(ready)
    assert len(victims) == 2 and os.getpid() not in victims and store.ids()
