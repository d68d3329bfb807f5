"""T-Attr, transformer attribution (Chefer et al. CVPR 2021): attention weighed by its gradient and
its relevance.

Relevance R starts as one at the class logit and is handed down operator by operator
(`engine.relevance`); with the probabilities A of block l,
    Abar_l = mean over heads of ReLU(dA_l * R_A_l)                            (eq. 13)
    C = (I + Abar_L) ... (I + Abar_1),   map = C[class, patches]              (eq. 14)
without normalising rows. `start` leaves out the first blocks (0 in the authors' notebooks, 1 in
their evaluation). The residual rule is applied per sample, where the authors' code sums over the
batch. Beyond the paper: a mean readout takes the mean of rows, a latent pool is one more attention
on top, LayerScale and rotations pass relevance on. Not done: what prefix tokens get is not shown,
and an MLP with an operator that has no rule is refused.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from seecause.attribution.gradients import differentiate, every_attention, over_images
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import explicit_run, walk_back
from seecause.engine.relevance import Rules, unchanged
from seecause.models.block import Block
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel
from seecause.target import Score, Target


def _both_graphs(model: VisionModel, layout: TokenLayout) -> int:
    return 3 * every_attention(
        model, layout
    )  # gradients first, then relevance, with what its rules hold


@method("t-attr", forwards="2 + 2 backward", needs="attention, gradients, relevance")
@over_images(_both_graphs)
@torch.enable_grad()
def t_attr(
    model: VisionModel, images: Tensor, target: Target, *, start: int = 0, score: Score = "logit"
) -> Maps:
    """Attention weighed by its gradient and its relevance, multiplied over blocks."""
    layout = model.check(images)
    plain = explicit_run(model, images, start=start)
    bound, (seed, *slopes) = differentiate(
        model, plain.logits, target, score, [plain.logits, *plain.probs], start=start
    )
    relevances = relevance(model, images, seed, start=start)
    steps = [
        (slope * own).relu().mean(dim=1) for slope, own in zip(slopes, relevances, strict=True)
    ]  # each [B, T, T]
    return Maps(walk_back(model, layout, steps)[:, layout.patches], bound)


def relevance(
    model: VisionModel, images: Tensor, seed: Tensor, *, start: int = 0
) -> tuple[Tensor, ...]:
    """Relevance of the probabilities, [B, H, T, T] each, from relevance `seed` [B, C] at the
    logits."""
    rules = Rules("t-attr")
    with rules:
        run = explicit_run(
            replace(model, blocks=[_relevant(block, rules) for block in model.blocks]),
            images,
            start=start,
        )
    return torch.autograd.grad(run.logits, run.probs, seed)


def _relevant(block: Block, rules: Rules) -> Block:
    """The same block; what only scales or turns its rows passes relevance on unchanged."""
    turns = {
        name: unchanged(getattr(block, name))
        for name in ("norm", "q_norm", "k_norm", "sub_norm", "branch")
    }
    mixes = {
        name: rules.inside(f"{block.name}.{name}", getattr(block, name))
        for name in ("project", "mix", "feed")
    }
    return Block(
        **{
            **vars(block),
            **turns,
            **mixes,
            "rotate": None if block.rotate is None else unchanged(block.rotate),
        }
    )
