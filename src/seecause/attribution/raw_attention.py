"""Raw attention: the control every attention method must beat.

    map = mean_h A^L[class, patches]

A^L is the last attention (of a latent pool: the pool's own). What values carry and what earlier
blocks mixed is ignored. Class-agnostic: `target` is recorded, not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.attribution.gradients import one_block, over_images
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import explicit_run, n_attentions, read_rows
from seecause.models.view import VisionModel
from seecause.target import Target


@method("raw-attention", forwards="1", needs="attention", class_specific=False)
@over_images(one_block)
@torch.no_grad()
def raw_attention(model: VisionModel, images: Tensor, target: Target) -> Maps:
    """Mean attention of the last block from the tokens that are read out."""
    layout = model.check(images)
    (probs,) = explicit_run(model, images, start=n_attentions(model) - 1).probs  # [B, H, T, T]
    return Maps(read_rows(model, layout, probs.mean(dim=1))[:, layout.patches], target)
