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

A screen gives scores for the price of a few forwards: guess all, measure the likeliest. Put a gate
g_h = 1 on every head. To first order, removing head h changes the response by its slope there
(attribution patching):
    A(h) = mean over images of dR / dg_h   ~   score(h)
One backward pass gives A for all heads. The `verify` heads with the largest guess are then measured
exactly, and a random few of the rest besides, to tell how many good ones the guess may have missed.
Known blind spots: saturated attention, effects that cancel, and images with BIG near 0, where JS
has no slope. `at` averages slopes at several uniform gates, such as (1.0, 0.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from seecause._options import check_options
from seecause.errors import BadOption, NotDefined
from seecause.heads._experiment import HeadExperiment, Operator
from seecause.heads._score import Temperature, score
from seecause.heads.erase import Baseline, Masks, Swapped
from seecause.heads.gains import information_gains
from seecause.heads.masks import discover_masks
from seecause.heads.registry import selector
from seecause.heads.scores import Head, HeadScores
from seecause.metrics import standard_error
from seecause.metrics.statistics import rank_correlation
from seecause.models.view import VisionModel

Guard = Literal["penalty", "protect", "none"]
By = Literal["signed", "size"]


@dataclass(frozen=True, kw_only=True)
class Screening:
    """Options of `screen`: find the `top` heads, verify 4 * top (or `verify`), audit a share of
    all."""

    top: int
    verify: int | None = None
    audit: float = 0.05
    at: Sequence[float] = (1.0,)
    by: By = "signed"


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
    screened = screen(model, images, masks, **asdict(settings), **options)
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
        seed=seed,
        **{**_without(options, "guard", "progress"), **_plain_temperature(options)},
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
    order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed)).tolist()
    audited = sorted(rest[i] for i in order[: math.ceil(audit * len(heads))])
    scores = score(model, images, masks, heads=[*verified, *audited], seed=seed, **options)
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
    check_options("first_order", HeadExperiment, options, leave_out=("guard",))
    with torch.no_grad():
        experiment = HeadExperiment(model, images, masks, guard=False, **options)
    width = [model.n_layers, model.n_heads]

    @torch.enable_grad()
    def run_chunk(part: slice) -> Tensor:
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
                experiment.gated(part, gates)["response"].sum(), gates
            )  # images do not see each other
            total += slope.double().cpu() / len(at)
        return total

    slopes = torch.cat(experiment.over_images(run_chunk, depth=model.n_layers + 1))  # [B, L, H]
    absent = torch.ones(width, dtype=torch.bool)
    absent[tuple(zip(*experiment.heads, strict=True))] = False
    slopes[:, absent] = torch.nan
    protocol = {
        "estimator": "first order",
        "at": list(at),
        "operator": experiment.operator,
        **experiment.record(),
    }
    return HeadScores(slopes.mean(dim=0), standard_error(slopes), protocol=protocol)


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
    missed = 0.0 if rest == 0 else math.nan
    if audited:
        missed = sum(exact[head] > bar for head in audited) / len(audited)
    values = torch.tensor(
        [[exact[head] for head in exact], [float(guess.value[head]) for head in exact]],
        dtype=torch.float64,
    )
    agreement = float(rank_correlation(values[:1], values[1:])[0])
    recall = math.nan if math.isnan(missed) else max(0.0, 1 - missed * rest / top)
    return Screened(scores, guess, verified, audited, agreement, missed, recall)


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def _plain_temperature(options: Mapping[str, Any]) -> dict[str, float]:
    """A slope has no ablated model to match: it is taken at the whole model's temperature."""
    return {"temperature": 1.0} if options.get("temperature") == "matched" else {}
