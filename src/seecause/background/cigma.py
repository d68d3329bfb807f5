"""CIGMA and its kin among the ways to choose heads (Maliha & Hougen, CVPR 2026), the same from
Python and from the command line. The arithmetic is in `masks`, `gains` and `_score`, guards in
`scores`.

One-shot scores add up only where heads do not stand in for each other. `greedy` scores again after
each removal; `additivity` says how far one-shot scores were from adding up:
    gap = (R - R^(-set)) / sum of score(h) over the set     1: they add up; below 1: they overlap;
                                                            above 1: they back each other up
`regress` shows every image `draws` random sets of removed heads, each head with probability `rate`,
and explains its loss of response by which heads were gone:
    R_i - R_i^(-S) = sum over h in S of beta_h + error,         score(h) = beta_h
by least squares (`ridge` > 0 shrinks). Errors are clustered by image: the draws of one image are
not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seecause.background._score import HeadExperiment, Operator, Temperature, score
from seecause.background.erase import Baseline, Masks, Swapped
from seecause.background.gains import information_gains
from seecause.background.heads import (
    GUARDS,
    Guard,
    Head,
    HeadScores,
    above_noise,
    absent,
    gates_without,
    selector,
)
from seecause.background.masks import discover_masks
from seecause.errors import BadOption
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel
from seecause.options import check_options


@dataclass(frozen=True, kw_only=True)
class Screening:
    """Options of `screen`: find the `top` heads, verify 3 * top (or `verify`), audit a share of
    all, measure in bfloat16 (`half`)."""

    top: int
    verify: int | None = None
    audit: float = 0.02
    half: bool = False


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
    at_hand = masks_at_hand(model, images, masks, baseline, mask_steps)
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
    plain = 1.0 if temperature == "matched" else temperature
    gains = information_gains(model, images, at_hand, baseline=both, temperature=plain)
    scores = GUARDS[guard](above_noise(scores, gains.noise_floor))
    source = "none" if at_hand is None else "given" if at_hand is masks else "discovered"
    return replace(scores, protocol={**scores.protocol, "masks": source, "guard": guard})


def _screened(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None,
    screening: int | Screening,
    options: Mapping[str, Any],
) -> HeadScores:
    """Exact scores of the likeliest heads; the protocol says how far the guess can be trusted."""
    from seecause.background._screen import screen

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
    model: VisionModel, images: Tensor, masks: Masks | Tensor | None, baseline: Baseline, steps: int
) -> Masks | Tensor | None:
    """The masks that were given; discovered ones where none were and the baseline needs some."""
    if masks is None and not isinstance(baseline, Swapped):
        return discover_masks(model, images, steps=steps)
    return masks


@dataclass(frozen=True, eq=False)
class Greedy:
    """Removals in order: `gains[i]` is the score of `heads[i]` when it was chosen, `rounds[i]` all
    scores of that round.

    Where it stopped early, the last round is the one that found no head worth removing.
    """

    heads: list[Head]
    gains: list[float]
    rounds: list[HeadScores]


@in_eval_mode
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
    gates = gates_without(model, ())
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
    guard: Guard = "penalty",
    top: int = 4,
    mask_steps: int = 250,
) -> HeadScores:
    """How soon each head goes when CIGMA scores the others anew after each removal; 0 for those
    that stay."""
    at_hand = masks_at_hand(model, images, masks, baseline, mask_steps)
    options = {"baseline": baseline, "operator": operator, "guard": guard != "none"}
    chosen = greedy(model, images, at_hand, top=top, rule=GUARDS[guard], target=labels, **options)
    first = chosen.rounds[0]
    value = torch.zeros_like(first.value).masked_fill(first.value.isnan(), torch.nan)
    gain = torch.full_like(value, torch.nan)
    for place, (head, won) in enumerate(zip(chosen.heads, chosen.gains, strict=True)):
        value[head], gain[head] = len(chosen.heads) - place, won
    protocol = {**first.protocol, "top": top, "guard": guard}
    after = {"score when chosen": gain}
    return HeadScores(value, after=after, before=first.before, protocol=protocol)


@in_eval_mode
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
    check_options("joint_effect", HeadExperiment, options)
    experiment = HeadExperiment(model, images, masks, **{"guard": False, **options})
    gone = gates_without(model, heads) == 0
    return _lost(experiment, gone.expand(len(images), 1, -1, -1))[:, 0]


def _lost(experiment: HeadExperiment, gone: Tensor) -> Tensor:
    """What the response of each image loses by each of its removals gone [B, n, L, H] (bool):
    [B, n] float64 on the CPU."""

    def run_chunk(part: slice) -> Tensor:
        gates = (~gone[part]).float().to(experiment.model.device)
        whole = experiment.gated(part, torch.ones_like(gates[:, 0]))["response"]
        lost = [whole - experiment.gated(part, each)["response"] for each in gates.unbind(1)]
        return torch.stack(lost, dim=1).double().cpu()

    return torch.cat(experiment.over_images(run_chunk))


@in_eval_mode
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
    if not heads:  # else 0 / 0 only as long as two runs agree to the last bit
        return math.nan
    together = joint_effect(model, images, masks, heads, **options).mean()
    return float(together / sum(float(scores.value[head]) for head in heads))


@in_eval_mode
@torch.no_grad()
def regress(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None = None,
    *,
    draws: int = 32,
    rate: float = 0.1,
    ridge: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> HeadScores:
    """Scores [L, H] with standard errors; costs `draws` forwards for each version of each image.
    Options are those of `score`.

    `before["r2"]` is the share of the variance between removals that the fit explains.
    """
    if draws < 1 or not 0 < rate < 1 or ridge < 0:
        raise BadOption(
            "draws, rate, ridge",
            (draws, rate, ridge),
            "at least one draw, a probability between 0 and 1, and a ridge of at least 0",
        )
    check_options("regress", HeadExperiment, options)
    experiment = HeadExperiment(model, images, masks, seed=seed, **{"guard": False, **options})
    exists, heads, count = ~absent(model), len(experiment.heads), len(experiment.images)
    if ridge == 0 and count * draws < 2 * heads:
        enough = f"{-(-2 * heads // count)} or more"
        raise BadOption("draws", draws, f"enough for {heads} heads: {enough}, or ridge above 0")
    generator = torch.Generator().manual_seed(seed)
    shape = (count, draws, *exists.shape)
    gone = (torch.rand(shape, generator=generator, dtype=torch.float64) < rate) & exists

    lost = _lost(experiment, gone)
    value, error, explained = fit(gone[:, :, exists].double(), lost, ridge=ridge)
    table = torch.full((2, *exists.shape), torch.nan, dtype=torch.float64)
    table[:, exists] = torch.stack([value, error])
    protocol = {"estimator": "regression", "draws": draws, "rate": rate, "ridge": ridge}
    protocol |= {"seed": seed, "operator": experiment.operator, **experiment.record()}
    return HeadScores(table[0], table[1], before={"r2": explained}, protocol=protocol)


@selector(
    "regression", cost="2 * draws forwards, and 500 for masks", needs="nothing; masks if at hand"
)
def regression(
    model: VisionModel,
    images: Tensor,
    labels: Tensor,
    *,
    masks: Masks | Tensor | None = None,
    baseline: Baseline = "grey",
    operator: Operator = "zero",
    draws: int = 32,
    rate: float = 0.1,
    ridge: float = 0.0,
    mask_steps: int = 250,
    seed: int = 0,
) -> HeadScores:
    """What each head adds to BIG while random others are missing too, by least squares. It has no
    guard."""
    at_hand = masks_at_hand(model, images, masks, baseline, mask_steps)
    options: dict[str, Any] = {"draws": draws, "rate": rate, "ridge": ridge, "seed": seed}
    options |= {"target": labels, "baseline": baseline, "operator": operator}
    return regress(model, images, at_hand, **options)


def fit(gone: Tensor, lost: Tensor, *, ridge: float = 0.0) -> tuple[Tensor, Tensor, float]:
    """Least squares of lost [B, n] on gone [B, n, P], with an intercept -> slopes [P], their errors
    clustered by image [P], and R^2."""
    x = torch.cat([torch.ones_like(gone[..., :1]), gone], dim=-1)  # [B, n, 1 + P]
    penalty = ridge * torch.eye(x.shape[-1], dtype=x.dtype)
    penalty[0, 0] = 0
    gram = torch.einsum("bnp,bnq->pq", x, x) + penalty
    if torch.linalg.matrix_rank(gram, hermitian=True) < len(gram):  # some always went together
        raise BadOption(
            "draws",
            x.shape[1],
            "more of them, or ridge above 0: these removals cannot tell all heads apart",
        )
    inverse = torch.linalg.inv(gram)
    slopes = inverse @ torch.einsum("bnp,bn->p", x, lost)
    residual = lost - x @ slopes
    scores = torch.einsum("bnp,bn->bp", x, residual)  # summed within each image
    variance = inverse @ (scores.T @ scores) @ inverse
    explained = 1 - float(residual.square().sum() / (lost - lost.mean()).square().sum())
    return slopes[1:], variance.diagonal().clamp_min(0).sqrt()[1:], explained
