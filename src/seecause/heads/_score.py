"""What a response loses when a head goes (CIGMA, phase 3), for every head, by exact suffix runs.

    score(h) = mean over images of  R - R^(-h),          CIGMA(h): R = BIG

A head with a positive CIGMA score made the answer hang on the background. The score alone can be
fooled: a head whose removal makes all answers alike has BIG^(-h) = 0 and the highest score there
is. So accuracy, NLL, entropy and (with `guard`) FIG without the head come along: see `cigma`.

    zero       the head carries nothing (the paper)
    mean       what it carries on average over the images, token by token
    resample   what it carries in another image (a seeded derangement); the same donor for all
               versions of an image
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from seecause._pieces import in_pieces
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.forks import HELD, fork, inert
from seecause.errors import BadOption
from seecause.heads.erase import Baseline, Masks
from seecause.heads.head_experiment import (
    OF_MASKS,
    HeadExperiment,
    Measure,
    Operator,
    Response,
    View,
    instead_of,
    matched_temperature,
)
from seecause.heads.scores import Head, HeadScores, checked_heads
from seecause.metrics import standard_error
from seecause.models._settled import settles
from seecause.models.view import VisionModel
from seecause.target import Spec

SCORED = {"cuda": 128, "cpu": 8}  # images of a piece, the same wherever it is done
Temperature = float | Literal["matched"]


@settles
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
    >>> scores = sc.heads.score(model, images, masks == 1)
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
    protocol = {**experiment.record(), "operator": operator, "temperature": temperature}
    protocol |= {"guard": guard, "seed": seed, "heads_run": len(running)}
    return _head_scores(plain, without, total=len(experiment.heads), protocol=protocol)


def _head_scores(
    plain: Mapping[str, Tensor],
    without: Mapping[str, Tensor],
    *,
    total: int,
    protocol: dict[str, Any],
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
        protocol=protocol,
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


@settles
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
