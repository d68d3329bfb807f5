"""Bidirectional transformer attribution (Chen et al. 2023, "Beyond intuition", head-wise), the
guide of MDA.

Heads count by how much their attention and its gradient agree, and the product is weighed by
integrated gradients of the last attention:
    I_h = mean |A_h^T dA_h|, scaled to sum to one;   R = I;   for every block from `start` on:  R <-
    R + (sum_h I_h A_h) R
    W = mean_h ReLU(mean_k dA^L(alpha_k x));   map = (R * W)[class, patches]
`start` = a third of the depth (4 of 12 in MDA's code). Averaging readouts take the mean of their
rows, and a latent pool is the last attention. Not done: the token-wise form, which also propagates
through norms and projections.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.attribution.gradients import differentiate, every_attention, over_images
from seecause.attribution.registry import Maps, method
from seecause.attribution.tam import mean_slope
from seecause.engine.attention import explicit_run, read_rows
from seecause.models.view import VisionModel
from seecause.target import Score, Target


@method(
    "bt",
    forwards="steps + 1 + 1 backward",
    needs="attention, gradients",
    unset={"start": "a third of the depth"},
)
@over_images(every_attention)
@torch.enable_grad()
def bt(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: int | None = None,
    steps: int = 20,
    score: Score = "logit",
) -> Maps:
    """Attention with heads weighed by their gradient, times integrated gradients of the last
    attention."""
    layout, start = model.check(images), model.n_layers // 3 if start is None else start
    run = explicit_run(model, images, start=start)
    bound, slopes = differentiate(model, run.logits, target, score, run.probs, start=start)
    reach = torch.eye(
        layout.tokens, dtype=slopes[0].dtype, device=images.device
    )  # [B, T, T] after the first block
    for layer, (probs, slope) in enumerate(zip(run.probs, slopes, strict=True), start):
        step = by_head(probs.detach(), slope) @ reach
        reach = (
            step if layer == model.n_layers else reach + step
        )  # a latent pool's query is no token
    weight = mean_slope(model, images, bound, steps, score).relu().mean(dim=1)
    return Maps(
        (read_rows(model, layout, reach) * read_rows(model, layout, weight))[:, layout.patches],
        bound,
    )


def by_head(probs: Tensor, slope: Tensor) -> Tensor:
    """Attention [B, H, R, T] and its gradient -> the mean over heads by their agreement, [B, R,
    T]."""
    agree = (probs.transpose(-1, -2) @ slope).abs().mean(dim=(-1, -2))  # [B, H]
    share = agree / agree.sum(dim=1, keepdim=True).clamp_min(torch.finfo(agree.dtype).tiny)
    return (share[..., None, None] * probs).sum(dim=1)
