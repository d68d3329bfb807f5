"""What a Critters classifier answers from: accuracies, groups, and what changes when a cue is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seecause.data import critters
from seecause.data.critters import BACKGROUNDS, CLASSES, Latents
from seecause.models.zoo.recipes import MEAN, STD

_ROWS = 512


@torch.no_grad()
def evaluate(model: nn.Module, regime: str, *, size: int, samples: int = 8192, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Held-out numbers on the test split: i.i.d. accuracy and its certificate, group accuracy against the creature, flip rates."""
    predict = _predictor(model, size)
    drawn = critters.draw(regime, "test", samples, device=device)
    accuracy = (predict(drawn) == drawn.label).double().mean().item()

    latents = critters.draw("balanced", "test", samples, start=samples, device=device)
    answer = predict(latents)
    right = (answer == latents.creature).double()
    cells = latents.creature * len(BACKGROUNDS) + latents.background
    groups = _mean_by(right, cells, len(CLASSES) * len(BACKGROUNDS)).view(len(CLASSES), len(BACKGROUNDS))
    turn = torch.arange(samples, device=device)
    elsewhere = (latents.background + 1 + turn // 32 % (len(BACKGROUNDS) - 1)) % len(BACKGROUNDS)
    another = (latents.creature + 1 + turn // 32 % (len(CLASSES) - 1)) % len(CLASSES)
    background_flips = (predict(latents.replace(background=elsewhere)) != answer).double().mean().item()
    creature_flips = (predict(latents.show(another)) != answer).double().mean().item()
    return {
        "regime": regime,
        "samples": samples,
        "accuracy": accuracy,
        "balanced_accuracy": right.mean().item(),
        "worst_group_accuracy": groups.min().item(),
        "group_accuracy": groups.tolist(),  # [creature][background]
        "background_flip_rate": background_flips,
        "creature_flip_rate": creature_flips,
        "certificate": dataclasses.asdict(critters.certificate(regime, accuracy=accuracy, samples=samples)),
    }


def normalise(image: Tensor) -> Tensor:
    """Raw pixels [B, 3, H, W] as the network wants them."""
    mean, std = (torch.tensor(value, device=image.device)[:, None, None] for value in (MEAN, STD))
    return (image - mean) / std


def _predictor(model: nn.Module, size: int) -> Callable[[Latents], Tensor]:
    def predict(latents: Latents) -> Tensor:
        pictures = (critters.render(batch, size=size).image for batch in latents.split(_ROWS))
        return torch.cat([model(normalise(image)).argmax(dim=1) for image in pictures])

    return predict


def _mean_by(values: Tensor, cell: Tensor, cells: int) -> Tensor:
    """The mean of values [N] in each cell [N] -> [cells]."""
    total = torch.zeros(cells, dtype=values.dtype, device=values.device).index_add_(0, cell, values)
    return total / torch.bincount(cell, minlength=cells)
