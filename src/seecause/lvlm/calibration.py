"""Calibration pictures for the embedded models: Critters in every drawing style, far from any
picture a model is trained or tested on."""

from __future__ import annotations

import torch
from PIL import Image

from seecause.data.images import to_pil

CALIBRATION = 100
_START = 1 << 30


def calibration_critters(count: int = CALIBRATION, *, size: int = 96) -> list[Image.Image]:
    """`count` pictures, every creature on every background, a third of them in each style."""
    from seecause import critters

    styles = critters.STYLES
    latents = critters.draw("balanced", "train", count, start=_START)
    drawn = [
        critters.render(rows, size=size, style=style).image
        for style, rows in zip(styles, latents.split(-(-count // len(styles))), strict=False)
    ]
    return [to_pil(image) for image in torch.cat(drawn)]
