"""Input x gradient (Shrikumar et al. 2016), on tokens or on pixels.

    token   map_j = sum_c h^0_jc d score / dh^0_jc,   h^0 = tokens entering the first block, with
    their positions
    pixel   map_j = sum over the patch's pixels and colours of x * d score / dx,   x = the
    normalised picture

A linear estimate of what is lost when the input becomes 0: one gradient, no baseline, no
completeness. On pixels, positions and biases of the embedding count for nothing; on tokens they do.
The score is chosen as in `ixg+`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seecause.attribution.gradients import every_block, over_images, patch_sums, pixel_slope
from seecause.attribution.ixg_plus import USUAL_SCORE, Mixer, relevances, usual_score
from seecause.attribution.registry import Maps, method
from seecause.errors import BadOption
from seecause.models.view import VisionModel
from seecause.target import Score, Target

Space = Literal["token", "pixel"]


@method(
    "ixg", forwards="1 + 1 backward", needs="gradients", unset={"score": USUAL_SCORE}, signed=True
)
@over_images(every_block)
@torch.enable_grad()
def ixg(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    space: Space = "token",
    mixer: Mixer = "sum",
    score: Score | None = None,
) -> Maps:
    """Input x gradient of the first tokens, or of pixels."""
    if space == "token":
        bound, _, (term,) = relevances(model, images, target, score, last=1, mixer=mixer)
        return Maps(term[:, model.check(images).patches], bound)
    if space != "pixel":
        raise BadOption("space", space, "token or pixel")
    bound, slope = pixel_slope(model, images, target, score or usual_score(model))
    product = images * slope
    pixels = (product.relu() if mixer == "relu" else product).sum(dim=1)  # [B, H, W]
    return Maps(patch_sums(model, pixels), bound, native=pixels)
