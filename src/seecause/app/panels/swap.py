"""Swap: patches of image A are put into image B at some layers, and B's prediction changes.

The inputs of blocks `first` to `last` of B's run at some patches are overwritten by those of A's
run at its patches (`sc.patch` with sites of kind resid); everything after it is computed again. The
region may be moved: `down` and `across` say how many patches away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from seecause.app.jobs import Reply
from seecause.app.panels import (
    SHOWN,
    Index,
    Name,
    OnModel,
    Panel,
    Patches,
    answer_lines,
    answers,
    as_script,
    checked_patches,
    opening_lines,
)
from seecause.app.state import ActionContext
from seecause.attribution.evidence import bisect
from seecause.engine.chunks import batched, fit
from seecause.engine.trace import Trace
from seecause.engine.walk import walk
from seecause.errors import BadOption, NotDefined
from seecause.models.block import wide
from seecause.models.view import VisionModel
from seecause.target import spread

Shift = Annotated[int, Field(ge=-512, le=512)]
POINTS = 7  # lengths that are tried at once in the search for the shortest path
WAY = 8  # mixtures of the two images in which patches are scored


class Swap(OnModel):
    """Patches of `a`, their positions in `b`, and the blocks."""

    a: Name
    b: Name
    patches: Patches = ()
    down: Shift = 0
    across: Shift = 0
    first: Index = 0
    last: Index | None = None


@torch.no_grad()
def exchange(context: ActionContext, request: Swap) -> Reply:
    """B's prediction with patches of A, and A's prediction with the patches of B that they
    replace."""
    model, layers = context.transformer, block_range(context, request)
    origin, places = moved_patches(context, request)
    runs = context.run(request.a), context.run(request.b)
    a, b = (run.logits[0] for run in runs if run.logits is not None)
    swapped = {
        "a": put_in(model, runs[0], runs[1], origin, places, layers),
        "b": put_in(model, runs[1], runs[0], places, origin, layers),
    }
    shown = {"a": a, "b": b}
    result: Reply = {"patches": len(places), "places": places, "of": origin}
    for name, plain in shown.items():
        other = shown["b" if name == "a" else "a"]
        target = int(other.argmax())
        result[name] = answers(model, swapped[name], plain, count=SHOWN - 1, target=target)
        result[f"plain_{name}"] = answers(model, plain, plain, count=SHOWN - 1, target=target)
        result[f"predicted_{name}"] = int(plain.argmax())
    return result


@torch.no_grad()
def path(context: ActionContext, request: Swap) -> Reply:
    """Turn B's prediction into A's: for every first block the fewest patches of A (at their own
    positions) that do so, and the predictions along the shortest of these paths."""
    model, layers = context.transformer, block_range(context, request)
    source, into = context.run(request.a), context.run(request.b)
    assert source.logits is not None and into.logits is not None
    goal, before = int(source.logits.argmax()), int(into.logits.argmax())
    if goal == before:
        name = model.class_name(goal)
        raise BadOption(
            "images", f"two predicted as {name}", "two images with different predictions"
        )
    every: list[dict[str, Any]] = []
    for step, first in enumerate(layers):
        context.progress(step / len(layers), f"from layer {first} on")
        span = range(first, layers.stop)
        patches = shortest(model, source, into, goal, before, span)
        every.append({"first": first, "patches": patches, "count": len(patches or ())})
    ways = [way for way in every if way["patches"] is not None]
    best = min(ways, key=lambda way: (way["count"], -way["first"]), default=None)
    result: Reply = {
        "from": model.class_name(before),
        "to": model.class_name(goal),
        "blocks": [{**way, "exists": way["patches"] is not None} for way in every],
        "best": best,
        "steps": [],
    }
    if best is not None:
        span = range(best["first"], layers.stop)
        sets = [best["patches"][:count] for count in range(best["count"] + 1)]
        logits = swapped_logits(model, into, source, sets, span)
        contrast = (logits[:, goal] - logits[:, before]).tolist()
        chances = spread(wide(logits), "prob", sigmoid=model.sigmoid)[:, goal].tolist()
        result["steps"] = [
            {"contrast": round(contrast[step], 4), "probability": round(chances[step], 4)}
            for step in range(len(sets))
        ]
    return result


def shortest(
    model: VisionModel, source: Trace, into: Trace, goal: int, before: int, layers: range
) -> list[int] | None:
    """Few patches of the source that turn the prediction into `goal`, the strongest first; None if
    all patches together do not. Every set was run; patches that are not needed are left out."""
    if layers.start >= model.n_layers:
        return None
    order = _order(model, source, into, goal, before, layers)

    def passes(_: Tensor, lengths: Tensor) -> Tensor:
        sets = [order[:length] for length in lengths.tolist()]
        return swapped_logits(model, into, source, sets, layers).argmax(dim=-1) == goal

    every = torch.tensor([len(order)])
    ends = passes(every, every)
    length = int(bisect(passes, torch.zeros(1, dtype=torch.long), len(order), ends, points=POINTS))
    if length < 0:
        return None
    patches, spared = order[:length], True
    while spared:  # one by one, from the weakest on
        spared = False
        for patch in reversed(patches):
            rest = [other for other in patches if other != patch]
            if int(swapped_logits(model, into, source, [rest], layers).argmax()) == goal:
                patches, spared = rest, True
    return patches


def _order(
    model: VisionModel, source: Trace, into: Trace, goal: int, before: int, layers: range
) -> list[int]:
    """Patches by their share in the difference of the two predictions: its gradient in the weight
    of each source patch, averaged along the path from one image to the other."""
    with torch.enable_grad():
        shares = (torch.arange(WAY, device=model.device, dtype=model.dtype) + 0.5) / WAY
        mixed = shares[:, None, None].repeat(1, into.layout.tokens, 1)
        mixed[:, : into.layout.prefix] = 0
        mixed.requires_grad_()
        copies = into.states[layers.start].expand(WAY, -1, -1)
        logits = _written(model, into, source, copies, layers, lambda h, new: h + mixed * (new - h))
        (slopes,) = torch.autograd.grad((logits[:, goal] - logits[:, before]).sum(), mixed)
    order = slopes.mean(dim=0)[into.layout.patches, 0].argsort(descending=True, stable=True)
    return order.tolist()


def swapped_logits(
    model: VisionModel, into: Trace, source: Trace, sets: list[list[int]], layers: range
) -> Tensor:
    """Logits [n, C] of one run with each set of patches taken from another, at their positions; as
    many at once as fit in the memory budget."""
    marks = torch.zeros(len(sets), into.layout.tokens, 1, dtype=torch.bool)
    for row, patches in zip(marks, sets, strict=True):
        row[[into.layout.prefix + patch for patch in patches]] = True

    def run(marks: Tensor) -> Tensor:
        copies = into.states[layers.start].expand(len(marks), -1, -1)
        return _written(
            model, into, source, copies, layers, lambda h, new: torch.where(marks, new, h)
        )

    size = fit(len(sets), model.forward_bytes(into.layout), model.device)
    return batched(run, marks.to(model.device), size, what="sets of patches")


def put_in(
    model: VisionModel,
    into: Trace,
    source: Trace,
    places: list[int],
    origin: list[int],
    layers: range,
) -> Tensor:
    """Logits [C] of one run with patches `origin` of another at `places`."""
    to, taken = (
        torch.tensor(patches, dtype=torch.long, device=model.device) + into.layout.prefix
        for patches in (places, origin)
    )

    def write(h: Tensor, new: Tensor) -> Tensor:
        return h.index_copy(1, to, new[:, taken])

    return _written(model, into, source, into.states[layers.start], layers, write)[0]


def _written(
    model: VisionModel,
    into: Trace,
    source: Trace,
    h: Tensor,
    layers: range,
    write: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Logits [n, C] of states h [n, T, D] that enter the first of `layers`, where
    `write(h, source's states)` returns the input of each of them."""
    rows = model.readout.rows(into.layout)
    with model.eval_mode():
        steps = walk(model, h, into.at, start=layers.start)
        for step in steps:
            if step.index in layers:
                step.h = write(step.h, source.states[step.index])
            if step.index == model.n_layers - 1 and rows is not None:
                step.take(rows)
        return model.readout.of_rows(steps.h, into.layout)


def block_range(context: ActionContext, request: Swap) -> range:
    """Blocks whose input is overwritten, from 0."""
    depth = context.transformer.n_layers
    last = depth - 1 if request.last is None else request.last
    if not request.first <= last < depth:
        expected = f"blocks 0 <= first <= last <= {depth - 1}"
        raise BadOption("first, last", (request.first, last), expected)
    if context.transformer.facts is not None:
        reason = "its blocks know more about a token than its state"
        raise NotDefined("swapping patches", reason, "Use sc.patch, which moves that, too")
    return range(request.first, last + 1)


def moved_patches(context: ActionContext, request: Swap) -> tuple[list[int], list[int]]:
    """Patches of A and their positions in B, without patches that would lie outside."""
    model = context.transformer
    checked_patches(model, request.patches)
    rows, columns = model.layout.grid
    origin, places = [], []
    for patch in sorted(set(request.patches)):
        row, column = patch // columns + request.down, patch % columns + request.across
        if 0 <= row < rows and 0 <= column < columns:
            origin.append(patch)
            places.append(row * columns + column)
    return origin, places


def copy(context: ActionContext, request: Swap) -> Reply:
    """Python code that computes these results without the app."""
    layers, prefix = block_range(context, request), context.transformer.layout.prefix
    origin, places = ([prefix + p for p in patches] for patches in moved_patches(context, request))
    moved = f", source_tokens={origin}" if origin != places else ""
    site = f"sc.Site(layer, tokens={places}{moved})"
    lines = opening_lines(context, request.b, request.a)  # images are B, others are A
    lines += [
        f"sites = [{site} for layer in range({layers.start}, {layers.stop})]",
        "logits = sc.patch(model, images, others, [sites])[0, 0]",
        *answer_lines(context.model),
    ]
    return as_script(lines)


PANEL = Panel(
    "swap",
    "Swap",
    "What if this patch came from another picture?",
    actions=(exchange, path, copy),
)
