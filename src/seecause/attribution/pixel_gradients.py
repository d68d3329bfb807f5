"""Gradients of pixels, averaged over copies of the picture: along a path, or under noise. Pixels
are summed over colours and patches. Copies leave the data: what is differentiated are answers to
faded or noisy pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from seecause.attribution.gradients import (
    bind_target,
    over_copies,
    over_images,
    patch_sums,
    pixel_slope,
    whole_graph,
)
from seecause.attribution.registry import EVERY_VIEW, Maps, method
from seecause.engine.blanks import Blank, blank_image
from seecause.models.base import ImageModel
from seecause.options import Count, NotNegative
from seecause.target import Score, Target


@method(
    "integrated-gradients",
    forwards="steps + steps backward",
    needs="gradients",
    architectures=EVERY_VIEW,
    signed=True,
)
@over_images(whole_graph)
def integrated_gradients(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    baseline: Blank | Tensor = "mean",
    steps: Count = 50,
    score: Score = "logit",
    seed: int = 0,
) -> Maps:
    """Gradients along the straight path from a baseline to the picture, times the difference.

        phi = (x - b) * integral_0^1 grad f(b + t (x - b)) dt,   sum phi = f(x) - f(b)

    (Sundararajan, Taly & Yan 2017). The integral is a Gauss-Legendre sum (captum's default), exact
    for polynomials of degree 2 * steps - 1; completeness holds up to its error. The baseline b is
    the mean colour, which is 0 after normalisation, unless another blank or a normalised picture is
    given.
    """
    target = bind_target(model, images, target)
    base = blank_image(model, (images.shape[-2], images.shape[-1]), baseline, seed=seed)
    nodes, weights = np.polynomial.legendre.leggauss(steps)  # on [-1, 1]
    t, weight = (torch.from_numpy(x / 2).to(images) for x in (1 + nodes, weights))

    def faded(a: int, b: int) -> Tensor:  # [B, n, 3, H, W]
        return base[:, None] + t[a:b, None, None, None] * (images - base)[:, None]

    slope = _mean_slope(model, images, target, score, faded, weight)
    pixels = ((images - base) * slope).sum(dim=1)  # [B, H, W]
    return Maps(patch_sums(model, pixels), target, native=pixels)


@method(
    "smoothgrad",
    forwards="samples + samples backward",
    needs="gradients",
    architectures=EVERY_VIEW,
)
@over_images(whole_graph)
def smoothgrad(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    samples: Count = 50,
    noise: NotNegative = 0.15,
    show: Literal["magnitude", "signed", "input"] = "magnitude",
    score: Score = "logit",
    seed: int = 0,
) -> Maps:
    """The gradient of pixels, averaged over noisy copies of the picture.

        g = mean_k d score / dx (x + sigma n_k),   n_k ~ N(0, 1),   sigma = noise (max x - min x)

    (Smilkov et al. 2017), and the map sums |g| (`magnitude`, the paper's pictures), g (`signed`) or
    x * g (`input`). A gradient says what a small change would do, not what the patch did; only
    `input` estimates a contribution. Noise is drawn once from `seed` and is the same for every
    picture, so a map does not depend on the batch. It is drawn on the device: millions of numbers
    from a CPU would take longer than the passes.
    """
    target = bind_target(model, images, target)
    generator = torch.Generator(images.device).manual_seed(seed)
    shape, device = (samples, *images.shape[1:]), images.device
    drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    sigma = noise * (images.amax(dim=(1, 2, 3)) - images.amin(dim=(1, 2, 3)))  # [B]

    def noisy(a: int, b: int) -> Tensor:  # [B, n, 3, H, W]
        return images[:, None] + sigma[:, None, None, None, None] * drawn[a:b].to(images)

    equal = torch.full((samples,), 1 / samples, dtype=torch.float64, device=images.device)
    slope = _mean_slope(model, images, target, score, noisy, equal)
    shown = {"magnitude": slope.abs(), "signed": slope, "input": images * slope}
    pixels = shown[show].sum(dim=1)  # [B, H, W]
    return Maps(patch_sums(model, pixels), target, native=pixels)


def _mean_slope(
    model: ImageModel,
    images: Tensor,
    target: Target,
    score: Score,
    copies: Callable[[int, int], Tensor],
    weights: Tensor,
) -> Tensor:
    """The weighted sum over copies of every image of the gradient of pixels, [B, 3, H, W]."""

    def slope_at(pictures: Tensor, aims: Target) -> Tensor:
        return pixel_slope(model, pictures, aims, score)[1]

    each = len(images) * whole_graph(model, model.check(images))
    return over_copies(copies, weights, target, slope_at, bytes_each=each)
