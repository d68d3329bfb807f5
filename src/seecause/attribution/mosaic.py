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
its derivative. Where no special token is read, the average or the latent query is the row and reads
final states mixed alike: far less faithful (docs/results/mosaic.md), so prefer CAAP there. tail=all
runs every token, one whole run with its derivative for each mask, and was worse still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.caap import ONE_CLASS, Classes, Layers, take_classes
from seecause.attribution.registry import Maps, join, method
from seecause.engine.blanks import Blank, blank_image, blank_trace
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.graphs import captured, ready
from seecause.engine.mixture import (
    MixedTail,
    Mixture,
    class_slopes,
    mask_bytes,
    need_gradients,
    slopes,
)
from seecause.engine.trace import Trace, record, trace_bytes
from seecause.errors import BadOption
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel
from seecause.target import Score, Target, spread
from seecause.types import wide, wide_dtype

Law = Literal["smooth", "iid", "path"]
NEAREST = 2**-23  # to 0 and 1: what float32 still tells from them
MOST_MASKS, MOST_CELLS = 100_000, 1_000
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
        if not 1 <= self.masks <= MOST_MASKS:
            raise BadOption("masks", self.masks, f"1 to {MOST_MASKS:,}")
        if self.law not in get_args(Law):
            raise BadOption("law", self.law, f"one of {', '.join(get_args(Law))}")
        if not 1 <= self.cells <= MOST_CELLS:
            raise BadOption("cells", self.cells, f"1 to {MOST_CELLS:,} along a side")
        if not 0 < self.eps < 0.5:
            raise BadOption("eps", self.eps, "above 0 and below 0.5: at 0 no mask has a slope")
        if self.antithetic and (self.law == "path" or self.masks % 2):
            raise BadOption(
                "antithetic", True, "an even number of drawn masks: law smooth or iid, masks even"
            )
        if not 0 <= self.seed < 2**63:
            raise BadOption("seed", self.seed, "a whole number from 0 to 2^63 - 1")

    @property
    def weights(self) -> Tensor:
        """Of the masks in a mean, [n] in float64: alike, or the path's dt / du."""
        u = _midpoints(self.masks)
        weights = u**2 * (1 - u) ** 2 if self.law == "path" else torch.ones_like(u)
        return weights / weights.sum()

    @property
    def draws(self) -> int:
        """Independent ones."""
        return 0 if self.law == "path" else self.masks // (2 if self.antithetic else 1)


@method(
    "mosaic",
    forwards="1.8 (24 masks); 1 + 3 x masks with tail=all",
    needs="gradients",
    unset={
        "layers": "0 (embedding) to the last block",
        "classes": ONE_CLASS,
    },
    signed=True,
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
    tail: MixedTail = "source",
    classes: Classes = None,
    seed: int = 0,
) -> Maps:
    """What the answer hangs on: slopes of the class score over mixtures of picture and blank."""
    plan = MaskPlan(masks, law, cells, eps, antithetic, seed)
    if tail not in get_args(MixedTail):
        raise BadOption("tail", tail, f"one of {', '.join(get_args(MixedTail))}")
    start = first_layer(model, layers)
    layout, size = model.check(images), (images.shape[-2], images.shape[-1])
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    key = ("mosaic", plan, tail, start, score, *one_blank(empty))
    whole = (images, *([] if len(empty) == 1 else [empty]), *target.tensors)
    again = classes is None and target.function is None and ready(model, key, *whole)
    if not again:  # a recording was made of what follows, with gradients
        need_gradients(model, "mosaic")

    def some_images(a: int, b: int) -> Maps:
        part, shared = target.take(slice(a, b)), empty if len(empty) == 1 else None
        prepare = partial(
            _prepare, model, shared, part, plan, tail, start, score, classes, layout, b - a
        )
        tensors = [images[a:b], *([] if shared is not None else [empty[a:b]]), *part.tensors]
        if classes is None and part.function is None:
            return _to_maps(part, plan, captured(model, key, prepare, *tensors))
        return _to_maps(part, plan, prepare()(*tensors))

    together = len(images) if again else images_at_once(model, images)
    maps = join(list(in_chunks(some_images, len(images), together, what="images")))
    return replace(maps, used={"tail": tail, "layers": [start, model.n_layers]})


def one_blank(blank: Tensor) -> tuple[int, ...]:
    """What a recording hangs on where one blank serves all images; others come with the images."""
    return (id(blank), blank._version) if len(blank) == 1 else ()


def blank_run(model: VisionModel, blank: Tensor, tail: MixedTail, start: int) -> Trace:
    return blank_trace(model, blank, **blank_recorded(model, tail, start))


def _prepare(
    model: VisionModel,
    blank: Tensor | None,
    target: Target,
    plan: MaskPlan,
    tail: MixedTail,
    start: int,
    score: Score,
    classes: Classes,
    layout: TokenLayout,
    count: int,
) -> Callable[..., tuple[Tensor, ...]]:
    """All that no picture changes. The function turns `count` pictures, a blank for each where they
    do not share one, and the classes to explain into logits and what `mean_slopes` gives."""
    shared = None if blank is None else blank_run(model, blank, tail, start)
    masks = PlannedMasks.on(plan, layout, model, tail, count)

    def run(images: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        picture = record(model, images, **picture_recorded(model, tail, start))
        context, aims = shared, others
        if context is None:
            context = record(model, others[0], **blank_recorded(model, tail, start))
            aims = others[1:]
        assert picture.logits is not None
        bound = target.given(*aims).bind(picture.logits)
        mixture = Mixture(model, context, picture, tail, start)
        return picture.logits, *mean_slopes(mixture, bound, masks, score, classes)

    return run


def _to_maps(target: Target, plan: MaskPlan, outputs: tuple[Tensor, ...]) -> Maps:
    """What `mean_slopes` returns, by name."""
    logits, values, *more = outputs
    errors, checks = None, {}
    if plan.law == "path":
        checks = {"completeness gap": more.pop(0), "difference": more.pop(0)}
    elif plan.draws > 1:
        errors = more.pop(0)
    every = more.pop(0) if more else None
    return Maps(values, target.bind(logits), class_maps=every, errors=errors, checks=checks)


def mean_slopes(
    run: Mixture, bound: Target, masks: PlannedMasks, score: Score, classes: Classes = None
) -> tuple[Tensor, ...]:
    """Mean slopes [B, N] over masks; then of a path its gap and difference [B], of draws the
    standard errors [B, N], where there are several; then maps of `classes` [B, N, C']."""
    model, plan = run.model, masks.plan

    def scores(logits: Tensor) -> Tensor:
        return bound.score(logits, score, sigmoid=model.sigmoid)

    slope = slopes(run, masks.values, scores, together=masks.together)  # [B, n, N]
    outputs = [torch.einsum("n,bnp->bp", masks.weights, slope)]
    if plan.law == "path":
        ends = torch.stack([torch.zeros_like(masks.values[0]), torch.ones_like(masks.values[0])])
        first, last = scores(run.logits(ends.expand(len(slope), -1, -1))).unbind(dim=1)
        outputs += [outputs[0].sum(dim=1) - (last - first), last - first]
    elif plan.draws > 1:
        outputs.append(standard_error(slope, plan))
    if classes is not None:

        def wanted(logits: Tensor) -> Tensor:
            return take_classes(model, spread(wide(logits), score, sigmoid=model.sigmoid), classes)

        weighted = masks.values, masks.weights
        outputs.append(class_slopes(run, *weighted, wanted, bytes_each=masks.bytes_each))
    return tuple(outputs)


def standard_error(slope: Tensor, plan: MaskPlan) -> Tensor:
    """Of the mean over masks of slopes [B, n, N]; pairs of antithetic masks count as one draw."""
    if plan.antithetic:
        slope = slope.unflatten(1, (-1, 2)).mean(dim=2)
    return slope.std(dim=1) / slope.shape[1] ** 0.5


def first_layer(model: VisionModel, layers: Layers) -> int:
    """The first of `layers`, a pair whose last is None: mixtures go to the end."""
    if layers is None:
        return 0
    if len(layers) != 2 or layers[1] is not None or not 0 <= layers[0] < model.n_layers:
        raise BadOption(
            "layers", layers, f"(first, None) with first from 0 to {model.n_layers - 1}"
        )
    return layers[0]


def blank_recorded(model: VisionModel, tail: MixedTail, start: int) -> dict[str, Any]:
    """What is kept of the blank's run: where rows start, keys, and final states that are read."""
    if tail == "all":
        return {"states": {start}, "kv": ()}
    final = () if model.readout.reads_rows else (model.n_layers,)
    return {"states": {start, *final}, "kv": set(range(start, model.n_layers))}


def picture_recorded(model: VisionModel, tail: MixedTail, start: int) -> dict[str, Any]:
    """The same of a picture's; its rows start as the blank's do."""
    both = blank_recorded(model, tail, start)
    return both if tail == "all" else {**both, "states": both["states"] - {start}}


def images_at_once(model: VisionModel, images: Tensor) -> int:
    """How many images run together with a few masks each."""
    layout = model.check(images)
    each = trace_bytes(model, layout) + model.forward_bytes(layout)
    return fit(len(images), each + 8 * mask_bytes(model, layout, "source"), images.device)


@dataclass(frozen=True, eq=False)
class PlannedMasks:
    """A plan's masks [n, N] and their weights [n] on a device, and how many of them run at once."""

    plan: MaskPlan
    values: Tensor
    weights: Tensor
    bytes_each: int
    together: int

    @classmethod
    def on(
        cls, plan: MaskPlan, layout: TokenLayout, model: VisionModel, tail: MixedTail, count: int
    ) -> PlannedMasks:
        """For `count` images together."""
        values, weights = _made(plan, layout.grid, wide_dtype(model.dtype), model.device)
        each = mask_bytes(model, layout, tail)
        together = fit(plan.masks, count * each, model.device, share=0.6)
        return cls(plan, values, weights, each, together)


@lru_cache(maxsize=32)
def _made(
    plan: MaskPlan, grid: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The same for every image and every machine."""
    with torch.inference_mode(False):
        return draw_masks(plan, grid).to(device, dtype), plan.weights.to(device, dtype)


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
