"""CAAP and mosaic in one map (ours).

    a = z(CAAP's logits) + z(mosaic),   z(x) = (x - mean over patches) / deviation over patches

CAAP finds where the object is, mosaic what the answer hangs on; the sum stays near the better of
the two in both (docs/results/mosaic.md). Both read the same recorded run of the picture. Values are
deviations, not scores: compare places within a map.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seecause.attribution.caap import make_plan, patches_at_once, recorded, swept_logits
from seecause.attribution.mosaic import (
    Law,
    MaskPlan,
    PlannedMasks,
    blank_recorded,
    images_at_once,
    mean_slopes,
    one_blank,
    picture_recorded,
)
from seecause.attribution.registry import Maps, join, method
from seecause.attribution.select import Select, selection
from seecause.engine.blanks import Blank, blank_image, blank_trace
from seecause.engine.chunks import in_chunks
from seecause.engine.graphs import captured, ready
from seecause.engine.mixture import Mixture, need_gradients
from seecause.engine.sweep import Sweep, SweepPlan
from seecause.engine.token_sets import token_sets
from seecause.engine.trace import record
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel
from seecause.target import Score, Target


@method("caap+mosaic", forwards="2.8 (24 masks)", needs="activations, gradients", signed=True)
@torch.no_grad()
def caap_mosaic(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    masks: int = 24,
    law: Law = "smooth",
    cells: int = 7,
    eps: float = 0.02,
    antithetic: bool = False,
    score: Score = "prob",
    select: Select | Tensor = "box1",
    blank: Blank | Tensor = "white",
    seed: int = 0,
) -> Maps:
    """Where it is and what the answer hangs on: z-scored CAAP (logit) plus z-scored mosaic."""
    plan = MaskPlan(masks, law, cells, eps, antithetic, seed)
    layout, size = model.check(images), (images.shape[-2], images.shape[-1])
    sweep = make_plan(model, layout, tail=None, layers=None)
    chosen = selection(layout.cells, select)
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    key = ("caap+mosaic", plan, score, id(chosen), chosen._version, *one_blank(empty))
    whole = (images, *([] if len(empty) == 1 else [empty]), *target.tensors)
    again = target.function is None and ready(model, key, *whole)
    if not again:
        need_gradients(model, "caap+mosaic")

    def some_images(a: int, b: int) -> Maps:
        part, shared = target.take(slice(a, b)), empty if len(empty) == 1 else None
        prepare = partial(_prepare, model, shared, part, plan, score, sweep, chosen, layout, b - a)
        tensors = [images[a:b], *([] if shared is not None else [empty[a:b]]), *part.tensors]
        logits, scores = (
            captured(model, key, prepare, *tensors)
            if part.function is None
            else prepare()(*tensors)
        )
        return Maps(scores, part.bind(logits))

    together = len(images) if again else images_at_once(model, images)
    return join(list(in_chunks(some_images, len(images), together, what="images")))


def _prepare(
    model: VisionModel,
    blank: Tensor | None,
    target: Target,
    plan: MaskPlan,
    score: Score,
    sweep: SweepPlan,
    chosen: Tensor,
    layout: TokenLayout,
    count: int,
) -> Callable[..., tuple[Tensor, ...]]:
    """All that no picture changes. The function turns `count` pictures, a blank for each where they
    do not share one, and the classes to explain into logits and maps."""
    of_context, of_donor = recorded(sweep, model)
    of_blank = _both(of_context, blank_recorded(model, "source", 0))
    of_picture = _both(of_donor, picture_recorded(model, "source", 0))
    shared = None if blank is None else blank_trace(model, blank, **of_blank)
    sets = token_sets(model, chosen, layout, sweep.live)
    together = patches_at_once(model, layout, chosen, sweep, count)
    masks = PlannedMasks.on(plan, layout, model, "source", count)

    def run(images: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        picture = record(model, images, **of_picture)
        context = shared or record(model, others[0], **of_blank)
        assert picture.logits is not None
        bound = target.given(*(others if shared else others[1:])).bind(picture.logits)
        logits = swept_logits(Sweep(model, context, picture, sweep), sets, together)
        place = bound.score(logits, "logit", sigmoid=model.sigmoid)
        slope = mean_slopes(Mixture(model, context, picture), bound, masks, score)[0]
        return picture.logits, standardised(place) + standardised(slope)

    return run


def _both(caap: tuple[Any, Any], mosaic: dict[str, Any]) -> dict[str, Any]:
    """States and blocks that one or the other reads."""
    return {"states": {*caap[0], *mosaic["states"]}, "kv": {*caap[1], *mosaic["kv"]}}


def standardised(scores: Tensor) -> Tensor:
    """Scores [B, N] less their mean, in deviations; a map without differences is zero."""
    spread = scores.std(dim=1, keepdim=True)
    tiny = torch.finfo(scores.dtype).tiny
    return (scores - scores.mean(dim=1, keepdim=True)) / spread.clamp_min(tiny)
