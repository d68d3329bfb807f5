"""Grad-CAM (Selvaraju et al. 2017) and its relatives: activations X, weighted by their gradient
G = d score / dX. Libraries scale maps to 0..1; ours are not scaled. Nothing before the activations
is held in memory."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seecause.attribution.gradients import (
    differentiate,
    every_stage,
    feature_products,
    features_and_slope,
    on_cells,
    one_block,
    over_images,
)
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import explicit_run, n_attentions, read_rows
from seecause.engine.trace import record
from seecause.engine.walk import walk
from seecause.models.block import Block
from seecause.models.staged import StagedModel
from seecause.models.view import VisionModel
from seecause.target import Score, Target

Weighing = Literal["mean", "hires", "layer", "x", "++"]
EPS = 1e-7  # as in pytorch-grad-cam


@method("grad-cam", forwards="1, backward through the last block", needs="activations, gradients")
@over_images(one_block)
def grad_cam(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    variant: Literal["a", "b", "c"] = "a",
    score: Score = "logit",
) -> Maps:
    """Activations of the last block, weighted by their mean gradient.

    Three conventions are in use, with p over patches, c over channels and h over heads:

        a   pytorch-grad-cam: X = normed input of the last attention,
            map_p = ReLU(sum_c w_c X_pc),   w_c = mean_p G_pc
        b   Chefer's baseline: X = last attention, class row,
            map_p = ReLU(mean_h w_h X_hp),   w_h = mean_p G_hp
        c   LibraGrad's code: X = residual input of the last block,
            map_p = sum_c w_c X_pc, signed,   w_c = mean of G_c over all tokens

    Whatever follows the last attention has no patch gradient in class-token models, which is why
    none of them looks there. In post-norm blocks the normed input is the input. With a latent pool,
    b uses the pool's attention; averaging readouts mean their rows.
    """
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
    x, logits = _last_block(model, images, normed=variant == "a")  # [B, T, D]
    last = model.n_layers - 1
    bound, (slope,) = differentiate(model, logits, target, score, [x], start=last)
    weight = slope[:, patches].mean(dim=1) if variant == "a" else slope.mean(dim=1)  # [B, D]
    scores = (x[:, patches] @ weight[..., None])[..., 0]
    return Maps(scores.relu() if variant == "a" else scores, bound)


def _last_block(model: VisionModel, images: Tensor, *, normed: bool) -> tuple[Tensor, Tensor]:
    """The (normed) input of the last block, free of what came before, and the logits as a function
    of it."""
    last, block = model.n_layers - 1, model.blocks[-1]
    with torch.no_grad():
        h = record(model, images, states={last}, until=last).states[last]
        x = (block.norm(h) if normed else h).detach()
    x.requires_grad_()
    steps = walk(model, h if normed else x, model.at(images), start=last)
    for step in steps:
        if normed:  # the residual path keeps h: x is what the attention reads, and nothing else
            step.block = Block(**{**vars(block), "norm": lambda _: x})
    return x, model.readout(steps.h, model.check(images))


@method(
    "grad-cam",
    forwards="1, backward from the stage on",
    needs="activations, gradients",
    architectures=("staged",),
    unset={"stage": "the last one"},
)
@over_images(every_stage)
def grad_cam_staged(
    model: StagedModel,
    images: Tensor,
    target: Target,
    *,
    variant: Weighing = "mean",
    stage: str | None = None,
    score: Score = "logit",
) -> Maps:
    """Features of a stage, weighted by their gradient: Grad-CAM and its relatives.

    map_p = ReLU(sum_c w_c X_cp), with weights by `variant` (p over places of the feature map):

        mean    w_c = mean_p G_cp                      Grad-CAM
        hires   w_cp = G_cp                            HiResCAM (Draelos & Carin 2020)
        layer   w_cp = ReLU(G_cp)                      LayerCAM (Jiang et al. 2021)
        x       w_c = sum_p X_cp G_cp / sum_p X_cp     XGrad-CAM (Fu et al. 2020)
        ++      w_c = sum_p a_cp ReLU(G_cp),           Grad-CAM++ (Chattopadhay et al. 2018)
                a_cp = G^2 / (2 G^2 + G^3 sum_p X_cp)
    """
    stage = stage or model.stages[-1].name
    bound, features, slope = features_and_slope(model, images, target, stage, score)
    if variant == "hires":
        scores = feature_products(model, features, slope, stage).relu()
    else:
        scores = (channel_weights(features, slope, variant) * features).sum(dim=1).relu()
    return Maps(on_cells(scores, model.check(images)), bound, used={"stage": stage})


def channel_weights(features: Tensor, slope: Tensor, variant: Weighing) -> Tensor:
    """Weights [B, C, 1 or h, 1 or w] of features [B, C, h, w] with their gradient."""
    places = (2, 3)
    if variant == "mean":
        return slope.mean(dim=places, keepdim=True)
    if variant == "hires":
        return slope
    if variant == "layer":
        return slope.relu()
    total = features.sum(dim=places, keepdim=True)
    if variant == "x":
        return (features * slope).sum(dim=places, keepdim=True) / (total + EPS)
    share = slope**2 / (2 * slope**2 + slope**3 * total + 10 * EPS)
    return (share.where(slope != 0, 0) * slope.relu()).sum(dim=places, keepdim=True)
