"""Heads that a high score does not excuse: their removal costs the foreground, the accuracy, or is
noise.

CIGMA(h) has no guard of its own: a head whose removal makes all answers alike gets the highest
score there is. Each rule takes scores and returns scores.

    penalised    score - alpha max(0, mean(FIG - FIG^(-h)))
    protected    heads whose removal costs more than a share of FIG, or more than some accuracy,
    must stay (-inf)
    above_noise  scores within the noise floor of the measurement are 0: the error of JS has one
    sign and does not average out
"""

from __future__ import annotations

from dataclasses import replace

import torch

from seecause.errors import NotDefined
from seecause.heads.result import HeadScores
from seecause.metrics import standard_error


def penalised(scores: HeadScores, *, alpha: float = 1.0) -> HeadScores:
    """Subtract what the foreground loses.

    Errors and effects become those of the penalised score where `score(per_image=True)` kept what
    each image loses; else errors of penalised heads are NaN, since they are not known.
    """
    drop = _fig_drop(scores)
    cost, said = drop.clamp_min(0), {**scores.protocol, "penalty": alpha}
    value, error = scores.value - alpha * cost, scores.error
    if scores.effects is not None and scores.fig_drops is not None:
        effects = (
            scores.effects - alpha * (drop > 0) * scores.fig_drops
        )  # the mean decides whether a head pays
        return replace(
            scores, value=value, error=standard_error(effects), effects=effects, protocol=said
        )
    return replace(
        scores,
        value=value,
        error=None if error is None else torch.where(cost > 0, torch.nan, error),
        effects=None,
        protocol=said,
    )


def protected(scores: HeadScores, *, fig: float = 0.05, accuracy: float = 0.01) -> HeadScores:
    """Keep heads without which FIG falls by more than a share `fig` of itself, or accuracy by more
    than `accuracy`."""
    harmed = _fig_drop(scores) > fig * scores.before["fig"]
    harmed |= scores.before["accuracy"] - scores.after["accuracy"] > accuracy
    value = torch.where(harmed & ~scores.value.isnan(), -torch.inf, scores.value)
    return replace(
        scores,
        value=value,
        protocol={**scores.protocol, "protected": {"fig": fig, "accuracy": accuracy}},
    )


def above_noise(scores: HeadScores, floor: float) -> HeadScores:
    """Scores whose size is below `floor` (`Gains.noise_floor`) become 0."""
    value = torch.where(scores.value.abs() < floor, 0.0, scores.value)
    return replace(scores, value=value, protocol={**scores.protocol, "noise_floor": floor})


def _fig_drop(scores: HeadScores) -> torch.Tensor:
    if "fig_drop" not in scores.after:
        raise NotDefined(
            "the guard", "FIG without each head was not measured", "Score with masks and guard=True"
        )
    return scores.after["fig_drop"]
