"""What a response loses without each head (CIGMA, Maliha & Hougen, CVPR 2026, phase 3), how heads
with large scores are found faster, and heads exchanged between versions of an image.

`score` measures every head, by exact suffix runs:

    score(h) = mean over images of  R - R^(-h),          CIGMA(h): R = BIG

A head with a positive CIGMA score made predictions depend on the background. The score alone can
mislead: a head whose removal makes all predictions alike has BIG^(-h) = 0 and the highest score. So
accuracy, NLL, entropy and (with `guard`) FIG without the head are measured too. A removed head
carries instead:

    zero       nothing (the paper)
    mean       what it carries on average over the images, token by token
    resample   what it carries in another image (a seeded derangement); the same donor for all
               versions of an image

`screen` guesses all scores and measures the highest exactly. With a gate g_h on every head, one
backward pass gives the slope of the response at g = 1 for all heads. A divergence bends where a
head matters: images with BIG near 0 have no slope although removals can only raise BIG there. So
BIG and FIG are guessed to second order. With d = log p - log q at the two predictions and
m = (p + q) / 2, the divergence is

    JS ~ ln 2 (1 - exp(-x / ln 2)),    x = |d|^2 / 8,    |d|^2 = sum_y m_y (d_y - sum_z m_z d_z)^2

exact for small d, and bounded by ln 2. Removing head h moves d by -e_h, to first order in its gate,
and x to

    x'(h) = max(0, x - <d, e_h> / 4 + c |e_h|^2 / 8)

<d, e_h> / 4 is the slope of x, which that of JS gives: dJS / dg = (1 - JS / ln 2) dx / dg. For
|e_h|^2 one random probe is enough: with random signs s_y, the square of
sum_y s_y sqrt(m_y) (e_h - m.e_h)_y has that mean, and a second backward pass gives it for all
heads; images average its noise away. Its weight c would be 1 if predictions moved in a straight
line and the probe had no noise; 0.6 served best on the images that chose it (docs/decisions.md).

`interchange` is the gold score where exact counterfactuals exist. x = (f, b), x' = (f, b') has
another background. One head of the run on x is given what it carries in the run on x':

    NIE(h) = E JS(p(x), p_{h <- x'}(x))

Nothing leaves the distribution, unlike zeros. The share of the whole effect JS(p(x), p(x')) that a
set of heads mediates:

    mediated(set) = E JS(p(x), p_{set <- x'}(x)) / E JS(p(x), p(x'))

Where E JS(p(x), p(x')) is within its own error over pairs there is no such share: a ratio whose
denominator may be zero has no bounds (Fieller).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
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
    mean_scores,
    need_heads,
    over_images,
    padded,
    penalised,
    selector,
)
from seecause.background.images import LabelledImages, images_of
from seecause.engine.chunks import fit, in_chunks, plain_logits
from seecause.engine.forks import (
    HELD,
    carried_logits,
    fork,
    gated_logits,
    inert,
    mean_carried,
    zeros,
)
from seecause.engine.sweep import need_gradients
from seecause.errors import BadOption
from seecause.metrics.statistics import standard_error
from seecause.models.base import protocol
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel
from seecause.options import Count, Positive, check_options
from seecause.target import Spec, Target, parse
from seecause.types import wide, wide_dtype

T = TypeVar("T")
Operator = Literal["zero", "mean", "resample"]
Response = Literal["big", "fig", "prob", "logit", "nll"]
# responses that compare predictions, and the version of an image that each compares with
COMPARED: dict[str, ErasedView] = {"big": "no_background", "fig": "no_object"}
SCORED = {"cuda": 128, "cpu": 8}  # images scored together at most
TOGETHER = (1, 2, 4, 8)  # heads that are exchanged together
UNMOVED = 1e-9  # nats: versions that differ by less have the same prediction
BEYOND_ZERO = 1.96  # standard errors: a smaller mean effect cannot be told from none, at 95 %
VERIFIED = 3  # heads that a screen measures for each that is wanted
MOST = math.log(2)  # no divergence is larger
BENT = 0.6  # c, the weight of |e_h|^2
ROOM = 1e-6  # of MOST, that is always left: the slope of x is that of JS over what is left


class HeadExperiment:
    """Images with their erased versions, what is measured on them, and what a removed head carries
    instead. Options are those of `score`."""

    def __init__(
        self,
        model: VisionModel,
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
        need_heads(model, "head scores")
        given = {"response": response, "operator": operator, "guard": guard, "seed": seed}
        check_options("score", HeadExperiment.__init__, {**given, "temperature": temperature})
        self.model, self.response, self.temperature = model, response, temperature
        self.operator: Operator = operator
        self.data = images_of(model, data)
        images = self.data.images
        self.layout = model.check(images)
        self.heads = all_heads(model)
        compares = response in COMPARED
        if compares:
            need_distribution(model, f"response={response!r} with masks")
        guarded = guard and (compares or self.data.masks is not None or fill == "swap")
        if guarded:
            need_distribution(model, "the guard")
        self.views = [view for name, view in COMPARED.items() if guarded or response == name]
        self.erased = Erased(model, self.data, fill) if self.views else None
        if target is None and self.data.labels is not None:
            target = self.data.labels
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
        """Versions of each image that run."""
        return 1 + len(self.views)

    def rows(self, part: slice) -> Tensor:
        """All versions of some images, [V * b, 3, H, W], and behind them their donors."""
        images = [self.data.images[part]]
        if self.erased is not None:
            images += self.erased.versions(part, self.views)
        if self.donors is not None:
            images.append(self.data.images[self.donors[part]])
        return torch.cat(images)

    def content(self, layer: int, carried: Tensor, tokens: Tensor) -> Tensor:
        """What a removed head carries instead."""
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
        labels, target, kind = self.labels[part], self.target.take(part), self.response
        by_image = plain.movedim(-2, 0)  # [b, ..., C]

        def of(target: Target, kind: Literal["prob", "logprob", "logit"]) -> Tensor:
            return target.score(by_image, kind).movedim(0, -1)

        values = {
            "accuracy": (plain.argmax(dim=-1) == labels).to(wide(plain).dtype),
            "nll": -of(Target(labels, sigmoid=self.model.sigmoid), "logprob"),
        }
        if not self.model.sigmoid:
            log_p = log_probs(plain, self.temperature)
            values["entropy"] = -(log_p.exp() * log_p).sum(dim=-1)
            names = {view: name for name, view in COMPARED.items()}
            for view, other in zip(self.views, erased, strict=True):
                values[names[view]] = jensen_shannon(log_p, log_probs(other, self.temperature))
        if kind in COMPARED:
            values["response"] = values[kind]
        else:
            values["response"] = -of(target, "logprob") if kind == "nll" else of(target, kind)  # type: ignore[arg-type]
        return values

    def over_images(
        self, run: Callable[[slice], T], *, depth: float = 1.0, most: int | None = None
    ) -> list[T]:
        """`run` on as many images at a time as fit, if each row holds `depth` times a plain run."""
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
        expected = "'zero' or 'mean': with one image there is no other to take from"
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
    progress: Callable[[int], None] | None = None,
) -> HeadScores:
    """What the response loses without each head.

    Args:
        model: A vision transformer.
        data: Images with `masks`, or with other versions for fill="swap"; a plain tensor of
            normalised images for responses that compare no versions.
        response: "big" (CIGMA), "fig", "prob", "logit" or "nll".
        target: The class that is meant; None: the labels of the data, or the model's predictions.
        operator: What a removed head carries: "zero", "mean" or "resample".
        fill: What replaces the background (`erase`).
        guard: Also measure FIG without each head, for half as much again.
        temperature: Of the predictions that are compared.
        heads: Score these alone; the others are NaN.
        seed: Draws the donors of operator="resample".
        progress: Called with the number of (image, head) pairs that are finished.

    Returns:
        A score [L, H] for every head, with standard errors and what else its removal does.

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
    if progress is not None and silent:
        progress(len(silent) * len(experiment.data))
    lost = {name: value[:, None, None] - without[name] for name, value in plain.items()}
    after = {name: value.mean(dim=0) for name, value in without.items()}
    after |= {"fig_drop": lost["fig"].mean(dim=0)} if "fig" in lost else {}
    record = {**experiment.record(), "operator": operator, "temperature": temperature}
    record |= {"guard": guard, "seed": seed, "heads_run": len(running)}
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
    experiment: HeadExperiment, heads: Sequence[Head], progress: Callable[[int], None] | None
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
        if progress is not None:
            progress(len(heads) * size)

    most = SCORED["cuda" if model.device.type == "cuda" else "cpu"]
    experiment.over_images(run_chunk, depth=1 / HELD, most=most)
    return dict(plain), {name: without[name] for name in plain}


@selector("loss-gain", cost="about L * H / 2 forwards", needs="labels")
def loss_gain(model: VisionModel, data: LabelledImages) -> HeadScores:
    """How much the loss falls without each head, by exact ablation."""
    return score(model, data, response="nll", guard=False)


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
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> HeadScores:
    """How much less predictions depend on the background without each head, less what the object
    loses.

    Scores below the noise floor are 0, then the guard applies (`penalised`). With `screen`, only
    the heads that a guess finds likeliest are measured.
    """
    complete = fill != "swap" or data.other_object is not None
    if not complete and guard:
        raise BadOption("guard", guard, "False: this data has no other objects to compare with")
    options: dict[str, Any] = {"fill": fill, "operator": operator, "temperature": temperature}
    options |= {"guard": complete, "seed": seed}
    if screen is None:
        scores = score(model, data, progress=progress, **options)
    else:
        scores = screened(model, data, top=screen, **options)
    both = data if complete else replace(data, other_object=data.other_background)
    gains = information_gains(model, both, fill=fill, temperature=temperature)
    small = scores.value.abs() < gains.noise_floor  # the error of JS does not average out
    scores = replace(scores, value=scores.value.masked_fill(small, 0.0))
    scores = penalised(scores) if guard else scores
    source = "none" if fill == "swap" or data.masks is None else data.masks.kind
    about = {"masks": source, "guard": guard, "noise_floor": gains.noise_floor}
    return replace(scores, protocol={**scores.protocol, **about})


@in_eval_mode
def screen(
    model: VisionModel,
    data: LabelledImages | Tensor,
    *,
    top: Count = 4,
    verify: Count | None = None,
    seed: int = 0,
    **options: Any,
) -> HeadScores:
    """Find the `top` heads at the price of a few forwards: guess all scores, measure the highest.

    A model in bfloat16 is screened several times as fast as one in float32.

    Args:
        model: A vision transformer.
        data: Images with `masks`, or with other versions for fill="swap".
        top: Heads to find.
        verify: Heads with the highest guess that are measured exactly; None: 3 * top.
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
    check_options("screen", screen, {"top": top, "verify": verify})
    check_options("screen", score, options, leave_out=("heads",))
    heads, count = all_heads(model), VERIFIED * top if verify is None else verify
    if top > len(heads) or count < top:
        raise BadOption(
            "top, verify", (top, count), f"1 to {len(heads)} heads, and at least as many verified"
        )
    guessing = {k: v for k, v in options.items() if k not in ("guard", "progress")}
    guess = guessed(model, data, seed=seed, **guessing)
    likeliest = guess.order(positive=False)[:count]
    scores = score(model, data, heads=likeliest, seed=seed, **options)
    return replace(scores, after={**scores.after, "guess": guess.value})


screened = screen  # in `cigma`, an option has the function's name


@in_eval_mode
def guessed(
    model: VisionModel, data: LabelledImages | Tensor, *, seed: int = 0, **options: Any
) -> HeadScores:
    """What BIG (or FIG, by `response`) would lose without each head, guessed to second order.
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
        spread = slopes(_probe(log_p, log_q, signs[part].to(divergence)), again=False).square()
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


def _probe(log_p: Tensor, log_q: Tensor, signs: Tensor) -> Tensor:
    """sum_y s_y sqrt(m_y) (d - m.d)_y of each image, [b]; m is held fixed."""
    mean = ((log_p.exp() + log_q.exp()) / 2).detach()
    apart = log_p - log_q
    apart = apart - (mean * apart).sum(dim=-1, keepdim=True)
    return (signs * mean.sqrt() * apart).sum(dim=-1)


@in_eval_mode
@torch.no_grad()
def interchange(
    model: VisionModel,
    data: LabelledImages,
    *,
    temperature: Positive = 1.0,
    progress: Callable[[int], None] | None = None,
) -> HeadScores:
    """Exchange every head between images and their other versions.

    Args:
        model: A vision transformer.
        data: Images with `other_background`.
        temperature: Of the predictions that are compared.
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
        whole, other = log_probs(model(rows), temperature).split(b - a)
        totals[a:b] = jensen_shannon(whole, other).double().cpu()

        def each(layer: int, at: list[int], logits: Tensor) -> None:
            moved = jensen_shannon(whole, log_probs(logits, temperature))  # [k, b]
            effects[a:b, layer, at] = moved.double().cpu().T

        def content(layer: int, carried: Tensor, tokens: Tensor) -> Tensor:
            return carried[b - a :]

        fork(model, rows, heads, each, content=content, forking=b - a)
        if progress is not None:
            progress(b - a)

    size = fit(n, 2 * model.forward_bytes(layout), images.device, share=HELD)
    list(in_chunks(run_chunk, n, size, what="images"))
    spread = float(standard_error(totals))
    record = {"temperature": temperature, "effect": float(totals.mean())}
    record |= {"effect error": None if math.isnan(spread) else spread, **protocol(model, images)}
    return HeadScores(effects.mean(dim=0), standard_error(effects), protocol=record)


@in_eval_mode
@torch.no_grad()
def mediated(
    model: VisionModel,
    data: LabelledImages,
    heads: Sequence[Head],
    *,
    temperature: Positive = 1.0,
) -> float:
    """The share of the whole effect of `other_background` that passes through `heads`, all
    exchanged together.

    It may exceed 1, since predictions need not move by the same path. NaN if the other versions
    change no prediction.
    """
    images, others = _pair(model, data)
    gates = gates_without(model, heads).to(model.device)

    def run_chunk(a: int, b: int) -> Tensor:
        rows = torch.cat([images[a:b], others[a:b]])
        plain = log_probs(model(rows), temperature).unflatten(0, (2, b - a))
        mixed = gated_logits(
            model,
            rows,
            gates.expand(b - a, -1, -1),
            content=lambda layer, carried, tokens: carried[b - a :],
        )
        compared = (log_probs(mixed, temperature), plain[1])
        return torch.stack([jensen_shannon(plain[0], p) for p in compared], dim=1).double().cpu()

    through, whole = over_images(run_chunk, model, images, holds=2).mean(dim=0)
    return float(through / whole)


@selector("interchange", cost="about L * H / 2 forwards for each pair", needs="pairs")
def interchange_shares(
    model: VisionModel,
    data: LabelledImages,
    *,
    temperature: Positive = 1.0,
    progress: Callable[[int], None] | None = None,
) -> HeadScores:
    """Share of what two versions of an image change that passes through each head.

    The protocol has `mediated`, the share that the 1, 2, 4 and 8 highest carry together. Where the
    whole effect cannot be told from none, scores are nats and nothing is mediated.
    """
    heads = all_heads(model)
    done = None if progress is None else lambda images: progress(images * len(heads))
    scores = interchange(model, data, temperature=temperature, progress=done)
    whole, spread = scores.protocol["effect"], scores.protocol["effect error"]
    if whole < UNMOVED:
        raise BadOption(
            "data",
            f"versions that move predictions by {whole:.2g} nats",
            "pairs whose predictions differ: these have the same predictions already",
        )
    shares = dict[int, float]()
    if spread is not None and whole > BEYOND_ZERO * spread:
        assert scores.error is not None
        scores = replace(scores, value=scores.value / whole, error=scores.error / whole)
        shares = {
            count: mediated(model, data, scores.top(count), temperature=temperature)
            for count in TOGETHER
            if count <= len(heads)
        }
    return replace(scores, protocol={**scores.protocol, "mediated": shares})


def _pair(model: VisionModel, data: LabelledImages) -> tuple[Tensor, Tensor]:
    """Images and their other versions, on the model's device."""
    need_heads(model, "interchange")
    need_distribution(model, "interchange")
    data = images_of(model, data)
    if data.other_background is None:
        expected = "two versions of each image: pairs:WITH:WITHOUT, or Critters"
        raise BadOption("data", data.name, expected)
    return data.images, data.other_background
