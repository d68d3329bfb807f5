"""Calibration pictures for the embedded models: Critters in every drawing style, far from any picture a model is trained or tested on."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause.data import critters
from seecause.data.critters.picture import STYLES
from seecause.errors import BadImage

CALIBRATION = 100
_START = 1 << 30


def to_pil(image: Tensor) -> Image.Image:
    """Raw pixels [3, H, W] in [0, 1] as a picture."""
    if image.ndim != 3 or image.shape[0] != 3:
        raise BadImage(f"tensor of shape {list(image.shape)}", "expected raw pixels [3, H, W] in [0, 1]", "see seecause.data.Sample")
    return Image.fromarray(np.ascontiguousarray((image.detach().float().cpu().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()))


def calibration_critters(count: int = CALIBRATION, *, size: int = 96) -> list[Image.Image]:
    """`count` pictures, every creature on every background, a third of them in each style."""
    latents = critters.draw("balanced", "train", count, start=_START)
    drawn = [critters.render(rows, size=size, style=style).image for style, rows in zip(STYLES, latents.split(-(-count // len(STYLES))), strict=False)]
    return [to_pil(image) for image in torch.cat(drawn)]
