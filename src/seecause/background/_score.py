"""What a response loses when a head goes (CIGMA, phase 3), for every head, by exact suffix runs.

    score(h) = mean over images of  R - R^(-h),          CIGMA(h): R = BIG

A head with a positive CIGMA score made the answer hang on the background. The score alone can be
fooled: a head whose removal makes all answers alike has BIG^(-h) = 0 and the highest score there
is. So accuracy, NLL, entropy and (with `guard`) FIG without the head come along: see `cigma`.

    zero       the head carries nothing (the paper)
    mean       what it carries on average over the images, token by token
    resample   what it carries in another image (a seeded derangement); the same donor for all
               versions of an image

`HeadExperiment` is what every estimator of head scores shares: images, what is measured on them,
and what a removed head carries instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from seecause._pieces import in_pieces
from seecause.background.erase import Baseline, ErasedView, ErasedViews, Masks, Swapped
from seecause.background.gains import (
    COMPARED,
    OF_MASKS,
    Measure,
    Response,
    View,
    matched_temperature,
    need_distribution,
)
from seecause.background.heads import Head, HeadScores, all_heads, checked_heads, need_heads
from seecause.engine.chunks import fit, in_chunks, plain_logits
from seecause.engine.forks import HELD, fork, gated_logits, inert, mean_carried, zeros
from seecause.errors import BadOption
from seecause.metrics.statistics import standard_error
from seecause.models.base import protocol
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel
from seecause.target import Spec, parse

T = TypeVar("T")
Operator = Literal["zero", "mean", "resample"]
Temperature = float | Literal["matched"]
SCORED = {"cuda": 128, "cpu": 8}  # images of a piece, the same wherever it is done


@in_eval_mode
@torch.no_grad()
def score(
    model: VisionModel,
    images: Tensor,
    masks: Masks | Tensor | None = None,
    *,
    response: Response | Callable[[Tensor], Tensor] = "big",
    target: Spec = None,
    operator: Operator = "zero",
    baseline: Baseline = "grey",
    guard: bool = True,
    temperature: Temperature = 1.0,
    heads: Sequence[Head] | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> HeadScores:
    """What the response loses without each head, on normalised images [B, 3, H, W] with their
    masks: a score [L, H] for every head, or for `heads` alone (the others are NaN).

    `response`: "big" (CIGMA), "fig", "prob", "logit", "nll", or a function of logits. `target`: the
    class that is meant, and accuracy measured by: labels, or None for the model's own answers.
    `operator`: what a removed head carries. `baseline` fills the background (`erase`). `guard`
    measures FIG without each head too, for half as much again. `temperature`: of the answers that
    are compared; "matched" gives each ablated model the whole model's mean entropy, so that flatter
    answers do not pass for fewer background cues.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-biased")
    >>> data = list(sc.data.open_data("critters:certified:test", limit=4))
    >>> images, labels, masks = sc.data.to_batch(model, data)
    >>> scores = sc.background.score(model, images, masks == 1)
    >>> scores.value.shape, len(scores.top(3))
    (torch.Size([6, 8]), 3)
    """
    matched = temperature == "matched"
    if matched and response not in OF_MASKS:
        expected = "a number: only response='big' and 'fig' compare answers at a temperature"
        raise BadOption("temperature", "matched", expected)
    experiment = HeadExperiment(
        model,
        images,
        masks,
        response=response,
        target=target,
        operator=operator,
        baseline=baseline,
        guard=guard,
        temperature=1.0 if temperature == "matched" else temperature,
        seed=seed,
    )
    chosen = experiment.heads if heads is None else checked_heads(model, heads)
    if not chosen:
        raise BadOption("heads", [], "at least one (layer, head)")
    silent = inert(model).intersection(chosen)
    running = [head for head in chosen if head not in silent]
    plain, without = _measured(experiment, running, silent, matched=matched, progress=progress)
    record = {**experiment.record(), "operator": operator, "temperature": temperature}
    record |= {"guard": guard, "seed": seed, "heads_run": len(running)}
    return _head_scores(plain, without, total=len(experiment.heads), record=record)


def _head_scores(
    plain: Mapping[str, Tensor],
    without: Mapping[str, Tensor],
    *,
    total: int,
    record: dict[str, Any],
) -> HeadScores:
    """From what was measured, by name: [B] of the whole model and [B, L, H] without each head."""
    lost = {name: value[:, None, None] - without[name] for name, value in plain.items()}
    after = {name: value.mean(dim=0) for name, value in without.items()}
    after |= {"fig_drop": lost["fig"].mean(dim=0)} if "fig" in lost else {}
    return HeadScores(
        value=lost["response"].mean(dim=0),
        error=standard_error(lost["response"]),
        after=after,
        before={name: float(value.mean()) for name, value in plain.items()},
        protocol=record,
        total=total,
        effects=lost["response"],
        fig_drops=lost.get("fig"),
    )


def _measured(
    experiment: HeadExperiment,
    heads: Sequence[Head],
    silent: Collection[Head],
    *,
    matched: bool,
    progress: Callable[[int], None] | None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Everything that is measured, by name, float64 on the CPU: [B] of the whole model, and
    [B, L, H] without each of `heads` and of the `silent` ones, which need not run, NaN elsewhere;
    `matched` at the temperature that gives the removal the whole model's entropy."""
    model, measure, count = experiment.model, experiment.measure, len(experiment.images)
    size = SCORED["cuda" if model.device.type == "cuda" else "cpu"]
    parts = [slice(a, min(a + size, count)) for a in range(0, count, size)]
    about = {"heads": list(heads), "operator": experiment.operator, "means": experiment.means}
    pieces = (
        {"images": experiment.rows(p), "measure": measure.take(p), "raw": matched, **about}
        for p in parts
    )

    def ended(number: int, _: dict[str, Tensor]) -> None:
        if progress is not None:
            progress(len(heads) * (parts[number].stop - parts[number].start))

    results = in_pieces(score_piece, model, pieces, ended=ended)
    joined = {label: torch.cat([r[label] for r in results], dim=-1) for label in results[0]}
    by_layer: dict[str, dict[str, Tensor]] = {}
    for label, values in joined.items():
        layer, _, name = label.partition(" ")
        by_layer.setdefault(layer, {})[name] = values
    if matched:
        by_layer = _at_matched_temperature(measure, by_layer, model.device)
    plain = {name: value.double().cpu() for name, value in by_layer.pop("plain").items()}
    shape = (count, model.n_layers, model.n_heads)
    names = [*plain, "temperature"] if matched else [*plain]
    without = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in names}
    for layer, values in by_layer.items():
        at = [head for block, head in heads if block == int(layer)]
        for name, value in values.items():
            without[name][:, int(layer), at] = value.T.double().cpu()
    for layer, head in silent:  # it cannot matter: everything is as it was
        for name, value in plain.items():
            without[name][:, layer, head] = value
    if progress is not None and silent:
        progress(len(silent) * count)
    return plain, without


@in_eval_mode
@torch.no_grad()
def score_piece(
    model: VisionModel,
    images: Tensor,
    measure: Measure,
    heads: list[Head],
    operator: Operator,
    means: list[Tensor],
    raw: bool,
) -> dict[str, Tensor]:
    """What is measured on all versions of some images (`HeadExperiment.rows`), on the CPU: "plain
    NAME" [b] of the whole model and "LAYER NAME" [k, b] without each head of that layer. With
    `raw`, the logits of each version in its place: [C, b] and [k, C, b]."""
    copies, count = len(measure.views), len(measure.labels)
    images = images.to(model.device).unflatten(0, (-1, count))  # versions, and donors if any
    measure = replace(measure, labels=measure.labels.to(model.device))
    content = partial(instead_of, operator, [mean.to(model.device) for mean in means], copies)

    def run_chunk(a: int, b: int) -> dict[str, Tensor]:
        part, values = measure.take(slice(a, b)), dict[str, list[Tensor]]()

        def keep(layer: int | str, logits: Tensor) -> None:
            by_view = measure.split(logits)
            measured = {v: rows.mT for v, rows in by_view.items()} if raw else part(by_view)
            for name, value in measured.items():
                values.setdefault(f"{layer} {name}", []).append(value)

        rows, forking = images[:, a:b].flatten(0, 1), copies * (b - a)
        plain = fork(
            model,
            rows,
            heads,
            lambda layer, at, logits: keep(layer, logits),
            content=content,
            forking=forking,
        )
        keep("plain", plain[:forking])
        return {label: torch.cat(parts).cpu() for label, parts in values.items()}  # waits here only

    each = len(images) * model.forward_bytes(model.check(images[0])) / HELD
    size = fit(count, int(each), model.device)
    chunks = list(in_chunks(run_chunk, count, size, what="images"))
    return {name: torch.cat([chunk[name] for chunk in chunks], dim=-1) for name in chunks[0]}


def _at_matched_temperature(
    measure: Measure, logits: Mapping[str, Mapping[str, Tensor]], device: torch.device
) -> dict[str, dict[str, Tensor]]:
    """What is measured, by layer and name, from logits [.., C, B] by layer and version."""

    def by_view(layer: str) -> dict[View, Tensor]:
        return {view: logits[layer][view].mT.to(device) for view in measure.views}

    values = {"plain": measure(by_view("plain"))}
    wanted = values["plain"]["entropy"].double().mean()
    for layer in logits:
        if layer != "plain":
            without = by_view(layer)
            matched = matched_temperature(without["plain"], wanted)  # [k]
            values[layer] = replace(measure, temperature=matched[:, None, None])(without)
            values[layer]["temperature"] = matched[:, None].expand_as(values[layer]["nll"])
    return values


class HeadExperiment:
    """Images with their erased versions, what is measured on them, and what a removed head carries
    instead."""

    def __init__(
        self,
        model: VisionModel,
        images: Tensor,
        masks: Masks | Tensor | None,
        *,
        response: Response | Callable[[Tensor], Tensor] = "big",
        target: Spec = None,
        operator: Operator = "zero",
        baseline: Baseline = "grey",
        guard: bool = True,
        temperature: float = 1.0,
        seed: int = 0,
    ):
        need_heads(model, "head scores")
        if operator not in get_args(Operator):
            raise BadOption("operator", operator, f"one of {', '.join(get_args(Operator))}")
        self.model = model
        self.operator: Operator = operator
        self.images = images.to(model.device, model.dtype)
        self.layout = model.check(self.images)
        self.heads = all_heads(model)
        if response in OF_MASKS:
            need_distribution(model, f"response={response!r} with masks")
        elif not callable(response) and response not in get_args(Response):
            known = ", ".join(get_args(Response))
            raise BadOption("response", response, f"one of {known}, or a function of logits")
        guarded = guard and (
            response in OF_MASKS or masks is not None or isinstance(baseline, Swapped)
        )
        if guarded:
            need_distribution(model, "the guard")
        erased: list[ErasedView] = [
            view for name, view in COMPARED.items() if guarded or response == name
        ]
        self.erased = ErasedViews(model, self.images, masks, baseline) if erased else None
        bound = parse(model, target, len(images))
        labels = bound.classes if bound.against is None else None
        if labels is None:  # the model's own answers
            plain = plain_logits(model, self.images, what="images")
            bound, labels = bound.bind(plain), plain.argmax(dim=-1)
        self.measure = Measure(response, tuple(erased), bound, labels, temperature, model.sigmoid)
        self.donors = (
            derangement(len(images), seed).to(model.device) if operator == "resample" else None
        )
        self.means = mean_carried(model, self.images) if operator == "mean" else []

    @property
    def copies(self) -> int:
        """Versions of each image that run."""
        return len(self.measure.views)

    def rows(self, part: slice) -> Tensor:
        """All versions of some images, [V * b, 3, H, W], and behind them the donors of those
        images."""
        pictures = [self.images[part]]
        if self.erased is not None:
            pictures += self.erased.erased(part, self.measure.erased)
        if self.donors is not None:
            pictures.append(self.images[self.donors[part]])
        return torch.cat(pictures)

    def content(self, layer: int, carried: Tensor, tokens: Tensor) -> Tensor:
        """What a removed head carries instead."""
        return instead_of(self.operator, self.means, self.copies, layer, carried, tokens)

    def gated(self, part: slice, gates: Tensor) -> dict[str, Tensor]:
        """Everything that is measured on some images whose heads have gates [b, L, H]: [b] each.
        Differentiable in the gates."""
        logits = gated_logits(
            self.model, self.rows(part), gates.repeat(self.copies, 1, 1), content=self.content
        )
        return self.measure.take(part)(self.measure.split(logits))

    def over_images(self, run: Callable[[slice], T], *, depth: float = 1.0) -> list[T]:
        """`run` on as many images at a time as fit, if each row holds `depth` times a plain run."""
        rows, count = self.copies + (self.donors is not None), len(self.images)
        each = int(rows * self.model.forward_bytes(self.layout) * depth)
        size = fit(count, each, self.images.device)
        return list(in_chunks(lambda a, b: run(slice(a, b)), count, size, what="images"))

    def record(self) -> dict[str, Any]:
        name = self.measure.response
        erased = {} if self.erased is None else self.erased.record()
        return {
            "response": name if isinstance(name, str) else getattr(name, "__name__", "callable"),
            "target": self.measure.target.record(self.model),
            **erased,
            **protocol(self.model, self.images),
        }


def instead_of(
    operator: Operator,
    means: list[Tensor],
    copies: int,
    layer: int,
    carried: Tensor,
    tokens: Tensor,
) -> Tensor:
    """What a removed head carries instead, where `copies` versions of each image run."""
    if operator == "mean":
        return means[layer][tokens]
    if operator == "resample":
        donors = len(carried) // (copies + 1)
        return carried[-donors:].repeat(copies, 1, 1, 1)
    return zeros(layer, carried, tokens)


def derangement(count: int, seed: int) -> Tensor:
    """For each of `count` images another one: the next in a random circle."""
    if count < 2:
        raise BadOption(
            "operator",
            "resample",
            "'zero' or 'mean': with one image there is no other to take from",
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    donors = torch.empty_like(order)
    donors[order] = order.roll(-1)
    return donors
