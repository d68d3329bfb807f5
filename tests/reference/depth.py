"""The class token's attention to object and background by definition: one picture, one block, one
patch at a time, by hooks on a timm ViT."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def attention_by_depth(
    module: nn.Module,
    images: Tensor,
    masks: Tensor,
    *,
    prefix: int,
    grid: tuple[int, int],
    ignore: int = 255,
) -> Tensor:
    """[B, 2, L]: mean attention to a patch of the object and of the background."""
    seen: list[Tensor] = []
    hooks = []
    for block in module.blocks:  # type: ignore[union-attr]
        block.attn.fused_attn = False
        hooks.append(
            block.attn.attn_drop.register_forward_hook(
                lambda part, given, out: seen.append(given[0])
            )
        )
    module(images)
    for hook in hooks:
        hook.remove()
    high, wide = images.shape[-2] // grid[0], images.shape[-1] // grid[1]
    found = torch.zeros(len(images), 2, len(seen), dtype=torch.float64)
    for b in range(len(images)):
        for kind in (0, 1):
            total = 0.0
            for row in range(grid[0]):
                for column in range(grid[1]):
                    part = masks[
                        b, row * high : (row + 1) * high, column * wide : (column + 1) * wide
                    ]
                    share = float(((part == 1 - kind) & (part != ignore)).double().mean())
                    total += share
                    for layer, probs in enumerate(seen):
                        found[b, kind, layer] += share * float(
                            probs[b, :, 0, prefix + row * grid[1] + column].mean()
                        )
            found[b, kind] /= total
    return found
