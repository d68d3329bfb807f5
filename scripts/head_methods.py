"""The ways to choose heads that studies compare, under the names their pages print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seecause.heads import Erasure, HeadScores, Masks, penalised, score, select
from seecause.heads.erase import erase
from seecause.models.view import VisionModel

PRINTED, GREY = "cigma as printed", "cigma, true masks, grey"
GUARD, FORCED = " + guard", ", forced"
CONTROLS = {
    "weight norm": "weight-norm", "output norm": "output-norm", "taylor": "taylor",
    "attention mass": "attention-mass", "loss gain": "loss-gain",
    "loss change": "loss-change",
}  # fmt: skip


def cigma(
    model: VisionModel, images: Tensor, labels: Tensor, looks: Mapping[str, Erasure], **options: Any
) -> dict[str, HeadScores]:
    """CIGMA by every look, as it is and less what the foreground loses. Options are those of
    `score`."""
    found = {}
    for name, look in looks.items():
        found[name] = score(
            model, images, look.masks, baseline=look.baseline, target=labels, **options
        )
        found[name + GUARD] = penalised(found[name])
    return found


def controls(
    model: VisionModel, images: Tensor, labels: Tensor, masks: Masks
) -> dict[str, HeadScores]:
    """Norms and attention on the background (the largest go first), Taylor importance (the
    smallest), and loss differences."""
    return {
        name: select(
            by, model, images, labels, **({"masks": masks} if by == "attention-mass" else {})
        )
        for name, by in CONTROLS.items()
    }


def contrastive_gating(
    model: VisionModel, images: Tensor, labels: Tensor, objects: Tensor, **options: Any
) -> HeadScores:
    """Causal Head Gating that keeps the answers to the objects [N, H, W] (bool) and suppresses
    those to the backgrounds, on grey."""
    erased = erase(model, images, objects, "grey")
    assert erased.no_foreground is not None
    return select(
        "gating",
        model,
        erased.no_background,
        labels,
        suppress=(erased.no_foreground, labels),
        **options,
    )


def forced(found: HeadScores) -> HeadScores:
    """Gating that removes as many heads as it is told to: by soft interference, whatever the heads
    are called."""
    return replace(
        found, value=found.after["interference"], protocol={**found.protocol, "forced": True}
    )


def as_scores(model: VisionModel, heads: list[tuple[int, int]]) -> HeadScores:
    """An order of heads as scores: the first gets the most."""
    value = torch.zeros(model.n_layers, model.n_heads, dtype=torch.float64)
    for place, head in enumerate(heads):
        value[head] = len(heads) - place
    return HeadScores(value)
