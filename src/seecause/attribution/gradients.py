"""What methods that take gradients share. Parameters never get any: only activations are asked for
theirs.

A run with a graph holds the activations of every block, so it is done on as many images at a time
as memory allows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import reduce, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, one_hot

from seecause.attribution.registry import Maps, join
from seecause.engine.chunks import fit, in_chunks, plain_logits
from seecause.engine.mixture import need_gradients
from seecause.errors import NotDefined
from seecause.models.base import ImageModel
from seecause.models.dense import DenseModel
from seecause.models.layout import TokenLayout, pixel_cells
from seecause.models.staged import StagedModel
from seecause.models.view import VisionModel
from seecause.target import Score, Target

log = logging.getLogger(__name__)
Run = Callable[..., Maps]
CANCELLED = 1e-3  # of the sum without signs: what is below it is rounding


def over_images(bytes_each: Callable[[Any, TokenLayout], int]) -> Callable[[Run], Run]:
    """Call a method, under gradients, on as many images at a time as fit, given what one image
    holds; its maps come back without a graph."""

    def decorate(run: Run) -> Run:
        @wraps(run)
        @torch.enable_grad()
        def chunked(model: ImageModel, images: Tensor, target: Target, **options: object) -> Maps:
            def run_chunk(a: int, b: int) -> Maps:
                return run(model, images[a:b].detach(), target.take(slice(a, b)), **options)

            size = fit(len(images), bytes_each(model, model.check(images)), images.device)
            return join(list(in_chunks(run_chunk, len(images), size, what="images")))

        return chunked

    return decorate


def whole_graph(model: ImageModel, layout: TokenLayout) -> int:
    """A graph through the whole model, whatever it is made of."""
    if isinstance(model, StagedModel):
        return every_stage(model, layout)
    if isinstance(model, DenseModel):
        return 16 * model.forward_bytes(layout)
    assert isinstance(model, VisionModel)
    return every_block(model, layout)


def every_stage(model: StagedModel, layout: TokenLayout) -> int:
    """A graph through all stages: several blocks each, of maps that get smaller."""
    return 4 * len(model.stages) * model.forward_bytes(layout)


def every_block(model: VisionModel, layout: TokenLayout) -> int:
    """A graph through the whole model, with fused attention."""
    return (model.n_layers + 1) * model.forward_bytes(layout)


def every_attention(model: VisionModel, layout: TokenLayout) -> int:
    """A graph through the whole model, with explicit attention."""
    return every_block(model, layout) + model.n_layers * one_attention(model, layout)


def one_block(model: VisionModel, layout: TokenLayout) -> int:
    """A graph through one block, with explicit attention."""
    return 2 * model.forward_bytes(layout) + one_attention(model, layout)


def one_attention(model: VisionModel, layout: TokenLayout) -> int:
    """Scores, probabilities and the gradients of both, in float32 or better."""
    wide = max(4, torch.finfo(model.dtype).bits // 8)
    return 4 * model.blocks[0].heads * layout.tokens**2 * wide


def differentiate(
    model: ImageModel,
    logits: Tensor,
    target: Target,
    score: Score,
    of: Sequence[Tensor],
    *,
    start: int = 0,
) -> tuple[Target, tuple[Tensor, ...]]:
    """The target, with the predicted class filled in, and the gradients of its score with respect
    to tensors `of` the same run, which lie behind the input of block `start`."""
    need_gradients(model, "a gradient", start=start)  # a path around a layer may bring another
    bound = target.bind(logits.detach())
    total = bound.score(logits, score, sigmoid=model.sigmoid).sum()  # images do not see each other
    gradients: tuple[Tensor | None, ...] = (None,)
    if all(tensor.requires_grad for tensor in (total, *of)):
        gradients = torch.autograd.grad(total, list(of), allow_unused=True)
    if any(gradient is None for gradient in gradients):
        raise NotDefined(
            "a gradient", f"none passes {model.name}, as in quantised layers",
            "Use method='caap', which takes no gradient",
        )  # fmt: skip
    return bound, tuple(gradient for gradient in gradients if gradient is not None)


def bind_target(model: ImageModel, images: Tensor, target: Target) -> Target:
    """Fill in the predicted class by a plain run, where the method itself makes none."""
    return target.bind(plain_logits(model, images)) if target.open else target


def pixel_slope(
    model: ImageModel, images: Tensor, target: Target, score: Score
) -> tuple[Target, Tensor]:
    """The bound target and the gradient of its score with respect to pixels [B, 3, H, W]."""
    images = images.detach().requires_grad_()
    bound, (slope,) = differentiate(model, model(images), target, score, [images])
    return bound, slope


def features_and_slope(
    model: StagedModel, images: Tensor, target: Target, stage: str, score: Score
) -> tuple[Target, Tensor, Tensor]:
    """The bound target, the features [B, C, h, w] after a stage and the gradient of its score.
    Nothing before the stage is held in memory."""
    with torch.no_grad():
        features = model.run_to(stage, images)
    features.requires_grad_()
    logits = model.run_from(stage, features.clone())  # activations behind it may be in place
    bound, (slope,) = differentiate(model, logits, target, score, [features])
    return bound, features.detach(), slope


def feature_products(model: StagedModel, features: Tensor, slope: Tensor, stage: str) -> Tensor:
    """Features times gradient, summed over channels: [B, h, w]. Where a norm over channels reads
    the stage (ConvNeXt, Hiera) they add up to 0 at every place but for its eps, and that is said:
    the map would be rounding, drawn as if it were evidence."""
    terms = features * slope
    total = terms.sum(dim=1)
    share = max(CANCELLED, torch.finfo(terms.dtype).eps)
    cancelled = bool(total.abs().max() < share * terms.abs().sum(dim=1).max())
    if cancelled and ("cancelled", stage) not in model.memo:
        model.memo["cancelled", stage] = True
        log.warning(
            "features times gradient add up to nothing after %s of %s, because a norm over channels"
            " follows: the map is rounding. Take method='grad-cam', another stage or space='pixel'",
            stage,
            model.name,
        )
    return total


def on_cells(values: Tensor, layout: TokenLayout) -> Tensor:
    """Features [B, h, w] -> means over cells [B, N]; where features are larger than cells, each
    cell has the value of those it lies in."""
    return adaptive_avg_pool2d(values[:, None], layout.grid).flatten(1)


def over_copies(
    copies: Callable[[int, int], Tensor],
    weights: Tensor,
    target: Target,
    slope: Callable[[Tensor, Target], Tensor],
    *,
    bytes_each: int,
) -> Tensor:
    """sum_k weights_k * slope(copy k) for every image [B, ...], on as many copies at a time as fit.

    `copies(a, b)` makes copies a to b of every image, [B, b - a, 3, H, W]; `slope` gets them in one
    batch, with the target of each.
    """

    def run_chunk(a: int, b: int) -> Tensor:
        made = copies(a, b)
        rows = torch.arange(len(made), device=made.device).repeat_interleave(b - a)
        slopes = slope(made.flatten(0, 1), target.take(rows)).unflatten(0, (len(made), b - a))
        slopes = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
        return torch.einsum("n,bn...->b...", weights[a:b].to(slopes), slopes)

    together = fit(len(weights), bytes_each, weights.device)
    return reduce(torch.add, in_chunks(run_chunk, len(weights), together, what="copies"))


def patch_sums(model: ImageModel, pixels: Tensor) -> Tensor:
    """Pixel maps [B, H, W] -> sums over each patch [B, N]."""
    grid, size = model.layout_at(*pixels.shape[-2:]).grid, pixels.shape[-2:]
    high, wide = size[0] // grid[0], size[1] // grid[1]
    if (grid[0] * high, grid[1] * wide) == tuple(size):
        return pixels.unflatten(2, (-1, wide)).unflatten(1, (-1, high)).sum(dim=(2, 4)).flatten(1)
    down, across = (  # [side, cells], where patches overlap and pixels have no patch of their own
        one_hot(pixel_cells(side, cells, pixels.device), cells).to(pixels)
        for side, cells in zip(size, grid, strict=True)
    )
    return torch.einsum("bhw,hr,wc->brc", pixels, down, across).flatten(1)
