"""Attention as the explanation, from the last block's row to gradient-weighted products of all.

A is a block's attention, mean_h a mean over its heads, dA = d score / dA, L the last block. A map
is read from the rows that the answer is read from: the class token's, written [class] below, or
the mean of an averaging readout's. A latent pool is one more attention on top, without an identity
beside it: its query is no token. What values and MLPs do counts through gradients only, or not at
all. Rollout and raw attention know no class: `target` is recorded, not used.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from seecause.attribution.gradients import (
    bind_target,
    differentiate,
    every_attention,
    one_block,
    over_copies,
    over_images,
)
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import (
    attention_probs,
    explicit_run,
    n_attentions,
    pool_logits,
    pool_probabilities,
    probabilities,
    read_rows,
    walk_back,
    weigh,
)
from seecause.engine.walk import Step, walk
from seecause.errors import BadOption
from seecause.models.view import VisionModel
from seecause.options import Count, Limit
from seecause.target import Score, Target

Fusion = Literal["mean", "max", "min"]
FUSE = {"mean": Tensor.mean, "max": Tensor.amax, "min": Tensor.amin}
Discarded = Annotated[float, Limit(lambda share: 0 <= share < 1, "a share from 0 to below 1")]


@method("raw-attention", forwards="1", needs="attention", class_specific=False)
@over_images(one_block)
@torch.no_grad()
def raw_attention(model: VisionModel, images: Tensor, target: Target) -> Maps:
    """Mean attention of the last block from the tokens that are read out.

    map = mean_h A^L[class, patches]: the control every attention method must beat.
    """
    (probs,) = explicit_run(model, images, start=n_attentions(model) - 1).probs  # [B, H, T, T]
    return Maps(_read(model, images, probs.mean(dim=1)), target)


@method("rollout", forwards="1", needs="attention", class_specific=False)
@over_images(one_block)
@torch.no_grad()
def rollout(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: int = 0,
    fusion: Fusion = "mean",
    discard: Discarded = 0.0,
    compat: bool = False,
) -> Maps:
    """Attention of all blocks multiplied through, as if values did not matter.

    Information that reaches the class token if every block mixed tokens by its fused attention and
    passed half of them on unchanged (Abnar & Zuidema 2020, eq. 1):

        A~ = normalise(fuse_h A + I),   R = A~_L ... A~_start,   map = R[class, patches]

    `normalise` makes rows sum to one; with mean fusion it is (A + I) / 2. `discard` first sets the
    smallest entries of each fused matrix to zero. `compat` repeats vit-explain's slip, which
    divides column j by the sum of row j, so that rows no longer sum to one.
    """
    reach = rollout_matrix(
        model, images, start=start, fusion=fusion, discard=discard, compat=compat
    )
    return Maps(_read(model, images, reach), target)


@torch.no_grad()
def rollout_matrix(
    model: VisionModel,
    images: Tensor,
    *,
    start: int = 0,
    fusion: Fusion = "mean",
    discard: float = 0.0,
    compat: bool = False,
) -> Tensor:
    """The product R [B, T, T], streamed: one block's matrix at a time. With a latent pool, its rows
    alone: [B, Q, T]."""
    reach: Tensor | None = None
    for layer, probs in enumerate(attention_probs(model, images, start=start), start):
        step = drop_smallest(FUSE[fusion](probs, dim=1), discard)  # [B, T, T]
        is_block = layer < model.n_layers
        if is_block:
            step = step + torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)
        total = step.sum(dim=-1)
        step = step / (total[:, None, :] if compat and is_block else total[..., None])
        reach = step if reach is None else step @ reach
    assert reach is not None
    return reach


def drop_smallest(attention: Tensor, share: float) -> Tensor:
    """Zero the smallest `share` of each image's entries [B, R, T]; the very first one, of the class
    token to itself, stays."""
    flat = attention.flatten(1)
    lowest = flat.topk(int(flat.shape[1] * share), dim=1, largest=False).indices
    kept = torch.ones_like(flat).scatter(1, lowest, 0)
    kept[:, 0] = 1
    return (flat * kept).view_as(attention)


@method("attn-grad", forwards="1, backward through the last block", needs="attention, gradients")
@over_images(one_block)
def attn_grad(
    model: VisionModel, images: Tensor, target: Target, *, score: Score = "logit"
) -> Maps:
    """The last block's attention, weighted by its gradient.

    map = mean_h ReLU(dA^L * A^L)[class, patches], the CLIP form of Chefer, Gur & Wolf (ICCV 2021).
    Backward stops there, so it costs little more than a forward; what earlier blocks mixed is not
    seen (see `gae`).
    """
    last = n_attentions(model) - 1
    run = explicit_run(model, images, start=last)
    bound, (slope,) = differentiate(model, run.logits, target, score, run.probs, start=last)
    return Maps(_read(model, images, (slope * run.probs[0]).relu().mean(dim=1)), bound)


@method("gae", forwards="1 + 1 backward", needs="attention, gradients")
@over_images(every_attention)
def gae(
    model: VisionModel, images: Tensor, target: Target, *, start: int = 0, score: Score = "logit"
) -> Maps:
    """Gradient-weighted attention of all blocks, multiplied through.

    Generic attention explainability (Chefer, Gur & Wolf, ICCV 2021, eq. 5-6) for self-attention:

        R = I;   for every block:  R <- R + mean_h ReLU(dA * A) R;   map = R[class, patches]

    No LRP (see `t-attr`), no row normalisation, and negative evidence is cut off. `start` leaves
    out earlier blocks.
    """
    layout = model.check(images)
    run = explicit_run(model, images, start=start)
    bound, slopes = differentiate(model, run.logits, target, score, run.probs, start=start)
    pairs = zip(slopes, run.probs, strict=True)
    steps = [(slope * probs.detach()).relu().mean(dim=1) for slope, probs in pairs]  # [B, T, T]
    return Maps(walk_back(model, layout, steps)[:, layout.patches], bound)


@method("tam", forwards="steps + 1, backward through the last block", needs="attention, gradients")
@over_images(one_block)
def tam(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: int = 0,
    steps: Count = 20,
    score: Score = "logit",
) -> Maps:
    """Attention walked back from the readout, times integrated gradients of the last attention.

    Transition attention maps (Yuan et al. 2021): a Markov chain that starts at the readout.

        state = mean_h A^L[class];   for l = L-1 .. start:  state <- state + state mean_h A^l
        map = (state * mean_h ReLU(mean_k dA^L(alpha_k x))[class])[patches]

    `start` = 0 as in the authors' deletion script; their tutorials use 4 of 12.
    """
    last, layout = n_attentions(model) - 1, model.check(images)
    wide = torch.promote_types(images.dtype, torch.float32)  # what probabilities come in
    reach = torch.eye(layout.tokens, dtype=wide, device=images.device)
    for layer, probs in enumerate(attention_probs(model, images, start=start), start):
        step = probs.mean(dim=1) @ reach  # [B, T, T]
        reach = step if layer == last else reach + step
    target = bind_target(model, images, target)
    weight = mean_slope(model, images, target, steps, score).relu().mean(dim=1)
    return Maps(_read(model, images, reach) * _read(model, images, weight), target)


@method(
    "bt",
    forwards="steps + 1 + 1 backward",
    needs="attention, gradients",
    unset={"start": "a third of the depth"},
)
@over_images(every_attention)
def bt(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: int | None = None,
    steps: Count = 20,
    score: Score = "logit",
) -> Maps:
    """Attention with heads weighed by their gradient, times integrated gradients of the last
    attention.

    Bidirectional transformer attribution (Chen et al. 2023, "Beyond intuition", head-wise), the
    guide of MDA. Heads count by how much their attention and its gradient agree:

        I_h = mean |A_h^T dA_h|, scaled to sum to one;   R <- R + (sum_h I_h A_h) R from `start` on
        map = (R * mean_h ReLU(mean_k dA^L(alpha_k x)))[class, patches]

    `start` = a third of the depth (4 of 12 in MDA's code). Not done: the token-wise form, which
    also propagates through norms and projections.
    """
    layout, start = model.check(images), model.n_layers // 3 if start is None else start
    run = explicit_run(model, images, start=start)
    bound, slopes = differentiate(model, run.logits, target, score, run.probs, start=start)
    reach = torch.eye(layout.tokens, dtype=slopes[0].dtype, device=images.device)
    for layer, (probs, slope) in enumerate(zip(run.probs, slopes, strict=True), start):
        step = by_head(probs.detach(), slope) @ reach  # [B, T, T]
        reach = step if layer == model.n_layers else reach + step
    weight = mean_slope(model, images, bound, steps, score).relu().mean(dim=1)
    return Maps(_read(model, images, reach) * _read(model, images, weight), bound)


def by_head(probs: Tensor, slope: Tensor) -> Tensor:
    """Attention [B, H, R, T] and its gradient -> the mean over heads by their agreement, [B, R,
    T]."""
    agree = (probs.transpose(-1, -2) @ slope).abs().mean(dim=(-1, -2))  # [B, H]
    share = agree / agree.sum(dim=1, keepdim=True).clamp_min(torch.finfo(agree.dtype).tiny)
    return (share[..., None, None] * probs).sum(dim=1)


def mean_slope(
    model: VisionModel, images: Tensor, target: Target, steps: int, score: Score
) -> Tensor:
    """mean_k dA^L(alpha_k x) [B, H, T, T], alpha = linspace(0, 1, steps). Both ends are used, and
    pictures are scaled towards 0 in normalised space, as in the code of TAM's authors."""
    alphas = torch.linspace(0, 1, steps, dtype=images.dtype, device=images.device)
    last = n_attentions(model) - 1

    def scaled(a: int, b: int) -> Tensor:
        return images[:, None] * alphas[a:b, None, None, None]  # [B, n, 3, H, W]

    def slope_at(pictures: Tensor, aims: Target) -> Tensor:
        run = explicit_run(model, pictures, start=last)
        return differentiate(model, run.logits, aims, score, run.probs, start=last)[1][0]

    equal = torch.full_like(alphas, 1 / steps, dtype=torch.float64)
    each = len(images) * one_block(model, model.check(images))
    return over_copies(scaled, equal, target, slope_at, bytes_each=each)


@method(
    "legrad",
    forwards="1, backward through each block and readout by itself",
    needs="attention, gradients",
)
@over_images(one_block)
def legrad(
    model: VisionModel, images: Tensor, target: Target, *, start: int = 0, score: Score = "logit"
) -> Maps:
    """Positive gradient of every block's own readout with respect to its attention.

    LeGrad (Bousselham et al., ICCV 2025), s^l the score of the readout applied to block l's output:

        map = mean_l E^l[patches],   E^l = mean over heads and rows of ReLU(d s^l / dA^l)

    Every block is read by the model's own final norm, pool and head; the authors' CLIP code reads
    the mean of all tokens instead of the class token. With a latent pool A^l is the pool's
    attention to block l's output, as in the paper. s^l depends on A^l through block l alone, so
    nothing is held but one block. `start` leaves out earlier blocks.
    """
    if not 0 <= start < model.n_layers:
        raise BadOption("start", start, f"0-{model.n_layers - 1}, the first block that counts")
    target, layout = bind_target(model, images, target), model.check(images)
    total = images.new_zeros(len(images), layout.tokens)
    for step in walk(model, model.embed(images), model.at(images)):
        step.h = step.h.detach().requires_grad_()
        probs, logits = _read_after(model, step)
        if step.index >= start:
            _, (slope,) = differentiate(model, logits, target, score, [probs])  # [B, H, T, T]
            total = total + slope.relu().mean(dim=(1, 2))
    return Maps(total[:, layout.patches] / (model.n_layers - start), target)


def _read_after(model: VisionModel, step: Step) -> tuple[Tensor, Tensor]:
    """The probabilities that explain a block's output, and the logits read from it."""
    layout = step.at.layout
    if model.readout.latent is None:
        probs = probabilities(step)
        step.o = weigh(probs, step.v)
        return probs, model.readout(step.out, layout)
    probs, v = pool_probabilities(model, step.out, layout)
    return probs, pool_logits(model, probs, v)


def _read(model: VisionModel, images: Tensor, attention: Tensor) -> Tensor:
    """The patches' part of the row [B, N] that is read of attention [B, T, T]."""
    layout = model.check(images)
    return read_rows(model, layout, attention)[:, layout.patches]
