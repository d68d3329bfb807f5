"""Remedies inside attention: heads that carry the background removed, or made blind to it.

    heads             the K heads with the highest score go, K from 1 by held-out versions. Scores:
                      interchange (what each head carries of the change between versions) or CIGMA
    head-directions   of the head that carries most of the change, the directions in which its
                      output differs between versions, folded into the output projection:
                      W_O[:, S_h] <- W_O[:, S_h] (I - V'V)

A removed head carries zero, or its mean, which goes into the bias of the output projection: both
are plain weights, so every library loads the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seecause.background._remedies import Lesson, Mended, remedy
from seecause.background.heads import Head, HeadScores, penalised
from seecause.background.images import LabelledImages, on_pixels
from seecause.background.last_layer import Directions, change_directions
from seecause.background.prune import edited_copy, zero
from seecause.background.scoring import interchange, score
from seecause.background.transplant import Transplants
from seecause.engine.attention import read_rows
from seecause.engine.forks import mean_carried
from seecause.engine.walk import walk
from seecause.errors import BadOption, NotDefined
from seecause.models.slicing import columns, find_attention, find_output, output_weight
from seecause.models.view import VisionModel

HeadScore = Literal["interchange", "cigma"]
Removal = Literal["zero", "mean"]
COUNTS = (1, 2, 4, 8)  # heads that go
SCORED = 64  # pairs that heads are scored on


@remedy("heads", cost="1 forward per head of 64 pairs")
def remove_heads(
    model: VisionModel,
    lesson: Lesson,
    *,
    by: HeadScore = "interchange",
    operator: Removal = "zero",
    counts: tuple[int, ...] = COUNTS,
    pairs: int = SCORED,
) -> Mended:
    """The heads that carry the change between versions are removed; how many, by held-out
    versions."""
    scores = head_scores(model, lesson, by, pairs)
    order = scores.order()
    images, means = lesson.learn.data.images, list[Tensor]()
    if operator == "mean":
        sampled = images[_spread(len(images), pairs).to(images.device)]
        means = [by_token.mean(dim=0) for by_token in mean_carried(model, sampled)]  # [H, dh] each
    if not order:
        return Mended(model, f"No head was removed: {by} gives none a score above 0.")
    with lesson.progress("removing heads", len(counts)) as advance:

        def edited() -> Iterator[tuple[int, VisionModel]]:
            for count in sorted({min(count, len(order)) for count in counts}):
                yield count, without(model, order[:count], operator, means)
                advance(1)

        count, view, tried = lesson.best(edited())
    heads = order[:count]
    details = {"heads": heads, "by": by, "operator": operator, "transplant-worst by count": tried}
    named = ", ".join(map(str, heads))
    done = f"{len(heads)} heads removed ({by}, {operator}): {named}."
    return Mended(view, done, details)


@remedy("head-directions", cost="1 forward per head of 64 pairs, 1 of each version")
def blind_head(
    model: VisionModel, lesson: Lesson, *, rank: int | None = None, pairs: int = SCORED
) -> Mended:
    """In the head that carries most of the change, the directions in which it differs between
    versions are folded out of the output projection."""
    most = min(block.head_dim for block in model.blocks)
    if rank is not None and rank > most:
        raise BadOption("rank", rank, f"1 to {most} directions of a head")
    layer, head = head_scores(model, lesson, "interchange", pairs).order(positive=False)[0]
    outputs = carried_by(model, lesson, layer, head)
    directions = change_directions(outputs, lesson.learn.moved.source_index)
    count, view, tried = lesson.best(
        (count, edited_copy(model, _fold_into(model, layer, head, directions, count)))
        for count in ([rank] if rank is not None else [1, 2, 4])
    )
    done = f"{count} of {outputs.shape[1]} directions folded out of head {(layer, head)}."
    details = {"head": [layer, head], "rank": count, "transplant-worst by rank": tried}
    return Mended(view, done, details)


def head_scores(model: VisionModel, lesson: Lesson, by: HeadScore, pairs: int) -> HeadScores:
    """[L, H] on pictures beside one version of each."""
    part = lesson.learn
    source, last = _last_versions(part.moved.source_index, pairs)
    images, others = part.data.images[source], part.moved[last]
    with lesson.progress("scoring heads", len(images)) as advance:
        if by == "interchange":
            moved = interchange(
                model, LabelledImages(images, other_background=others), progress=advance
            )
            return HeadScores(moved.background, moved.background_error)
        if not isinstance(part.moved, Transplants):
            pairs_of = LabelledImages(images, other_background=others)
            return score(model, pairs_of, fill="swap", guard=False)
        masks = on_pixels(part.moved.shapes[source], (images.shape[-2], images.shape[-1]))
        return penalised(score(model, LabelledImages(images, part.labels[source], masks)))


def _last_versions(source: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Of up to `pairs` pictures, spread over all: their places, and the last version of each, which
    of pairs is the other one: the first is the picture itself."""
    pictures, which = source.unique(return_inverse=True)
    number = torch.arange(len(source), device=source.device)
    last = torch.zeros_like(pictures).scatter_reduce(0, which, number, "amax")
    rows = _spread(len(pictures), pairs).to(source.device)
    return pictures[rows], last[rows]


def _spread(length: int, count: int) -> Tensor:
    """Up to `count` places of `length`, evenly."""
    return torch.linspace(0, length - 1, min(count, length)).round().long()


@torch.no_grad()
def carried_by(model: VisionModel, lesson: Lesson, layer: int, head: int) -> Tensor:
    """What one head brings to the rows the answer is read from, [M, dh], of all versions."""
    layout = model.layout

    def run(images: Tensor) -> Tensor:
        for step in walk(model, model.embed(images), model.at(images), stop=layer + 1):
            if step.index == layer:
                return read_rows(model, layout, step.carried[:, :, head])  # of [b, T, dh]
        raise AssertionError(layer)

    return torch.cat([run(batch).double().cpu() for batch in lesson.learn.moved.batches(64)])


def without(
    model: VisionModel, heads: Sequence[Head], operator: Removal, means: list[Tensor]
) -> VisionModel:
    """A copy in which heads carry zero, or their mean."""
    if operator == "zero":
        return zero(model, heads)

    def edit(block: nn.Module, layer: int) -> None:
        for at, head in heads:
            if at == layer:
                own = columns([head], model.blocks[layer].head_dim)
                _add_to_bias(block, own, means[layer][head])
                output_weight(block)[:, own.to(model.device)] = 0

    with torch.no_grad():
        return edited_copy(model, edit)


def _fold_into(
    model: VisionModel, layer: int, head: int, directions: Directions, rank: int
) -> Callable[[nn.Module, int], None]:
    vectors = directions.vectors[:rank].to(model.device, model.dtype)
    mean = directions.mean.to(model.device, model.dtype)

    @torch.no_grad()
    def edit(block: Any, at: int) -> None:
        if at != layer:
            return
        own = columns([head], model.blocks[layer].head_dim).to(model.device)
        _add_to_bias(block, own, vectors.T @ (vectors @ mean))
        weight = output_weight(block)
        weight[:, own] -= (weight[:, own] @ vectors.T) @ vectors

    return edit


@torch.no_grad()
def _add_to_bias(block: Any, own: Tensor, content: Tensor) -> None:
    """What the columns `own` of the output projection make of `content` [dh], for good."""
    out = find_output(find_attention(block)[1])
    if out.bias is None:
        raise NotDefined(
            "a head that carries its mean",
            "the output projection has no bias to hold it",
            "Give operator='zero'",
        )
    out.bias += out.weight[:, own.to(out.weight.device)] @ content.to(out.weight)
