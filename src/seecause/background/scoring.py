"""A score for every head: what a response loses without it (CIGMA, Maliha & Hougen, CVPR 2026,
phase 3), how heads with large scores are found faster, heads exchanged between versions of an
image, and the selectors that these are compared with.

`score` measures every head, by exact suffix runs:

    score(h) = mean over images of  R - R^(-h),          CIGMA(h): R = BIG

A head with a positive CIGMA score made predictions depend on the background. The score alone can
mislead: a head whose removal makes all predictions alike has BIG^(-h) = 0 and the highest score. So
accuracy, NLL and (with `guard`) FIG without the head are measured too. The output of a
removed head is replaced by:

    zero       zeros (the paper)
    mean       its mean output over the images, token by token
    resample   its output for another image (a seeded derangement); the same donor for all
               versions of an image

`screen` guesses all scores and measures the highest exactly. With a gate g_h on every head, one
backward pass gives the gradient of the response at g = 1 for all heads. JS is not linear in the
gate: where BIG is near 0 its gradient is 0, although removing a head can increase BIG. So BIG and
FIG are expanded to second order. With d = log p - log q at the two predictions and
m = (p + q) / 2, the divergence is

    JS ~ ln 2 (1 - exp(-x / ln 2)),    x = |d|^2 / 8,    |d|^2 = sum_y m_y (d_y - sum_z m_z d_z)^2

exact for small d, and bounded by ln 2. Removing head h moves d by -e_h, to first order in its gate,
and x to

    x'(h) = max(0, x - <d, e_h> / 4 + c |e_h|^2 / 8)

<d, e_h> / 4 is the slope of x, which that of JS gives: dJS / dg = (1 - JS / ln 2) dx / dg. For
|e_h|^2 one random probe is enough: with random signs s_y, the square of
sum_y s_y sqrt(m_y) (e_h - m.e_h)_y has that mean, and a second backward pass gives it for all
heads; the mean over images reduces its noise. In theory c = 1 (predictions change linearly, the
probe has no noise). c = 0.6 gave the best ranking on the tuning images (docs/decisions.md).

`interchange` is the gold score where exact counterfactuals exist. x = (f, b), x' = (f, b') has
another background. One head of the run on x gets its output from the run on x':

    NIE(h) = E JS(p(x), p_{h <- x'}(x))

Nothing leaves the distribution, unlike zeros. The share of the whole effect JS(p(x), p(x')) that a
set of heads mediates:

    mediated(set) = E JS(p(x), p_{set <- x'}(x)) / E JS(p(x), p(x'))

Where E JS(p(x), p(x')) is within its own error over pairs there is no such share: a ratio whose
denominator may be zero has no bounds (Fieller).

CIGMA is compared with:

    random          every order of heads is equally likely: the control for all others
    taylor          -|g_h dL/dg_h| at g = 1, the first-order change of the loss without the head
                    (Michel et al. 2019; the head term of MDP, 2504.02168), plus a constant: pruning
                    removes the heads that matter least
    attention-mass  how much of a head's attention, in the rows that are read out, falls on
                    background patches
    gating          Causal Head Gating (Nam et al. 2025, 2505.13737)

Causal Head Gating fits soft gates of all heads at once, under opposite pressures:

    G = sigmoid(theta),   loss = NLL(G) - strength * mean(clip(theta, -4, 4))

There are three fits: strength 0 from uniform gates, then +strength (G+, gates are pushed up) and
-strength (G-, pushed down), both from the first and on the same batches.

    facilitating   stays open under either pressure         soft: G-
    irrelevant     follows the pressure                     soft: G+ (1 - G-)
    interfering    shut even when pushed open               soft: 1 - G+

"Open" is a mean over fits above 0.5. As scores, only heads called interfering are above 0: 1 - G+
for them, -G+ for all others. Written from the equations. It learns from labels: on biased data a
head that reads the background *facilitates*.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.background.gains import (
    Erased,
    ErasedView,
    Fill,
    information_gains,
    jensen_shannon,
    log_probs,
    need_distribution,
)
from seecause.background.heads import (
    Head,
    HeadScores,
    absent,
    all_heads,
    checked_heads,
    gates_without,
    need_heads,
    over_images,
    penalised,
    selector,
)
from seecause.background.images import Advance, LabelledImages, images_of, no_advance
from seecause.engine.chunks import fit, in_chunks, plain_logits, run_in_chunks
from seecause.engine.forks import (
    HELD,
    carried_logits,
    fork,
    gated_logits,
    inert,
    mean_carried,
    zeros,
)
from seecause.engine.trace import attention_probs, need_gradients, read_rows
from seecause.errors import BadOption
from seecause.metrics.statistics import standard_error
from seecause.models.base import ImageModel, in_eval_mode, protocol
from seecause.models.block import wide, wide_dtype
from seecause.models.view import VisionModel
from seecause.options import Count, Positive, check_options, checked
from seecause.target import Spec, Target, parse

T = TypeVar("T")
Operator = Literal["zero", "mean", "resample"]
Response = Literal["big", "fig", "prob", "logit", "nll"]
COMPARED: dict[str, ErasedView] = {"big": "no_background", "fig": "no_object"}
SCORED = {"cuda": 128, "cpu": 8}  # maximum number of images scored together
TOGETHER = (1, 2, 4, 8)  # numbers of heads that are exchanged together
UNMOVED = 1e-9  # nats; versions with a smaller JS have the same prediction
BEYOND_ZERO = 1.96  # standard errors; a smaller mean effect is not significant at 95 %
VERIFIED = 3  # measured heads per requested head of a screen
MOST = math.log(2)  # the maximum of JS
BENT = 0.6  # c, the weight of |e_h|^2 in the second-order estimate
OPEN = 0.5  # a gate above this value counts as open
CLIP = 4.0  # maximum size of gate logits in the pressure term
NORM = 1.0  # maximum gradient norm of each set of gates
ROOM = 1e-6  # JS is kept below (1 - ROOM) * MOST: the gradient of x divides by the difference


@checked
class HeadExperiment:
    """Images with their erased versions, the measures, and the replacement of removed heads.
    Options are those of `score`."""

    def __init__(
        self,
        model: ImageModel,
        data: LabelledImages | Tensor,
        *,
        response: Response = "big",
        target: Spec = None,
        operator: Operator = "zero",
        fill: Fill = "grey",
        guard: bool = True,
        temperature: Positive = 1.0,
        seed: int = 0,
    ):
        model = need_heads(model, "head scores")
        self.model, self.response, self.temperature = model, response, temperature
        self.operator = operator
        self.data = images_of(model, data)
        images = self.data.images
        self.layout = model.check(images)
        self.heads = all_heads(model)
        guarded = guard and (response in COMPARED or self.data.masks is not None or fill == "swap")
        # measures that compare predictions, and the version of an image that each compares with
        self.views: dict[str, ErasedView] = {
            n: view for n, view in COMPARED.items() if guarded or response == n
        }
        if self.views:
            need_distribution(model, "a comparison of versions")
        self.erased = Erased(model, self.data, fill) if self.views else None
        target = self.data.labels if target is None else target
        bound = parse(model, target, len(images))
        labels = bound.classes if bound.against is None else None
        if labels is None:  # the model's own predictions
            plain = plain_logits(model, images, what="images")
            bound, labels = bound.bind(plain), plain.argmax(dim=-1)
        self.target, self.labels = bound, labels.to(model.device)
        resample = operator == "resample"
        self.donors = derangement(len(images), seed).to(model.device) if resample else None
        self.means = mean_carried(model, images) if operator == "mean" else []

    @property
    def copies(self) -> int:
        """Number of versions per image in a run."""
        return 1 + len(self.views)

    def rows(self, part: slice) -> Tensor:
        """All versions of some images, [V * b, 3, H, W], followed by their donors."""
        images = [self.data.images[part]]
        if self.erased is not None:
            images += self.erased.versions(part, [*self.views.values()])
        if self.donors is not None:
            images.append(self.data.images[self.donors[part]])
        return torch.cat(images)

    def content(self, layer: int, carried: Tensor, tokens: Tensor) -> Tensor:
        """The replacement of a removed head's output."""
        if self.operator == "mean":
            return self.means[layer][tokens]
        if self.operator == "resample":
            donors = len(carried) // (self.copies + 1)
            return carried[-donors:].repeat(self.copies, 1, 1, 1)
        return zeros(layer, carried, tokens)

    def measure(self, logits: Tensor, part: slice) -> dict[str, Tensor]:
        """Logits [..., V * b, C] of all versions of some images -> [..., b] of everything that is
        measured; the response under `response`."""
        plain, *erased = logits.unflatten(-2, (self.copies, -1)).unbind(-3)
        labels, sigmoid = self.labels[part], self.model.sigmoid
        by_image = plain.movedim(-2, 0)  # [b, ..., C]

        def of(target: Target, kind: Literal["prob", "logprob", "logit"]) -> Tensor:
            return target.score(by_image, kind).movedim(0, -1)

        values = {
            "accuracy": (plain.argmax(dim=-1) == labels).to(wide(plain).dtype),
            "nll": -of(Target(labels, sigmoid=self.model.sigmoid), "logprob"),
        }
        if not sigmoid:
            log_p = log_probs(plain, self.temperature)
            for name, other in zip(self.views, erased, strict=True):
                values[name] = jensen_shannon(log_p, log_probs(other, self.temperature))
        if self.response in ("prob", "logit"):
            return {**values, "response": of(self.target.take(part), self.response)}
        return {**values, "response": values[self.response]}

    def over_images(
        self, run: Callable[[slice], T], *, depth: float = 1.0, most: int | None = None
    ) -> list[T]:
        """Calls `run` in chunks that fit in memory; a row holds `depth` times a plain run."""
        rows, count = self.copies + (self.donors is not None), len(self.data)
        each = int(rows * self.model.forward_bytes(self.layout) * depth)
        size = min(fit(count, each, self.data.images.device), most or count)
        return list(in_chunks(lambda a, b: run(slice(a, b)), count, size, what="images"))

    def record(self) -> dict[str, Any]:
        """Everything that decided the measurement, for protocols."""
        return {
            "response": self.response,
            "target": self.target.record(self.model),
            **({} if self.erased is None else self.erased.record()),
            **protocol(self.model, self.data.images),
        }


def derangement(count: int, seed: int) -> Tensor:
    """For each of `count` images another one: the next in a random circle."""
    if count < 2:
        expected = "'zero' or 'mean': resampling needs at least two images"
        raise BadOption("operator", "resample", expected)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    donors = torch.empty_like(order)
    donors[order] = order.roll(-1)
    return donors


@in_eval_mode
@torch.no_grad()
def score(
    model: VisionModel,
    data: LabelledImages | Tensor,
    *,
    response: Response = "big",
    target: Spec = None,
    operator: Operator = "zero",
    fill: Fill = "grey",
    guard: bool = True,
    temperature: Positive = 1.0,
    heads: Sequence[Head] | None = None,
    seed: int = 0,
    progress: Advance = no_advance,
) -> HeadScores:
    """Score each head by the drop of a response when the head is removed.

    Args:
        model: A vision transformer.
        data: Images with `masks`, or with other versions for fill="swap"; a plain tensor of
            normalised images for responses that compare no versions.
        response: "big" (CIGMA), "fig", "prob", "logit" or "nll" (of the labels).
        target: The class of the response; None: the labels of the data, or the model's predictions.
        operator: Replacement of a removed head: "zero", "mean" or "resample".
        fill: What replaces the background (`erase`).
        guard: Also measure FIG without each head, for half as much again.
        temperature: Of the predictions that are compared.
        heads: Score these alone; the others are NaN.
        seed: Draws the donors of operator="resample".
        progress: Called with the number of (image, head) pairs that are finished.

    Returns:
        A score [L, H] for every head, with standard errors and other effects of its removal.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=4)
        >>> data = sc.background.read_images(model, data)
        >>> scores = sc.background.score(model, data.with_masks(data.truth))
        >>> scores.value.shape, len(scores.top(3))
        (torch.Size([6, 8]), 3)
    """
    experiment = HeadExperiment(
        model,
        data,
        response=response,
        target=target,
        operator=operator,
        fill=fill,
        guard=guard,
        temperature=temperature,
        seed=seed,
    )
    chosen = experiment.heads if heads is None else checked_heads(model, heads)
    if not chosen:
        raise BadOption("heads", [], "at least one (layer, head)")
    silent = inert(model).intersection(chosen)
    running = [head for head in chosen if head not in silent]
    plain, without = _measured(experiment, running, progress)
    for layer, head in silent:  # its removal changes nothing
        for name, value in plain.items():
            without[name][:, layer, head] = value
    progress(len(silent) * len(experiment.data))
    lost = {name: value[:, None, None] - without[name] for name, value in plain.items()}
    after = {name: value.mean(dim=0) for name, value in without.items()}
    after |= {"fig_drop": lost["fig"].mean(dim=0)} if "fig" in lost else {}
    record = {"operator": operator, "temperature": temperature, "guard": guard, "seed": seed}
    record |= {**experiment.record(), "heads_run": len(running)}
    return HeadScores(
        value=lost["response"].mean(dim=0),
        error=standard_error(lost["response"]),
        after=after,
        before={name: float(value.mean()) for name, value in plain.items()},
        protocol=record,
        effects=lost["response"],
        fig_drops=lost.get("fig"),
    )


def _measured(
    experiment: HeadExperiment, heads: Sequence[Head], progress: Advance
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Everything that is measured, by name, float64 on the CPU: [B] of the whole model, and
    [B, L, H] without each of `heads`, NaN elsewhere."""
    model, count = experiment.model, len(experiment.data)
    shape = (count, model.n_layers, model.n_heads)
    plain = defaultdict[str, Tensor](lambda: torch.empty(count, dtype=torch.float64))
    without = defaultdict[str, Tensor](lambda: torch.full(shape, torch.nan, dtype=torch.float64))

    def run_chunk(part: slice) -> None:
        size = part.stop - part.start
        waiting = list[tuple[int, list[int], dict[str, Tensor]]]()  # on the device

        def each(layer: int, at: list[int], logits: Tensor) -> None:
            waiting.append((layer, list(at), experiment.measure(logits, part)))

        rows, forking = experiment.rows(part), experiment.copies * size
        logits = fork(model, rows, heads, each, content=experiment.content, forking=forking)
        for name, value in experiment.measure(logits[:forking], part).items():
            plain[name][part] = value.double().cpu()
        for layer, at, measured in waiting:
            for name, value in measured.items():
                without[name][part, layer, at] = value.T.double().cpu()
        progress(len(heads) * size)

    most = SCORED["cuda" if model.device.type == "cuda" else "cpu"]
    experiment.over_images(run_chunk, depth=1 / HELD, most=most)
    return dict(plain), {name: without[name] for name in plain}


@selector("cigma", cost="about L * H forwards", needs="masks, or other versions")
def cigma(
    model: VisionModel,
    data: LabelledImages,
    *,
    fill: Fill = "grey",
    operator: Operator = "zero",
    guard: bool = True,
    temperature: Positive = 1.0,
    screen: Count | None = None,
    floor: bool = True,
    seed: int = 0,
    progress: Advance = no_advance,
) -> HeadScores:
    """The decrease of the dependence on the background (BIG) when each head is removed, less the
    decrease of the dependence on the object (FIG).

    Args:
        model: A vision transformer.
        data: Images with masks, or with other versions for fill="swap".
        fill: What replaces the background; the paper: "mean".
        operator: Replacement of a removed head; the paper: "zero".
        guard: Subtract what the object loses (`penalised`), after the floor; the paper: False.
        temperature: Of the predictions that are compared.
        screen: Measure 3 * screen heads with the highest estimates; the paper measures all: None.
        floor: Scores below the noise of equal runs in other batches are 0; the paper: False.
        seed: Draws donors and probes.
        progress: Called with the number of (image, head) pairs that are finished.
    """
    complete = fill != "swap" or data.other_object is not None
    if not complete and guard:
        raise BadOption("guard", guard, "False: this data has no other objects to compare with")
    options: dict[str, Any] = {"fill": fill, "operator": operator, "temperature": temperature}
    options |= {"guard": complete, "seed": seed, "progress": progress}
    find = score if screen is None else partial(screened, top=screen)
    scores = find(model, data, **options)
    both = data if complete else replace(data, other_object=data.other_background)
    gains = information_gains(model, both, fill=fill, temperature=temperature)
    if floor:  # the error of JS does not average out
        small = scores.value.abs() < gains.noise_floor
        scores = replace(scores, value=scores.value.masked_fill(small, 0.0))
    scores = penalised(scores) if guard else scores
    source = "none" if fill == "swap" or data.masks is None else data.masks.kind
    about = {"masks": source, "guard": guard, "noise_floor": gains.noise_floor}
    return replace(scores, protocol={**scores.protocol, **about})


@checked
@in_eval_mode
def screen(
    model: VisionModel,
    data: LabelledImages | Tensor,
    *,
    top: Count = 4,
    seed: int = 0,
    **options: Any,
) -> HeadScores:
    """Find the `top` heads at the cost of a few forward passes: estimate all scores, measure the
    highest.

    A model in bfloat16 is screened several times as fast as one in float32.

    Args:
        model: A vision transformer.
        data: Images with `masks`, or with other versions for fill="swap".
        top: Heads to find; three times as many, with the highest guesses, are measured exactly.
        seed: Draws the probes.
        **options: Options of `score`, with response "big" or "fig".

    Returns:
        Exact scores, NaN where nothing was measured; `after["guess"]` has the guess of every head.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:train", limit=4)
        >>> data = sc.background.read_images(model, data)
        >>> scores = sc.background.screen(model, data.with_masks(data.truth), top=2)
        >>> int(scores.value.isfinite().sum())
        6
    """
    check_options("screen", score, options, leave_out=("heads",))
    if top > (heads := len(all_heads(model))):
        raise BadOption("top", top, f"1 to {heads} heads")
    guessing = {k: v for k, v in options.items() if k not in ("guard", "progress")}
    guess = guessed(model, data, seed=seed, **guessing)
    likeliest = guess.order(positive=False)[: VERIFIED * top]
    scores = score(model, data, heads=likeliest, seed=seed, **options)
    return replace(scores, after={**scores.after, "guess": guess.value})


screened = screen  # in `cigma`, an option has the function's name


@in_eval_mode
def guessed(
    model: VisionModel, data: LabelledImages | Tensor, *, seed: int = 0, **options: Any
) -> HeadScores:
    """Estimate to second order how much BIG (or FIG, by `response`) falls without each head.
    Options are those of `score`; `seed` draws the probes."""
    need_gradients(model, "screen", remedy="Measure every head: sc.background.score")
    if (response := options.get("response", "big")) not in COMPARED:
        raise BadOption("response", response, "big or fig")
    with torch.no_grad():
        experiment = HeadExperiment(model, data, guard=False, seed=seed, **options)
    draw = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (len(experiment.data), model.n_classes), generator=draw) * 2.0 - 1

    @torch.enable_grad()
    def run_chunk(part: slice) -> Tensor:
        logits, seen = carried_logits(model, experiment.rows(part))
        count = experiment.copies * (part.stop - part.start)  # without donors
        carried = [each for each, _ in seen]
        with torch.no_grad():  # what each head's gate multiplies
            removed = [
                each[:count] - experiment.content(layer, each, tokens)
                for layer, (each, tokens) in enumerate(seen)
            ]

        def slopes(values: Tensor, again: bool) -> Tensor:
            """Of values [b], each of its own image, in the gates that its versions share:
            [b, L, H]."""
            grads = torch.autograd.grad(
                values.sum(), carried, retain_graph=again, materialize_grads=True
            )  # a model that reads an earlier block's output does not depend on the last heads
            by_block = [
                (part * grad[:count]).sum(dim=(1, 3), dtype=wide_dtype(grad.dtype))
                for part, grad in zip(removed, grads, strict=True)
            ]  # [V * b, H_l]
            versions = padded(model, by_block).unflatten(0, (experiment.copies, -1))
            return versions.sum(dim=0).double().cpu()

        divergence = experiment.measure(logits[:count], part)["response"]
        first = slopes(divergence, again=True)
        log_p, log_q = log_probs(logits[:count], experiment.temperature).chunk(2)
        mean, apart = ((log_p.exp() + log_q.exp()) / 2).detach(), log_p - log_q
        apart = apart - (mean * apart).sum(dim=-1, keepdim=True)
        probe = (signs[part].to(divergence) * mean.sqrt() * apart).sum(dim=-1)
        spread = slopes(probe, again=False).square()
        at = divergence.detach().double().cpu()[:, None, None]
        return at - saturated(at, first, spread)

    effects = torch.cat(experiment.over_images(run_chunk, depth=model.n_layers + 1))
    effects[:, absent(model)] = torch.nan
    return replace(mean_scores(model, effects), effects=effects)


def saturated(divergence: Tensor, slope: Tensor, spread: Tensor) -> Tensor:
    """The divergence without a head, from the one with it [b, 1, 1], its slope in the head's gate
    and |e_h|^2 [b, L, H]."""
    left = (1 - divergence / MOST).clamp_min(ROOM)
    moved = (-MOST * left.log() - slope / left + BENT * spread / 8).clamp_min(0)
    return -MOST * torch.expm1(-moved / MOST)


@in_eval_mode
@torch.no_grad()
def interchange(
    model: VisionModel,
    data: LabelledImages,
    *,
    progress: Advance = no_advance,
) -> HeadScores:
    """Exchange every head between images and their other versions.

    Args:
        model: A vision transformer.
        data: Images with `other_background`.
        progress: Called with the number of images that are finished.

    Returns:
        The effect of every head in nats. `protocol["effect"]` is the mean divergence of the whole
        predictions, and `protocol["effect error"]` its standard error over pairs.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=2)
        >>> scores = sc.background.interchange(model, sc.background.read_images(model, data))
        >>> bool(scores.value.max() < scores.protocol["effect"])
        True
    """
    images, others = _pair(model, data)
    layout, heads, n = model.check(images), all_heads(model), len(images)
    effects = torch.full((n, model.n_layers, model.n_heads), torch.nan, dtype=torch.float64)
    totals = torch.empty(n, dtype=torch.float64)

    def run_chunk(a: int, b: int) -> None:
        rows = torch.cat([images[a:b], others[a:b]])
        whole, other = log_probs(model(rows)).split(b - a)
        totals[a:b] = jensen_shannon(whole, other).double().cpu()

        def each(layer: int, at: list[int], logits: Tensor) -> None:
            moved = jensen_shannon(whole, log_probs(logits))  # [k, b]
            effects[a:b, layer, at] = moved.double().cpu().T

        def content(layer: int, carried: Tensor, tokens: Tensor) -> Tensor:
            return carried[b - a :]

        fork(model, rows, heads, each, content=content, forking=b - a)
        progress(b - a)

    size = fit(n, 2 * model.forward_bytes(layout), images.device, share=HELD)
    list(in_chunks(run_chunk, n, size, what="images"))
    spread = None if n == 1 else float(standard_error(totals))
    record = {"effect": float(totals.mean()), "effect error": spread}
    record |= protocol(model, images)
    return HeadScores(effects.mean(dim=0), standard_error(effects), protocol=record)


@in_eval_mode
@torch.no_grad()
def mediated(
    model: VisionModel,
    data: LabelledImages,
    heads: Sequence[Head],
) -> float:
    """The share of the whole effect of `other_background` that passes through `heads`, all
    exchanged together.

    It may exceed 1, since predictions need not move by the same path. NaN if the other versions
    change no prediction.

    Args:
        model: A vision transformer.
        data: Images with `other_background`.
        heads: Pairs (layer, head), both from 0.

    Returns:
        The share.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-biased")
        >>> data = sc.data.open_data("critters:certified:test", limit=4)
        >>> data = sc.background.read_images(model, data)
        >>> heads = [(layer, head) for layer in range(6) for head in range(8)]
        >>> 0 < sc.background.mediated(model, data, heads) < 2
        True
    """
    images, others = _pair(model, data)
    gates = gates_without(model, heads).to(model.device)

    def run_chunk(a: int, b: int) -> Tensor:
        rows = torch.cat([images[a:b], others[a:b]])
        gated = {"content": lambda layer, carried, tokens: carried[b - a :]}
        mixed = gated_logits(model, rows, gates.expand(b - a, -1, -1), **gated)
        plain, *moved = log_probs(torch.cat([model(rows), mixed])).split(b - a)
        effects = [jensen_shannon(plain, each) for each in moved]
        return torch.stack(effects, dim=1).double().cpu()

    whole, through = over_images(run_chunk, model, images, holds=2).mean(dim=0)
    return float(through / whole)


@selector("interchange", cost="about L * H / 2 forwards for each pair", needs="pairs")
def interchange_shares(
    model: VisionModel,
    data: LabelledImages,
    *,
    progress: Advance = no_advance,
) -> HeadScores:
    """The share of the change between two versions of an image that passes through each head.

    The protocol has `mediated`, the share of the 1, 2, 4 and 8 highest heads together. If the whole
    effect is not significant, scores are in nats and shares are undefined.
    """
    heads = all_heads(model)
    scores = interchange(
        model,
        data,
        progress=lambda images: progress(images * len(heads)),
    )
    whole, spread = scores.protocol["effect"], scores.protocol["effect error"]
    if whole < UNMOVED:
        got = f"versions that move predictions by {whole:.2g} nats"
        expected = "pairs whose predictions differ: these have the same predictions already"
        raise BadOption("data", got, expected)
    about, error = {**scores.protocol, "mediated": {}}, scores.error
    if spread is None or error is None or whole <= BEYOND_ZERO * spread:
        return replace(scores, protocol=about)
    about["mediated"] = {
        count: mediated(model, data, scores.top(count)) for count in TOGETHER if count <= len(heads)
    }
    return replace(scores, value=scores.value / whole, error=error / whole, protocol=about)


def _pair(model: VisionModel, data: LabelledImages) -> tuple[Tensor, Tensor]:
    """Images and their other versions, on the model's device."""
    need_heads(model, "interchange")
    need_distribution(model, "interchange")
    data = images_of(model, data)
    if data.other_background is None:
        expected = "two versions of each image: pairs:WITH:WITHOUT, or Critters"
        raise BadOption("data", data.name, expected)
    return data.images, data.other_background


def padded(model: VisionModel, blocks: list[Tensor]) -> Tensor:
    """One tensor [..., H_l] for each block -> [..., L, H]."""
    return torch.stack(
        [F.pad(values, (0, model.n_heads - values.shape[-1])) for values in blocks], dim=-2
    )


def mean_scores(model: VisionModel, per_image: Tensor) -> HeadScores:
    """Means over images of per_image [N, L, H], with their standard errors."""
    values, missing = per_image.detach().double().cpu(), absent(model)
    return HeadScores(
        values.mean(dim=0).masked_fill(missing, torch.nan),
        standard_error(values).masked_fill(missing, torch.nan),
        protocol={"images": len(values)},
    )


@selector("taylor", cost="1 forward, 1 backward", needs="labels")
def taylor(model: VisionModel, data: LabelledImages) -> HeadScores:
    """First-order change of the loss without each head; the least important heads score highest."""
    need_gradients(model, "a gradient of gates", remedy="Measure every head: sc.background.score")
    labels = data.need_labels()

    @torch.enable_grad()
    def run_chunk(start: int, stop: int) -> Tensor:
        images = data.images[start:stop]
        gates = images.new_ones(len(images), model.n_layers, model.n_heads, requires_grad=True)
        logits = gated_logits(model, images, gates)
        loss = F.cross_entropy(logits, labels[start:stop], reduction="sum")
        return torch.autograd.grad(loss, gates)[0].abs()

    per_image = over_images(run_chunk, model, data.images, holds=2 * model.n_layers)
    scores = mean_scores(model, per_image)
    most = scores.value[~absent(model)].max()
    return replace(scores, value=most - scores.value)


@selector("attention-mass", cost="1 forward", needs="masks")
@torch.no_grad()
def attention_mass(model: VisionModel, data: LabelledImages) -> HeadScores:
    """Share of attention on the background; unknown pixels of masks are ignored."""
    if data.masks is None:
        raise BadOption("masks", None, "object masks: data.with_masks(object_masks(...))")
    layout = model.check(data.images)
    hard, inside = data.masks.hard, data.masks.inside
    background = ~hard if inside is None else inside & ~hard
    pixels = background.to(data.images.device, data.images.dtype)
    share = F.adaptive_avg_pool2d(pixels[:, None], layout.grid).flatten(1)  # [N, patches]

    def run_chunk(start: int, stop: int) -> Tensor:
        masses = []
        for probs in attention_probs(model, data.images[start:stop]):  # [B, H, T, T] each
            row = read_rows(model, layout, probs)  # [B, H, T]
            masses.append((row[..., layout.patches] * share[start:stop, None]).sum(dim=-1))
        return padded(model, masses)

    per_image = over_images(run_chunk, model, data.images, holds=2 + layout.tokens // 64)
    return mean_scores(model, per_image)


@selector(
    "gating", cost="3 * steps * fits forwards and backwards of a batch, in all", needs="labels"
)
def gating(
    model: VisionModel,
    data: LabelledImages,
    *,
    fits: Count = 10,
    steps: Count = 500,
    strength: Positive = 0.1,
    rate: Positive = 1.0,
    batch: Count = 32,
    seed: int = 0,
) -> HeadScores:
    """Interference by Causal Head Gating. Only interfering heads, which stay closed even when gates
    are pushed open, score above 0."""
    schedule: dict[str, Any] = {"steps": steps, "rate": rate, "batch": batch}
    opened, shut = fitted_gates(model, data, fits=fits, strength=strength, seed=seed, **schedule)
    interfering = (opened.mean(dim=0) <= OPEN) & (shut.mean(dim=0) <= OPEN)
    closed = 1 - opened.mean(dim=0)
    return HeadScores(
        torch.where(interfering, closed, closed - 1),
        standard_error(opened),  # over fits
        after={
            "facilitation": shut.mean(dim=0),
            "irrelevance": (opened * (1 - shut)).mean(dim=0),
            "interference": closed,
        },
        protocol={"open": OPEN, "fits": fits, "strength": strength, "seed": seed, **schedule},
    )


def fitted_gates(
    model: VisionModel,
    data: LabelledImages,
    *,
    fits: int,
    strength: float,
    seed: int,
    **schedule: Any,
) -> tuple[Tensor, Tensor]:
    """Gates G+ and G- of Causal Head Gating [fits, L, H], float64 on the CPU; NaN where a block has
    no such head. Each fit has its own start: (1) free, (2) pushed open and (3) pushed shut."""
    need_gradients(model, "gating", remedy="Measure every head: sc.background.score")
    generator, missing = torch.Generator().manual_seed(seed), absent(model)
    uniform = torch.rand(fits, *missing.shape, generator=generator, dtype=torch.float64)
    start = uniform.logit().clamp(-CLIP, CLIP).to(model.device, wide_dtype(model.dtype))
    schedule["generator"] = generator
    free = fit_gates(model, data, start, start.new_zeros(fits), **schedule)
    pressure = start.new_tensor([strength, -strength]).repeat_interleave(fits)
    # side by side, on the same batches
    pushed = fit_gates(model, data, free.repeat(2, 1, 1), pressure, **schedule)
    opened, shut = pushed.sigmoid().double().cpu().masked_fill(missing, torch.nan).chunk(2)
    return opened, shut


def fit_gates(
    model: VisionModel,
    data: LabelledImages,
    start: Tensor,
    strengths: Tensor,
    *,
    steps: int,
    rate: float,
    batch: int,
    generator: torch.Generator,
) -> Tensor:
    """Logits of gates [M, L, H] after `steps` updates on random batches, the same ones for every
    set of gates; `strengths` [M] push them open."""
    theta = start.clone().requires_grad_()
    adam = torch.optim.Adam([theta], lr=rate)
    exists = ~absent(model).to(theta.device)
    # [M, L, H]: the slope of the pressure where it is not clipped
    push = exists.to(theta.dtype) / exists.sum() * strengths[:, None, None]
    labels = data.need_labels()
    for _ in range(steps):
        rows = torch.randperm(len(labels), generator=generator)[:batch].to(labels.device)
        adam.zero_grad()
        within = (theta.detach().abs() <= CLIP).to(theta.dtype)
        theta.grad = _loss_slopes(model, data.images[rows], labels[rows], theta) - within * push
        norm = theta.grad.flatten(1).norm(dim=1).clamp_min(1e-12)
        theta.grad *= (NORM / norm).clamp(max=1.0)[:, None, None]
        adam.step()
    return theta.detach()


def _loss_slopes(model: VisionModel, images: Tensor, labels: Tensor, theta: Tensor) -> Tensor:
    """The gradient of the mean NLL in `theta` [M, L, H]; as many sets of gates at once as fit."""
    count = len(images)
    each = count * model.forward_bytes(model.check(images)) * model.n_layers * 2

    @torch.enable_grad()
    def run_chunk(start: int, stop: int) -> Tensor:
        part = theta[start:stop].detach().requires_grad_()
        gates = part.sigmoid().to(images.dtype).repeat_interleave(count, dim=0)  # [m * B, L, H]
        logits = gated_logits(model, images.repeat(stop - start, 1, 1, 1), gates)
        loss = F.cross_entropy(wide(logits), labels.repeat(stop - start), reduction="sum") / count
        return torch.autograd.grad(loss, part)[0]

    return run_in_chunks(run_chunk, len(theta), each, images.device, what="gates")
