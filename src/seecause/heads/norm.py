"""Largest norm: heads by how much they write, whatever they write. Two controls of CIGMA (section
1.9).

weight norm   |W_O[:, S_h]|_F
output norm   mean over images and tokens of |W_O[:, S_h] o_h|, what a head adds before LayerScale
or a norm
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.heads.registry import selector
from seecause.heads.result import HeadScores
from seecause.heads.values import Remove, mean_scores, over_images, padded
from seecause.models.block import Block, fused
from seecause.models.view import VisionModel


@selector("weight-norm", cost="none", needs="nothing")
@torch.no_grad()
def weight_norm(
    model: VisionModel, images: Tensor, labels: Tensor, *, remove: Remove = "most"
) -> HeadScores:
    """Frobenius norm of each head's columns of the output projection."""
    norms = [output_weights(block, model).flatten(1).norm(dim=1) for block in model.blocks]
    return mean_scores(
        model,
        padded(model, norms)[None],
        remove=remove,
        protocol={"selector": "weight-norm", "remove": remove},
    )


@selector("output-norm", cost="1 forward", needs="images")
@torch.no_grad()
def output_norm(
    model: VisionModel, images: Tensor, labels: Tensor, *, remove: Remove = "most"
) -> HeadScores:
    """Mean norm of what each head adds to the residual stream."""
    grams = []  # [H, dh, dh] each: |W o|^2 = o' (W' W) o
    for block in model.blocks:
        weight = output_weights(block, model)
        grams.append(weight @ weight.mT)

    def some(start: int, stop: int) -> Tensor:
        layout = model.check(images[start:stop])
        at, h = layout.at(images.device), model.embed(images[start:stop])
        norms = []
        for layer, (block, gram) in enumerate(zip(model.blocks, grams, strict=True)):
            q, k, v = block.qkv(h, at)
            carried = block.carried(
                h, fused(q, k, v, block.scale, block.bias(at, at))
            )  # [B, R, H, dh]
            carried = carried if (gate := model.gate(layer)) is None else carried * gate[:, None]
            norms.append(
                torch.einsum("brhi,hij,brhj->brh", carried, gram, carried)
                .clamp_min(0)
                .sqrt()
                .mean(dim=1)
            )
            h = block.close(h, carried)
        return padded(model, norms)

    per_image = over_images(some, model, images, holds=2)
    return mean_scores(
        model, per_image, remove=remove, protocol={"selector": "output-norm", "remove": remove}
    )


def output_weights(block: Block, model: VisionModel) -> Tensor:
    """W_O' head by head, [H, dh, D], read through the block, so that it is right for every
    library."""
    width = block.heads * block.head_dim
    rows = torch.cat([torch.zeros(1, width), torch.eye(width)]).to(model.device, model.dtype)[None]
    mixed = block.mix(rows)[0]  # a bias is in every row
    return (mixed[1:] - mixed[:1]).unflatten(0, (block.heads, block.head_dim))
