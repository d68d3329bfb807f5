"""Head scores for the price of a few forwards: guess all, measure the likeliest.

Put a gate g_h = 1 on every head. To first order, removing head h changes the response by its slope
there (attribution patching):
    A(h) = mean over images of dR / dg_h   ~   score(h)
One backward pass gives A for all heads. The `verify` heads with the largest guess are then measured
exactly, and a random few of the rest besides, to tell how many good ones the guess may have missed.

Known blind spots: saturated attention, effects that cancel, and images with BIG near 0, where JS
has no slope. `at` averages slopes at several uniform gates, such as (1.0, 0.5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seecause._options import check_options
from seecause.errors import BadOption
from seecause.heads.masks import Masks
from seecause.heads.result import Head, HeadScores
from seecause.heads.score import score
from seecause.heads.study import Study
from seecause.metrics import standard_error
from seecause.metrics.statistics import rank_correlation
from seecause.models.view import VisionModel

By = Literal["signed", "size"]


@dataclass(frozen=True, eq=False)
class Screened:
    """Exact scores of the heads that were verified or audited, and how far the guess can be
    trusted."""

    scores: HeadScores  # exact; NaN where nothing was measured
    guess: HeadScores  # first order, of every head
    verified: list[Head]
    audited: list[Head]  # random heads among the rest
    agreement: float  # Spearman's correlation of guess and exact score over the measured heads
    missed: float  # share of the audited heads that beat the last of the top
    recall: float  # estimate: 1 - (such heads expected among the rest) / top; NaN without an audit

    def __repr__(self) -> str:
        measured = (
            f"{len(self.verified)} verified + {len(self.audited)} audited of"
            f" {int(self.guess.value.isfinite().sum())} heads"
        )
        return (
            f"Screened({measured}; agreement {self.agreement:.2f}, estimated recall"
            f" {self.recall:.2f})"
        )


def screen(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None = None,
    *,
    top: int = 4,
    verify: int | None = None,
    audit: float = 0.05,
    at: Sequence[float] = (1.0,),
    by: By = "signed",
    seed: int = 0,
    **options: Any,
) -> Screened:
    """Find the `top` heads: verify 4 * top (or `verify`) and audit a share of all heads. `by` ranks
    guesses by value or by size. Options are `score`'s."""
    check_options("screen", score, options, leave_out=("heads",))
    guess = first_order(
        model,
        images,
        masks,
        at=at,
        **_without(options, "guard", "progress", "per_image", "entropy_match"),
    )
    heads = [(int(layer), int(head)) for layer, head in guess.value.isfinite().nonzero()]
    count = 4 * top if verify is None else verify
    if not 0 < top <= len(heads) or count < top:
        raise BadOption(
            "top, verify", (top, count), f"1 to {len(heads)} heads, and at least as many verified"
        )
    if by not in get_args(By) or not 0 <= audit <= 1:
        raise BadOption(
            "by, audit",
            (by, audit),
            f"one of {', '.join(get_args(By))}, and a share between 0 and 1",
        )
    ranked = sorted(
        heads,
        key=lambda head: -float(guess.value[head].abs() if by == "size" else guess.value[head]),
    )
    verified, rest = ranked[:count], ranked[count:]
    drawn = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[
        : math.ceil(audit * len(heads))
    ].tolist()
    audited = sorted(rest[i] for i in drawn)
    scores = score(model, images, masks, heads=[*verified, *audited], **options)
    return _judge(scores, guess, verified, audited, top=top, rest=len(rest))


def first_order(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None = None,
    *,
    at: Sequence[float] = (1.0,),
    **options: Any,
) -> HeadScores:
    """The slope of the response in every head's gate, averaged over images and the uniform gates
    `at`. Options are those of `score`."""
    if not at or not all(0 <= point <= 1 for point in at):
        raise BadOption("at", at, "gates between 0 and 1")
    check_options("first_order", Study, options, leave_out=("guard",))
    with torch.no_grad():
        study = Study(model, images, masks, guard=False, **options)
    width = [model.n_layers, model.n_heads]

    @torch.enable_grad()
    def some(part: slice) -> Tensor:
        total = torch.zeros(part.stop - part.start, *width, dtype=torch.float64)
        for point in at:
            gates = torch.full(
                (part.stop - part.start, *width),
                float(point),
                dtype=torch.promote_types(model.dtype, torch.float32),
                device=model.device,
            )
            gates.requires_grad_()
            (slope,) = torch.autograd.grad(
                study.gated(part, gates)["response"].sum(), gates
            )  # images do not see each other
            total += slope.double().cpu() / len(at)
        return total

    slopes = torch.cat(study.over_images(some, depth=model.n_layers + 1))  # [B, L, H]
    absent = torch.ones(width, dtype=torch.bool)
    absent[tuple(zip(*study.heads, strict=True))] = False
    slopes[:, absent] = torch.nan
    said = {
        "estimator": "first order",
        "at": list(at),
        "operator": study.operator,
        **study.record(),
    }
    return HeadScores(slopes.mean(dim=0), standard_error(slopes), protocol=said)


def _judge(
    scores: HeadScores,
    guess: HeadScores,
    verified: list[Head],
    audited: list[Head],
    *,
    top: int,
    rest: int,
) -> Screened:
    exact = {head: float(scores.value[head]) for head in (*verified, *audited)}
    bar = sorted((exact[head] for head in verified), reverse=True)[top - 1]
    missed = (
        sum(exact[head] > bar for head in audited) / len(audited)
        if audited
        else 0.0
        if rest == 0
        else math.nan
    )
    values = torch.tensor(
        [[exact[head] for head in exact], [float(guess.value[head]) for head in exact]],
        dtype=torch.float64,
    )
    agreement = float(rank_correlation(values[:1], values[1:])[0])
    recall = math.nan if math.isnan(missed) else max(0.0, 1 - missed * rest / top)
    return Screened(scores, guess, verified, audited, agreement, missed, recall)


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}
