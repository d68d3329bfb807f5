"""MUTEX (Traini et al.): 54 ways to read the attention graph vote on which half of the patches
matters.

Attention between patches is a graph in each block (heads fused by min, max or sum; edges below 1 %
of the block's largest are cut). A node's in- or out-degree over blocks is summarised by nine
statistics: 3 fusions x 2 degrees x 9 = 54 vectors. Each keeps the nodes at or above its lower
median; the others are dropped after the position embedding, and with the class score f_m of what is
left
    S_j = sum_m M_mj f_m / max(1, sum_m M_mj)
Prefix tokens are no nodes but stay in every run. The map is coarse: few masks, many ties. No
gradient is used.
"""

from __future__ import annotations

import math
from itertools import islice

import torch
from torch import Tensor

from seecause.attribution.gradients import one_block, settle
from seecause.attribution.registry import Maps, method
from seecause.engine.attention import attention_probs
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.trace import kept_logits_each
from seecause.errors import BadOption
from seecause.models.view import VisionModel
from seecause.target import Score, Target


@method("mutex", forwards="1 + 54 on half of the patches", needs="attention, token removal")
@torch.no_grad()
def mutex(
    model: VisionModel,
    images: Tensor,
    target: Target,
    *,
    keep: float = 0.5,
    edge: float = 0.01,
    start: int = 0,
    score: Score = "prob",
) -> Maps:
    """The mean score of runs on half of the patches, chosen by 54 statistics of the attention
    graph."""
    if not 0 < keep <= 1 or not 0 <= start < model.n_layers:
        raise BadOption(
            "keep, start", (keep, start), f"a share in (0, 1] and a block 0-{model.n_layers - 1}"
        )
    layout = model.check(images)
    each = one_block(model, layout)

    def run_chunk(a: int, b: int) -> Tensor:
        return upper(
            statistics(_degrees(model, images[a:b], edge=edge, start=start)).flatten(1, 3), keep
        )

    chosen = torch.cat(
        list(
            in_chunks(run_chunk, len(images), fit(len(images), each, images.device), what="images")
        )
    )  # [B, 54, N]
    bound = settle(model, images, target)
    scores = bound.score(
        kept_logits_each(model, images, chosen), score, sigmoid=model.sigmoid
    )  # [B, 54]
    there = chosen.to(scores.dtype)
    return Maps((scores[..., None] * there).sum(dim=1) / there.sum(dim=1).clamp_min(1), bound)


def _degrees(model: VisionModel, images: Tensor, *, edge: float, start: int) -> Tensor:
    """Degrees [B, 3 fusions, 2 (in, out), L', N] of every patch in the blocks from `start` on."""
    patches, degrees = model.check(images).patches, []
    for probs in islice(
        attention_probs(model, images, start=start), model.n_layers - start
    ):  # each [B, H, T, T]; a latent pool is no block
        between = probs[..., patches, patches]
        graph = torch.stack(
            [between.amin(dim=1), between.amax(dim=1), between.sum(dim=1)], dim=1
        )  # [B, 3, N, N]
        graph = graph.masked_fill(graph < edge * graph.amax(dim=(-1, -2), keepdim=True), 0)
        degrees.append(torch.stack([graph.sum(dim=-2), graph.sum(dim=-1)], dim=2))  # [B, 3, 2, N]
    return torch.stack(degrees, dim=3)


def statistics(table: Tensor) -> Tensor:
    """Nine numbers for each node of tables [..., L, N] over its L values: [..., 9, N]. What has no
    meaning (0/0) is 0."""
    total, mean = table.sum(dim=-2), table.mean(dim=-2)
    spread = table.std(dim=-2) if table.shape[-2] > 1 else torch.zeros_like(total)
    share = table / total[..., None, :]
    centred = table - mean[..., None, :]
    second, third, fourth = ((centred**power).mean(dim=-2) for power in (2, 3, 4))
    rows = [
        -torch.special.xlogy(share, share).sum(dim=-2),
        table.amax(dim=-2),
        table.amin(dim=-2),
        total,
        spread,
        total / (spread + 1e-8),
        table.median(dim=-2).values,  # the lower one
        third / second**1.5,
        fourth / second**2 - 3,
    ]
    return torch.stack(rows, dim=-2).nan_to_num(0, 0, 0)


def upper(values: Tensor, keep: float) -> Tensor:
    """The share `keep` of the patches with the highest values [..., N]: those at or above the
    threshold, so ties keep more."""
    n = values.shape[-1]
    place = max(0, math.ceil((1 - keep) * n) - 1)
    return values >= values.sort(dim=-1).values[..., place, None]
