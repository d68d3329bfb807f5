"""What a response loses without each head (CIGMA, Maliha & Hougen, CVPR 2026, phase 3), and its
variants.

`score` measures every head, by exact suffix runs:

    score(h) = mean over images of  R - R^(-h),          CIGMA(h): R = BIG

A head with a positive CIGMA score made predictions depend on the background. The score alone can
mislead: a head whose removal makes all predictions alike has BIG^(-h) = 0 and the highest score. So
accuracy, NLL, entropy and (with `guard`) FIG without the head come along.

    zero       a removed head carries nothing (the paper)
    mean       what it carries on average over the images, token by token
    resample   what it carries in another image (a seeded derangement); the same donor for all
               versions of an image

One-shot scores add up only where heads do not replace each other: `greedy` scores again after each
removal.

`interchange` is the gold score where exact counterfactuals exist. x = (f, b), x' = (f, b') has
another background, x'' = (f', b) another object. One head of the run on x is given what it carries
in the run on x':
    NIE_bg(h) = E JS(p(x), p_{h <- x'}(x)),    NIE_fg(h) = E JS(p(x), p_{h <- x''}(x)),
    selectivity(h) = NIE_bg / (NIE_bg + NIE_fg)
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
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from seecause.background.erase import Erased, ErasedView, Fill
from seecause.background.gains import (
    COMPARED,
    OF_MASKS,
    Measure,
    Response,
    information_gains,
    jensen_shannon,
    log_probs,
    need_distribution,
)
from seecause.background.heads import (
    GUARDS,
    Guard,
    Head,
    HeadScores,
    above_noise,
    all_heads,
    checked_heads,
    gates_without,
    need_heads,
    over_images,
    selector,
)
from seecause.background.images import LabelledImages, as_labelled
from seecause.engine.chunks import fit, in_chunks, plain_logits
from seecause.engine.forks import HELD, fork, gated_logits, inert, mean_carried, zeros
from seecause.errors import BadOption
from seecause.metrics.statistics import standard_error
from seecause.models.base import protocol
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel
from seecause.options import Count, Fraction, Positive, check_options
from seecause.target import Spec, parse

T = TypeVar("T")
Operator = Literal["zero", "mean", "resample"]
Answering = Response | Callable[[Tensor], Tensor]
SCORED = {"cuda": 128, "cpu": 8}  # images scored together at most
TOGETHER = (1, 2, 4, 8)  # heads that are exchanged together
UNMOVED = 1e-9  # nats: versions that differ by less have the same prediction
BEYOND_ZERO = 1.96  # standard errors: a smaller mean effect cannot be told from none, at 95 %


class HeadExperiment:
    """Images with their erased versions, what is measured on them, and what a removed head carries
    instead: what all estimators of head scores share. Options are those of `score`."""

    def __init__(
        self,
        model: VisionModel,
        data: LabelledImages | Tensor,
        *,
        response: Answering = "big",
        target: Spec = None,
        operator: Operator = "zero",
        fill: Fill | Tensor = "grey",
        guard: bool = True,
        temperature: Positive = 1.0,
        seed: int = 0,
    ):
        need_heads(model, "head scores")
        given = {"operator": operator, "guard": guard, "temperature": temperature, "seed": seed}
        check_options("score", HeadExperiment.__init__, given)
        self.model = model
        self.operator: Operator = operator
        self.data = as_labelled(model, data)
        images = self.data.images
        self.layout = model.check(images)
        self.heads = all_heads(model)
        compares = isinstance(response, str) and response in OF_MASKS
        if compares:
            need_distribution(model, f"response={response!r} with masks")
        elif not callable(response) and response not in get_args(Response):
            known = ", ".join(get_args(Response))
            raise BadOption("response", response, f"one of {known}, or a function of logits")
        swap = isinstance(fill, str) and fill == "swap"
        guarded = guard and (compares or self.data.masks is not None or swap)
        if guarded:
            need_distribution(model, "the guard")
        views: list[ErasedView] = [
            view for name, view in COMPARED.items() if guarded or (compares and response == name)
        ]
        self.erased = Erased(model, self.data, fill) if views else None
        if target is None and self.data.labels is not None:
            target = self.data.labels
        bound = parse(model, target, len(images))
        labels = bound.classes if bound.against is None else None
        if labels is None:  # the model's own predictions
            plain = plain_logits(model, images, what="images")
            bound, labels = bound.bind(plain), plain.argmax(dim=-1)
        labels = labels.to(model.device)
        self.measure = Measure(response, tuple(views), bound, labels, temperature, model.sigmoid)
        resample = operator == "resample"
        self.donors = derangement(len(images), seed).to(model.device) if resample else None
        self.means = mean_carried(model, images) if operator == "mean" else []

    @property
    def copies(self) -> int:
        """Versions of each image that run."""
        return len(self.measure.views)

    def rows(self, part: slice) -> Tensor:
        """All versions of some images, [V * b, 3, H, W], and behind them their donors."""
        images = [self.data.images[part]]
        if self.erased is not None:
            images += self.erased.versions(part, self.measure.erased)
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
        name = self.measure.response
        return {
            "response": name if isinstance(name, str) else getattr(name, "__name__", "callable"),
            "target": self.measure.target.record(self.model),
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
    response: Answering = "big",
    target: Spec = None,
    operator: Operator = "zero",
    fill: Fill | Tensor = "grey",
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
        response: "big" (CIGMA), "fig", "prob", "logit", "nll", or a function of logits.
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
        total=len(experiment.heads),
        effects=lost["response"],
        fig_drops=lost.get("fig"),
    )


def _measured(
    experiment: HeadExperiment,
    heads: Sequence[Head],
    progress: Callable[[int], None] | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Everything that is measured, by name, float64 on the CPU: [B] of the whole model, and
    [B, L, H] without each of `heads`, NaN elsewhere."""
    model, measure, count = experiment.model, experiment.measure, len(experiment.data)

    def run_chunk(rows: slice) -> dict[tuple[int, str], Tensor]:
        """[b] of the whole model (layer -1) and [k, b] without each head of a layer."""
        part, values = measure.take(rows), defaultdict[tuple[int, str], list[Tensor]](list)
        size = rows.stop - rows.start

        def keep(layer: int, logits: Tensor) -> None:
            for name, value in part(measure.split(logits)).items():
                values[layer, name].append(value)

        plain = fork(
            model,
            experiment.rows(rows),
            heads,
            lambda layer, at, logits: keep(layer, logits),
            content=experiment.content,
            forking=experiment.copies * size,
        )
        keep(-1, plain[: experiment.copies * size])
        if progress is not None:
            progress(len(heads) * size)
        return {key: torch.cat(parts).cpu() for key, parts in values.items()}  # waits here only

    most = SCORED["cuda" if model.device.type == "cuda" else "cpu"]
    chunks = experiment.over_images(run_chunk, depth=1 / HELD, most=most)
    joined = {key: torch.cat([chunk[key] for chunk in chunks], dim=-1) for key in chunks[0]}
    by_layer: dict[int, dict[str, Tensor]] = {}
    for (layer, name), values in joined.items():
        by_layer.setdefault(layer, {})[name] = values
    plain = {name: value.double().cpu() for name, value in by_layer.pop(-1).items()}
    shape = (count, model.n_layers, model.n_heads)
    without = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in plain}
    for layer, measured in by_layer.items():
        at = [head for block, head in heads if block == layer]
        for name, value in measured.items():
            without[name][:, layer, at] = value.T.double().cpu()
    return plain, without


@selector("loss-gain", cost="about L * H / 2 forwards", needs="labels")
def loss_gain(model: VisionModel, data: LabelledImages) -> HeadScores:
    """How much the loss falls without each head, by exact ablation."""
    return score(model, data, response="nll", guard=False)


@selector("cigma", cost="about L * H forwards", needs="masks, or other versions")
def cigma(
    model: VisionModel,
    data: LabelledImages,
    *,
    fill: Fill | Tensor = "grey",
    operator: Operator = "zero",
    guard: Guard = "penalty",
    temperature: Positive = 1.0,
    screen: Count | None = None,
    verify: Count | None = None,
    audit: Fraction = 0.02,
    half: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> HeadScores:
    """How much less predictions depend on the background without each head, less what the object
    loses.

    Scores below the noise floor are 0, then the guard applies. With `screen`, only the heads that a
    guess finds likeliest are measured; `verify`, `audit` and `half` are options of
    `sc.background.screen`, which finds so many.
    """
    swap = isinstance(fill, str) and fill == "swap"
    complete = not swap or data.other_object is not None
    if not complete and guard != "none":
        raise BadOption("guard", guard, "'none': this data has no other objects to compare with")
    options: dict[str, Any] = {"fill": fill, "operator": operator, "temperature": temperature}
    options |= {"guard": complete, "seed": seed}
    if screen is None:
        scores = score(model, data, progress=progress, **options)
    else:
        from seecause.background.screening import screen as run_screen

        settings: dict[str, Any] = {"verify": verify, "audit": audit, "half": half}
        screened = run_screen(model, data, top=screen, **settings, **options)
        about = {
            "verified": len(screened.verified),
            "audited": len(screened.audited),
            "heads": int(screened.guess.value.isfinite().sum()),
            "agreement": screened.agreement,
            "recall": screened.recall,
        }
        about = {**screened.scores.protocol, "screen": about}
        scores = replace(screened.scores, protocol=about)
    both = data if complete else replace(data, other_object=data.other_background)
    gains = information_gains(model, both, fill=fill, temperature=temperature)
    scores = GUARDS[guard](above_noise(scores, gains.noise_floor))
    source = "none" if swap or data.masks is None else data.masks.kind
    return replace(scores, protocol={**scores.protocol, "masks": source, "guard": guard})


@dataclass(frozen=True, eq=False)
class Greedy:
    """Removals in order: `gains[i]` is the score of `heads[i]` when it was chosen, `rounds[i]` all
    scores of that round. If it stopped early, the last round found no head worth removing."""

    heads: list[Head]
    gains: list[float]
    rounds: list[HeadScores]


@in_eval_mode
def greedy(
    model: VisionModel,
    data: LabelledImages | Tensor,
    *,
    top: Count = 4,
    rule: Callable[[HeadScores], HeadScores] | None = None,
    **options: Any,
) -> Greedy:
    """Remove up to `top` heads one by one, scoring again after each removal.

    It stops early when no head has a positive score. `rule` is a guard applied in each round.
    Options are those of `score`. Chosen heads are gated to zero for the next round, whatever the
    operator that scores them.
    """
    check_options("greedy", greedy, {"top": top})
    check_options("greedy", score, options)
    gates = gates_without(model, ())
    chosen, gains, rounds = list[Head](), list[float](), list[HeadScores]()
    for _ in range(top):
        with model.gated(gates):
            scores = score(model, data, **options)
        scores = scores if rule is None else rule(scores)
        rounds.append(scores)
        best = scores.order()[:1]
        if not best:
            break
        chosen += best
        gains.append(float(scores.value[best[0]]))
        gates[best[0]] = 0
    return Greedy(chosen, gains, rounds)


@selector("greedy", cost="as cigma, for each of `top` heads", needs="masks, or other versions")
def greedy_cigma(
    model: VisionModel,
    data: LabelledImages,
    *,
    fill: Fill | Tensor = "grey",
    operator: Operator = "zero",
    guard: Guard = "penalty",
    top: Count = 4,
) -> HeadScores:
    """How soon each head goes when CIGMA scores the others again after each removal; 0 for those
    that stay."""
    options: dict[str, Any] = {"fill": fill, "operator": operator, "guard": guard != "none"}
    chosen = greedy(model, data, top=top, rule=GUARDS[guard], **options)
    first = chosen.rounds[0]
    value = torch.zeros_like(first.value).masked_fill(first.value.isnan(), torch.nan)
    gain = torch.full_like(value, torch.nan)
    for place, (head, won) in enumerate(zip(chosen.heads, chosen.gains, strict=True)):
        value[head], gain[head] = len(chosen.heads) - place, won
    protocol = {**first.protocol, "top": top, "guard": guard}
    after = {"score when chosen": gain}
    return HeadScores(value, after=after, before=first.before, protocol=protocol)


@dataclass(frozen=True, eq=False)
class Interchange:
    """Effects of exchanging each head, [L, H] float64 on the CPU; NaN where a block has no such
    head."""

    background: Tensor  # NIE_bg
    background_error: Tensor  # standard error over pairs
    foreground: Tensor | None = None  # NIE_fg
    foreground_error: Tensor | None = None
    # JS between the predictions of the whole images, by cue ("background", "foreground")
    total: dict[str, float] = field(default_factory=dict)
    total_error: dict[str, float] = field(default_factory=dict)  # NaN for one pair
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def selectivity(self) -> Tensor:
        """NIE_bg / (NIE_bg + NIE_fg), [L, H]; NaN where neither matters."""
        if self.foreground is None:
            raise BadOption("data", "no other_object", "images with other_object for selectivity")
        return self.background / (self.background + self.foreground)


@in_eval_mode
@torch.no_grad()
def interchange(
    model: VisionModel,
    data: LabelledImages,
    *,
    temperature: Positive = 1.0,
    progress: Callable[[int], None] | None = None,
) -> Interchange:
    """Exchange every head between images and their other versions.

    Args:
        model: A vision transformer.
        data: Images with `other_background`, and with `other_object` for the selectivity.
        temperature: Of the predictions that are compared.
        progress: Called with the number of images that are finished.
    """
    cues, data = _cues(model, data)
    images = data.images
    layout, n, kinds = model.check(images), len(images), len(cues)
    heads = all_heads(model)
    effects = torch.full((n, kinds, model.n_layers, model.n_heads), torch.nan, dtype=torch.float64)
    totals = torch.empty(n, kinds, dtype=torch.float64)

    def run_chunk(a: int, b: int) -> None:
        # each image for every cue, then its counterfactuals
        rows = torch.cat([*[images[a:b]] * kinds, *(other[a:b] for other in cues.values())])
        half = kinds * (b - a)
        whole, other = log_probs(model(rows), temperature).split(half)
        totals[a:b] = jensen_shannon(whole, other).double().cpu().unflatten(0, (kinds, b - a)).T

        def each(layer: int, at: list[int], logits: Tensor) -> None:
            moved = jensen_shannon(whole, log_probs(logits, temperature))  # [k, kinds * b]
            by_cue = moved.double().cpu().unflatten(1, (kinds, b - a))  # [k, kinds, b]
            effects[a:b, :, layer, at] = by_cue.permute(2, 1, 0)

        def content(layer: int, carried: Tensor, tokens: Tensor) -> Tensor:
            return carried[half:]

        fork(model, rows, heads, each, content=content, forking=half)
        if progress is not None:
            progress(b - a)

    size = fit(n, 2 * kinds * model.forward_bytes(layout), images.device, share=HELD)
    list(in_chunks(run_chunk, n, size, what="images"))
    means, errors = effects.mean(dim=0), standard_error(effects)
    record = {"temperature": temperature, "cues": list(cues), **protocol(model, images)}
    total = dict(zip(cues, totals.mean(dim=0).tolist(), strict=True))
    spread = dict(zip(cues, standard_error(totals).tolist(), strict=True))
    foreground = (means[1], errors[1]) if kinds == 2 else (None, None)
    return Interchange(means[0], errors[0], *foreground, total, spread, record)


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
    cues, data = _cues(model, data)
    others = cues["background"]
    gates = gates_without(model, heads).to(model.device)

    def run_chunk(a: int, b: int) -> Tensor:
        rows = torch.cat([data.images[a:b], others[a:b]])
        plain = log_probs(model(rows), temperature).unflatten(0, (2, b - a))
        mixed = gated_logits(
            model,
            rows,
            gates.expand(b - a, -1, -1),
            content=lambda layer, carried, tokens: carried[b - a :],
        )
        compared = (log_probs(mixed, temperature), plain[1])
        return torch.stack([jensen_shannon(plain[0], p) for p in compared], dim=1).double().cpu()

    through, whole = over_images(run_chunk, model, data.images, holds=2).mean(dim=0)
    return float(through / whole)


@selector("interchange", cost="about L * H / 2 forwards for each pair", needs="pairs")
def interchange_scores(
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
    data = replace(data, other_object=None)
    heads = all_heads(model)
    done = None if progress is None else lambda images: progress(images * len(heads))
    effects = interchange(model, data, temperature=temperature, progress=done)
    whole = effects.total["background"]
    if whole < UNMOVED:
        raise BadOption(
            "data",
            f"versions that move predictions by {whole:.2g} nats",
            "pairs whose predictions differ: these have the same predictions already",
        )
    spread = effects.total_error["background"]
    about = {**effects.protocol, "effect": whole}
    about["effect error"] = None if math.isnan(spread) else spread
    value, error = effects.background, effects.background_error
    if not whole > BEYOND_ZERO * spread:
        return HeadScores(value, error, total=len(heads), protocol={**about, "mediated": {}})
    scores = HeadScores(value / whole, error / whole, total=len(heads))
    shares = {
        count: mediated(model, data, scores.top(count), temperature=temperature)
        for count in TOGETHER
        if count <= len(heads)
    }
    return replace(scores, protocol={**about, "mediated": shares})


def _cues(model: VisionModel, data: LabelledImages) -> tuple[dict[str, Tensor], LabelledImages]:
    """The other versions by what they change, and the images on the model's device."""
    need_heads(model, "interchange")
    need_distribution(model, "interchange")
    data = as_labelled(model, data)
    if data.other_background is None:
        expected = "two versions of each image: pairs:WITH:WITHOUT, or Critters"
        raise BadOption("data", data.name, expected)
    cues = {"background": data.other_background}
    return cues if data.other_object is None else {**cues, "foreground": data.other_object}, data
