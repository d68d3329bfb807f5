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

One-shot scores add up only where heads do not replace each other. `greedy` scores again after each
removal; `additivity` is how far one-shot scores are from adding up:
    gap = (R - R^(-set)) / sum of score(h) over the set     1: they add up; below 1: they overlap;
                                                            above 1: they back each other up
`regress` removes `draws` random sets of heads from every image, each head with probability `rate`,
and explains the loss of response by which heads were removed:
    R_i - R_i^(-S) = sum over h in S of beta_h + error,         score(h) = beta_h
by least squares (`ridge` > 0 shrinks). Errors are clustered by image: the draws of one image are
not independent.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from seecause.background.erase import Erased, ErasedView, Fill
from seecause.background.gains import (
    COMPARED,
    OF_MASKS,
    Measure,
    Response,
    View,
    information_gains,
    jensen_shannon,
    log_probs,
    matched_temperature,
    need_distribution,
)
from seecause.background.heads import (
    GUARDS,
    Guard,
    Head,
    HeadScores,
    above_noise,
    absent,
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
from seecause.options import Count, Limit, NotNegative, Positive, check_options
from seecause.target import Spec, parse

T = TypeVar("T")
Operator = Literal["zero", "mean", "resample"]
Temperature = Positive | Literal["matched"]
Answering = Response | Callable[[Tensor], Tensor]
Rate = Annotated[float, Limit(lambda rate: 0 < rate < 1, "a probability between 0 and 1")]
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

    def gated(self, part: slice, gates: Tensor) -> dict[str, Tensor]:
        """Everything that is measured on some images whose heads have gates [b, L, H]: [b] each.
        Differentiable in the gates."""
        spread = gates.repeat(self.copies, 1, 1)
        logits = gated_logits(self.model, self.rows(part), spread, content=self.content)
        return self.measure.take(part)(self.measure.split(logits))

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
    temperature: Temperature = 1.0,
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
        temperature: Of the predictions that are compared; "matched" gives each ablated model the
            whole model's mean entropy, so that flatter predictions do not count as fewer
            background cues.
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
    matched = temperature == "matched"
    if matched and not (isinstance(response, str) and response in OF_MASKS):
        expected = "a number: only response='big' and 'fig' compare predictions at a temperature"
        raise BadOption("temperature", "matched", expected)
    experiment = HeadExperiment(
        model,
        data,
        response=response,
        target=target,
        operator=operator,
        fill=fill,
        guard=guard,
        temperature=1.0 if temperature == "matched" else temperature,
        seed=seed,
    )
    chosen = experiment.heads if heads is None else checked_heads(model, heads)
    if not chosen:
        raise BadOption("heads", [], "at least one (layer, head)")
    silent = inert(model).intersection(chosen)
    running = [head for head in chosen if head not in silent]
    plain, without = _measured(experiment, running, matched=matched, progress=progress)
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
    *,
    matched: bool,
    progress: Callable[[int], None] | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Everything that is measured, by name, float64 on the CPU: [B] of the whole model, and
    [B, L, H] without each of `heads`, NaN elsewhere; `matched` at the temperature that gives the
    ablated model the whole model's entropy."""
    model, measure, count = experiment.model, experiment.measure, len(experiment.data)

    def run_chunk(rows: slice) -> dict[tuple[int, str], Tensor]:
        """[b] of the whole model (layer -1) and [k, b] without each head of a layer; if matched,
        logits of each version instead, [C, b] and [k, C, b]."""
        part, values = measure.take(rows), defaultdict[tuple[int, str], list[Tensor]](list)
        size = rows.stop - rows.start

        def keep(layer: int, logits: Tensor) -> None:
            by_view = measure.split(logits)
            measured = {v: each.mT for v, each in by_view.items()} if matched else part(by_view)
            for name, value in measured.items():
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
    if matched:
        by_layer = _at_matched_temperature(measure, by_layer, model.device)
    plain = {name: value.double().cpu() for name, value in by_layer.pop(-1).items()}
    shape = (count, model.n_layers, model.n_heads)
    names = [*plain, "temperature"] if matched else [*plain]
    without = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in names}
    for layer, measured in by_layer.items():
        at = [head for block, head in heads if block == layer]
        for name, value in measured.items():
            without[name][:, layer, at] = value.T.double().cpu()
    return plain, without


def _at_matched_temperature(
    measure: Measure, logits: Mapping[int, Mapping[str, Tensor]], device: torch.device
) -> dict[int, dict[str, Tensor]]:
    """What is measured, by layer and name, from logits [.., C, B] by layer and version."""

    def by_view(layer: int) -> dict[View, Tensor]:
        return {view: logits[layer][view].mT.to(device) for view in measure.views}

    values = {-1: measure(by_view(-1))}
    wanted = values[-1]["entropy"].double().mean()
    for layer in logits:
        if layer != -1:
            without = by_view(layer)
            matched = matched_temperature(without["plain"], wanted)  # [k]
            values[layer] = replace(measure, temperature=matched[:, None, None])(without)
            values[layer]["temperature"] = matched[:, None].expand_as(values[layer]["nll"])
    return values


@selector("loss-gain", cost="about L * H / 2 forwards", needs="labels")
def loss_gain(model: VisionModel, data: LabelledImages) -> HeadScores:
    """How much the loss falls without each head, by exact ablation."""
    return score(model, data, response="nll", guard=False)


@dataclass(frozen=True, kw_only=True)
class Screening:
    """Options of `screen`: find the `top` heads, verify 3 * top (or `verify`), audit a share of
    all, measure in bfloat16 (`half`)."""

    top: Count
    verify: Count | None = None
    audit: float = 0.02
    half: bool = False


@selector("cigma", cost="about L * H forwards", needs="masks, or other versions")
def cigma(
    model: VisionModel,
    data: LabelledImages,
    *,
    fill: Fill | Tensor = "grey",
    operator: Operator = "zero",
    guard: Guard = "penalty",
    temperature: Temperature = 1.0,
    screen: Count | Screening | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> HeadScores:
    """How much less predictions depend on the background without each head, less what the object
    loses.

    Scores below the noise floor are 0, then the guard applies. `screen` measures only the likeliest
    heads.
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

        settings = screen if isinstance(screen, Screening) else Screening(top=screen)
        screened = run_screen(model, data, **asdict(settings), **options)
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
    plain = 1.0 if temperature == "matched" else temperature
    gains = information_gains(model, both, fill=fill, temperature=plain)
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


@in_eval_mode
@torch.no_grad()
def joint_effect(
    model: VisionModel, data: LabelledImages | Tensor, heads: Sequence[Head], **options: Any
) -> Tensor:
    """What the response of each image loses when all of `heads` are removed together, [B] float64.
    Options are those of `score`."""
    check_options("joint_effect", HeadExperiment.__init__, options)
    experiment = HeadExperiment(model, data, **{"guard": False, **options})
    gone = gates_without(model, heads) == 0
    return _lost(experiment, gone.expand(len(experiment.data), 1, -1, -1))[:, 0]


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
    data: LabelledImages | Tensor,
    heads: Sequence[Head],
    scores: HeadScores,
    **options: Any,
) -> float:
    """The additivity gap of a set of heads with one-shot `scores`, measured with the options they
    were made with. NaN for an empty set."""
    if not heads:  # else 0 / 0 only as long as two runs agree to the last bit
        return math.nan
    together = joint_effect(model, data, heads, **options).mean()
    return float(together / sum(float(scores.value[head]) for head in heads))


@in_eval_mode
@torch.no_grad()
def regress(
    model: VisionModel,
    data: LabelledImages | Tensor,
    *,
    draws: Count = 32,
    rate: Rate = 0.1,
    ridge: NotNegative = 0.0,
    seed: int = 0,
    **options: Any,
) -> HeadScores:
    """Scores [L, H] by least squares on random removals; costs `draws` forwards for each version of
    each image. Other options are those of `score`.

    `before["r2"]` is the share of the variance between removals that the fit explains.
    """
    given = {"draws": draws, "rate": rate, "ridge": ridge, "seed": seed}
    check_options("regress", regress, given)
    check_options("regress", HeadExperiment.__init__, options)
    experiment = HeadExperiment(model, data, seed=seed, **{"guard": False, **options})
    exists, heads, count = ~absent(model), len(experiment.heads), len(experiment.data)
    if ridge == 0 and count * draws < 2 * heads:
        enough = f"{-(-2 * heads // count)} or more"
        raise BadOption("draws", draws, f"enough for {heads} heads: {enough}, or ridge above 0")
    generator = torch.Generator().manual_seed(seed)
    shape = (count, draws, *exists.shape)
    gone = (torch.rand(shape, generator=generator, dtype=torch.float64) < rate) & exists
    lost = _lost(experiment, gone)
    value, error, explained = fit_removals(gone[:, :, exists].double(), lost, ridge=ridge)
    table = torch.full((2, *exists.shape), torch.nan, dtype=torch.float64)
    table[:, exists] = torch.stack([value, error])
    about = {"estimator": "regression", **given, "operator": experiment.operator}
    about |= experiment.record()
    return HeadScores(table[0], table[1], before={"r2": explained}, protocol=about)


@selector("regression", cost="2 * draws forwards", needs="masks, or other versions")
def regression(
    model: VisionModel,
    data: LabelledImages,
    *,
    fill: Fill | Tensor = "grey",
    operator: Operator = "zero",
    draws: Count = 32,
    rate: Rate = 0.1,
    ridge: NotNegative = 0.0,
    seed: int = 0,
) -> HeadScores:
    """What each head adds to BIG while random others are missing too, by least squares, without a
    guard."""
    options: dict[str, Any] = {"draws": draws, "rate": rate, "ridge": ridge, "seed": seed}
    return regress(model, data, fill=fill, operator=operator, **options)


def fit_removals(gone: Tensor, lost: Tensor, *, ridge: float = 0.0) -> tuple[Tensor, Tensor, float]:
    """Least squares of lost [B, n] on gone [B, n, P], with an intercept -> slopes [P], their errors
    clustered by image [P], and R^2."""
    x = torch.cat([torch.ones_like(gone[..., :1]), gone], dim=-1)  # [B, n, 1 + P]
    penalty = ridge * torch.eye(x.shape[-1], dtype=x.dtype)
    penalty[0, 0] = 0
    gram = torch.einsum("bnp,bnq->pq", x, x) + penalty
    if torch.linalg.matrix_rank(gram, hermitian=True) < len(gram):  # some always went together
        expected = "more of them, or ridge above 0: these removals cannot tell all heads apart"
        raise BadOption("draws", x.shape[1], expected)
    inverse = torch.linalg.inv(gram)
    slopes = inverse @ torch.einsum("bnp,bn->p", x, lost)
    residual = lost - x @ slopes
    scores = torch.einsum("bnp,bn->bp", x, residual)  # summed within each image
    variance = inverse @ (scores.T @ scores) @ inverse
    explained = 1 - float(residual.square().sum() / (lost - lost.mean()).square().sum())
    return slopes[1:], variance.diagonal().clamp_min(0).sqrt()[1:], explained


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
