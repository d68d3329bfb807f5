"""Settings of a training run: their defaults, their kinds, and the files they come from."""

import dataclasses

import pytest
import torch

import seecause as sc
from seecause.errors import BadOption
from seecause.faithful import IFAMOptions, LossWeights, TrainConfig
from seecause.faithful.training import frame_for, read_config
from seecause.models.preprocess import Preprocess
from seecause.options import keyword_options
from tests.faithful.runs import tiny_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": "many"}, "TrainConfig option epochs='many' cannot be used; expected a whole"),
        ({"parts": 0}, "TrainConfig option parts=0"),
        ({"precision": "half"}, "precision"),
        ({"std": 0.5}, "several values"),
        ({"options": {"part_dropout": "x"}}, "options option part_dropout='x'"),
        ({"options": {"gradients": "none"}}, "options option gradients='none' .* one of stages"),
        ({"options": "soft"}, "a table"),
        ({"losses": {"presense": 1.0}}, "losses option presense=1.0 .* presence"),
    ],
)
def test_settings_have_their_kind(tmp_path, changes, message):
    with pytest.raises(sc.SeecauseError, match=message):
        tiny_config(tmp_path, **changes)


def test_the_rate_is_halved_after_every_fourth_epoch_or_follows_a_cosine():
    """As torch's StepLR has it, with PDiscoFormer's schedule."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, expected = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5), []
    for _ in range(28):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    config = TrainConfig(data="cub:PATH", backbone="timm:x", out="run", epochs=28, schedule="step")
    assert [config.pace(epoch) for epoch in range(28)] == expected
    cosine = dataclasses.replace(config, schedule="cosine", epochs=4)
    paces = [cosine.pace(epoch) for epoch in range(4)]
    assert paces == pytest.approx([1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])


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
    assert read_config(path, out="run", options={"gradient": "ste"}).options["gradient"] == "ste"
    with pytest.raises(BadOption, match=r"TrainConfig option epoch=5 .* epochs"):
        read_config(path, out="run", epoch=5)
    (tmp_path / "run.json").write_text('{"data": "cub:PATH", "backbone": "timm:x", "epochs": 3}')
    plain = read_config(tmp_path / "run.json", out="run", std=[0.5, 0.25, 0.125])
    assert (plain.data, plain.epochs) == ("cub:PATH", 3)
    assert (plain.mean, plain.std) == (None, (0.5, 0.25, 0.125))
    for name in ("data", "backbone", "out"):
        settings = {"data": "d", "backbone": "b", "out": "o", name: None}
        with pytest.raises(BadOption, match=f"{name} is not set"):
            read_config(None, **settings)
    path.write_text("data =")
    with pytest.raises(BadOption, match="valid TOML"):
        read_config(path)


def test_defaults_are_the_papers():
    """Of training at batch 128, of the network and its losses, and of the evaluation."""
    config = dataclasses.asdict(TrainConfig(data="d", backbone="b", out="o"))
    nothing = ("val", "limit", "val_limit", "weights", "size", "mean", "std")
    assert config == {
        "data": "d", "backbone": "b", "out": "o", "parts": 8, **dict.fromkeys(nothing),
        "options": {}, "losses": {}, "epochs": 90, "batch": 128, "accumulate": 1,
        "learning_rate": 1e-6, "prototype_factor": 1e3, "head_factor": 1e4, "schedule": "cosine",
        "weight_decay": 0.05, "clip": 2.0,
        "precision": "auto", "ema": False, "select": "average", "augment": "birds", "seed": 0,
        "device": "auto", "workers": 4, "log_every": 10, "snapshot_every": 0,
    }  # fmt: skip
    assert dataclasses.asdict(IFAMOptions()) == {
        "stages": 2, "gradient": "ste", "modulation": "joint", "orthogonality": "parts",
        "presence": "global", "eval_noise": False, "mask_noise": "own", "part_dropout": 0.3,
        "part_dropout2": 0.3, "freeze": "stage1", "selects": "parts", "masking": "early",
    }  # fmt: skip
    weights = dataclasses.asdict(LossWeights())
    assert weights.pop("background") == 2 and set(weights.values()) == {1.0} and len(weights) == 7
    options = keyword_options(sc.faithful.evaluate, leave_out=("progress",))
    assert options == {
        "data": None, "intervention": "best", "quantiles": (0.97, 0.99), "by": "distance",
        "calibration": None, "keypoints": True, "limit": None, "batch": 32,
        "workers": 0,
    }  # fmt: skip


def test_test_images_are_prepared_as_the_paper_has_them():
    """X-rays have a mean of their own; ImageNet's test images are cropped below 384 pixels."""
    run = {"data": "d", "backbone": "b", "out": "o"}
    large = Preprocess(size=(384, 384), mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.9)
    siim = frame_for(TrainConfig(**run, augment="plain", mean=[0.48865] * 3), large)
    assert siim.mean == (0.48865,) * 3 and siim.std == (0.5,) * 3
    assert (siim.squash, siim.crop, siim.filter) == (True, 1, "bilinear")
    imagenet = TrainConfig(**run, augment="imagenet")
    frame = frame_for(imagenet, large)
    assert (frame.crop, frame.filter, frame.squash) == (1, "bicubic", False)
    assert frame_for(imagenet, dataclasses.replace(large, size=(384, 383))).crop == 0.875
    birds = frame_for(TrainConfig(**run), large)
    assert (birds.crop, birds.squash, birds.filter, birds.size) == (
        1,
        False,
        "bilinear",
        (384, 384),
    )
