"""Mosaic: derivatives over mixtures of the image and a blank (ours).

CAAP asks what a patch does alone in a blank image, deletion what it does in the whole one; the
prediction depends on a patch at every stage between. A mask m in [0, 1]^N mixes the two banks of
keys that CAAP's `source` tail reads (engine/sweep.py); f(m) is the score of the class, and

    a_i = mean over masks of df / dm_i,   m = eps + (1 - 2 eps) S

S are smooth random sets of patches: uniform noise on cells x cells, bilinear to the grid, the
largest entries of it, share drawn from U(0.05, 0.95).

`caap+mosaic` is both in one map: CAAP finds where the object is, mosaic what the prediction depends
on. Their sum is close to the better of the two in localization and in faithfulness
(docs/results/mosaic.md).

Each mask computes only the special tokens (p of T tokens), so its cost is p / T of a forward pass,
or about three times that with the gradient. If the readout uses no special token, the average or
the latent query is the row and reads the mixed final states. That is far less faithful
(docs/results/mosaic.md), so prefer CAAP for such models.

Networks of stages mix the feature map after one stage instead of keys:

    F(m) = F(blank) + m (F(source) - F(blank))

where every feature has the largest weight of the cells it overlaps. Nothing after the stage is
shared between masks, so each costs a run of that part of the network and its derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.caap import (
    Recorded,
    Run,
    Tensors,
    chunked,
    make_plan,
    patches_at_once,
    recorded,
    swept_logits,
)
from seecause.attribution.registry import BlankLike, Maps, blanks, join, method
from seecause.data.dataset import Size
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.sweep import (
    Mixture,
    Select,
    Sweep,
    mask_bytes,
    selection,
    slopes,
    token_sets,
)
from seecause.engine.trace import (
    Trace,
    blank_trace,
    need_gradients,
    record,
    trace_bytes,
)
from seecause.models.block import TokenLayout, wide, wide_dtype
from seecause.models.view import VisionModel
from seecause.options import Count, Limit, Seed
from seecause.target import Score, Target

Near = Annotated[
    float, Limit(lambda eps: 0 < eps < 0.5, "above 0 and below 0.5: at 0 no mask has a slope")
]
Read = Callable[[Trace, Trace, Target], Tensors]  # (blank, image, target) -> maps
SHARES = (0.05, 0.95)  # range of the share of image patches in a drawn mask


@dataclass(frozen=True)
class MaskPlan:
    """How masks are drawn."""

    masks: int = 24
    cells: int = 7
    eps: float = 0.02
    seed: int = 0


@method("mosaic", forwards="1.8 (24 masks)", needs="gradients", signed=True)
@torch.no_grad()
def mosaic(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    masks: Count = 24,
    cells: Count = 7,
    eps: Near = 0.02,
    score: Score = "prob",
    blank: BlankLike = "white",
    seed: Seed = 0,
) -> Maps:
    """Mean gradient of the class score over mixtures of image and blank: what the prediction
    depends on."""
    plan = MaskPlan(masks, cells, eps, seed)
    layout = model.check(images)
    empty = blanks(model, images, blank, seed)

    def prepare(count: int) -> Read:
        slope_of = slopes_of(model, layout, plan, score, count)

        def read(context: Trace, source: Trace, bound: Target) -> Tensors:
            slope = slope_of(context, source, bound)
            return slope.mean(dim=1), *standard_errors(slope)

        return read

    key, runs = ("mosaic", plan, score), mixed_runs(model)
    return against_blank(model, images, empty, target, prepare, key, runs)


@method("caap+mosaic", forwards="2.8 (24 masks)", needs="activations, gradients", signed=True)
@torch.no_grad()
def caap_mosaic(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    masks: Count = 24,
    cells: Count = 7,
    eps: Near = 0.02,
    score: Score = "prob",
    select: Select | Tensor = "box1",
    blank: BlankLike = "white",
    seed: Seed = 0,
) -> Maps:
    """Z-scored CAAP (logit) plus z-scored mosaic.

        a = z(CAAP's logits) + z(mosaic),   z(x) = (x - mean over patches) / deviation over patches

    Both read the same recorded run of the image. Values are deviations, not scores:
    compare patches within a map.
    """
    plan = MaskPlan(masks, cells, eps, seed)
    layout = model.check(images)
    sweep = make_plan(model, layout, tail=None, layers=None)
    chosen = selection(layout.cells, select)
    empty = blanks(model, images, blank, seed)
    both = zip(recorded(sweep, model), mixed_runs(model), strict=True)
    of_blank, of_image = ({name: a[name] | b[name] for name in a} for a, b in both)
    key = ("caap+mosaic", plan, score, id(chosen), chosen._version)

    def prepare(count: int) -> Read:
        sets = token_sets(model, chosen, layout, sweep.live)
        at_once = patches_at_once(model, layout, chosen, sweep, count)
        slope_of = slopes_of(model, layout, plan, score, count)

        def read(context: Trace, source: Trace, bound: Target) -> Tensors:
            logits = swept_logits(Sweep(model, context, source, sweep), sets, at_once)
            slope = slope_of(context, source, bound).mean(dim=1)
            return (standardised(bound.score(logits, "logit")) + standardised(slope),)

        return read

    return against_blank(model, images, empty, target, prepare, key, (of_blank, of_image))


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
    key: tuple[Hashable, ...],
    runs: tuple[Recorded, Recorded],
) -> Maps:
    """Maps from recorded runs of images and of a blank, or of one for each; as many images at a
    time as fit.

    `prepare(count)` does what does not depend on an image and returns a function of the recorded
    runs and the bound target, which returns scores [B, N] and perhaps their standard errors. `runs`
    says what is kept of the blank's run and of an image's. On a GPU all of it is recorded by `key`,
    unless the target is a function.
    """
    of_blank, of_image = runs

    def prepare_run(count: int) -> Run:
        need_gradients(model, str(key[0]))
        read = prepare(count)
        held = blank_trace(model, empty, **of_blank) if len(empty) == 1 else None

        def run(sources: Tensor, own_blanks: Tensor, *classes: Tensor) -> Tensors:
            source = record(model, sources, **of_image)
            context = held or record(model, own_blanks, **of_blank)
            assert source.logits is not None
            goal = target.given(*classes).bind(source.logits)
            return source.logits, *read(context, source, goal)

        return run

    layout = model.check(images)
    each = trace_bytes(model, layout) + model.forward_bytes(layout)
    each += 8 * mask_bytes(model, layout)  # with a few masks each
    by = key if target.function is None else None
    found = chunked(model, by, prepare_run, images, empty, *target.tensors, bytes_each=each)
    logits, scores, *errors = found
    return Maps(scores, target.bind(logits), errors=errors[0] if errors else None)


def standard_errors(slope: Tensor) -> list[Tensor]:
    """The standard errors [B, N] of means over masks of slopes [B, n, N]; none of one mask."""
    count = slope.shape[1]
    return [slope.std(dim=1) / count**0.5] if count > 1 else []


def mixed_runs(model: VisionModel) -> tuple[Recorded, Recorded]:
    """Recorded states and keys of the blank's run (first states, keys, final states) and of an
    image's run, whose rows start as the blank's do."""
    kv = set(range(model.n_layers))
    final = set() if model.readout.reads_rows else {model.n_layers}
    return {"states": {0} | final, "kv": kv}, {"states": final, "kv": kv}


def slopes_of(
    model: VisionModel, layout: TokenLayout, plan: MaskPlan, score: Score, count: int
) -> Callable[[Trace, Trace, Target], Tensor]:
    """A function of the runs of a blank and of `count` images that returns the slopes [B, n, N] of
    their class score at each of a plan's masks, as many at once as fit."""
    values = _made(plan, layout.grid, wide_dtype(model.dtype), model.device)  # [n, N]
    each = count * mask_bytes(model, layout)
    together = fit(plan.masks, each, model.device, share=0.6)

    def run(context: Trace, source: Trace, bound: Target) -> Tensor:
        scores = partial(bound.score, kind=score)
        return slopes(Mixture(model, context, source), values, scores, together=together)

    return run


@lru_cache(maxsize=32)
def _made(plan: MaskPlan, grid: Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The masks on a device. Cached, so that CUDA graphs recorded with this tensor are reused."""
    with torch.inference_mode(False):
        return draw_masks(plan, grid).to(device, dtype)


def draw_masks(plan: MaskPlan, grid: Size) -> Tensor:
    """Masks [n, N] in float64, on the CPU; the same on every machine."""
    patches, (low, high) = grid[0] * grid[1], SHARES
    generator = torch.Generator().manual_seed(plan.seed)
    share = low + (high - low) * torch.rand(plan.masks, generator=generator, dtype=torch.float64)
    side = (plan.masks, 1, plan.cells, plan.cells)
    noise = torch.rand(side, generator=generator, dtype=torch.float64)
    noise = F.interpolate(noise, size=grid, mode="bilinear", align_corners=False)
    rank = noise.flatten(1).argsort(dim=1).argsort(dim=1)  # the largest entries rank last
    chosen = (rank >= patches - (share * patches).round()[:, None]).double()
    return plan.eps + (1 - 2 * plan.eps) * chosen


@method(
    "mosaic",
    forwards="1 + 3 x masks x the part after the stage",
    needs="gradients",
    architectures=("staged", "dense"),
    signed=True,
)
@torch.no_grad()
def mosaic_staged(
    model: Any,  # StagedModel or DenseModel
    images: Tensor,
    target: Target,
    *,
    masks: Count = 24,
    cells: Count = 7,
    eps: Near = 0.02,
    score: Score = "prob",
    blank: BlankLike = "white",
    stage: str | None = None,
    seed: Seed = 0,
) -> Maps:
    """Mean gradient of the class score over mixtures of feature maps: what the prediction depends
    on.

    The default stage is the one at two thirds of the depth.
    """
    from seecause.attribution.gradients import differentiate

    need_gradients(model, "mosaic")
    layout, stage = model.check(images), stage or model.cells
    drawn = draw_masks(MaskPlan(masks, cells, eps, seed), layout.grid).to(images)
    empty = blanks(model, images, blank, seed)
    shared = model.run_to(stage, empty) if len(empty) == 1 else None  # [1, C, h, w]

    def some_images(a: int, b: int) -> Maps:
        features = model.run_to(stage, images[a:b])
        ground = model.run_to(stage, empty[a:b]) if shared is None else shared
        bound = target.take(slice(a, b)).bind(model.run_from(stage, features))

        @torch.enable_grad()
        def some_masks(c: int, d: int) -> Tensor:
            m = drawn[c:d].expand(b - a, -1, -1).clone().requires_grad_()  # [b, n, N]
            between = mixtures(m.unflatten(2, layout.grid), ground, features)
            logits = model.run_from(stage, between).unflatten(0, m.shape[:2])
            return differentiate(model, logits, bound, score, [m])[1][0]

        # with the activations of the backward pass
        each = 4 * (b - a) * model.forward_bytes(layout, after=stage)
        together = fit(len(drawn), each, images.device, share=0.8)
        slope = wide(torch.cat(list(in_chunks(some_masks, len(drawn), together)), dim=1))
        errors = standard_errors(slope)
        used = {"stage": stage}
        return Maps(slope.mean(dim=1), bound, errors=errors[0] if errors else None, used=used)

    at_once = fit(len(images), model.forward_bytes(layout), images.device, share=0.5)
    return join(list(in_chunks(some_images, len(images), at_once, what="images")))


def mixtures(masks: Tensor, blank: Any, source: Any) -> Any:
    """Feature maps [B * n, C, h, w] between those of blanks [1 or B, C, h, w] and of images
    [B, C, h, w], by masks [B, n, gh, gw] of cells; of every level, where rows read several."""
    if not isinstance(source, Tensor):  # features of several levels
        return source.over(blank, lambda theirs, ground: mixtures(masks, ground, theirs))
    size = (source.shape[-2], source.shape[-1])
    share = largest_weights(masks, size)[:, :, None].to(source.dtype)
    return (blank[:, None] + share * (source - blank)[:, None]).flatten(0, 1)


def largest_weights(masks: Tensor, size: Size) -> Tensor:
    """Weights [B, n, h, w] of features, each the largest of the cells [B, n, gh, gw] it overlaps.
    Cells of equal weight share its slope, which `adaptive_max_pool2d` gives to one of them."""
    if masks.shape[-2:] == size:
        return masks
    (rows, tall), (columns, broad) = (
        _overlaps(cells, features, masks.device)
        for cells, features in zip(masks.shape[-2:], size, strict=True)
    )
    windows = masks[:, :, rows[:, None, :, None], columns[None, :, None, :]]  # [B, n, h, w, kh, kw]
    inside = tall[:, None, :, None] & broad[None, :, None, :]
    return windows.masked_fill(~inside, -torch.inf).amax(dim=(-2, -1))


def _overlaps(cells: int, features: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which cells [features, k] each feature of one axis overlaps; k is the largest number, and the
    second tensor is False on padding."""
    index = torch.arange(features)[:, None]
    first, end = index * cells // features, -((-(index + 1) * cells) // features)
    which = first + torch.arange(int((end - first).max()))
    return which.clamp(max=cells - 1).to(device), (which < end).to(device)
