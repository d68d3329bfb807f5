"""Controls that know nothing of the model: a method that does not beat them has shown nothing.

random   uniform noise, its own for each picture
center   a Gaussian at the middle of the grid
sobel    the mean edge strength of each patch
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.registry import Maps, method
from seecause.models.base import ImageModel
from seecause.target import Target


@method(
    "random",
    forwards="0",
    needs="nothing",
    class_specific=False,
    architectures=("transformer", "staged", "dense"),
)
def random(model: ImageModel, images: Tensor, target: Target, *, seed: int = 0) -> Maps:
    """Uniform noise, drawn for each picture from its pixels and `seed`: the place in the batch
    never matters."""
    n = model.check(images).n_patches
    pixels = (
        (model.preprocess.raw(images).detach().cpu().float() * 255)
        .round()
        .clamp(0, 255)
        .to(torch.uint8)
    )  # the same on every device
    seeds = [
        int.from_bytes(
            hashlib.sha256(f"{seed} ".encode() + own.contiguous().numpy().tobytes()).digest()[:7]
        )
        for own in pixels
    ]
    noise = torch.stack(
        [torch.rand(n, generator=torch.Generator().manual_seed(own)) for own in seeds]
    )
    return Maps(noise.to(images.device), target)


@method(
    "center",
    forwards="0",
    needs="nothing",
    class_specific=False,
    architectures=("transformer", "staged", "dense"),
)
def center(model: ImageModel, images: Tensor, target: Target, *, width: float = 0.25) -> Maps:
    """A Gaussian at the middle, `width` of each side wide."""
    rows, columns = (torch.linspace(-0.5, 0.5, n) for n in model.check(images).grid)
    bump = (
        torch.exp(-(rows[:, None] ** 2 + columns**2) / (2 * width**2)).flatten().to(images.device)
    )
    return Maps(bump.expand(len(images), -1).clone(), target)


@method(
    "sobel",
    forwards="0",
    needs="nothing",
    class_specific=False,
    architectures=("transformer", "staged", "dense"),
)
def sobel(model: ImageModel, images: Tensor, target: Target) -> Maps:
    """Mean edge strength of the grey picture in each patch."""
    grey = model.preprocess.raw(images).float().mean(dim=1, keepdim=True)
    kernel = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]], device=images.device)
    edges = F.conv2d(
        F.pad(grey, (1, 1, 1, 1), mode="replicate"), torch.stack([kernel, kernel.T])[:, None]
    ).norm(dim=1)
    return Maps(
        F.adaptive_avg_pool2d(edges[:, None], model.check(images).grid).flatten(1),
        target,
        native=edges,
    )
