"""Attention on the background: how much of a head's attention, in the rows the answer is read from,
falls on background patches.

A control of CIGMA (section 1.9). What a head looks at is not what it says: this needs masks and no
answer of the model at all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.attention import attention_probs, read_rows
from seecause.errors import BadOption
from seecause.heads.masks import Masks
from seecause.heads.registry import selector
from seecause.heads.result import HeadScores
from seecause.heads.values import mean_scores, over_images, padded
from seecause.models.view import VisionModel


@selector("attention-mass", cost="1 forward", needs="masks")
@torch.no_grad()
def attention_mass(
    model: VisionModel, images: Tensor, labels: Tensor, *, masks: Masks | Tensor | None = None
) -> HeadScores:
    """Share of attention on the background; `masks` [N, H, W] are true on the object. What is
    neither (IGNORE, padding) is no background."""
    found = Masks.oracle(masks) if isinstance(masks, Tensor) else masks
    if found is None or found.hard.shape != (len(images), *images.shape[-2:]):
        shape = None if found is None else list(found.hard.shape)
        raise BadOption(
            "masks",
            shape,
            f"object masks {[len(images), *images.shape[-2:]]}, true on the object, in the model's"
            " frame",
        )
    layout = model.check(images)
    behind = (~found.hard if found.inside is None else ~found.hard & found.inside).to(
        images.device, images.dtype
    )
    share = F.adaptive_avg_pool2d(behind[:, None], layout.grid).flatten(1)  # [N, patches]

    def some(start: int, stop: int) -> Tensor:
        found = [
            read_rows(model, layout, probs)
            for _, probs in zip(
                model.blocks, attention_probs(model, images[start:stop]), strict=False
            )
        ]  # [B, H, T]
        return padded(
            model,
            [(row[..., layout.patches] * share[start:stop, None]).sum(dim=-1) for row in found],
        )

    per_image = over_images(some, model, images, holds=2 + layout.tokens // 64)
    return mean_scores(model, per_image, protocol={"selector": "attention-mass"})
