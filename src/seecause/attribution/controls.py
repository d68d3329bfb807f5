"""Controls that know nothing of the model: a method that does not beat them has shown nothing."""

from __future__ import annotations

import hashlib
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.registry import EVERY_VIEW, Maps, method
from seecause.models.base import ImageModel
from seecause.options import Positive
from seecause.target import Target

_control = partial(
    method, forwards="0", needs="nothing", class_specific=False, architectures=EVERY_VIEW
)


@_control("random")
def random(model: ImageModel, images: Tensor, target: Target, *, seed: int = 0) -> Maps:
    """Uniform noise, drawn for each picture from its pixels and `seed`: the place in the batch
    never matters."""
    n = model.check(images).n_patches
    raw = model.preprocess.raw(images).detach().cpu().float()
    pixels = (raw * 255).round().clamp(0, 255).to(torch.uint8)  # the same on every device
    noise = []
    for own in pixels:
        bits = hashlib.sha256(f"{seed} ".encode() + own.contiguous().numpy().tobytes()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(bits[:7]))
        noise.append(torch.rand(n, generator=generator, dtype=torch.float32))
    return Maps(torch.stack(noise).to(images.device), target)


@_control("center")
def center(model: ImageModel, images: Tensor, target: Target, *, width: Positive = 0.25) -> Maps:
    """A Gaussian at the middle, `width` of each side wide."""
    rows, columns = (
        torch.linspace(-0.5, 0.5, n, dtype=torch.float32) for n in model.check(images).grid
    )
    bump = torch.exp(-(rows[:, None] ** 2 + columns**2) / (2 * width**2)).flatten()
    return Maps(bump.to(images.device).repeat(len(images), 1), target)


@_control("sobel")
def sobel(model: ImageModel, images: Tensor, target: Target) -> Maps:
    """Mean edge strength of the grey picture in each patch."""
    grey = model.preprocess.raw(images).float().mean(dim=1, keepdim=True)
    kernel = grey.new_tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
    padded = F.pad(grey, (1, 1, 1, 1), mode="replicate")
    edges = F.conv2d(padded, torch.stack([kernel, kernel.T])[:, None]).norm(dim=1)  # [B, H, W]
    scores = F.adaptive_avg_pool2d(edges[:, None], model.check(images).grid).flatten(1)
    return Maps(scores, target, native=edges)
