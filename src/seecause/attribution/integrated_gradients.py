"""Integrated gradients (Sundararajan, Taly & Yan 2017).

    phi = (x - b) * integral_0^1 grad f(b + t (x - b)) dt,   sum phi = f(x) - f(b)

The integral is a Gauss-Legendre sum (captum's default), exact for polynomials of degree 2 * steps -
1. The baseline b is the mean colour, which is 0 after normalisation, unless another blank or a
  normalised picture is given. Pixels are summed over colours and patches. The path leaves the data:
  what is integrated are answers to faded pictures. Completeness holds up to the error of the sum;
  more steps make it smaller.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from seecause.attribution.gradients import (
    over_copies,
    over_images,
    patch_sums,
    pixel_slope,
    settle,
    whole_graph,
)
from seecause.attribution.registry import Maps, method
from seecause.engine.blanks import Blank, blank_image
from seecause.errors import BadOption
from seecause.models.base import ImageModel
from seecause.target import Score, Target


@method(
    "integrated-gradients",
    forwards="steps + steps backward",
    needs="gradients",
    architectures=("transformer", "staged", "dense"),
    signed=True,
)
@over_images(whole_graph)
@torch.enable_grad()
def integrated_gradients(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    baseline: Blank | Tensor = "mean",
    steps: int = 50,
    score: Score = "logit",
    seed: int = 0,
) -> Maps:
    """Gradients along the straight path from a baseline to the picture, times the difference."""
    if steps < 1:
        raise BadOption("steps", steps, "at least 1")
    target = settle(model, images, target)
    base = blank_image(
        model, (images.shape[-2], images.shape[-1]), baseline, seed=seed
    )  # [1, 3, H, W]
    where, weight = _nodes(steps, images)

    def faded(a: int, b: int) -> Tensor:
        return (
            base[:, None] + where[a:b, None, None, None] * (images - base)[:, None]
        )  # [B, n, 3, H, W]

    def slope_at(pictures: Tensor, aims: Target) -> Tensor:
        return pixel_slope(model, pictures, aims, score)[1]

    slope = over_copies(
        faded,
        weight,
        target,
        slope_at,
        bytes_each=len(images) * whole_graph(model, model.check(images)),
    )
    pixels = ((images - base) * slope).sum(dim=1)  # [B, H, W]
    return Maps(patch_sums(model, pixels), target, native=pixels)


def _nodes(steps: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Where on [0, 1] the integrand is taken, and with what weight."""
    x, w = np.polynomial.legendre.leggauss(steps)
    return torch.from_numpy((1 + x) / 2).to(like), torch.from_numpy(w / 2).to(like)
