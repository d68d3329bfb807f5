"""Pixels shown or hidden, and the class score that is left: one neighbourhood at a time, or random
masks. Nothing but the forward is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.caap import ONE_CLASS, Classes, take_classes
from seecause.attribution.gradients import bind_target, on_cells
from seecause.attribution.registry import EVERY_VIEW, Maps, method
from seecause.engine.blanks import Blank, blank_image
from seecause.engine.chunks import fit, in_chunks, plain_logits, run_in_chunks
from seecause.engine.token_sets import Select, selection
from seecause.metrics.pixels import spread_out
from seecause.models.base import ImageModel
from seecause.options import Count, Share
from seecause.target import Score, Target, spread


@method("simple-insertion", forwards="N", needs="logits", architectures=EVERY_VIEW)
@torch.no_grad()
def simple_insertion(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    select: Select | Tensor = "box1",
    blank: Blank | Tensor = "white",
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The class score of the blank with one neighbourhood of pixels pasted in.

    CAAP's control (table 12 of its paper): the same neighbourhoods S(i), moved as pixels. For patch
    embeddings without overlap this is activation patching at the embedding (l_s = l_e = 0,
    tail = all), which the tests use as a cross-check of the engine.
    """
    bound = bind_target(model, images, target)
    size = (images.shape[-2], images.shape[-1])
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    return Maps(_pasted(model, images, empty.expand_as(images), select, bound, score), bound)


@method("simple-deletion", forwards="N + 1", needs="logits", architectures=EVERY_VIEW, signed=True)
@torch.no_grad()
def simple_deletion(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    select: Select | Tensor = "box1",
    blank: Blank | Tensor = "white",
    score: Score = "prob",
    seed: int = 0,
) -> Maps:
    """The drop of the class score when one neighbourhood is covered."""
    logits = plain_logits(model, images)
    bound = target.bind(logits)
    plain = bound.score(logits, score, sigmoid=model.sigmoid)[:, None]
    size = (images.shape[-2], images.shape[-1])
    empty = blank_image(model, size, blank, seed=seed, count=len(images))
    return Maps(
        plain - _pasted(model, empty.expand_as(images), images, select, bound, score), bound
    )


def _pasted(
    model: ImageModel,
    above: Tensor,
    below: Tensor,
    select: Select | Tensor,
    target: Target,
    score: Score,
) -> Tensor:
    """Scores [B, N] of `below` [B, 3, H, W] with the pixels of `above` pasted at each S(i)."""
    layout, size = model.check(below), (below.shape[-2], below.shape[-1])
    chosen = selection(layout.cells, select).to(below.device).unflatten(1, layout.grid)
    marks = spread_out(chosen, size)  # [N, H, W]

    def run_patches(a: int, b: int) -> Tensor:
        item = torch.arange(a, b, device=below.device)  # of B * N
        image, patch = item // len(marks), item % len(marks)
        mixed = torch.where(marks[patch][:, None], above[image], below[image])  # [m, 3, H, W]
        return target.take(image).score(model(mixed), score, sigmoid=model.sigmoid)

    total, each = len(below) * len(marks), model.forward_bytes(layout)
    scores = run_in_chunks(run_patches, total, each, below.device, what="patches")
    return scores.view(-1, len(marks))


@method(
    "rise",
    forwards="4000",
    needs="logits",
    architectures=EVERY_VIEW,
    unset={"classes": ONE_CLASS},
)
@torch.no_grad()
def rise(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    masks: Count = 4000,
    cells: Count = 7,
    p: Share = 0.5,
    normalise: Literal["expected", "mask"] = "expected",
    score: Score = "prob",
    classes: Classes = None,
    seed: int = 0,
) -> Maps:
    """The mean of random masks, weighted by the class score of what they leave visible.

    RISE (Petsiuk et al. 2018): a coarse grid of cells, each open with probability p, is enlarged
    smoothly and shifted at random into a mask m_k (eq. 6):

        S = sum_k f(x * m_k) m_k / (n p)

    or, with `normalise="mask"`, divided by sum_k m_k at each pixel, which is steadier for few
    masks. Covered pixels are 0 in normalised space. Masks come from `seed` alone, so every image
    meets the same ones. Not done: no early stop, and no estimate of the error (try two seeds).
    """
    layout, size = model.check(images), (images.shape[-2], images.shape[-1])
    each = model.forward_bytes(layout)
    fitting = fit(len(images), each, images.device)  # images together, each behind `together` masks
    together = fit(masks, fitting * each, images.device)
    bound = bind_target(model, images, target)
    draw = random_masks(masks, cells, p, size, seed=seed, device=images.device)
    weight: Tensor | float = masks * p
    if normalise == "mask":
        sums = in_chunks(lambda a, b: draw(a, b).sum(dim=0), masks, together)
        weight = reduce(torch.add, sums).clamp_min(torch.finfo(torch.float64).tiny)  # [H, W]

    def run_masks(shown: Tensor, goal: Target, a: int, b: int) -> list[Tensor]:
        chosen = draw(a, b)  # [m, H, W]
        pictures = (shown[:, None] * chosen.to(shown)[None, :, None]).flatten(0, 1)
        logits = model(pictures).unflatten(0, (len(shown), b - a))  # [B, m, C]
        scores = goal.score(logits, score, sigmoid=model.sigmoid)
        weighted = (chosen / weight).to(scores)
        native = torch.einsum("bm,mhw->bhw", scores, weighted)
        if classes is None:
            return [native]
        answers = spread(logits.to(scores.dtype), score, sigmoid=model.sigmoid)
        answers = take_classes(model, answers, classes)
        return [native, torch.einsum("bmc,mn->bnc", answers, on_cells(weighted, layout))]

    def over_masks(first: int, last: int) -> list[Tensor]:
        run = partial(run_masks, images[first:last], bound.take(slice(first, last)))
        parts = in_chunks(run, masks, together, what="masks")
        return reduce(lambda total, part: list(map(torch.add, total, part)), parts)

    parts = in_chunks(over_masks, len(images), fitting, what="images")
    native, *every = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Maps(
        on_cells(native, layout), bound, native=native, class_maps=every[0] if every else None
    )


def random_masks(
    count: int,
    cells: int,
    p: float,
    size: tuple[int, int],
    *,
    seed: int,
    device: torch.device | str = "cpu",
) -> Callable[[int, int], Tensor]:
    """`draw(a, b)` gives masks a..b of `count`, [b - a, H, W] in [0, 1], whatever was drawn
    before."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(count, 1, cells, cells, generator=generator, dtype=torch.float64)
    open_cells = (noise < p).double()
    cell = [math.ceil(side / cells) for side in size]  # pixels
    shifts = [torch.randint(pixels, (count,), generator=generator).tolist() for pixels in cell]

    def draw(a: int, b: int) -> Tensor:
        large = [(cells + 1) * pixels for pixels in cell]
        smooth = F.interpolate(open_cells[a:b].to(device), size=large, mode="bilinear")[:, 0]
        corners = zip(smooth, *(shift[a:b] for shift in shifts), strict=True)
        return torch.stack([mask[y : y + size[0], x : x + size[1]] for mask, y, x in corners])

    return draw
