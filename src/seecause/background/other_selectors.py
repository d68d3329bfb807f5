"""Ways to choose heads that CIGMA is compared with (section 1.9): the short ones. `gating.py` and
`_interchange.py` have one each.

weight-norm     |W_O[:, S_h]|_F: how much a head can write, whatever it writes
output-norm     mean over images and tokens of |W_O[:, S_h] o_h|, what it adds before LayerScale or
                a norm
taylor          |g_h dL/dg_h| at g = 1, the first-order change of the loss without the head (Michel
                et al. 2019; the head term of MDP, 2504.02168). Pruning removes what matters least,
                so `remove="least"` is the default; `"most"` is the control that damages the model.
                MDP then solves a latency program and fine-tunes: this is its importance
attention-mass  how much of a head's attention, in the rows the answer is read from, falls on
                background patches. What a head looks at is not what it says
loss-gain       NLL - NLL^(-h), by exact ablation: positive where the model does better without it
loss-change     |NLL - NLL^(-h)|: heads that matter, for better or worse
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.background._score import score
from seecause.background.erase import Masks
from seecause.background.heads import (
    HeadScores,
    Remove,
    mean_scores,
    over_images,
    padded,
    selector,
)
from seecause.engine.attention import attention_probs, read_rows
from seecause.engine.forks import gated_logits
from seecause.engine.mixture import need_gradients
from seecause.engine.walk import walk
from seecause.errors import BadOption
from seecause.models.block import Block
from seecause.models.view import VisionModel


@selector("weight-norm", cost="none", needs="nothing")
@torch.no_grad()
def weight_norm(
    model: VisionModel, images: Tensor, labels: Tensor, *, remove: Remove = "most"
) -> HeadScores:
    """Frobenius norm of each head's columns of the output projection."""
    norms = [output_weights(block, model).flatten(1).norm(dim=1) for block in model.blocks]
    return mean_scores(model, padded(model, norms)[None], remove=remove)


@selector("output-norm", cost="1 forward", needs="images")
@torch.no_grad()
def output_norm(
    model: VisionModel, images: Tensor, labels: Tensor, *, remove: Remove = "most"
) -> HeadScores:
    """Mean norm of what each head adds to the residual stream."""
    weights = [output_weights(block, model) for block in model.blocks]
    grams = [weight @ weight.mT for weight in weights]  # [H, dh, dh]: |W o|^2 = o' (W' W) o

    def run_chunk(start: int, stop: int) -> Tensor:
        norms = []
        for step in walk(model, model.embed(images[start:stop]), model.at(images[start:stop])):
            carried = step.carried  # [B, R, H, dh]
            carried = carried if step.gate is None else carried * step.gate[:, None]
            squares = torch.einsum("brhi,hij,brhj->brh", carried, grams[step.index], carried)
            norms.append(squares.clamp_min(0).sqrt().mean(dim=1))
        return padded(model, norms)

    per_image = over_images(run_chunk, model, images, holds=2)
    return mean_scores(model, per_image, remove=remove)


def output_weights(block: Block, model: VisionModel) -> Tensor:
    """W_O' head by head, [H, dh, D], read through the block, so that it is right for every
    library."""
    width = block.heads * block.head_dim
    rows = torch.cat([torch.zeros(1, width), torch.eye(width)]).to(model.device, model.dtype)[None]
    mixed = block.mix(rows)[0]  # a bias is in every row
    return (mixed[1:] - mixed[:1]).unflatten(0, (block.heads, block.head_dim))


@selector("taylor", cost="1 forward, 1 backward", needs="labels")
def taylor(
    model: VisionModel, images: Tensor, labels: Tensor, *, remove: Remove = "least"
) -> HeadScores:
    """First-order change of the loss without each head; the least important go first."""

    def run_chunk(start: int, stop: int) -> Tensor:
        return gate_gradients(model, images[start:stop], labels[start:stop]).abs()

    per_image = over_images(run_chunk, model, images, holds=2 * model.n_layers)
    return mean_scores(model, per_image, remove=remove)


def gate_gradients(model: VisionModel, images: Tensor, labels: Tensor) -> Tensor:
    """dNLL / dg at g = 1, image by image: [B, L, H]."""
    need_gradients(model, "a gradient of gates", remedy="Measure every head: sc.background.score")
    gates = images.new_ones(len(images), model.n_layers, model.n_heads, requires_grad=True)
    with torch.enable_grad():
        loss = F.cross_entropy(gated_logits(model, images, gates), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, gates)
    return gradient


@selector("attention-mass", cost="1 forward", needs="masks")
@torch.no_grad()
def attention_mass(
    model: VisionModel, images: Tensor, labels: Tensor, *, masks: Masks | Tensor | None = None
) -> HeadScores:
    """Share of attention on the background; `masks` [N, H, W] are true on the object. What is
    neither (IGNORE, padding) is no background."""
    truth = Masks.oracle(masks) if isinstance(masks, Tensor) else masks
    if truth is None or truth.hard.shape != (len(images), *images.shape[-2:]):
        shape = None if truth is None else list(truth.hard.shape)
        raise BadOption(
            "masks",
            shape,
            f"object masks {[len(images), *images.shape[-2:]]}, true on the object, in the model's"
            " frame",
        )
    layout = model.check(images)
    background = ~truth.hard if truth.inside is None else ~truth.hard & truth.inside
    pixels = background.to(images.device, images.dtype)
    share = F.adaptive_avg_pool2d(pixels[:, None], layout.grid).flatten(1)  # [N, patches]

    def run_chunk(start: int, stop: int) -> Tensor:
        masses = []
        every = attention_probs(model, images[start:stop])  # [B, H, T, T] each
        for _, probs in zip(model.blocks, every, strict=False):
            row = read_rows(model, layout, probs)  # [B, H, T]
            masses.append((row[..., layout.patches] * share[start:stop, None]).sum(dim=-1))
        return padded(model, masses)

    per_image = over_images(run_chunk, model, images, holds=2 + layout.tokens // 64)
    return mean_scores(model, per_image)


@selector("loss-gain", cost="about L * H / 2 forwards", needs="labels")
def loss_gain(model: VisionModel, images: Tensor, labels: Tensor) -> HeadScores:
    """How much the loss falls without each head, by exact ablation."""
    return score(model, images, response="nll", target=labels, guard=False)


@selector("loss-change", cost="about L * H / 2 forwards", needs="labels")
def loss_change(model: VisionModel, images: Tensor, labels: Tensor) -> HeadScores:
    """How much the loss moves without each head, either way, by exact ablation."""
    scores = loss_gain(model, images, labels)
    return replace(scores, value=scores.value.abs())
