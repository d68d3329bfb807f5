"""Transition attention maps (Yuan et al. 2021).

Attention as a Markov chain that starts at the readout and walks to the input, weighted by
integrated gradients of the last attention:

    state = mean_h A^L[class];   for l = L-1 .. start:  state <- state + state mean_h A^l
    W = mean_h ReLU(mean_k dA^L(alpha_k x))[class],   alpha = linspace(0, 1, steps);   map = (state
    * W)[patches]

Both ends of alpha are used, and pictures are scaled towards 0 in normalised space, as in the
authors' code. A^L is the last attention (of a latent pool: the pool's own); backward stops there.
Averaging readouts take the mean of their rows for both factors. `start` = 0 as in the authors'
deletion script; their tutorials use 4 of 12. Scores do not add up to the logit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.attribution.gradients import (
    differentiate,
    one_block,
    over_copies,
    over_images,
    settle,
)
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import (
    attention_probs,
    check_start,
    explicit_run,
    n_attentions,
    read_rows,
)
from seecause.errors import BadOption
from seecause.models.view import VisionModel
from seecause.target import Score, Target


@method("tam", forwards="steps + 1, backward through the last block", needs="attention, gradients")
@over_images(one_block)
@torch.enable_grad()
def tam(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    start: int = 0,
    steps: int = 20,
    score: Score = "logit",
) -> Maps:
    """Attention walked back from the readout, times integrated gradients of the last attention."""
    check_start(model, start)
    if steps < 1:
        raise BadOption("steps", steps, "at least 1")
    target = settle(model, images, target)
    layout = model.check(images)
    weight = mean_slope(model, images, target, steps, score).relu().mean(dim=1)  # [B, T, T]
    state = _walk(model, images, start)
    return Maps((state * read_rows(model, layout, weight))[:, layout.patches], target)


def mean_slope(
    model: VisionModel, images: Tensor, target: Target, steps: int, score: Score
) -> Tensor:
    """Gradient of the last attention [B, H, T, T], averaged over scaled copies of each picture."""
    alphas = torch.linspace(0, 1, steps, dtype=images.dtype, device=images.device)

    def scaled(a: int, b: int) -> Tensor:
        return images[:, None] * alphas[a:b, None, None, None]  # [B, n, 3, H, W]

    last = n_attentions(model) - 1

    def slope_at(pictures: Tensor, aims: Target) -> Tensor:
        run = explicit_run(model, pictures, start=last)
        return differentiate(model, run.logits, aims, score, run.probs, start=last)[1][0]

    equal = torch.full_like(alphas, 1 / steps, dtype=torch.float64)
    return over_copies(
        scaled,
        equal,
        target,
        slope_at,
        bytes_each=len(images) * one_block(model, model.check(images)),
    )


@torch.no_grad()
def _walk(model: VisionModel, images: Tensor, start: int) -> Tensor:
    """The state [B, T] at the input: the last attention's row times the product of all (I + A^l)
    before it, streamed from the input on."""
    last, layout = n_attentions(model) - 1, model.check(images)
    wide = torch.promote_types(images.dtype, torch.float32)  # what probabilities come in
    reach = torch.eye(
        layout.tokens, dtype=wide, device=images.device
    )  # [B, T, T] after the first block
    for layer, probs in enumerate(attention_probs(model, images, start=start), start):
        step = probs.mean(dim=1) @ reach
        reach = step if layer == last else reach + step
    return read_rows(model, layout, reach)
