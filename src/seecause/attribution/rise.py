"""RISE (Petsiuk et al. 2018): what do the random masks have in common that keep the answer?

A coarse grid of s x s cells, each open with probability p, is enlarged smoothly and shifted at
random into a mask m_k; the map is the mean of the masks, weighted by the class score of what they
leave visible:
    S = sum_k f(x * m_k) m_k / (n p)                                          (eq. 6)
or, with `normalise="mask"`, divided by sum_k m_k at each pixel, which is steadier for few masks.
Covered pixels are 0 in normalised space. Masks come from `seed` alone, so every image meets the
same ones. Not done: no early stop, and no estimate of the error (try two seeds).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.caap import ONE_CLASS, Classes, take_classes
from seecause.attribution.registry import Maps, method
from seecause.engine.chunks import batched, fit, in_chunks
from seecause.errors import BadOption
from seecause.models.base import ImageModel
from seecause.target import Score, Target, spread

Normalise = Literal["expected", "mask"]


@method(
    "rise",
    forwards="4000",
    needs="logits",
    architectures=("transformer", "staged", "dense"),
    unset={"classes": ONE_CLASS},
)
@torch.no_grad()
def rise(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    masks: int = 4000,
    cells: int = 7,
    p: float = 0.5,
    normalise: Normalise = "expected",
    score: Score = "prob",
    classes: Classes = None,
    seed: int = 0,
) -> Maps:
    """The mean of random masks, weighted by the class score of what they leave visible."""
    if normalise not in get_args(Normalise):
        raise BadOption("normalise", normalise, f"one of {', '.join(get_args(Normalise))}")
    if masks < 1 or cells < 1 or not 0 < p <= 1:
        raise BadOption(
            "masks, cells, p",
            (masks, cells, p),
            "at least one mask, one cell, and a probability above 0",
        )
    layout, size = model.check(images), (images.shape[-2], images.shape[-1])
    grid, each = layout.grid, model.forward_bytes(layout)
    fitting = fit(len(images), each, images.device)  # images together, each behind `together` masks
    bound = target.bind(batched(model, images, fitting)) if target.open else target
    draw = random_masks(masks, cells, p, size, seed=seed, device=images.device)
    together = fit(masks, fitting * each, images.device)
    weight: Tensor | float = masks * p
    if normalise == "mask":
        weight = _cover(in_chunks(draw, masks, together))

    def run_masks(shown: Tensor, goal: Target, a: int, b: int) -> tuple[Tensor, Tensor | None]:
        chosen = draw(a, b)  # [m, H, W]
        pictures = (shown[:, None] * chosen.to(shown)[None, :, None]).flatten(0, 1)
        logits = model(pictures).unflatten(0, (len(shown), b - a))  # [B, m, C]
        scores = goal.score(logits, score, sigmoid=model.sigmoid)
        weighted = (chosen / weight).to(scores)
        native = torch.einsum("bm,mhw->bhw", scores, weighted)
        if classes is None:
            return native, None
        answers = spread(logits.to(scores.dtype), score, sigmoid=model.sigmoid)
        answers = take_classes(model, answers, classes)
        return native, torch.einsum("bmc,mn->bnc", answers, _by_patch(weighted, grid))

    def over_masks(first: int, last: int) -> tuple[Tensor, Tensor | None]:
        run = partial(run_masks, images[first:last], bound.take(slice(first, last)))
        return _sums(in_chunks(run, masks, together, what="masks"))

    parts = list(in_chunks(over_masks, len(images), fitting, what="images"))
    native = torch.cat([maps for maps, _ in parts])
    every = [maps for _, maps in parts if maps is not None]
    class_maps = torch.cat(every) if every else None
    return Maps(_by_patch(native, grid), bound, native=native, class_maps=class_maps)


def _sums(parts: Iterable[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Maps and class maps of all chunks, added up as they come."""
    total: Tensor | None = None
    classes: Tensor | None = None
    for native, every in parts:
        total = native if total is None else total + native
        if every is not None:
            classes = every if classes is None else classes + every
    assert total is not None  # there is at least one mask
    return total, classes


def _cover(parts: Iterable[Tensor]) -> Tensor:
    """The sum of all masks at each pixel [H, W], above 0."""
    total = sum(part.sum(dim=0) for part in parts)
    assert isinstance(total, Tensor)
    return total.clamp_min(torch.finfo(total.dtype).tiny)


def _by_patch(maps: Tensor, grid: tuple[int, int]) -> Tensor:
    """The mean of [B, H, W] over each patch, [B, N]."""
    return F.adaptive_avg_pool2d(maps[:, None], grid).flatten(1)


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
    open_cells = (
        torch.rand(count, 1, cells, cells, generator=generator, dtype=torch.float64) < p
    ).double()
    cell = [math.ceil(side / cells) for side in size]  # pixels
    shifts = [torch.randint(pixels, (count,), generator=generator).tolist() for pixels in cell]

    def draw(a: int, b: int) -> Tensor:
        smooth = F.interpolate(
            open_cells[a:b].to(device),
            size=[(cells + 1) * pixels for pixels in cell],
            mode="bilinear",
        )[:, 0]
        return torch.stack(
            [
                mask[y : y + size[0], x : x + size[1]]
                for mask, y, x in zip(smooth, *(s[a:b] for s in shifts), strict=True)
            ]
        )

    return draw
