"""SmoothGrad (Smilkov et al. 2017): the gradient, averaged over noisy copies of the picture.

    g = mean_k d score / dx (x + sigma * n_k),   n_k ~ N(0, 1),   sigma = noise * (max x - min x) of
    each picture

    magnitude   map_j = sum over the patch's pixels and colours of |g|      (the paper's pictures)
    signed      the same sum of g
    input       the same sum of x * g

Noise is drawn once from `seed` and is the same for every picture, so a map does not depend on the
batch. It is drawn on the device: millions of numbers from a CPU would take longer than the passes.
A gradient says what a small change would do, not what the patch did; only `input` estimates a
contribution.
"""

from __future__ import annotations

from typing import Literal, get_args

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
from seecause.errors import BadOption
from seecause.models.base import ImageModel
from seecause.target import Score, Target

Show = Literal["magnitude", "signed", "input"]


@method(
    "smoothgrad",
    forwards="samples + samples backward",
    needs="gradients",
    architectures=("transformer", "staged", "dense"),
)
@over_images(whole_graph)
@torch.enable_grad()
def smoothgrad(
    model: ImageModel,
    images: Tensor,
    target: Target,
    *,
    samples: int = 50,
    noise: float = 0.15,
    show: Show = "magnitude",
    score: Score = "logit",
    seed: int = 0,
) -> Maps:
    """The gradient of pixels, averaged over noisy copies of the picture."""
    if samples < 1 or noise < 0:
        raise BadOption(
            "samples, noise", (samples, noise), "at least one sample, and noise of 0 or more"
        )
    if show not in get_args(Show):
        raise BadOption("show", show, f"one of {', '.join(get_args(Show))}")
    target = settle(model, images, target)
    drawn = torch.randn(
        samples,
        *images.shape[1:],
        generator=torch.Generator(images.device).manual_seed(seed),
        device=images.device,
    )
    sigma = noise * (images.amax(dim=(1, 2, 3)) - images.amin(dim=(1, 2, 3)))  # [B]

    def noisy(a: int, b: int) -> Tensor:
        return images[:, None] + sigma[:, None, None, None, None] * drawn[a:b].to(
            images
        )  # [B, n, 3, H, W]

    def slope_at(pictures: Tensor, aims: Target) -> Tensor:
        return pixel_slope(model, pictures, aims, score)[1]

    equal = torch.full((samples,), 1 / samples, dtype=torch.float64, device=images.device)
    slope = over_copies(
        noisy,
        equal,
        target,
        slope_at,
        bytes_each=len(images) * whole_graph(model, model.check(images)),
    )
    shown = {"magnitude": slope.abs(), "signed": slope, "input": images * slope}
    pixels = shown[show].sum(dim=1)  # [B, H, W]
    return Maps(patch_sums(model, pixels), target, native=pixels)
