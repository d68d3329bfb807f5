"""A training run in this process: what it writes, what it refuses, and what decides its weights."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import pickle
import shutil

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import default_collate

import seecause as sc
from seecause.errors import (
    BadImage,
    BadOption,
    DataMissing,
    Diverged,
    MissingExtra,
    MissingWeights,
    UnsupportedModel,
    ViewMismatch,
)
from seecause.faithful import IFAM, TrainConfig, objective, open_run, read_config, train
from seecause.faithful.config import cosine, normalised_decay, scaled_rate
from seecause.faithful.data import (
    StepShares,
    TrainingPictures,
    epoch_order,
    labelled_batches,
    open_test,
    open_train,
    open_val,
    read_batches,
)
from seecause.faithful.examine import examine, merge
from seecause.faithful.interventions import best_of, calibrate, intervene, try_interventions
from seecause.faithful.losses import TrainingLosses
from seecause.faithful.run import LOSSES, write_best
from seecause.faithful.training import Run, frame_for, new_net, new_optimizer
from seecause.models.preprocess import Preprocess
from tests.faithful.nets import dinov2_backbone, pictures, timm_backbone, tiny_net
from tests.faithful.runs import tiny_config, tiny_pictures


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run, which tests read and do not change; without a test split, which it must not need."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_config(folder)
    shutil.move(folder / "pictures" / "test", folder / "kept-for-later")
    lines: list[tuple[int, int, str]] = []
    done = train(config, on_step=lambda *message: lines.append(message))
    shutil.move(folder / "kept-for-later", folder / "pictures" / "test")
    return config, done, lines


def rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def weights(config):
    return torch.load(config.folder / "last.pt", weights_only=True)["net"]


def test_a_run_leaves_logs_grids_and_a_network(finished):
    config, done, lines = finished
    assert [message[:2] for message in lines] == [
        (step, 8) for step in range(1, 9)
    ] and "loss" in lines[-1][2]
    log = rows(config.folder / "log.csv")
    assert [int(row["step"]) for row in log] == list(range(1, 9))
    terms = [
        float(log[-1][name]) * (2 if name == "background" else 1)
        for name in LOSSES
        if name != "total"
    ]
    assert len(terms) == 8 and math.isclose(sum(terms), float(log[-1]["total"]), abs_tol=1e-4)
    epochs = rows(config.folder / "epochs.csv")
    assert [row["epoch"] for row in epochs] == ["0", "1"] and float(
        epochs[done.best_epoch]["average"]
    ) == pytest.approx(done.best, abs=1e-6)
    assert [path.name for path in sorted((config.folder / "parts").iterdir())] == [
        "epoch-0001.png",
        "epoch-0002.png",
    ]
    opened, net = open_run(config.folder)
    assert opened == config and isinstance(net, IFAM) and net.class_names == ("left", "right")
    model = sc.load(str(config.folder / "best"))
    assert model.classes == ("left", "right") and model.preprocess.size == (24, 24)


def test_only_other_weights_differ_from_the_start(finished):
    """Stage-1 blocks are frozen, its tokens and positions are not, stage 2 learns."""
    config, _, _ = finished
    before, after = new_net(config, ("left", "right")).state_dict(), weights(config)
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert not any(name.startswith("stage1.tower.native.blocks") for name in moved)
    assert {
        "stage1.tower.native.pos_embed",
        "stage1.prototypes",
        "stage2.head.weight",
        "stage2.tower.native.blocks.0.attn.qkv.weight",
    } <= moved


def test_the_best_epoch_is_the_average_networks(finished):
    config, done, _ = finished
    _, net = open_run(config.folder)
    card = json.loads((config.folder / "best" / "ifam.json").read_text())
    assert card["epoch"] == done.best_epoch
    result = examine(net, open_val(config.data)).table()
    assert result == card["validation"] and result["average"] == done.best
    halves = [examine(net, open_val(config.data), places=range(start, 6, 2)) for start in (0, 1)]
    assert merge(halves).table()["worst"] == result["worst"]


def test_a_finished_run_has_nothing_left_to_do(finished):
    config, done, _ = finished
    before = (config.folder / "last.pt").read_bytes()
    assert train(config) == done
    assert (config.folder / "last.pt").read_bytes() == before


def test_another_run_is_not_continued_in_its_folder(finished):
    config, _, _ = finished
    with pytest.raises(BadOption, match="differs in parts, seed"):
        train(tiny_config(config.folder.parent, parts=3, seed=1))


def test_passes_add_up_to_a_step(tmp_path):
    """Two passes of two pictures are one step of four; presence alone looks at a whole pass."""
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
    for name, value in weights(one).items():
        assert_close(weights(two)[name], value, atol=1e-5, rtol=0)


def test_a_seed_repeats_a_run_and_another_does_not(tmp_path):
    runs = [
        tiny_config(tmp_path, out=str(tmp_path / name), epochs=1, seed=seed, grid=0)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    torch.manual_seed(11)
    for config in runs:
        train(config)
        torch.rand(3)  # what the global generator did does not matter
    first, again, other = map(weights, runs)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["stage1.prototypes"], other["stage1.prototypes"])


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"stages": 1}, "precision": "bfloat16"},
        {"options": {"gradient": "soft"}, "select": "worst", "augment": "imagenet"},
    ],
)
def test_other_networks_train_too(tmp_path, changes):
    done = train(tiny_config(tmp_path, epochs=1, **changes))
    assert done.steps == 4 and 0 <= done.best <= 1


def test_losses_are_never_in_half_precision(monkeypatch):
    """CUDA refuses some of them there, and distances decide by small differences."""
    seen = []

    def spy(net, out, labels, **options):
        seen.append((torch.is_autocast_enabled("cpu"), out.maps.dtype))
        return objective(net, out, labels, **options)

    monkeypatch.setattr("seecause.faithful.losses.objective", spy)
    net = tiny_net().float().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _, _ = TrainingLosses(net)(
            pictures(2).float(), torch.tensor([0, 1]), torch.tensor([5, 9]), 0, 0
        )
    assert seen == [(False, torch.float32)] and total.dtype == torch.float32


def test_a_run_without_numbers_stops(tmp_path):
    config = tiny_config(tmp_path, learning_rate=1e30, epochs=4, grid=0)
    with pytest.raises(Diverged, match="step"):
        train(config)


@pytest.mark.parametrize("log_every", [1, 100])
def test_weights_without_numbers_are_never_kept(tmp_path, log_every, monkeypatch):
    """Also where the log has not noticed yet."""
    step = Run._step

    def spoilt(run, parts, lines):
        step(run, parts, lines)
        if run.position.step == 5:
            with torch.no_grad():
                run.net.stage1.prototypes[0, 0] = torch.nan

    monkeypatch.setattr(Run, "_step", spoilt)
    config = tiny_config(tmp_path, snapshot_every=1, log_every=log_every, grid=0, ema=False)
    with pytest.raises(Diverged, match="not finite at step 6"):
        train(config)
    assert all(bool(value.isfinite().all()) for value in weights(config).values())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_is_an_error_of_ours_in_any_process(tmp_path, workers):
    config = tiny_config(tmp_path, workers=workers)
    (tmp_path / "pictures" / "train" / "left" / "3.png").write_bytes(b"not a picture")
    with pytest.raises(BadImage, match=r"3\.png"):
        train(config)


def test_errors_survive_the_way_between_processes():
    error = ViewMismatch("probe", "block 3", "off by 1")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ViewMismatch and str(again) == str(error) and again.where == "block 3"


def test_rates():
    assert scaled_rate(1e-6, 128) == pytest.approx(2.828e-6, rel=1e-3) and scaled_rate(
        1e-6, 1024
    ) == pytest.approx(8e-6)
    assert normalised_decay(0.05, 46 * 90) == pytest.approx(7.8e-4, rel=1e-2)
    assert [cosine(epoch, 4) for epoch in range(4)] == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    )


def test_groups_have_the_papers_rates(tmp_path):
    config = tiny_config(
        tmp_path, batch=16, learning_rate=1e-6, prototype_factor=1e3, head_factor=1e4
    )
    groups = {
        group["name"]: (group["lr"], group["weight_decay"] > 0)
        for group in new_optimizer(config, new_net(config, ("a", "b")), 100).param_groups
    }
    assert groups["stage1 tokens"] == (1e-6, False) and groups["prototypes"] == (
        pytest.approx(1e-3),
        False,
    )
    assert groups["stage2 matrices"] == (1e-6, True) and groups["stage2 vectors"] == (1e-6, False)
    assert groups["stage2 head"] == (pytest.approx(1e-2), True) and groups["stage2 fc_norm"] == (
        pytest.approx(1e-2),
        False,
    )
    assert "stage1 matrices" not in groups


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


def test_an_epoch_is_shared_out_whole():
    alone = StepShares(4).keys(11, seed=5, epoch=2)
    assert [index for step in alone for _, index in step] == epoch_order(11, 5, 2).tolist()[:8]
    shared = [
        StepShares(4, accumulate=2, rank=rank, world=2).keys(11, seed=5, epoch=2) for rank in (0, 1)
    ]
    assert all(len(part) == 4 and all(len(one) == 1 for one in part) for part in shared)
    for step in (0, 1):
        assert sorted(
            key for part in shared for one in part[2 * step : 2 * step + 2] for key in one
        ) == sorted(alone[step])
    assert StepShares(4).keys(11, seed=5, epoch=2, first=1) == alone[1:]
    assert epoch_order(11, 5, 2).tolist() != epoch_order(11, 5, 3).tolist()
    with pytest.raises(BadOption, match="multiple of 4"):
        StepShares(6, accumulate=2, world=2).keys(11, seed=0, epoch=0)
    with pytest.raises(BadOption, match="at most 3"):
        StepShares(4).check(3)


def test_validation_is_never_training_nor_test(tmp_path):
    flat = tiny_pictures(tmp_path / "all", train=20)
    train_part, val_part = (
        ids(opener(f"folder:{flat / 'train'}")) for opener in (open_train, open_val)
    )
    assert len(train_part) == 36 and len(val_part) == 4 and not train_part & val_part
    split = [ids(opener(f"folder:{flat}")) for opener in (open_train, open_val, open_test)]
    assert [len(subset) for subset in split] == [40, 6, 6]
    assert (
        open_train("critters:simplicity").name == "critters:simplicity:train"
        and len(open_train("critters:simplicity")) == 4096
    )
    assert open_val("critters:simplicity", limit=7).name == "critters:simplicity:val"
    with pytest.raises(BadOption, match="for testing"):
        open_train("waterbird200:PATH")
    with pytest.raises(DataMissing, match="too few"):
        open_val(f"folder:{flat / 'val'}")
    shutil.rmtree(flat / "test")
    with pytest.raises(DataMissing, match="no such folder"):
        open_test(f"folder:{flat}")


def ids(data):
    return {data[place].id for place in range(len(data))}


def test_what_cannot_be_trained_says_so(tmp_path):
    with pytest.raises(BadOption, match=r"'presense' of losses=1.0 .* presence"):
        tiny_config(tmp_path, losses={"presense": 1.0})
    with pytest.raises(BadOption, match="parts=0"):
        tiny_config(tmp_path, parts=0)
    with pytest.raises(BadOption, match="at most 36"):
        train(tiny_config(tmp_path, parts=40))
    with pytest.raises(BadOption, match="precision"):
        tiny_config(tmp_path, precision="half")
    with pytest.raises(MissingWeights, match="the folder that"):
        open_run(tmp_path)
    empty = tmp_path / "pictures" / "train" / "neither"
    empty.mkdir()
    with pytest.raises(sc.SeecauseError, match="neither"):
        train(tiny_config(tmp_path))
    empty.rmdir()
    other = tmp_path / "other"
    tiny_pictures(other)
    (other / "val" / "left").rename(other / "val" / "leftish")
    with pytest.raises(BadOption, match="classes of"):
        train(tiny_config(tmp_path, val=f"folder:{other / 'val'}"))


@pytest.mark.parametrize("backbone", ["builtin:critters-ifam", "builtin:critters-planted"])
def test_backbones_that_decide_what_is_seen_are_refused(tmp_path, backbone):
    with pytest.raises(UnsupportedModel, match="decides by itself"):
        train(tiny_config(tmp_path, backbone=backbone))


def test_what_could_not_be_saved_is_not_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "seecause.faithful.checkpoint.build_backbone", lambda described: timm_backbone()
    )
    with pytest.raises(BadOption, match="building it so gives another"):
        train(tiny_config(tmp_path))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"epochs": "many"},
            "'epochs' of TrainConfig='many' cannot be used; expected a whole number",
        ),
        ({"batch": 4.5}, "a whole number"),
        ({"ema": "yes"}, "true or false"),
        ({"limit": 0}, "at least 1"),
        ({"learning_rate": -1.0}, "more than 0"),
        ({"mean": "grey"}, "several values"),
        ({"std": 0}, "more than 0"),
        ({"options": {"part_dropout": "x"}}, "'part_dropout' of options='x'"),
        (
            {"options": {"gradients": "none"}},
            "'gradients' of options='none' .* one of stages, gradient",
        ),
        ({"options": {"eval_noise": 1}}, "true or false"),
        ({"options": "soft"}, "a table"),
        ({"losses": {"class1": "none"}}, "'class1' of losses='none'"),
    ],
)
def test_settings_have_their_kind(tmp_path, changes, message):
    with pytest.raises(sc.SeecauseError, match=message):
        tiny_config(tmp_path, **changes)


def test_damaged_files_of_a_run_are_named(finished, tmp_path):
    config, _, _ = finished
    folder = tmp_path / "run"
    shutil.copytree(config.folder, folder)
    whole = (folder / "last.pt").read_bytes()
    for broken in (b"", b"no zip", whole[: len(whole) // 2]):
        (folder / "last.pt").write_bytes(broken)
        with pytest.raises(MissingWeights, match=r"last\.pt"):
            train(dataclasses.replace(config, out=str(folder)))
    for broken in ("{", "[]", '{"data": 3}'):
        (folder / "config.json").write_text(broken)
        with pytest.raises(BadOption):
            open_run(folder)


def test_pictures_are_framed_as_the_paper_has_them(tmp_path):
    """Grey X-rays have a mean of their own; ImageNet's test pictures are cut below 384 pixels."""
    siim = new_net(
        tiny_config(tmp_path, augment="plain", mean=0.48865, std=[0.24621] * 3), ("a", "b")
    ).preprocess
    assert (
        siim.mean == (0.48865,) * 3
        and siim.std == (0.24621,) * 3
        and siim.squash
        and siim.crop == 1
    )
    assert new_net(tiny_config(tmp_path, augment="imagenet"), ("a", "b")).preprocess.crop == 0.875
    large = Preprocess(size=(384, 384), mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.9)
    imagenet = frame_for(tiny_config(tmp_path, augment="imagenet"), large)
    assert imagenet.crop == 1 and imagenet.filter == "bicubic" and siim.filter == "bilinear"


def test_tensorboard_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match="tools"):
        train(tiny_config(tmp_path, tensorboard=True))


def test_a_configuration_comes_from_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'data = "cub:PATH"\nbackbone = "timm:x"\nepochs = 3\n[options]\ngradient = "none"\n'
    )
    result = read_config(path, out="run", epochs=5, batch=None)
    assert result == TrainConfig(
        data="cub:PATH", backbone="timm:x", out="run", epochs=5, options={"gradient": "none"}
    )
    both = read_config(path, out="run", options={"stages": 1}, losses={"class1": 0.0})
    assert both.options == {"gradient": "none", "stages": 1} and both.losses == {"class1": 0.0}
    with pytest.raises(BadOption, match=r"'epoch' of TrainConfig=5 .* epochs"):
        read_config(path, out="run", epoch=5)
    path.write_text("data =")
    with pytest.raises(BadOption, match="valid TOML"):
        read_config(path)
    with pytest.raises(BadOption, match="data"):
        read_config(None, out="run")


def test_interventions_are_tried_on_validation(finished):
    config, _, _ = finished
    _, net = open_run(config.folder)
    val = open_val(config.data)
    calibrate(
        net,
        torch.cat([batch[0] for batch in labelled_batches(net, open_train(config.data))]),
        [0.9],
    )
    tried = try_interventions(net, lambda: labelled_batches(net, val), [0.9])
    assert [(one.drop, one.quantile) for one in tried] == [
        ((), None),
        ((0,), None),
        ((1,), None),
        ((), 0.9),
        ((0,), 0.9),
        ((1,), 0.9),
    ]
    best = best_of(tried)
    assert best.worst == max(one.worst for one in tried)
    with intervene(net, drop_parts=best.drop, quantile=best.quantile):
        assert examine(net, val).table()["worst"] == best.worst


def test_a_replacement_that_was_killed_is_undone(finished, tmp_path):
    config, _, _ = finished
    folder = tmp_path / "run"
    shutil.copytree(config.folder, folder)
    (folder / "best").rename(folder / ".best.old")  # between the two renames
    assert isinstance(open_run(folder)[1], IFAM) and not (folder / ".best.old").exists()
    write_best(folder, open_run(folder)[1], epoch=7)
    assert json.loads((folder / "best" / "ifam.json").read_text())["epoch"] == 7
    assert {path.name for path in folder.iterdir()} == {
        path.name for path in config.folder.iterdir()
    }


def test_reading_processes_change_nothing(tmp_path):
    config = tiny_config(tmp_path)
    data = TrainingPictures(
        open_train(config.data), "birds", new_net(config, ("a", "b")).preprocess, seed=1
    )
    keys = StepShares(4).keys(len(data), seed=1, epoch=0)[:2]
    alone, helped = (
        read_batches(data, keys, default_collate, workers=workers) for workers in (0, 1)
    )
    for mine, theirs in zip(alone, helped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not torch.equal(data[(0, 3)][0], data[(1, 3)][0])


def test_reading_processes_change_no_evaluation(finished):
    config, _, _ = finished
    _, net = open_run(config.folder)
    alone, helped = (
        examine(net, open_val(config.data), batch=2, workers=workers) for workers in (0, 1)
    )
    assert torch.equal(alone.logits, helped.logits) and torch.equal(alone.labels, helped.labels)
