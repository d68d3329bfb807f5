"""Loss difference: what the loss on the labels does without each head, by exact ablation (a control
of CIGMA, section 1.9).

signed     NLL - NLL^(-h): positive where the model does better without the head
absolute   |NLL - NLL^(-h)|: heads that matter, for better or worse
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from seecause.heads.registry import selector
from seecause.heads.result import HeadScores
from seecause.heads.score import score
from seecause.models.view import VisionModel


@selector("loss-gain", cost="about L * H / 2 forwards", needs="labels")
def loss_gain(model: VisionModel, images: Tensor, labels: Tensor) -> HeadScores:
    """How much the loss falls without each head, by exact ablation."""
    scores = score(model, images, response="nll", target=labels, guard=False)
    return replace(scores, protocol={**scores.protocol, "selector": "loss-gain"})


@selector("loss-change", cost="about L * H / 2 forwards", needs="labels")
def loss_change(model: VisionModel, images: Tensor, labels: Tensor) -> HeadScores:
    """How much the loss moves without each head, either way, by exact ablation."""
    scores = loss_gain(model, images, labels)
    return replace(
        scores, value=scores.value.abs(), protocol={**scores.protocol, "selector": "loss-change"}
    )
