"""Gradient-weighted attention of the last block (the CLIP form of Chefer, Gur & Wolf, ICCV 2021).

    map = mean_h ReLU(dA^L * A^L)[class, patches],   dA = d score / dA

A^L is the last attention (of a latent pool: the pool's own). Backward stops there, so it costs
little more than a forward. It does not see what earlier blocks mixed; see `gae`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.attribution.gradients import differentiate, one_block, over_images
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import explicit_run, n_attentions, read_rows
from seecause.models.view import VisionModel
from seecause.target import Score, Target


@method("attn-grad", forwards="1, backward through the last block", needs="attention, gradients")
@over_images(one_block)
@torch.enable_grad()
def attn_grad(
    model: VisionModel, images: Tensor, target: Target, *, score: Score = "logit"
) -> Maps:
    """The last block's attention, weighted by its gradient."""
    layout = model.check(images)
    last = n_attentions(model) - 1
    run = explicit_run(model, images, start=last)
    bound, (slope,) = differentiate(model, run.logits, target, score, run.probs, start=last)
    weighted = (slope * run.probs[0]).relu().mean(dim=1)  # [B, T, T]
    return Maps(read_rows(model, layout, weighted)[:, layout.patches], bound)
