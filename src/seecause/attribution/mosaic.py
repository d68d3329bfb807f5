"""Mosaic: derivatives over mixtures of the image and a blank (ours).

CAAP asks what a patch does alone in a blank image, deletion what it does in the whole one; the
prediction depends on a patch at every stage between. A mask m in [0, 1]^N mixes the two banks of
keys that CAAP's `source` tail reads (engine/mixture.py); f(m) is the score of the class, and

    a_i = mean over masks of df / dm_i

    smooth   m = eps + (1 - 2 eps) S: uniform noise on cells x cells, bilinear to the grid, the
             largest entries of it, share drawn from U(0.05, 0.95)
    iid      S of independent patches, with such a share
    path     m = t from 0 to 1: sum_i a_i = f(1) - f(0) (integrated gradients over patching) up to
             the steps' error, which the result reports as `completeness gap`. Steps are midpoints
             of u in t = u^3 (10 - 15 u + 6 u^2): crowded at both ends, where one run's keys take
             over from the other's

`caap+mosaic` is both in one map: CAAP finds where the object is, mosaic what the prediction depends
on, and the sum stays near the better of the two in both (docs/results/mosaic.md).

A row is a special token under one mask: a mask costs as much as p of the T tokens, three times with
its derivative. Where no special token is read, the average or the latent query is the row and reads
final states mixed alike: far less faithful (docs/results/mosaic.md), so prefer CAAP there. tail=all
runs every token, one whole run with its derivative for each mask, and was worse still.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.caap import (
    ONE_CLASS,
    Classes,
    Layers,
    Recorded,
    make_plan,
    one_blank,
    patches_at_once,
    recorded,
    swept_logits,
    take_classes,
)
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
from seecause.engine.sweep import Select, Sweep, selection, token_sets
from seecause.engine.trace import Trace, record, trace_bytes
from seecause.errors import BadOption
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel
from seecause.options import Limit
from seecause.target import Score, Target, spread
from seecause.types import wide, wide_dtype

Law = Literal["smooth", "iid", "path"]
Masks = Annotated[int, Limit(lambda count: 1 <= count <= 100_000, "1 to 100,000")]
Cells = Annotated[int, Limit(lambda count: 1 <= count <= 1_000, "1 to 1,000 along a side")]
Near = Annotated[
    float, Limit(lambda eps: 0 < eps < 0.5, "above 0 and below 0.5: at 0 no mask has a slope")
]
Seed = Annotated[int, Limit(lambda seed: 0 <= seed < 2**63, "a whole number from 0 to 2^63 - 1")]
NEAREST = 2**-23  # to 0 and 1: what float32 still tells from them
Read = Callable[[Trace, Trace, Target], tuple[Tensor, ...]]  # of blank, image and target
SHARES = (0.05, 0.95)  # of patches that are the image's, in a drawn mask


@dataclass(frozen=True)
class MaskPlan:
    """How masks are made."""

    masks: int = 24
    law: Law = "smooth"
    cells: int = 7
    eps: float = 0.02
    antithetic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.antithetic and (self.law == "path" or self.masks % 2):
            raise BadOption(
                "antithetic", True, "an even number of drawn masks: law smooth or iid, masks even"
            )

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
    masks: Masks = 24,
    law: Law = "smooth",
    cells: Cells = 7,
    eps: Near = 0.02,
    antithetic: bool = False,
    score: Score = "prob",
    blank: Blank | Tensor = "white",
    layers: Layers = None,
    tail: MixedTail = "source",
    classes: Classes = None,
    seed: Seed = 0,
) -> Maps:
    """What the prediction depends on: slopes of the class score over mixtures of image and
    blank."""
    plan = MaskPlan(masks, law, cells, eps, antithetic, seed)
    start, size = first_layer(model, layers), (images.shape[-2], images.shape[-1])
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    runs = mixed_runs(model, tail, start)
    key = None if classes is not None else ("mosaic", plan, tail, start, score)

    def prepare(count: int) -> Read:
        planned = PlannedMasks.on(plan, model.check(images), model, tail, count)

        def read(context: Trace, picture: Trace, bound: Target) -> tuple[Tensor, ...]:
            mixture = Mixture(model, context, picture, tail, start)
            return mean_slopes(mixture, bound, planned, score, classes)

        return read

    to_maps = partial(_to_maps, plan)
    maps = against_blank(model, images, empty, target, prepare, to_maps, key, runs)
    return replace(maps, used={"tail": tail, "layers": [start, model.n_layers]})


@method("caap+mosaic", forwards="2.8 (24 masks)", needs="activations, gradients", signed=True)
@torch.no_grad()
def caap_mosaic(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    masks: Masks = 24,
    law: Law = "smooth",
    cells: Cells = 7,
    eps: Near = 0.02,
    antithetic: bool = False,
    score: Score = "prob",
    select: Select | Tensor = "box1",
    blank: Blank | Tensor = "white",
    seed: Seed = 0,
) -> Maps:
    """Where it is and what the prediction depends on: z-scored CAAP (logit) plus z-scored mosaic.

        a = z(CAAP's logits) + z(mosaic),   z(x) = (x - mean over patches) / deviation over patches

    Both read the same recorded run of the image. Values are deviations, not scores: compare
    places within a map.
    """
    plan = MaskPlan(masks, law, cells, eps, antithetic, seed)
    layout, size = model.check(images), (images.shape[-2], images.shape[-1])
    sweep = make_plan(model, layout, tail=None, layers=None)
    chosen = selection(layout.cells, select)
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    both = zip(recorded(sweep, model), mixed_runs(model, "source", 0), strict=True)
    of_blank, of_picture = ({name: a[name] | b[name] for name in a} for a, b in both)
    key = ("caap+mosaic", plan, score, id(chosen), chosen._version)

    def prepare(count: int) -> Read:
        sets = token_sets(model, chosen, layout, sweep.live)
        together = patches_at_once(model, layout, chosen, sweep, count)
        planned = PlannedMasks.on(plan, layout, model, "source", count)

        def read(context: Trace, picture: Trace, bound: Target) -> tuple[Tensor, ...]:
            logits = swept_logits(Sweep(model, context, picture, sweep), sets, together)
            place = bound.score(logits, "logit", sigmoid=model.sigmoid)
            slope = mean_slopes(Mixture(model, context, picture), bound, planned, score)[0]
            return (standardised(place) + standardised(slope),)

        return read

    runs = (of_blank, of_picture)
    return against_blank(model, images, empty, target, prepare, Maps, key, runs)


def standardised(scores: Tensor) -> Tensor:
    """Scores [B, N] less their mean, in deviations; a map without differences is zero."""
    deviation = scores.std(dim=1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    return (scores - scores.mean(dim=1, keepdim=True)) / deviation


def against_blank(
    model: VisionModel,
    images: Tensor,
    empty: Tensor,
    target: Target,
    prepare: Callable[[int], Read],
    to_maps: Callable[..., Maps],
    key: tuple[Hashable, ...] | None,
    runs: tuple[Recorded, Recorded],
) -> Maps:
    """Maps from recorded runs of images and of a blank, or of one for each; as many images at a
    time as fit.

    `prepare(count)` does what no image changes, `runs` says what is kept of the blank's run and
    of an image's, and `to_maps` gets the scores that are read of them, the bound target and what
    else was read. On a GPU all of it is recorded by `key`, unless that is None or the target is a
    function.
    """
    of_blank, of_picture = runs
    shared, own = (empty, []) if len(empty) == 1 else (None, [empty])
    name = "mosaic" if key is None else str(key[0])
    key = None if key is None or target.function is not None else (*key, *one_blank(empty))
    again = key is not None and ready(model, key, images, *own, *target.tensors)
    if not again:  # a recording was made of what follows, with gradients
        need_gradients(model, name)

    def prepare_run(part: Target, count: int) -> Callable[..., tuple[Tensor, ...]]:
        read = prepare(count)
        held = None if shared is None else blank_trace(model, shared, **of_blank)

        def run(pictures: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            picture = record(model, pictures, **of_picture)
            context = held or record(model, others[0], **of_blank)
            assert picture.logits is not None
            bound = part.given(*others[len(own) :]).bind(picture.logits)
            return picture.logits, *read(context, picture, bound)

        return run

    def some_images(a: int, b: int) -> Maps:
        part = target.take(slice(a, b))
        tensors = [images[a:b], *(blanks[a:b] for blanks in own), *part.tensors]
        ready_run = partial(prepare_run, part, b - a)
        logits, scores, *more = (
            ready_run()(*tensors) if key is None else captured(model, key, ready_run, *tensors)
        )
        return to_maps(scores, part.bind(logits), *more)

    together = len(images)
    if not again:  # with a few masks each
        layout = model.check(images)
        each = trace_bytes(model, layout) + model.forward_bytes(layout)
        each += 8 * mask_bytes(model, layout, "source")
        together = fit(len(images), each, images.device)
    return join(list(in_chunks(some_images, len(images), together, what="images")))


def _to_maps(plan: MaskPlan, values: Tensor, bound: Target, *more: Tensor) -> Maps:
    """What `mean_slopes` returns, by name."""
    rest, errors, checks = list(more), None, {}
    if plan.law == "path":
        checks = {"completeness gap": rest.pop(0), "difference": rest.pop(0)}
    elif plan.draws > 1:
        errors = rest.pop(0)
    every = rest.pop(0) if rest else None
    return Maps(values, bound, class_maps=every, errors=errors, checks=checks)


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


def mixed_runs(model: VisionModel, tail: MixedTail, start: int) -> tuple[Recorded, Recorded]:
    """What is kept of the blank's run (where rows start, keys, and final states that are read), and
    of an image's, whose rows start as the blank's do."""
    if tail == "all":
        return {"states": {start}, "kv": set()}, {"states": {start}, "kv": set()}
    kv, final = set(range(start, model.n_layers)), {model.n_layers}
    final = set() if model.readout.reads_rows else final
    return {"states": {start} | final, "kv": kv}, {"states": final, "kv": kv}


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
