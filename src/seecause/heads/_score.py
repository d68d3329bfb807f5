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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from seecause._pieces import in_pieces
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.forks import HELD, fork, inert
from seecause.errors import BadOption
from seecause.heads._experiment import (
    OF_MASKS,
    HeadExperiment,
    Measure,
    Operator,
    Response,
    View,
    by_version,
    instead_of,
    matched_temperature,
)
from seecause.heads.erase import Baseline, Masks
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
    """Scores [L, H] of every head (or of `heads`; the others are NaN) on normalised images [B, 3,
    H, W].

    `target` is the class that `prob`, `logit` and `nll` speak of, and what accuracy and NLL are
    measured against: None for the model's own answers, or labels. `temperature` is that of the
    answers that BIG, FIG and entropy compare; "matched" gives each ablated model the temperature at
    which its mean entropy is the whole model's, so that flatter answers do not pass for fewer
    background cues (it keeps all logits). `guard` also runs the pictures without foreground (half
    as much again). `progress` is told how many (image, head) pairs are done, each time some are.
    """
    matched = temperature == "matched"
    if matched and response not in OF_MASKS:
        raise BadOption(
            "temperature",
            "matched",
            "a number: only response='big' and 'fig' compare answers at a temperature",
        )
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
    silent = inert(model)
    running = [head for head in chosen if head not in silent]
    measure = _measure_matched if matched else _measure
    table = measure(experiment, running, progress)
    for head in chosen:
        if head in silent:
            table.copy_plain(head)
    if progress is not None and len(running) < len(chosen):
        progress((len(chosen) - len(running)) * len(experiment.images))
    protocol = {**experiment.record(), "operator": operator, "temperature": temperature}
    protocol |= {"guard": guard, "seed": seed, "heads_run": len(running)}
    return table.scores(total=len(experiment.heads), protocol=protocol)


class EffectTable:
    """Everything that was measured: [B] of the whole model, and [B, L, H] without each head, NaN
    where there is none."""

    def __init__(self, images: int, model: VisionModel):
        self.shape = (images, model.n_layers, model.n_heads)
        self.plain: dict[str, Tensor] = {}
        self.without: dict[str, Tensor] = {}

    def put_plain(self, rows: slice, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._room(self.plain, name, value, self.shape[:1])[rows] = value

    def put(self, rows: slice, layer: int, heads: list[int], values: Mapping[str, Tensor]) -> None:
        """values [k, b]."""
        for name, value in values.items():
            self._room(self.without, name, value, self.shape)[rows, layer, heads] = value.T

    def copy_plain(self, head: Head) -> None:
        """Without a head that cannot matter, everything is as it was."""
        for name, value in self.plain.items():
            self._room(self.without, name, value, self.shape)[:, head[0], head[1]] = value

    def _room(
        self, table: dict[str, Tensor], name: str, like: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        if name not in table:
            table[name] = like.new_full(shape, torch.nan)
        return table[name]

    def _lost(self, name: str) -> Tensor:
        """What a number of each image loses without each head, [B, L, H]."""
        return (self.plain[name][:, None, None] - self.without[name]).double().cpu()

    def scores(self, *, total: int, protocol: dict[str, Any]) -> HeadScores:
        effects = self._lost("response")
        after = {name: value.double().mean(dim=0).cpu() for name, value in self.without.items()}
        before = {name: float(value.double().mean()) for name, value in self.plain.items()}
        if "fig" in after:
            after["fig_drop"] = before["fig"] - after["fig"]
        return HeadScores(
            value=effects.mean(dim=0),
            error=standard_error(effects),
            after=after,
            before=before,
            protocol=protocol,
            total=total,
            effects=effects,
            fig_drops=self._lost("fig") if "fig" in self.without else None,
        )


def _measure(
    experiment: HeadExperiment, heads: Sequence[Head], progress: Callable[[int], None] | None
) -> EffectTable:
    """Everything that is measured, without each of `heads`."""
    table = EffectTable(len(experiment.images), experiment.model)
    count = len(experiment.images)
    size = SCORED["cuda" if experiment.model.device.type == "cuda" else "cpu"]
    parts = [slice(a, min(a + size, count)) for a in range(0, count, size)]

    def ended(number: int, values: dict[str, Tensor]) -> None:
        part = parts[number]
        for label, value in values.items():
            layer, _, name = label.partition(" ")
            if layer == "plain":
                table.put_plain(part, {name: value})
            else:
                at = [head for block, head in heads if block == int(layer)]
                table.put(part, int(layer), at, {name: value})
        if progress is not None:
            progress(len(heads) * (part.stop - part.start))

    about = {"heads": list(heads), "operator": experiment.operator, "means": experiment.means}
    pieces = (
        {"images": experiment.rows(part), "measure": experiment.measure.take(part), **about}
        for part in parts
    )
    in_pieces(score_piece, experiment.model, pieces, ended=ended)
    return table


@settles
@torch.no_grad()
def score_piece(
    model: VisionModel,
    images: Tensor,
    measure: Measure,
    heads: list[Head],
    operator: Operator,
    means: list[Tensor],
) -> dict[str, Tensor]:
    """What is measured on all versions of some images (`HeadExperiment.rows`), on the CPU: "plain
    NAME" [b] of the whole model and "LAYER NAME" [k, b] without each head of that layer."""
    copies, count = len(measure.views), len(measure.labels)
    images = images.to(model.device).unflatten(0, (-1, count))  # versions, and donors if any
    measure = replace(measure, labels=measure.labels.to(model.device))
    content = partial(instead_of, operator, [mean.to(model.device) for mean in means], copies)

    def run_chunk(a: int, b: int) -> dict[str, Tensor]:
        part, values = measure.take(slice(a, b)), dict[str, list[Tensor]]()

        def keep(layer: int | str, logits: Tensor) -> None:
            for name, value in part(by_version(measure.views, logits)).items():
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


def _measure_matched(
    experiment: HeadExperiment, heads: Sequence[Head], progress: Callable[[int], None] | None
) -> EffectTable:
    """The same, each head at the temperature that gives its removal the whole model's entropy."""
    table = EffectTable(len(experiment.images), experiment.model)
    logits: dict[Head, dict[int, dict[View, Tensor]]] = {}  # by head and first image

    def put(part: slice, layer: int, at: list[int], by_view: dict[View, Tensor]) -> None:
        for place, head in enumerate(at):
            rows: dict[View, Tensor] = {v: value[place].cpu() for v, value in by_view.items()}
            logits.setdefault((layer, head), {})[part.start] = rows

    _run(experiment, heads, table, put, progress)
    wanted = table.plain["entropy"].double().mean()
    for (layer, head), parts in logits.items():
        whole: dict[View, Tensor] = {}
        for view in experiment.measure.views:
            rows = torch.cat([parts[first][view] for first in sorted(parts)])
            whole[view] = rows.to(experiment.images.device)[None]
        matched = matched_temperature(whole["plain"], wanted)
        values = replace(experiment.measure, temperature=matched[:, None, None])(whole)
        values["temperature"] = matched[:, None].expand_as(values["nll"]).to(values["nll"])
        table.put(slice(None), layer, [head], values)
    return table


def _run(
    experiment: HeadExperiment,
    heads: Sequence[Head],
    table: EffectTable,
    put: Callable[[slice, int, list[int], dict[View, Tensor]], None],
    progress: Callable[[int], None] | None,
) -> None:
    """Fork off the logits without each head, and hand them to `put` as they come."""

    def run_chunk(part: slice) -> None:
        count = part.stop - part.start
        rows = experiment.copies * count

        def each(layer: int, at: list[int], logits: Tensor) -> None:
            put(part, layer, at, experiment.split(logits))
            if progress is not None:
                progress(len(at) * count)

        plain = fork(
            experiment.model,
            experiment.rows(part),
            heads,
            each,
            content=experiment.content,
            forking=rows,
        )
        table.put_plain(part, experiment.measure.take(part)(experiment.split(plain[:rows])))

    experiment.over_images(run_chunk, depth=1 / HELD)
