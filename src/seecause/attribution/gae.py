"""Generic attention explainability (Chefer, Gur & Wolf, ICCV 2021), for self-attention.

    R = I;   for every block:  R <- R + A_bar R,   A_bar = mean_h ReLU(dA * A);   map = R[class,
    patches]          (eq. 5-6)

with dA = d score / dA. Only the rows that are read out are needed, so the product is taken from the
last block to the first, a row at a time. A latent pool is one more step, without the identity: its
query is no token. No LRP (see `t-attr`), no row normalisation; values and MLPs count only through
the gradient, and negative evidence is cut off. `start` leaves out earlier blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.attribution.gradients import differentiate, every_attention, over_images
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import explicit_run, walk_back
from seecause.models.view import VisionModel
from seecause.target import Score, Target


@method("gae", forwards="1 + 1 backward", needs="attention, gradients")
@over_images(every_attention)
@torch.enable_grad()
def gae(
    model: VisionModel, images: Tensor, target: Target, *, start: int = 0, score: Score = "logit"
) -> Maps:
    """Gradient-weighted attention of all blocks, multiplied through."""
    layout = model.check(images)
    run = explicit_run(model, images, start=start)
    bound, slopes = differentiate(model, run.logits, target, score, run.probs, start=start)
    steps = [
        (slope * probs.detach()).relu().mean(dim=1)
        for slope, probs in zip(slopes, run.probs, strict=True)
    ]  # each [B, T, T]
    return Maps(walk_back(model, layout, steps)[:, layout.patches], bound)
