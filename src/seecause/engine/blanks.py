"""Blank images: the neutral context that a patch is put into, and their recorded runs.

    white | black   raw pixels 1 or 0
    mean            the channel mean the model subtracts
    noise           independent Gaussian pixels with the mean and deviation the model expects
    blur-noise      the same noise, blurred by a Gaussian of 1/28 of the side and brought back to that deviation

The run of a blank is recorded once per model state, size and blank, and reused; any change of a weight or gate is noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Literal, get_args

import torch
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from seecause.engine.trace import Trace, record
from seecause.errors import BadImage, BadOption
from seecause.models.view import VisionModel

Blank = Literal["white", "black", "mean", "noise", "blur-noise"]


def blank_image(model: VisionModel, size: tuple[int, int], blank: Blank | Tensor = "white", *, seed: int = 0) -> Tensor:
    """A normalised blank [1, 3, H, W] on the model's device; a tensor is checked and passed on."""
    channels = len(model.preprocess.mean)
    if isinstance(blank, Tensor):
        if blank.shape[-3:] != (channels, *size):
            raise BadImage(f"blank of shape {list(blank.shape)}", f"expected [1, {channels}, {size[0]}, {size[1]}], normalised like the images", "resize it")
        return blank.reshape(1, channels, *size).to(model.device, model.dtype)
    if blank not in get_args(Blank):
        raise BadOption("blank", blank, f"one of {', '.join(get_args(Blank))}, or a tensor")
    shape = (1, channels, *size)
    if blank in ("white", "black"):
        normal = model.preprocess.normalise(torch.full(shape, float(blank == "white"), dtype=torch.float64))
    elif blank == "mean":
        normal = torch.zeros(shape, dtype=torch.float64)
    else:
        normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        if blank == "blur-noise":
            sigma = max(size) / 28
            normal = gaussian_blur(normal, 2 * round(2 * sigma) + 1, sigma)
            normal = (normal - normal.mean()) / normal.std()
    return normal.to(model.device, model.dtype)


@torch.no_grad()
def blank_trace(model: VisionModel, blank: Tensor, *, states: Collection[int], kv: Collection[int]) -> Trace:
    """The recorded run of a blank image, kept in the model's memo while nothing changes."""
    digest = hashlib.sha256(blank.detach().float().cpu().numpy().tobytes()).hexdigest()
    key = (model.state_key(), digest, tuple(blank.shape), blank.dtype)
    known: dict[str, tuple[object, Trace]] = model.memo.setdefault("blanks", {})
    held = known.get(digest)
    if held is None or held[0] != key or not (set(states) <= set(held[1].states) and set(kv) <= set(held[1].kv)):
        if held is not None and held[0] == key:  # the same blank, more of it
            states, kv = {*states, *held[1].states}, {*kv, *held[1].kv}
        if len(known) >= 4:
            known.pop(next(iter(known)))
        known[digest] = (key, record(model, blank, states=set(states), kv=set(kv)))
    return known[digest][1]
