"""Grad-CAM (Selvaraju et al. 2017) on the last block of a transformer. Three conventions are in
use:

    a   pytorch-grad-cam: X = normed input of the last attention;  w_c = mean_p G_pc over patches;
    map_p = ReLU(sum_c w_c X_pc)
    b   Chefer's baseline: X = last attention, class row;  w_h = mean_p G_hp over patches;  map_p =
    ReLU(mean_h w_h X_hp)
    c   LibraGrad's code: X = residual input of the last block;  w_c = mean over all tokens;  map_p
    = sum_c w_c X_pc, signed

G = d score / dX. Whatever follows the last attention has no patch gradient in class-token models,
which is why none of them looks there. In post-norm blocks the normed input is the input. With a
latent pool, b uses the pool's attention; averaging readouts mean their rows. Libraries then scale
maps to 0..1; ours are not scaled. Nothing before the last block is held in memory.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seecause.attribution.gradients import differentiate, one_block, over_images
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import explicit_run, n_attentions, read_rows
from seecause.engine.trace import record
from seecause.engine.walk import walk
from seecause.errors import BadOption
from seecause.models.block import Block
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel
from seecause.target import Score, Target

Variant = Literal["a", "b", "c"]


@method("grad-cam", forwards="1, backward through the last block", needs="activations, gradients")
@over_images(one_block)
@torch.enable_grad()
def grad_cam(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    variant: Variant = "a",
    score: Score = "logit",
) -> Maps:
    """Activations of the last block, weighted by their mean gradient."""
    layout = model.check(images)
    patches = layout.patches
    if variant == "b":
        last = n_attentions(model) - 1
        run = explicit_run(model, images, start=last)
        bound, slopes = differentiate(model, run.logits, target, score, run.probs, start=last)
        slope, probs = (
            read_rows(model, layout, t)[..., patches] for t in (slopes[0], run.probs[0])
        )  # [B, H, N]
        return Maps((slope.mean(dim=2, keepdim=True) * probs).mean(dim=1).relu(), bound)
    if variant not in ("a", "c"):
        raise BadOption("variant", variant, "a, b or c")
    x, logits = _last_block(model, images, layout, normed=variant == "a")  # [B, T, D]
    last = model.n_layers - 1
    bound, (slope,) = differentiate(model, logits, target, score, [x], start=last)
    weight = slope[:, patches].mean(dim=1) if variant == "a" else slope.mean(dim=1)  # [B, D]
    scores = (x[:, patches] @ weight[..., None])[..., 0]
    return Maps(scores.relu() if variant == "a" else scores, bound)


def _last_block(
    model: VisionModel, images: Tensor, layout: TokenLayout, *, normed: bool
) -> tuple[Tensor, Tensor]:
    """The (normed) input of the last block, free of what came before, and the logits as a function
    of it."""
    with torch.no_grad():
        h = record(model, images, states={model.n_layers - 1}, until=model.n_layers - 1).states[
            model.n_layers - 1
        ]
        block = model.blocks[-1]
        x = (block.norm(h) if normed else h).detach()
    x.requires_grad_()
    steps = walk(model, h if normed else x, model.at(images), start=model.n_layers - 1)
    for step in steps:
        if normed:  # the residual path keeps h: x is what the attention reads, and nothing else
            step.block = Block(**{**vars(block), "norm": lambda _: x})
    return x, model.readout(steps.h, layout)
