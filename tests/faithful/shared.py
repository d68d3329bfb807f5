"""What `test_processes` runs once alone and once in two processes: iFAM and the fine-tuning repair,
tiny and in float64."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import torch
from torch.utils.data import default_collate

from seecause.background.last_layer import fine_tune
from seecause.faithful import train, training
from seecause.faithful.training import join_processes
from tests.background.repair_toys import fitted, made_splits, scenes
from tests.faithful.runs import snapshot, tiny_config


def _double(items):
    images, *rest = default_collate(items)
    return images.double(), *rest


def train_parts(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Three steps with gradients of every kind."""
    settings = {"epochs": 1, "batch": 4, "limit": 12, "options": {"freeze": "none"}, "ema": False}
    config = tiny_config(folder, out=str(out), **settings)
    new_net = training.new_net
    with (
        mock.patch.object(training, "new_net", lambda *words: new_net(*words).double()),
        mock.patch.object(training, "default_collate", _double),
    ):
        train(config)
    return snapshot(out)["net"]


def fine_tuned() -> dict[str, torch.Tensor]:
    """Two epochs of an odd batch, and of one that only the first process has a share of."""
    biased = fitted(scenes(64)).to(torch.float64)
    splits = made_splits(biased)
    options = {"epochs": 2, "rate": 1e-3, "batch": len(splits.train) - 1}
    view, _ = fine_tune(
        biased,
        splits.train,
        lambda view: splits.validation.predict(view).transplant_worst,
        **options,
    )
    return {name: value.detach() for name, value in view.module.state_dict().items()}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    out.mkdir(exist_ok=True)
    with join_processes("cpu"):
        weights = {f"tuned {k}": v for k, v in fine_tuned().items()}
        weights |= {f"parts {k}": v for k, v in train_parts(out.parent, out / "run").items()}
    if os.environ.get("RANK", "0") == "0":
        torch.save(weights, out / "weights.pt")


def in_a_process(out: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    main(out)
