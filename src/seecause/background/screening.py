"""Head scores at the price of a few forwards: guess them all, measure the likeliest.

Put a gate g_h on every head. The slope of the response at g = 1 guesses what removal (g = 0) does,

    first order      score(h) ~ mean over images of dR / dg_h

and one backward pass gives it for all heads. A divergence bends where a head matters: images with
BIG near 0 have no slope although removals can only raise BIG there. So BIG and FIG are guessed to
second order. With d = log p - log q at the two predictions and m = (p + q) / 2, the divergence is

    JS ~ ln 2 (1 - exp(-x / ln 2)),    x = |d|^2 / 8,    |d|^2 = sum_y m_y (d_y - sum_z m_z d_z)^2

exact for small d, and bounded by ln 2. Removing head h moves d by -e_h, to first
order in its gate, and x to

    x'(h) = max(0, x - <d, e_h> / 4 + c |e_h|^2 / 8)

<d, e_h> / 4 is the slope of x, which that of JS gives: dJS / dg = (1 - JS / ln 2) dx / dg. For
|e_h|^2 one random probe is enough: with random signs s_y, the square of
sum_y s_y sqrt(m_y) (e_h - m.e_h)_y has that mean, and a second backward pass gives it for all
heads; images average its noise away. Its weight c would be 1 if predictions moved in a straight
line and the probe had no noise; 0.6 served best on the images that chose it (docs/decisions.md).

The `verify` heads with the largest guess are then measured exactly, and a random few of the rest,
to estimate how many good ones the guess missed. Guesses of a float32 model on a GPU are made
in bfloat16; what is measured is measured in float32, unless `half` allows otherwise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from seecause.background.gains import COMPARED, OF_MASKS, log_probs
from seecause.background.heads import Head, HeadScores, absent, mean_scores, padded
from seecause.background.images import LabelledImages
from seecause.background.scoring import HeadExperiment, score
from seecause.engine.forks import carried_logits
from seecause.engine.mixture import need_gradients
from seecause.errors import BadOption, NotDefined
from seecause.loading import rewrap
from seecause.metrics.statistics import rank_correlation
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel
from seecause.options import Count, Limit, check_options
from seecause.types import wide_dtype

AuditShare = Annotated[float, Limit(lambda share: 0 <= share <= 1, "a share between 0 and 1")]
VERIFIED = 3  # heads that are measured for each that is wanted
MOST = math.log(2)  # no divergence is larger
BENT = 0.6  # c, the weight of |e_h|^2
PROBES = 1  # random signs whose squares are averaged
ROOM = 1e-6  # of it, that is always left: the slope of x is that of JS over what is left


@dataclass(frozen=True, eq=False)
class Screened:
    """Exact scores of the heads that were verified or audited, and how far the guess can be
    trusted."""

    scores: HeadScores  # exact; NaN where nothing was measured
    guess: HeadScores  # of every head
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


@in_eval_mode
def screen(
    model: VisionModel,
    data: LabelledImages | Tensor,
    *,
    top: Count = 4,
    verify: Count | None = None,
    audit: AuditShare = 0.02,
    half: bool = False,
    seed: int = 0,
    **options: Any,
) -> Screened:
    """Find the `top` heads at the price of a few forwards.

    Args:
        model: A vision transformer.
        data: As `score` takes it.
        top: Heads to find.
        verify: Heads with the largest guess that are measured exactly; None: 3 * top.
        audit: Share of all heads that are drawn at random from the rest and measured too.
        half: Measure a float32 model on a GPU in bfloat16: several times as fast, and scores are
            off by much less than their standard error.
        seed: Draws the audited heads and the probes.
        **options: Options of `score`.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:train", limit=4)
        >>> data = sc.background.read_images(model, data)
        >>> screened = sc.background.screen(model, data.with_masks(data.truth), top=2)
        >>> len(screened.verified), len(screened.audited)
        (6, 1)
    """
    given = {"top": top, "verify": verify, "audit": audit, "half": half}
    check_options("screen", screen, given)
    check_options("screen", score, options, leave_out=("heads",))
    guessing = {k: v for k, v in options.items() if k not in ("guard", "progress")}
    need_gradients(model, "screen", remedy="Measure every head: sc.background.score")
    quick = _half_twin(model)
    experiment = _experiment("screen", quick, data, {"seed": seed, **guessing})
    make = _second_order if experiment.measure.response in OF_MASKS else _first_order
    guess = make(experiment, seed)
    heads = [(int(layer), int(head)) for layer, head in guess.value.isfinite().nonzero()]
    count = VERIFIED * top if verify is None else verify
    if not 0 < top <= len(heads) or count < top:
        raise BadOption(
            "top, verify", (top, count), f"1 to {len(heads)} heads, and at least as many verified"
        )
    ranked = sorted(heads, key=lambda head: -float(guess.value[head]))
    verified, rest = ranked[:count], ranked[count:]
    order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed)).tolist()
    audited = sorted(rest[i] for i in order[: math.ceil(audit * len(heads))])
    measured = quick if half else model
    scores = score(measured, data, heads=[*verified, *audited], seed=seed, **options)
    if measured is not model:
        scores.protocol["model_fingerprint"] = model.fingerprint()
    return _judge(scores, guess, verified, audited, top=top, rest=len(rest))


@in_eval_mode
def first_order(model: VisionModel, data: LabelledImages | Tensor, **options: Any) -> HeadScores:
    """The slope of the response in every head's gate, averaged over images. Options are those of
    `score`."""
    experiment = _experiment("first_order", model, data, options)
    return _described(experiment, _first_order(experiment))


@in_eval_mode
def second_order(model: VisionModel, data: LabelledImages | Tensor, **options: Any) -> HeadScores:
    """What BIG (or FIG, by `response`) would lose without each head, guessed as this file says.
    Options are those of `score`; `seed` draws the probes."""
    response = options.get("response", "big")
    if response not in OF_MASKS:
        raise BadOption("response", response, "big or fig; first_order takes the others")
    experiment = _experiment("second_order", model, data, options)
    return _described(experiment, _second_order(experiment, options.get("seed", 0)))


def _first_order(experiment: HeadExperiment, seed: int = 0) -> HeadScores:
    @torch.enable_grad()
    def run_chunk(part: slice) -> Tensor:
        graph = _TracedImages(experiment, part)
        return graph.slopes(graph.measured()["response"])

    return _averaged(experiment, "first order", run_chunk)


def _second_order(experiment: HeadExperiment, seed: int) -> HeadScores:
    other = COMPARED[str(experiment.measure.response)]
    chance = torch.Generator().manual_seed(seed)
    shape = (PROBES, len(experiment.data), experiment.model.n_classes)
    signs = torch.randint(0, 2, shape, generator=chance) * 2.0 - 1

    @torch.enable_grad()
    def run_chunk(part: slice) -> Tensor:
        graph = _TracedImages(experiment, part)
        divergence = graph.measured()["response"]
        slopes = graph.slopes(divergence, again=True)
        answers = [
            log_probs(graph.logits[view], experiment.measure.temperature)
            for view in ("plain", other)
        ]
        spread = torch.zeros_like(slopes)
        for probe, sign in enumerate(signs[:, part].to(divergence)):
            probed = graph.slopes(_probe(answers[0], answers[1], sign), again=probe + 1 < PROBES)
            spread += probed.square() / PROBES
        at = divergence.detach().double().cpu()[:, None, None]
        return at - saturated(at, slopes, spread)

    return _averaged(experiment, "second order", run_chunk)


def saturated(divergence: Tensor, slope: Tensor, spread: Tensor) -> Tensor:
    """The divergence without a head, from the one with it [b, 1, 1], its slope in the head's gate
    and |e_h|^2 [b, L, H]."""
    left = (1 - divergence / MOST).clamp_min(ROOM)
    moved = (-MOST * left.log() - slope / left + BENT * spread / 8).clamp_min(0)
    return -MOST * torch.expm1(-moved / MOST)


def _probe(log_p: Tensor, log_q: Tensor, signs: Tensor) -> Tensor:
    """sum_y s_y sqrt(m_y) (d - m.d)_y of each image, [b]; m is held fixed."""
    mean = ((log_p.exp() + log_q.exp()) / 2).detach()
    apart = log_p - log_q
    apart = apart - (mean * apart).sum(dim=-1, keepdim=True)
    return (signs * mean.sqrt() * apart).sum(dim=-1)


class _TracedImages:
    """Some images run once, with every head's content in reach of gradients."""

    def __init__(self, experiment: HeadExperiment, part: slice):
        self.experiment, self.part, model = experiment, part, experiment.model
        rows = experiment.rows(part)
        self.count = experiment.copies * (part.stop - part.start)  # rows that answer
        logits, seen = carried_logits(model, rows)
        self.logits = experiment.measure.split(logits[: self.count])
        self.carried = [carried for carried, _ in seen]
        with torch.no_grad():
            self.removed = [
                carried[: self.count] - experiment.content(layer, carried, tokens)
                for layer, (carried, tokens) in enumerate(seen)
            ]  # what each head's gate multiplies

    def measured(self) -> dict[str, Tensor]:
        return self.experiment.measure.take(self.part)(self.logits)

    def slopes(self, values: Tensor, *, again: bool = False) -> Tensor:
        """Of values [b], each of its own image, in the gates that its versions share: [b, L, H],
        float64 on the CPU."""
        grads = torch.autograd.grad(
            values.sum(), self.carried, retain_graph=again, materialize_grads=True
        )  # a model that reads an earlier block's output does not hang on the last heads at all
        by_block = [
            (removed * grad[: self.count]).sum(dim=(1, 3), dtype=wide_dtype(grad.dtype))
            for removed, grad in zip(self.removed, grads, strict=True)
        ]  # [V * b, H_l]
        versions = padded(self.experiment.model, by_block).unflatten(
            0, (self.experiment.copies, -1)
        )
        return versions.sum(dim=0).double().cpu()


def _experiment(
    what: str,
    model: VisionModel,
    data: LabelledImages | Tensor,
    options: Mapping[str, Any],
) -> HeadExperiment:
    check_options(what, HeadExperiment.__init__, options, leave_out=("guard",))
    with torch.no_grad():
        return HeadExperiment(model, data, guard=False, **options)


def _described(experiment: HeadExperiment, guess: HeadScores) -> HeadScores:
    """With everything that a result says of itself; naming the pixels takes as long as a guess."""
    return replace(guess, protocol={**guess.protocol, **experiment.record()})


def _averaged(
    experiment: HeadExperiment, estimator: str, run_chunk: Callable[[slice], Tensor]
) -> HeadScores:
    """Guesses [b, L, H] of all images, averaged; heads that are not there are NaN."""
    model = experiment.model
    guesses = torch.cat(experiment.over_images(run_chunk, depth=model.n_layers + 1))
    guesses[:, absent(model)] = torch.nan
    scores = mean_scores(model, guesses)
    about = {"estimator": estimator, "operator": experiment.operator, **scores.protocol}
    return replace(scores, effects=guesses, protocol=about)


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


def _half_twin(model: VisionModel) -> VisionModel:
    """A float32 model on a GPU in bfloat16, kept as long as its weights and gates are what they
    are; any other as it is."""
    if model.device.type != "cuda" or model.dtype != torch.float32:
        return model
    state, held = model.state_key(), model.memo.get("half twin")
    if held is None or held[0] != state:
        try:
            module = copy.deepcopy(model.module).to(torch.bfloat16).eval()
            twin = rewrap(model, module, check=False)
        except NotDefined:  # of classes that its module does not know
            twin = model
        else:
            twin.gates = model.gates
        held = model.memo["half twin"] = (state, twin)
    return held[1]
