"""PDiscoFormer's own recipe beside iFAM's: steps instead of a cosine, Adam, and no change of
light."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest
import torch

from seecause.errors import BadOption
from seecause.faithful import TrainConfig, open_run, train
from seecause.faithful.config import stepped
from tests.faithful.runs import tiny_config


def test_the_rate_is_halved_after_every_fourth_epoch():
    """As torch's StepLR has it."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, expected = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5), []
    for _ in range(28):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert [stepped(epoch, every=4, factor=0.5) for epoch in range(28)] == expected
    config = TrainConfig(data="cub:PATH", backbone="timm:x", out="run", epochs=28, schedule="step")
    assert [config.pace(epoch) for epoch in range(28)] == expected
    assert dataclasses.replace(config, schedule="cosine").pace(14) == pytest.approx(0.5)
    for wrong in ({"schedule": "linear"}, {"step_epochs": 0}, {"step_factor": 0.0}):
        with pytest.raises(BadOption, match=next(iter(wrong))):
            dataclasses.replace(config, **wrong)


def test_a_run_takes_the_steps(tmp_path):
    config = tiny_config(
        tmp_path,
        schedule="step",
        step_epochs=1,
        weight_decay=0.0,
        augment="birds_no_jitter",
        options={"stages": 1},
        ema=False,
        grid=0,
    )
    train(config)
    rates = [
        float(row["learning_rate"])
        for row in csv.DictReader((config.folder / "log.csv").read_text().splitlines())
    ]
    assert rates == [5e-4] * 4 + [2.5e-4] * 4 and open_run(config.folder)[0] == config


def test_adamw_without_decay_is_adam():
    """So PDiscoFormer's optimiser needs no option of its own."""
    ends = []
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        weight = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
        optimizer = kind([weight], lr=0.1, weight_decay=0.0)
        for _ in range(5):
            optimizer.zero_grad()
            (weight**4).sum().backward()
            optimizer.step()
        ends.append(weight.detach().clone())
    assert torch.equal(*ends)


def test_a_configuration_from_before_an_option_takes_its_default(tmp_path):
    config = TrainConfig(data="cub:PATH", backbone="timm:x", out="run")
    config.save(tmp_path / "config.json")
    settings = json.loads((tmp_path / "config.json").read_text())
    old = {
        name: value
        for name, value in settings.items()
        if name not in ("schedule", "step_epochs", "step_factor")
    }
    assert len(settings) - len(old) == 3 and TrainConfig(**old) == config
