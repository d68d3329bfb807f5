"""Mosaic: derivatives over mixtures of the picture and a blank (ours).

CAAP asks what a patch does alone in a blank picture, deletion what it does in the whole one; the
answer hangs on a patch at every stage between. A mask m in [0, 1]^N mixes the two banks of keys
that CAAP's `source` tail reads (engine/mixture.py); f(m) is the score of the class, and

    a_i = mean over masks of df / dm_i

    smooth   m = eps + (1 - 2 eps) S: uniform noise on cells x cells, bilinear to the grid, the
             largest entries of it, share drawn from U(0.05, 0.95)
    iid      S of independent patches, with such a share
    path     m = t from 0 to 1: sum_i a_i = f(1) - f(0) (integrated gradients over patching) up to
             the steps' error, which the result reports as `completeness gap`. Steps are midpoints
             of u in t = u^3 (10 - 15 u + 6 u^2): crowded at both ends, where one run's keys take
             over from the other's

A row is a special token under one mask: a mask costs as much as p of the T tokens, three times with
its derivative. Where no special token is read, an average or a latent query would read frozen final
states; there every token runs (tail=all), one whole run with its derivative for each mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.caap import ONE_CLASS, Classes, Layers, take_classes
from seecause.attribution.gradients import join
from seecause.attribution.registry import Maps, method
from seecause.engine.blanks import Blank, blank_image, blank_trace
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.mixture import (
    MixedTail,
    Mixture,
    class_slopes,
    mask_bytes,
    need_gradients,
    slopes,
    special_rows,
)
from seecause.engine.trace import record, trace_bytes
from seecause.errors import BadOption
from seecause.models.view import VisionModel
from seecause.target import Score, Target, spread
from seecause.types import wide, wide_dtype

Law = Literal["smooth", "iid", "path"]
NEAREST = 2**-23  # to 0 and 1: what float32 still tells from them
SHARES = (0.05, 0.95)  # of patches that are the picture's, in a drawn mask


@dataclass(frozen=True)
class MaskPlan:
    """How masks are made; checked when it is."""

    masks: int = 24
    law: Law = "smooth"
    cells: int = 7
    eps: float = 0.02
    antithetic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.masks < 1:
            raise BadOption("masks", self.masks, "at least 1")
        if self.law not in get_args(Law):
            raise BadOption("law", self.law, f"one of {', '.join(get_args(Law))}")
        if self.cells < 1:
            raise BadOption("cells", self.cells, "at least 1")
        if not 0 < self.eps < 0.5:
            raise BadOption("eps", self.eps, "above 0 and below 0.5: at 0 no mask has a slope")
        if self.antithetic and (self.law == "path" or self.masks % 2):
            raise BadOption(
                "antithetic", True, "an even number of drawn masks: law smooth or iid, masks even"
            )


@method(
    "mosaic",
    forwards="1.4 (24 masks); 1 + 3 x masks where no class token is read",
    needs="gradients",
    unset={
        "tail": "source; all where the model reads no class token",
        "layers": "0 (embedding) to the last block",
        "classes": ONE_CLASS,
    },
)
@torch.no_grad()
def mosaic(
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
    blank: Blank | Tensor = "white",
    layers: Layers = None,
    tail: MixedTail | None = None,
    classes: Classes = None,
    seed: int = 0,
) -> Maps:
    """What the answer hangs on: slopes of the class score over mixtures of picture and blank."""
    plan = MaskPlan(masks, law, cells, eps, antithetic, seed)
    how = mixed_tail(model, images, tail), first_layer(model, layers)
    size = (images.shape[-2], images.shape[-1])
    empty = blank_image(model, size, blank, seed=seed, count=len(images))

    def some_images(a: int, b: int) -> Maps:
        own = empty if len(empty) == 1 else empty[a:b]
        context = blank_trace(model, own, **recorded(model, *how))
        need_gradients(model, context, "mosaic")
        run = Mixture(model, context, record(model, images[a:b], **recorded(model, *how)), *how)
        return mixed_maps(run, target.take(slice(a, b)), plan, score=score, classes=classes)

    together = images_at_once(model, images)
    return join(list(in_chunks(some_images, len(images), together, what="images")))


def mixed_maps(
    run: Mixture, target: Target, plan: MaskPlan, *, score: Score, classes: Classes = None
) -> Maps:
    """Maps of recorded images: mean slopes over the plan's masks, and their standard errors."""
    model, plain = run.model, run.picture.logits
    assert plain is not None
    bound, grid = target.bind(plain), run.picture.layout.grid
    mixed, weights = masks_on(plan, grid, wide_dtype(model.dtype), model.device)
    bytes_each = mask_bytes(model, run.picture.layout, run.tail)

    def scores(logits: Tensor) -> Tensor:
        return bound.score(logits, score, sigmoid=model.sigmoid)

    _, slope = slopes(run, mixed, scores, bytes_each=bytes_each)  # [B, n, N]
    values = torch.einsum("n,bnp->bp", weights, slope)
    checks = {}
    if plan.law == "path":
        ends = torch.stack([torch.zeros_like(mixed[0]), torch.ones_like(mixed[0])])
        start, end = scores(run.logits(ends.expand(len(slope), -1, -1))).unbind(dim=1)
        checks = {"completeness gap": values.sum(dim=1) - (end - start), "difference": end - start}
    every = None
    if classes is not None:

        def wanted(logits: Tensor) -> Tensor:
            return take_classes(model, spread(wide(logits), score, sigmoid=model.sigmoid), classes)

        every = class_slopes(run, mixed, weights, wanted, bytes_each=bytes_each)
    used = {"tail": run.tail, "layers": [run.start, model.n_layers]}
    return Maps(
        values,
        bound,
        class_maps=every,
        used=used,
        errors=standard_error(slope, plan),
        checks=checks,
    )


def standard_error(slope: Tensor, plan: MaskPlan) -> Tensor | None:
    """Of the mean over masks of slopes [B, n, N]; pairs of antithetic masks count as one. None for
    one draw, and for a path, which is not drawn."""
    if plan.antithetic:
        slope = slope.unflatten(1, (-1, 2)).mean(dim=2)
    if plan.law == "path" or slope.shape[1] < 2:
        return None
    return slope.std(dim=1) / slope.shape[1] ** 0.5


def mixed_tail(model: VisionModel, images: Tensor, tail: MixedTail | None) -> MixedTail:
    """The tail that was asked for; else all tokens run where no special one is read."""
    if tail is None:
        return "source" if special_rows(model, model.check(images)) else "all"
    if tail not in get_args(MixedTail):
        raise BadOption("tail", tail, f"one of {', '.join(get_args(MixedTail))}")
    return tail


def first_layer(model: VisionModel, layers: Layers) -> int:
    """The first of `layers`, a pair whose last is None: mixtures go to the end."""
    if layers is None:
        return 0
    if len(layers) != 2 or layers[1] is not None or not 0 <= layers[0] < model.n_layers:
        raise BadOption(
            "layers", layers, f"(first, None) with first from 0 to {model.n_layers - 1}"
        )
    return layers[0]


def recorded(model: VisionModel, tail: MixedTail, start: int) -> dict[str, Any]:
    """What is kept of a run."""
    blocks = range(start, model.n_layers) if tail == "source" else ()
    return {"states": {start, model.n_layers}, "kv": set(blocks)}


def images_at_once(model: VisionModel, images: Tensor) -> int:
    """How many images run together with a few masks each."""
    layout = model.check(images)
    each = trace_bytes(model, layout) + model.forward_bytes(layout)
    return fit(len(images), each + 8 * mask_bytes(model, layout, "source"), images.device)


@lru_cache(maxsize=32)
def masks_on(
    plan: MaskPlan, grid: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The plan's masks [n, N] and their weights [n] on a device: the same for every image and every
    machine."""
    with torch.inference_mode(False):
        masks = draw_masks(plan, grid)
        weights = torch.full((plan.masks,), 1 / plan.masks, dtype=torch.float64)
        if plan.law == "path":
            u = _midpoints(plan.masks)
            weights = 30 * u**2 * (1 - u) ** 2 / plan.masks  # dt / du
            weights = weights / weights.sum()
        return masks.to(device, dtype), weights.to(device, dtype)


def _midpoints(count: int) -> Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def draw_masks(plan: MaskPlan, grid: tuple[int, int]) -> Tensor:
    """Masks [n, N] in float64, on the CPU."""
    count = plan.masks // 2 if plan.antithetic else plan.masks
    patches = grid[0] * grid[1]
    if plan.law == "path":
        u = _midpoints(count)
        t = (u**3 * (10 - 15 * u + 6 * u**2)).clamp(NEAREST, 1 - NEAREST)
        return t[:, None].repeat(1, patches)
    generator = torch.Generator().manual_seed(plan.seed)
    low, high = SHARES
    share = low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)
    side = (plan.cells, plan.cells) if plan.law == "smooth" else grid
    noise = torch.rand(count, 1, *side, generator=generator, dtype=torch.float64)
    if plan.law == "smooth":
        noise = F.interpolate(noise, size=grid, mode="bilinear", align_corners=False)
    rank = noise.flatten(1).argsort(dim=1).argsort(dim=1)  # the largest entries rank last
    chosen = (rank >= patches - (share * patches).round()[:, None]).double()
    if plan.antithetic:
        chosen = torch.stack([chosen, 1 - chosen], dim=1).flatten(0, 1)
    return plan.eps + (1 - 2 * plan.eps) * chosen
