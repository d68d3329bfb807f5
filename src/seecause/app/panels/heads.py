"""Heads: which of them carry the prediction, which the background, and what if some are off?

A head that is off carries zeros. The background's share of a prediction is BIG / (FIG + BIG): how
far the prediction moves when the background, or the object, becomes grey. The object mask comes
with the data, or is brushed by the user.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seecause.app.jobs import Reply
from seecause.app.panels import (
    Index,
    OnPicture,
    Panel,
    Patches,
    answers,
    as_script,
    brushed_mask,
    checked_target,
    class_word,
    counting,
    heat,
    offered,
    rounded,
)
from seecause.app.state import ActionContext
from seecause.attribution.attribute import attribute
from seecause.background._export import export as export_heads
from seecause.background.gains import information_gains
from seecause.background.heads import Head, ablate
from seecause.background.images import LabelledImages
from seecause.background.scoring import score as score_heads
from seecause.errors import BadOption

By = Literal["answer", "background", "object"]
RESPONSES = {"answer": "logit", "background": "big", "object": "fig"}
NO_OBJECT = "patches of the object: this image comes without a mask, so brush it"


class HeadsRequest(OnPicture):
    """`brushed`: patches of the object, if the data has no mask; `off`: heads that are off, layer x
    (heads of the widest block) + head."""

    target: Index | None = None
    brushed: Patches = ()
    by: By = "answer"
    off: Patches = ()


def score(context: ActionContext, request: HeadsRequest) -> Reply:
    """How much the prediction, or its dependence on background or object, falls without each
    head."""
    model, image = context.transformer, context.image(request.picture)
    mask = object_mask(context, request)
    if request.by != "answer" and mask is None:
        raise BadOption("brushed", "none", NO_OBJECT)
    total = sum(block.heads for block in model.blocks)
    with model.eval_mode():
        scores = score_heads(
            model,
            LabelledImages(image, masks=None if request.by == "answer" else mask),
            response=RESPONSES[request.by],  # type: ignore[arg-type]
            target=checked_target(model, request.target),
            guard=False,
            progress=counting(context, total, lambda done: f"{done} of {total} heads"),
        )
    return {
        "values": [rounded(row) for row in scores.value],
        "by": request.by,
        "unit": "logit" if request.by == "answer" else "nats",
    }


@torch.no_grad()
def switch(context: ActionContext, request: HeadsRequest) -> Reply:
    """Predictions, and the background's share of them, with all heads and without those that are
    off."""
    model, image = context.transformer, context.image(request.picture)
    heads = checked_off(context, request.off)
    with model.eval_mode():
        plain, shares = model(image)[0], [_share(context, request)]
        with ablate(model, heads):
            after = model(image)[0]
            shares.append(_share(context, request))
    target = checked_target(model, request.target)
    return {
        "heads": len(heads),
        "predicted": int(plain.argmax()),
        "before": answers(model, plain, plain, target=target),
        "after": answers(model, after, plain, target=target),
        "background": None if None in shares else shares,
    }


def maps(context: ActionContext, request: HeadsRequest) -> Reply:
    """CAAP with all heads and with those that are off at zero; both on one scale."""
    model, image = context.transformer, context.image(request.picture)
    target = checked_target(model, request.target)
    heads = checked_off(context, request.off)
    if target is None:  # by its index: classes may have no names, or one name twice
        target = int(context.logits(request.picture).argmax())
    before = attribute(model, image, target=target)
    context.progress(0.5, "once more without the heads")
    with ablate(model, heads):
        after = attribute(model, image, target=target)
    both = torch.stack([before.maps[0], after.maps[0]])
    return {
        "label": model.class_name(target),
        "before": heat(both[0], among=both),
        "after": heat(both[1], among=both),
    }


def export(context: ActionContext, request: HeadsRequest) -> Reply:
    """A checkpoint without the heads, as a zip file: the same shape, these heads zeroed."""
    model, heads = context.transformer, checked_off(context, request.off)
    if not heads:
        raise BadOption("off", "no head", "at least one head that is off")
    note = "Heads were chosen by hand in `seecause serve`."
    name = f"{context.served.key}-without-{len(heads)}-heads.zip"
    return offered(context, name, lambda folder: export_heads(model, heads, folder, note=note))


def copy(context: ActionContext, request: HeadsRequest) -> Reply:
    """Python code that computes these results without the app."""
    model, heads = context.transformer, checked_off(context, request.off)
    target = class_word(model, checked_target(model, request.target))
    return as_script("heads", context, request, heads=heads, target=target)


def checked_off(context: ActionContext, off: tuple[int, ...]) -> list[Head]:
    """Heads as pairs (layer, head), or which of them the model does not have."""
    model = context.transformer
    heads = sorted({divmod(place, model.n_heads) for place in off})
    for layer, head in heads:
        if layer >= model.n_layers or head >= model.blocks[layer].heads:
            expected = f"layers 0-{model.n_layers - 1}, heads 0-{model.n_heads - 1}"
            raise BadOption("off", (layer, head), expected)
    return heads


def object_mask(context: ActionContext, request: HeadsRequest) -> Tensor | None:
    """The object [1, H, W] (bool): brushed, or known to the data."""
    model = context.transformer
    if request.brushed:
        return brushed_mask(model, request.brushed)
    return context.mask(request.picture)


def _share(context: ActionContext, request: HeadsRequest) -> dict[str, float | None] | None:
    """How far the prediction moves without its background, of how far it moves without background
    or object. None where the object is not known, or classes do not exclude each other."""
    mask = object_mask(context, request)
    if mask is None or context.model.sigmoid:
        return None
    data = LabelledImages(context.image(request.picture), masks=mask)
    gains = information_gains(context.model, data)
    return {"share": None if bool(gains.degenerate[0]) else round(float(gains.bir[0]), 4)}


PANEL = Panel(
    "heads",
    "Heads",
    "Which heads carry the answer, and what if they are off?",
    actions=(score, switch, maps, export, copy),
    kinds=("classifier",),
    blocks=True,
)
