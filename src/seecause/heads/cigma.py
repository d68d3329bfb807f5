"""CIGMA among the ways to choose heads (Maliha & Hougen, CVPR 2026): masks, the score of every
head, its guard and its noise floor, the same from Python and from the command line.

The arithmetic is in `masks`, `gains` and `score`. CIGMA(h) has no guard of its own: a head whose
removal makes all answers alike gets the highest score there is. Each rule here takes scores and
returns scores.

    penalised    score - alpha max(0, mean(FIG - FIG^(-h)))
    protected    heads whose removal costs more than a share of FIG, or more than some accuracy,
                 must stay (-inf)
    above_noise  scores within the noise floor of the measurement are 0: the error of JS has one
                 sign and does not average out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor

from seecause.errors import BadOption, NotDefined
from seecause.heads._experiment import Operator
from seecause.heads._score import Temperature, score
from seecause.heads._screen import Screening, screen as screen_heads
from seecause.heads.erase import Baseline, Masks, Swapped
from seecause.heads.gains import information_gains
from seecause.heads.masks import discover_masks
from seecause.heads.registry import selector
from seecause.heads.scores import HeadScores
from seecause.metrics import standard_error
from seecause.models.view import VisionModel

Guard = Literal["penalty", "protect", "none"]


@selector(
    "cigma", cost="about L * H forwards, and 500 for masks", needs="nothing; masks if at hand"
)
def cigma(
    model: VisionModel,
    images: Tensor,
    labels: Tensor,
    *,
    masks: Masks | Tensor | None = None,
    baseline: Baseline = "grey",
    operator: Operator = "zero",
    guard: Guard = "penalty",
    temperature: Temperature = 1.0,
    screen: int | Screening | None = None,
    mask_steps: int = 250,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> HeadScores:
    """How much less the answer hangs on the background without each head, less what the foreground
    loses.

    Scores below the noise floor are 0, then the guard applies. `screen` measures only the likeliest
    heads. Masks are searched (`mask_steps`) where none are given and the baseline needs some.
    """
    at_hand = masks_at_hand(model, images, masks, baseline, steps=mask_steps)
    complete = not (isinstance(baseline, Swapped) and baseline.foreground is None)
    if not complete and guard != "none":
        raise BadOption("guard", guard, "'none': these counterfactuals have no other foreground")
    options: dict[str, Any] = {
        "target": labels,
        "baseline": baseline,
        "operator": operator,
        "temperature": temperature,
        "guard": complete,
        "seed": seed,
    }
    if screen is None:
        scores = score(model, images, at_hand, progress=progress, **options)
    else:
        scores = _screened(model, images, at_hand, screen, options)
    both = baseline if complete else Swapped(baseline.background, baseline.background)  # type: ignore[union-attr]
    floor = information_gains(model, images, at_hand, baseline=both).noise_floor
    scores = GUARDS[guard](above_noise(scores, floor))
    source = "none" if at_hand is None else "given" if at_hand is masks else "discovered"
    return replace(
        scores,
        protocol={**scores.protocol, "selector": "cigma", "masks": source, "guard": guard},
    )


def _screened(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None,
    screening: int | Screening,
    options: Mapping[str, Any],
) -> HeadScores:
    """Exact scores of the likeliest heads; the protocol says how far the guess can be trusted."""
    settings = screening if isinstance(screening, Screening) else Screening(top=screening)
    screened = screen_heads(model, images, masks, **asdict(settings), **options)
    about = {
        "verified": len(screened.verified),
        "audited": len(screened.audited),
        "heads": int(screened.guess.value.isfinite().sum()),
        "agreement": screened.agreement,
        "recall": screened.recall,
    }
    return replace(screened.scores, protocol={**screened.scores.protocol, "screen": about})


def masks_at_hand(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None,
    baseline: Baseline,
    *,
    steps: int,
) -> Masks | Tensor | None:
    """The masks that were given; discovered ones where none were and the baseline needs some."""
    if masks is None and not isinstance(baseline, Swapped):
        return discover_masks(model, images, steps=steps)
    return masks


def penalised(scores: HeadScores, *, alpha: float = 1.0) -> HeadScores:
    """Subtract what the foreground loses.

    Errors and effects become those of the penalised score where scores know what each image
    loses; else errors of penalised heads are NaN, since they are not known.
    """
    drop = _fig_drop(scores)
    cost, protocol = drop.clamp_min(0), {**scores.protocol, "penalty": alpha}
    value, error = scores.value - alpha * cost, scores.error
    if scores.effects is not None and scores.fig_drops is not None:
        effects = (
            scores.effects - alpha * (drop > 0) * scores.fig_drops
        )  # the mean decides whether a head pays
        return replace(
            scores, value=value, error=standard_error(effects), effects=effects, protocol=protocol
        )
    return replace(
        scores,
        value=value,
        error=None if error is None else torch.where(cost > 0, torch.nan, error),
        effects=None,
        protocol=protocol,
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


GUARDS: Mapping[str, Callable[[HeadScores], HeadScores]] = {
    "penalty": penalised,
    "protect": protected,
    "none": lambda scores: scores,
}


def _fig_drop(scores: HeadScores) -> torch.Tensor:
    if "fig_drop" not in scores.after:
        raise NotDefined(
            "the guard", "FIG without each head was not measured", "Score with masks and guard=True"
        )
    return scores.after["fig_drop"]
