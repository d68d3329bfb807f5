"""Swap: patches of image A are put into image B at some layers, and B's prediction changes.

The inputs of blocks `first` to `last` of B's run at some patches are overwritten by those of A's
run at its patches (`sc.patch` with sites of kind resid); everything after it is computed again. The
region may be moved: `down` and `across` say how many patches away.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from pydantic import Field

from seecause.app.jobs import Reply
from seecause.app.panels import (
    SHOWN,
    Index,
    Name,
    OnModel,
    Panel,
    Patches,
    answers,
    as_script,
    checked_patches,
)
from seecause.app.state import ActionContext
from seecause.attribution.evidence import evidence as find_evidence
from seecause.engine.patching import Site, run_patched
from seecause.errors import BadOption

Shift = Annotated[int, Field(ge=-512, le=512)]


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
    images = {name: context.image(getattr(request, name)) for name in "ab"}
    plain = {name: context.logits(getattr(request, name)) for name in "ab"}
    result: Reply = {"patches": len(places), "places": places, "of": origin}
    for name, other, at, source in (("a", "b", origin, places), ("b", "a", places, origin)):
        tokens, taken = ([model.layout.prefix + patch for patch in part] for part in (at, source))
        sites = [Site(layer, tokens=tokens, source_tokens=taken) for layer in layers if tokens]
        swapped = run_patched(model, images[name], images[other], [sites])[0, 0]
        bars = partial(answers, model, count=SHOWN - 1, target=int(plain[other].argmax()))
        result[name] = bars(swapped, plain[name])
        result[f"plain_{name}"] = bars(plain[name], plain[name])
        result[f"predicted_{name}"] = int(plain[name].argmax())
    return result


@torch.no_grad()
def path(context: ActionContext, request: Swap) -> Reply:
    """The fewest patches of A that, put on B at their own positions, give A's prediction: A's
    evidence (`sc.evidence`) with B in place of the blank."""
    model, a, b = context.transformer, context.image(request.a), context.image(request.b)
    context.progress(0.1, "ranking the patches of A")
    found = find_evidence(model, a, blank=b)
    goal, before = found.labels[0], model.class_name(int(context.logits(request.b).argmax()))
    if goal == before:
        expected = "two images with different predictions"
        raise BadOption("images", f"two predicted as {goal}", expected)
    patches = found.enough.patches[0].flatten().nonzero()[:, 0].tolist()
    probability = float(found.enough.probability[0])
    order = found.manifest["options"]["order"]
    return {
        "from": before,
        "to": goal,
        "patches": patches,
        "probability": probability,
        "order": order,
    }


def block_range(context: ActionContext, request: Swap) -> range:
    """Blocks whose input is overwritten, from 0."""
    depth = context.transformer.n_layers
    last = depth - 1 if request.last is None else request.last
    if not request.first <= last < depth:
        expected = f"blocks 0 <= first <= last <= {depth - 1}"
        raise BadOption("first, last", (request.first, last), expected)
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
    return as_script("swap", context, request, layers=layers, origin=origin, places=places)


PANEL = Panel(
    "swap",
    "Swap",
    "What if this patch came from another image?",
    actions=(exchange, path, copy),
    kinds=("classifier",),
    blocks=True,
)
