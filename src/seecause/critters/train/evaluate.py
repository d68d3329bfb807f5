"""What a Critters classifier answers from: accuracies, groups, and what changes when a cue is
changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seecause import critters
from seecause.critters import BACKGROUNDS, CLASSES, Latents, Regime, find_regime
from seecause.metrics.groups import group_accuracy
from seecause.models.preprocess import Preprocess

_ROWS = 512


@torch.no_grad()
def evaluate(
    model: nn.Module,
    regime: str | Regime,
    *,
    preprocess: Preprocess,
    samples: int = 8192,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Held-out numbers on the test split: i.i.d. accuracy and its certificate, group accuracy
    against the creature, flip rates."""
    predict = _predictor(model, preprocess)
    law = find_regime(regime)
    drawn = critters.draw(law, "test", samples, device=device)
    accuracy = (predict(drawn) == drawn.label).double().mean().item()

    latents = critters.draw("balanced", "test", samples, start=samples, device=device).on_mat(
        law.mat
    )
    answer = predict(latents)
    groups = group_accuracy(
        answer == latents.creature, torch.stack([latents.creature, latents.background], dim=1)
    )
    turn = torch.arange(samples, device=device)
    elsewhere = (latents.background + 1 + turn // 32 % (len(BACKGROUNDS) - 1)) % len(BACKGROUNDS)
    another = (latents.creature + 1 + turn // 32 % (len(CLASSES) - 1)) % len(CLASSES)
    background_flips = (
        (predict(latents.replace(background=elsewhere)) != answer).double().mean().item()
    )
    creature_flips = (predict(latents.show(another)) != answer).double().mean().item()
    return {
        "regime": law.name,
        "samples": samples,
        "accuracy": accuracy,
        "balanced_accuracy": groups.average,
        "worst_group_accuracy": groups.worst,
        "group_accuracy": (
            groups.accuracy.view(-1, len(BACKGROUNDS)).tolist()
        ),  # [creature][background]
        "background_flip_rate": background_flips,
        "creature_flip_rate": creature_flips,
        "certificate": dataclasses.asdict(
            critters.certificate(regime, accuracy=accuracy, samples=samples)
        ),
    }


def _predictor(model: nn.Module, preprocess: Preprocess) -> Callable[[Latents], Tensor]:
    def predict(latents: Latents) -> Tensor:
        pictures = (
            critters.render(batch, size=preprocess.size[0]).image for batch in latents.split(_ROWS)
        )
        return torch.cat([model(preprocess.normalise(image)).argmax(dim=1) for image in pictures])

    return predict
