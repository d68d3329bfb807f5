"""Tiny training runs: a backbone in a folder, images in class folders."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from seecause.faithful import TrainConfig, train
from seecause.faithful.training import Processes, Run

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = dict(
    img_size=24, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=0, reg_tokens=2
)  # like DINOv2, without a classifier


def tiny_backbone(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    shape = SHAPE | changes
    torch.manual_seed(0)
    save_file(VisionTransformer(**shape).state_dict(), folder / "toy.safetensors")
    architecture = {"library": "timm", "class": "VisionTransformer", "arguments": shape}
    card = {"architecture": architecture, "classes": ["a", "b", "c"]}
    card |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    (folder / "toy.json").write_text(json.dumps(card))
    return folder


def tiny_images(folder: Path, *, train: int = 8, others: int = 3) -> Path:
    """Two classes: a bright square on the left or on the right."""
    draw = np.random.default_rng(0)
    for split, count in (("train", train), ("val", others), ("test", others)):
        for label, name in enumerate(("left", "right")):
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 90, (26, 30, 3), dtype=np.uint8)
                pixels[8:18, 2 + 16 * label : 12 + 16 * label] = 230
                Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


def tiny_config(folder: Path, **changes: Any) -> TrainConfig:
    """A run of 2 epochs of 4 steps, on images and a backbone below `folder`, which are made if
    they are not there."""
    if not (folder / "images").exists():
        tiny_images(folder / "images")
        tiny_backbone(folder / "backbone")
    settings: dict[str, Any] = dict(
        data=f"folder:{folder / 'images'}",
        backbone=str(folder / "backbone"),
        out=str(folder / "run"),
        parts=2,
        epochs=2,
        batch=4,
    )
    settings |= dict(
        learning_rate=1e-3,
        prototype_factor=10.0,
        head_factor=10.0,
        workers=0,
        log_every=1,
        device="cpu",
        ema=True,
    )
    return TrainConfig(**(settings | changes))


def train_in_a_process(config: TrainConfig, environment: dict[str, str]) -> None:
    """What a process that a test starts does, as if `torchrun` had told it the environment."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    train(config)


def snapshot(folder: Path) -> dict[str, Any]:
    """What a run can go on from."""
    return torch.load(folder / "last.pt", weights_only=True)


def start(config) -> Run:
    return Run(config, Processes(0, 1, CPU))


def ignore(*message) -> None:
    pass


def table(path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))
