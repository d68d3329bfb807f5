"""Gradients at the feature map of a stage: input x gradient, and the family of Grad-CAM.

F [C, h, w] is the map after a stage, G = d score / dF, c a channel and p a place:

    ixg         sum_c F_cp G_cp                          what is lost if the feature becomes 0
    grad-cam    ReLU(sum_c w_c F_cp), by variant:
      mean      w_c = mean_p G_cp                        Grad-CAM (Selvaraju et al. 2017)
      hires     w_cp = G_cp                              HiResCAM (Draelos & Carin 2020)
      layer     w_cp = ReLU(G_cp)                        LayerCAM (Jiang et al. 2021)
      x         w_c = sum_p F_cp G_cp / sum_p F_cp       XGrad-CAM (Fu et al. 2020)
      ++        w_c = sum_p a_cp ReLU(G_cp),             Grad-CAM++ (Chattopadhay et al. 2018)
                a_cp = G^2 / (2 G^2 + G^3 sum_p F_cp)

Cells get the mean (ixg: the sum) of the features they cover; where features are larger than cells,
each cell has the value of those it lies in. On pixels, ixg is that of `ixg.py`. Nothing before the
stage is held in memory.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.gradients import (
    differentiate,
    every_stage,
    over_images,
    patch_sums,
    pixel_slope,
)
from seecause.attribution.registry import Maps, method
from seecause.errors import BadOption
from seecause.models.staged_view import StagedModel
from seecause.target import Score, Target

Space = Literal["stage", "pixel"]
Variant = Literal["mean", "hires", "layer", "x", "++"]


@method(
    "ixg",
    forwards="1 + 1 backward",
    needs="gradients",
    architectures=("staged",),
    unset={"stage": "the one at two thirds of the depth"},
    signed=True,
)
@over_images(every_stage)
@torch.enable_grad()
def ixg_staged(
    model: StagedModel,
    images: Tensor,
    target: Target,
    *,
    space: Space = "stage",
    stage: str | None = None,
    score: Score = "prob",
) -> Maps:
    """Input x gradient of a stage's features, or of pixels."""
    if space == "pixel":
        bound, slope = pixel_slope(model, images, target, score)
        pixels = (images * slope).sum(dim=1)  # [B, H, W]
        return Maps(patch_sums(model, pixels), bound, native=pixels)
    if space != "stage":
        raise BadOption("space", space, "stage or pixel")
    stage = stage or model.cells
    bound, features, slope = _at_stage(model, images, target, stage, score)
    product = (features * slope).sum(dim=1)  # [B, h, w]
    grid = model.check(images).grid
    share = product[0].numel() / (grid[0] * grid[1])  # features of a cell
    return Maps(_on_cells(product, grid) * share, bound, used={"stage": stage})


@method(
    "grad-cam",
    forwards="1, backward from the stage on",
    needs="activations, gradients",
    architectures=("staged",),
    unset={"stage": "the last one"},
)
@over_images(every_stage)
@torch.enable_grad()
def grad_cam_staged(
    model: StagedModel,
    images: Tensor,
    target: Target,
    *,
    variant: Variant = "mean",
    stage: str | None = None,
    score: Score = "logit",
) -> Maps:
    """Features of a stage, weighted by their gradient: Grad-CAM and its relatives."""
    stage = stage or model.stages[-1].name
    bound, features, slope = _at_stage(model, images, target, stage, score)
    scores = (channel_weights(features, slope, variant) * features).sum(dim=1).relu()
    return Maps(_on_cells(scores, model.check(images).grid), bound, used={"stage": stage})


def channel_weights(features: Tensor, slope: Tensor, variant: Variant) -> Tensor:
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
    if variant != "++":
        raise BadOption("variant", variant, "mean, hires, layer, x or ++")
    share = slope**2 / (2 * slope**2 + slope**3 * total + 10 * EPS)
    return (share.where(slope != 0, 0) * slope.relu()).sum(dim=places, keepdim=True)


EPS = 1e-7  # as in pytorch-grad-cam


def _at_stage(
    model: StagedModel, images: Tensor, target: Target, stage: str, score: Score
) -> tuple[Target, Tensor, Tensor]:
    """The bound target, the features [B, C, h, w] after a stage and the gradient of its score."""
    with torch.no_grad():
        features = model.run_to(stage, images)
    features.requires_grad_()
    logits = model.run_from(stage, features.clone())  # activations behind it may be in place
    bound, (slope,) = differentiate(model, logits, target, score, [features])
    return bound, features.detach(), slope


def _on_cells(values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Features [B, h, w] -> means over cells [B, N]."""
    return F.adaptive_avg_pool2d(values[:, None], grid).flatten(1)
