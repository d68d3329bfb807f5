"""SaCo, salience-guided faithfulness coefficient (Wu et al. 2024): are groups of patches as
influential as the map says, by as much?

Patches in descending order are cut into K groups G_1 .. G_K of equal size; s(G) is the salience of
G and drop(G) the fall of the score when G alone is replaced by the picture's mean colour.
    w_ij = s_i - s_j   if drop_i >= drop_j   else   -(s_i - s_j)          i < j
    SaCo = sum_{i<j} w_ij / sum_{i<j} |w_ij|                              -1 to 1, higher is better
Defaults: K = 10, probability, mean fill. A constant map makes no claim and has no score: NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.metrics._pixels import Ties, importance_ranks
from seecause.metrics._scorer import Fill, picture_scorer
from seecause.metrics.registry import higher, metric
from seecause.models.base import ImageModel
from seecause.target import Score, Spec


@metric(
    "saco",
    family="removal",
    columns={
        "saco": higher(
            "do groups of patches matter in the order and proportion that the map claims? From -1 "
            "to 1"
        ),
    },
)
@torch.no_grad()
def saco(
    model: ImageModel,
    images: Tensor,
    maps: Tensor,
    target: Spec = None,
    *,
    groups: int = 10,
    fill: Fill = "mean",
    score: Score = "prob",
    ties: Ties = "raster",
) -> Tensor:
    """[B]. Where the number of patches is no multiple of `groups`, groups differ by one patch:
    salience is therefore their mean, not their sum."""
    scorer = picture_scorer(model, images, target, score=score)
    cells = scorer.cells(maps)
    grid, count = (cells.shape[1], cells.shape[2]), cells[0].numel()
    if not 2 <= groups <= count:
        raise BadOption("groups", groups, f"2 to {count}, the number of patches")
    places, _ = importance_ranks(cells, grid, grid, order="patch", ties=ties)  # [B, gh, gw]
    member = (places[:, None] * groups // count) == torch.arange(groups, device=places.device)[
        :, None, None
    ]  # [B, K, gh, gw]
    salience = (cells[:, None] * member).sum(dim=(2, 3)) / member.sum(dim=(2, 3))
    flat = (cells == cells[:, :1, :1]).flatten(1).all(dim=1).cpu()
    return coefficient(salience.cpu(), scorer.drops(member, fill)).masked_fill(flat, torch.nan)


def coefficient(salience: Tensor, drops: Tensor) -> Tensor:
    """SaCo [B] of groups in descending order, from their salience and drops, both [B, K]."""
    first, second = torch.triu_indices(salience.shape[1], salience.shape[1], offset=1)
    gap = salience[:, first] - salience[:, second]
    weight = torch.where(drops[:, first] >= drops[:, second], gap, -gap)
    return weight.sum(dim=1) / weight.abs().sum(dim=1)
