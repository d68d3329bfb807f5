"""CIGMA among the other ways to choose heads: discovered masks (or given ones), then the score of
every head, with its guard.

Maliha & Hougen, CVPR 2026. The arithmetic is in `masks`, `gains` and `score`; the guard, which the
paper asserts and never computes, in `guard`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from seecause.heads.erase import Baseline, Swapped
from seecause.heads.guard import penalised
from seecause.heads.masks import Masks, discover_masks
from seecause.heads.registry import selector
from seecause.heads.result import HeadScores
from seecause.heads.score import score
from seecause.heads.study import Operator
from seecause.models.view import VisionModel


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
    guard: bool = True,
    steps: int = 250,
) -> HeadScores:
    """How much less the answer hangs on the background without each head, less what the foreground
    loses."""
    found = masks_at_hand(model, images, masks, baseline, steps=steps)
    scores = score(
        model, images, found, target=labels, baseline=baseline, operator=operator, guard=guard
    )
    scores = penalised(scores) if guard else scores
    used = "discovered" if found is not masks else "none" if masks is None else "given"
    return replace(scores, protocol={**scores.protocol, "selector": "cigma", "masks": used})


def masks_at_hand(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None,
    baseline: Baseline,
    *,
    steps: int,
) -> Masks | Tensor | None:
    """The masks that were given; found ones where none were and the baseline needs some."""
    return (
        discover_masks(model, images, steps=steps)
        if masks is None and not isinstance(baseline, Swapped)
        else masks
    )
