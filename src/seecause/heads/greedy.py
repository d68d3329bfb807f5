"""Heads chosen one after the other, each scored in the model that the earlier ones have left.

One-shot scores add up only where heads do not stand in for each other. `greedy` scores again after
each removal; `additivity` says how far one-shot scores were from adding up:
    gap = (R - R^(-set)) / sum of score(h) over the set            1: they add up; below 1: they
    overlap; above 1: they back each other up
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seecause._options import check_options
from seecause.errors import BadOption
from seecause.heads.cigma import masks_at_hand
from seecause.heads.erase import Baseline
from seecause.heads.guard import penalised
from seecause.heads.masks import Masks
from seecause.heads.registry import selector
from seecause.heads.result import Head, HeadScores
from seecause.heads.score import score
from seecause.heads.study import Operator, Study, check_heads
from seecause.models.view import VisionModel


@dataclass(frozen=True, eq=False)
class Greedy:
    """Removals in order: `gains[i]` is the score of `heads[i]` when it was chosen, `rounds[i]` all
    scores of that round.

    Where it stopped early, the last round is the one that found no head worth removing.
    """

    heads: list[Head]
    gains: list[float]
    rounds: list[HeadScores]


def greedy(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None = None,
    *,
    top: int = 4,
    rule: Callable[[HeadScores], HeadScores] | None = None,
    **options: Any,
) -> Greedy:
    """Up to `top` heads; stops early when none has a positive score. `rule` is a guard applied in
    each round. Options are those of `score`.

    Chosen heads are gated to zero for the next round, whatever the operator that scores them.
    """
    if top < 1:
        raise BadOption("top", top, "at least one head")
    check_options("greedy", score, options)
    gates = torch.ones(model.n_layers, model.n_heads)
    chosen, gains, rounds = list[Head](), list[float](), list[HeadScores]()
    for _ in range(top):
        with model.gated(gates):
            scores = score(model, images, masks, **options)
        scores = scores if rule is None else rule(scores)
        rounds.append(scores)
        best = scores.order()[:1]
        if not best:
            break
        chosen += best
        gains.append(float(scores.value[best[0]]))
        gates[best[0]] = 0
    return Greedy(chosen, gains, rounds)


@selector(
    "greedy", cost="as cigma, once for each of `top` heads", needs="nothing; masks if at hand"
)
def greedy_cigma(
    model: VisionModel,
    images: Tensor,
    labels: Tensor,
    *,
    masks: Masks | Tensor | None = None,
    baseline: Baseline = "grey",
    operator: Operator = "zero",
    guard: bool = True,
    top: int = 4,
    steps: int = 250,
) -> HeadScores:
    """How soon each head goes when CIGMA scores the others anew after each removal; 0 for those
    that stay."""
    found = masks_at_hand(model, images, masks, baseline, steps=steps)
    options = {"target": labels, "baseline": baseline, "operator": operator, "guard": guard}
    chosen = greedy(model, images, found, top=top, rule=penalised if guard else None, **options)
    first = chosen.rounds[0]
    value = torch.zeros_like(first.value).masked_fill(first.value.isnan(), torch.nan)
    gain = torch.full_like(value, torch.nan)
    for place, (head, won) in enumerate(zip(chosen.heads, chosen.gains, strict=True)):
        value[head], gain[head] = len(chosen.heads) - place, won
    said = {**first.protocol, "selector": "greedy", "top": top, "guard": guard}
    return HeadScores(
        value,
        after={"score when chosen": gain},
        before=first.before,
        protocol=said,
        total=first.total,
    )


@torch.no_grad()
def joint_effect(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None,
    heads: Sequence[Head],
    **options: Any,
) -> Tensor:
    """What the response of each image loses when all of `heads` go together, [B] float64. Options
    are those of `score`."""
    check_options("joint_effect", Study, options)
    study = Study(model, images, masks, **{"guard": False, **options})
    whole = torch.ones(model.n_layers, model.n_heads, device=model.device)
    cut = whole.clone()
    for head in check_heads(model, heads):
        cut[head] = 0

    def some(part: slice) -> Tensor:
        first, second = (
            study.gated(part, gates.expand(part.stop - part.start, -1, -1))["response"]
            for gates in (whole, cut)
        )
        return (first - second).double().cpu()

    return torch.cat(study.over_images(some))


def additivity(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None,
    heads: Sequence[Head],
    scores: HeadScores,
    **options: Any,
) -> float:
    """The additivity gap of a set of heads with one-shot `scores`, measured with the options they
    were made with. NaN for an empty set."""
    if not heads:
        return float("nan")
    return float(
        joint_effect(model, images, masks, heads, **options).mean()
        / sum(float(scores.value[head]) for head in heads)
    )
