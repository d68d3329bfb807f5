"""A training run in this process: what it writes, what it refuses, and what decides its weights."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.errors import BadImage, BadOption, DataMissing, SeecauseError, UnsupportedModel
from seecause.faithful import IFAM, Intervention, evaluate, open_network, train
from seecause.faithful.data import open_split
from seecause.faithful.evaluation import examine, merge
from seecause.faithful.training import LOSSES, Run, new_net
from tests.faithful.nets import dinov2_backbone
from tests.faithful.runs import snapshot, table, tiny_config, tiny_images


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run, which tests read and do not change; without a test split, which it must not need."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_config(folder)
    shutil.move(folder / "images" / "test", folder / "kept-for-later")
    lines: list[tuple[int, int, str]] = []
    done = train(config, on_step=lambda *message: lines.append(message))
    shutil.move(folder / "kept-for-later", folder / "images" / "test")
    return config, done, lines


def weights(config):
    return snapshot(Path(config.out))["net"]


def test_a_run_leaves_logs_grids_and_a_network(finished):
    config, done, lines = finished
    assert [message[:2] for message in lines] == [
        (step, 8) for step in range(1, 9)
    ] and "loss" in lines[-1][2]
    log = table(Path(config.out) / "log.csv")
    assert [int(row["step"]) for row in log] == list(range(1, 9))
    terms = [
        float(log[-1][name]) * (2 if name == "background" else 1)
        for name in LOSSES
        if name != "total"
    ]
    assert len(terms) == 8 and math.isclose(sum(terms), float(log[-1]["total"]), abs_tol=1e-4)
    epochs = table(Path(config.out) / "epochs.csv")
    assert [row["epoch"] for row in epochs] == ["0", "1"] and float(
        epochs[done.best_epoch]["average"]
    ) == pytest.approx(done.best, abs=1e-6)
    network = open_network(config.out)
    assert isinstance(network.net, IFAM) and network.net.class_names == ("left", "right")
    assert (network.data, network.run) == (config.data, Path(config.out))
    model = sc.load(str(Path(config.out) / "best"))
    assert model.classes == ("left", "right") and model.preprocess.size == (24, 24)


def test_the_best_epoch_is_the_average_networks(finished):
    config, done, _ = finished
    net = open_network(config.out).net
    card = json.loads((Path(config.out) / "best" / "ifam.json").read_text())
    assert card["epoch"] == done.best_epoch
    result = examine(net, open_split(config.data, "val")).table()
    assert result == card["validation"] and result["average"] == done.best
    row = table(Path(config.out) / "epochs.csv")[done.best_epoch]
    assert {name for name, cell in row.items() if cell} == {"epoch", "step", "best", *result}
    for name, value in result.items():
        assert float(row[name]) == pytest.approx(value, rel=1e-5), name
    assert (row["step"], row["best"]) == (str(4 * (done.best_epoch + 1)), "1")
    assert done.out == config.out and done.steps == 8
    val = open_split(config.data, "val")
    halves = [examine(net, val, rows=range(start, 6, 2)) for start in (0, 1)]
    assert merge(halves).table()["worst"] == result["worst"]


def test_another_run_is_not_continued_in_its_folder(finished):
    config, _, _ = finished
    with pytest.raises(BadOption, match="differs in parts, seed"):
        train(tiny_config(Path(config.out).parent, parts=3, seed=1))


def test_passes_add_up_to_a_step(tmp_path):
    """Two passes of two images are one step of four; presence alone looks at a whole pass."""
    losses = {"presence": 0.0}
    one, two = (
        tiny_config(
            tmp_path,
            out=str(tmp_path / f"run{n}"),
            accumulate=n,
            epochs=1,
            losses=losses,
            ema=False,
        )
        for n in (1, 2)
    )
    train(one)
    train(two)
    shared = weights(two)
    for name, value in weights(one).items():
        assert_close(shared[name], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("log_every", [1, 100])
def test_weights_without_numbers_are_never_kept(tmp_path, log_every, monkeypatch):
    """Also where the log has not noticed yet."""
    step = Run._step

    def spoilt(run, passes):
        losses = step(run, passes)
        if run.position.step == 5:
            with torch.no_grad():
                run.net.stage1.prototypes[0, 0] = torch.nan
        return losses

    monkeypatch.setattr(Run, "_step", spoilt)
    config = tiny_config(tmp_path, snapshot_every=1, log_every=log_every, ema=False)
    with pytest.raises(SeecauseError, match="not finite at step 6"):
        train(config)
    assert all(bool(value.isfinite().all()) for value in weights(config).values())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_an_error_of_ours_in_any_process(tmp_path, workers):
    config = tiny_config(tmp_path, workers=workers)
    (tmp_path / "images" / "train" / "left" / "3.png").write_bytes(b"no image")
    with pytest.raises(BadImage, match=r"3\.png"):
        train(config)


def test_a_backbone_of_transformers_comes_back_from_disk(tmp_path):
    """What RAD-DINO is: a bare Dinov2Model with an image processor."""
    dinov2_backbone().save_pretrained(tmp_path / "dino")
    steps = {
        "size": {"height": 40, "width": 40},
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
        "do_center_crop": False,
    }
    (tmp_path / "dino" / "preprocessor_config.json").write_text(json.dumps(steps))
    net = new_net(tiny_config(tmp_path, backbone=f"hf:{tmp_path / 'dino'}"), ("a", "b")).eval()
    assert net.preprocess.size == (40, 40) and net.preprocess.std == (0.25,) * 3
    net.save(tmp_path / "saved")
    again, images = sc.faithful.load(tmp_path / "saved"), torch.rand(2, 3, 40, 40)
    assert torch.equal(again(images).logits, net(images).logits)


def test_what_cannot_be_trained_says_so(tmp_path):
    tiny_config(tmp_path)  # makes images
    empty = tmp_path / "images" / "train" / "neither"
    empty.mkdir()
    with pytest.raises(sc.SeecauseError, match="neither"):
        train(tiny_config(tmp_path))
    empty.rmdir()
    other = tmp_path / "other"
    tiny_images(other)
    (other / "val" / "left").rename(other / "val" / "leftish")
    with pytest.raises(BadOption, match="classes of"):
        train(tiny_config(tmp_path, val=f"folder:{other / 'val'}"))


@pytest.mark.parametrize("backbone", ["builtin:critters-ifam", "builtin:critters-planted"])
def test_backbones_that_decide_what_is_seen_are_refused(tmp_path, backbone):
    with pytest.raises(UnsupportedModel, match="decides by itself"):
        train(tiny_config(tmp_path, backbone=backbone))


def test_a_run_that_was_evaluated_keeps_thresholds_of_all_training_images(finished, tmp_path):
    config, _, _ = finished
    folder = tmp_path / "run"
    shutil.copytree(config.out, folder)
    (folder / "best").rename(folder / ".best.old")  # a replacement that was killed is undone
    network = open_network(str(folder))
    before = json.loads((folder / "best" / "ifam.json").read_text())
    change = Intervention((), 0.75)
    for calibration in (3, None):
        result = evaluate(network, intervention=change, calibration=calibration)
        after = json.loads((folder / "best" / "ifam.json").read_text())
        assert [each["images"] for each in after["thresholds"]] == [16] * (calibration is None)
    assert before.pop("thresholds") == [] and {**after, "thresholds": 0} == before | {
        "thresholds": 0
    }
    assert open_network(str(folder)).net.thresholds == network.net.thresholds
    few = evaluate(network, intervention=None, limit=2)
    kept = json.loads((folder / "evaluation.json").read_text())
    assert kept.keys() == {result.data, few.data}  # a test of fewer images does not replace it
    assert kept[result.data]["plain"] == result.plain
    assert kept[result.data]["intervention"]["quantile"] == 0.75
    shutil.rmtree(folder / "best")
    with pytest.raises(DataMissing, match="best"):
        open_network(str(folder))
