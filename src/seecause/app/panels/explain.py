"""Explain: which patches caused the prediction, and what if only these, or only others, were there?

Brushed patches are put into the run of a blank ("only these"), or replaced by the blank's in the
run of the image ("without these"): only rows of special tokens are computed. All patches brushed
give the prediction of the whole image, none gives the blank's.
"""

from __future__ import annotations

import re
import time
from typing import Any

import torch
from torch import Tensor

from seecause.app.jobs import Reply
from seecause.app.panels import (
    SHOWN,
    Name,
    OnPicture,
    Panel,
    Patches,
    Patching,
    answers,
    as_script,
    call,
    checked_patches,
    checked_target,
    class_word,
    heat,
    opening_lines,
    rounded,
)
from seecause.app.state import ActionContext
from seecause.attribution.attribute import attribute
from seecause.attribution.caap import make_plan, sweep_features
from seecause.attribution.evidence import PatchSet, evidence as find_evidence
from seecause.attribution.registry import find
from seecause.data.dataset import to_pil
from seecause.engine.sweep import Sweep, SweepPlan
from seecause.engine.trace import blank_image
from seecause.errors import BadOption
from seecause.models.block import wide
from seecause.models.staged import StagedModel
from seecause.models.view import VisionModel
from seecause.report.explain import evidence_sentences
from seecause.report.figures import data_uri


class Draw(Patching):
    method: Name = "caap"


class Brush(Patching):
    patches: Patches = ()


class Regions(Patching):
    """Two sets of patches."""

    one: Patches = ()
    other: Patches = ()


class ExplainState(Patching):
    """Everything that the panel shows, for `copy`."""

    methods: tuple[Name, ...] = ("caap",)
    patches: Patches = ()


@torch.no_grad()
def look(context: ActionContext, request: OnPicture) -> Reply:
    """The image as the model receives it, and the prediction."""
    model, image = context.model, context.image(request.picture)
    raw = wide(model.preprocess.raw(image))[0].clamp(0, 1).cpu()
    logits = _plain_logits(context, request)
    sides = list(raw.shape[-2:])
    return {
        "picture": data_uri(to_pil(raw), photo=max(sides) > 160),
        "size": sides,
        "grid": list(model.layout_at(*sides).grid),
        "name": context.picture(request.picture).name,
        "answers": answers(model, logits, logits),
        "predicted": int(logits.argmax()),
    }


def draw(context: ActionContext, request: Draw) -> Reply:
    """One map, with values of every patch for the most probable classes where the method gives
    them."""
    model = context.model
    entry = find(request.method, model.architecture)
    options = method_options(context, request)
    plain_logits = _plain_logits(context, request)
    top = plain_logits.topk(min(SHOWN, plain_logits.numel())).indices.tolist()
    classes = {"classes": top} if "classes" in entry.options else {}
    target = checked_target(model, request.target)
    start = time.perf_counter()
    drawn = attribute(
        model,
        context.image(request.picture),
        target=target,
        method=request.method,
        **options,
        **classes,
    )
    taken = time.perf_counter() - start
    every = None if drawn.class_maps is None else drawn.class_maps[0].flatten(0, 1).T  # [C', N]
    return {
        **heat(drawn.maps[0], signed=drawn.signed),
        "method": request.method,
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
    whole = _plain_logits(context, request)
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
    target = int(_plain_logits(context, request).argmax()) if target is None else target
    one, other, joint = (logits[:3, target] - logits[3, target]).tolist()
    return {
        "label": model.class_name(target),
        "one": round(one, 4),
        "other": round(other, 4),
        "joint": round(joint, 4),
        "interaction": round(joint - one - other, 4),
    }


def evidence(context: ActionContext, request: Draw) -> Reply:
    """The patches that are enough for the prediction, and those it needs, in the order of a map."""
    model = context.model
    context.progress(0.1, "drawing the map whose order is taken")
    sets = find_evidence(
        model,
        context.image(request.picture),
        target=checked_target(model, request.target),
        method=request.method,
        options=method_options(context, request),
        blank=request.blank,
    )
    return {
        "label": sets.labels[0],
        "probability": float(sets.probability[0]),
        "enough": _patch_set(sets.enough),
        "needed": _patch_set(sets.needed),
        "sentences": list(evidence_sentences(sets, 0)),
    }


def copy(context: ActionContext, request: ExplainState) -> Reply:
    """Python code that computes these results without the app."""
    model, target = context.model, checked_target(context.model, request.target)
    named = None if target is None else class_word(model, target)
    fields = request.model_dump(include=set(Patching.model_fields))
    options = {m: method_options(context, Draw(**fields, method=m)) for m in request.methods}
    lines = opening_lines(context, request.picture)
    for method in request.methods:
        drawn = call(
            "sc.attribute", "model", "images", target=named, method=method, **options[method]
        )
        lines.append(f"maps_{re.sub(r'[^a-z0-9]+', '_', method)} = {drawn}.maps")
    lines += _brush_lines(context, request) if request.patches else []
    return as_script(lines)


def _brush_lines(context: ActionContext, request: ExplainState) -> list[str]:
    """The brushed patches by CAAP, every patch standing for the same set."""
    model = context.model
    target = (
        int(_plain_logits(context, request).argmax()) if request.target is None else request.target
    )
    options: dict[str, Any] = {"target": class_word(model, target), "blank": request.blank}
    if isinstance(model, VisionModel):
        plan = sweep_plan(context, request)
        layers = (plan.start, None if plan.tail == "source" else plan.stop)
        options |= {"tail": plan.tail, "layers": layers, "propagate_registers": True}
    count = model.layout.n_patches
    inserted = call("sc.attribute", "model", "images", "select=brushed", **options)
    removed = call(
        "sc.attribute", "model", "images", "select=brushed", direction="delete", **options
    )
    return [
        "",
        "import torch",
        f"brushed = torch.zeros({count}, {count}, dtype=torch.bool)",
        f"brushed[:, {sorted(request.patches)}] = True  # every row is the brushed set",
        f"only_these = {inserted}.maps[0, 0, 0]  # probability",
        f"drop_without_these = {removed}.maps[0, 0, 0]",
    ]


def method_options(context: ActionContext, request: Draw) -> dict[str, Any]:
    """The settings of the panel that a method has as options."""
    known = find(request.method, context.model.architecture).options
    options: dict[str, Any] = {"blank": request.blank} if "blank" in known else {}
    if not isinstance(context.model, VisionModel):
        return options
    if request.method == "caap":
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


def _plain_logits(context: ActionContext, request: OnPicture) -> Tensor:
    """Logits [C] of the whole image."""
    if isinstance(context.model, VisionModel):
        logits = context.run(request.picture).logits
        assert logits is not None
        return logits[0]
    with torch.no_grad():
        return context.model(context.image(request.picture))[0]


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
    "Which patches caused the answer?",
    actions=(look, draw, brush, pair, evidence, copy),
)
