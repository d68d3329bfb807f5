"""Explain: which patches caused the prediction, and what if only these, or only others, were there?

Brushed patches are put into the run of a blank ("only these"), or replaced by the blank's in the
run of the image ("without these"): only rows of special tokens are computed. All patches brushed
give the prediction of the whole image, none gives the blank's.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from seecause.app.jobs import Reply
from seecause.app.panels import (
    SHOWN,
    Index,
    Names,
    OnPicture,
    Panel,
    Patches,
    Patching,
    answers,
    as_script,
    checked_patches,
    checked_target,
    class_word,
    heat,
    photo,
    rounded,
)
from seecause.app.state import ActionContext
from seecause.attribution.attribute import attribute
from seecause.attribution.caap import make_plan, sweep_features
from seecause.attribution.evidence import PatchSet, evidence as find_evidence
from seecause.attribution.registry import find
from seecause.engine.sweep import Sweep, SweepPlan
from seecause.engine.trace import blank_image
from seecause.errors import BadOption
from seecause.models.staged import StagedModel
from seecause.models.view import VisionModel


class OfClass(OnPicture):
    target: Index | None = None


class Brush(Patching):
    """`methods`: the maps that are shown, for `copy`."""

    patches: Patches = ()
    methods: Names = ("caap",)


class Regions(Patching):
    """Two sets of patches."""

    one: Patches = ()
    other: Patches = ()


@torch.no_grad()
def look(context: ActionContext, request: OnPicture) -> Reply:
    """The image as the model receives it, and the prediction."""
    model, image = context.model, context.image(request.picture)
    logits = context.logits(request.picture)
    sides = list(image.shape[-2:])
    return {
        "picture": photo(model, image),
        "size": sides,
        "grid": list(model.layout_at(*sides).grid),
        "name": context.picture(request.picture).name,
        "answers": answers(model, logits, logits),
        "predicted": int(logits.argmax()),
        "truth": context.picture(request.picture).truth,
    }


def draw(context: ActionContext, request: Patching, method: str) -> Reply:
    """One map, with values of every patch for the most probable classes where the method gives
    them."""
    model = context.model
    entry = find(method, model.architecture)
    options = method_options(context, request, method)
    plain_logits = context.logits(request.picture)
    top = plain_logits.topk(min(SHOWN, plain_logits.numel())).indices.tolist()
    classes = {"classes": top} if "classes" in entry.options else {}
    target = checked_target(model, request.target)
    start = time.perf_counter()
    drawn = attribute(
        model,
        context.image(request.picture),
        target=target,
        method=method,
        **options,
        **classes,
    )
    taken = time.perf_counter() - start
    every = None if drawn.class_maps is None else drawn.class_maps[0].flatten(0, 1).T  # [C', N]
    return {
        **heat(drawn.maps[0], signed=drawn.signed),
        "method": method,
        "summary": entry.summary,
        "label": drawn.labels[0] if drawn.labels else "",
        "seconds": round(taken, 3),
        "classes": [] if every is None else [model.class_name(index) for index in top],
        "by_class": [] if every is None else [rounded(row) for row in every],
    }


@torch.no_grad()
def brush(context: ActionContext, request: Brush) -> Reply:
    """Predictions with only these patches, and without them."""
    model, target = context.model, checked_target(context.model, request.target)
    checked_patches(model, request.patches)
    chosen = _chosen(model.layout.n_patches, [request.patches])
    whole = context.logits(request.picture)
    only, without = (
        brushed_logits(context, request, chosen, insert=insert)[0] for insert in (True, False)
    )
    return {
        "patches": len(request.patches),
        "predicted": int(whole.argmax()),
        "only": answers(model, only, whole, target=target),
        "without": answers(model, without, whole, target=target),
    }


@torch.no_grad()
def pair(context: ActionContext, request: Regions) -> Reply:
    """The interaction of two regions, in logits."""
    model = context.model
    for name, patches in (("one", request.one), ("other", request.other)):
        checked_patches(model, patches, name)
        if not patches:
            raise BadOption(name, "no patch", "at least one patch in each region")
    both = tuple({*request.one, *request.other})
    chosen = _chosen(model.layout.n_patches, [request.one, request.other, both, ()])
    logits = brushed_logits(context, request, chosen, insert=True)  # [4, C]
    target = checked_target(model, request.target)
    target = int(context.logits(request.picture).argmax()) if target is None else target
    one, other, joint = (logits[:3, target] - logits[3, target]).tolist()
    return {
        "label": model.class_name(target),
        "one": round(one, 4),
        "other": round(other, 4),
        "joint": round(joint, 4),
        "interaction": round(joint - one - other, 4),
    }


def evidence(context: ActionContext, request: OfClass) -> Reply:
    """The patches that are enough for the prediction, and those it needs: `sc.evidence` with its
    own ranking and blank, as in the report."""
    model, image = context.model, context.image(request.picture)
    context.progress(0.1, "ranking the patches")
    sets = find_evidence(model, image, target=checked_target(model, request.target))
    return {
        "label": sets.labels[0],
        "probability": float(sets.probability[0]),
        "of": sets.maps[0].numel(),
        "answered": bool(sets.answered[0]),
        "order": sets.manifest["options"]["order"],
        "enough": _patch_set(sets.enough),
        "needed": _patch_set(sets.needed),
    }


def copy(context: ActionContext, request: Brush) -> Reply:
    """Python code that computes these results without the app."""
    model, target = context.model, checked_target(context.model, request.target)
    methods = {method: method_options(context, request, method) for method in request.methods}
    brushed = int(context.logits(request.picture).argmax()) if target is None else target
    brush: dict[str, Any] = {"target": class_word(model, brushed), "blank": request.blank}
    if isinstance(model, VisionModel):
        brush |= {**method_options(context, request, "caap"), "propagate_registers": True}
    target = class_word(model, target)
    return as_script("explain", context, request, methods=methods, target=target, brush=brush)


def method_options(context: ActionContext, request: Patching, method: str) -> dict[str, Any]:
    """The settings of the panel that a method has as options."""
    known = find(method, context.model.architecture).options
    options: dict[str, Any] = {"blank": request.blank} if "blank" in known else {}
    if not isinstance(context.model, VisionModel):
        return options
    if method == "caap":
        plan = sweep_plan(context, request)
        last = None if plan.tail == "source" else plan.stop
        options |= {"tail": plan.tail, "layers": (plan.start, last)}
    return options


def sweep_plan(context: ActionContext, request: Patching, *, registers: bool = False) -> SweepPlan:
    """Layers and tail of the settings. With the tail "source" the last layer has no effect."""
    model = context.transformer
    layout = model.layout
    tail = make_plan(model, layout, tail=request.tail, layers=None).tail
    layers = (request.first, None if tail == "source" else request.last)
    return make_plan(model, layout, tail=tail, layers=layers, propagate_registers=registers)


def brushed_logits(
    context: ActionContext, request: Patching, chosen: Tensor, *, insert: bool
) -> Tensor:
    """Logits [n, C] of sets of patches [n, N] put into the blank, or taken out of the image."""
    model = context.model
    if isinstance(model, StagedModel):
        empty = blank_image(model, model.preprocess.size, request.blank)
        image = context.image(request.picture)
        pair = (image, empty) if insert else (empty, image)
        with model.eval_mode():
            return sweep_features(model, *pair, chosen, model.cells).interventions[0]
    plan = sweep_plan(context, request, registers=True)
    picture, blank = context.run(request.picture), context.blank(request.blank)
    pair = (blank, picture) if insert else (picture, blank)
    with context.transformer.eval_mode():
        return Sweep(context.transformer, *pair, plan).logits(chosen)[0]


def _chosen(count: int, sets: list[tuple[int, ...]]) -> Tensor:
    """Bool [n, N]."""
    chosen = torch.zeros(len(sets), count, dtype=torch.bool)
    for row, patches in zip(chosen, sets, strict=True):
        row[list(patches)] = True
    return chosen


def _patch_set(chosen: PatchSet) -> dict[str, Any]:
    patches = chosen.patches[0].flatten().nonzero()[:, 0].tolist()
    return {
        "patches": patches,
        "exists": bool(chosen.exists[0]),
        "answer": chosen.labels[0],
        "probability": float(chosen.probability[0]),
    }


PANEL = Panel(
    "explain",
    "Explain",
    "Which patches caused the prediction?",
    actions=(look, brush, pair, evidence, copy),
)
