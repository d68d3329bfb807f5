"""Random heads: what removing any K of them does. Every comparison shows this band beside it (at
least 20 draws)."""

from __future__ import annotations

import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.heads.registry import selector
from seecause.heads.result import Head, HeadScores
from seecause.heads.values import absent
from seecause.models.view import VisionModel


@selector("random", cost="none", needs="nothing")
def random_heads(
    model: VisionModel, images: Tensor, labels: Tensor, *, seed: int = 0
) -> HeadScores:
    """Every order of heads is as likely as any other: the control for all others."""
    missing = absent(model)
    value = (
        torch.rand(
            missing.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        + 1e-9
    )
    return HeadScores(
        value.masked_fill(missing, torch.nan), protocol={"selector": "random", "seed": seed}
    )


def random_sets(
    model: VisionModel, k: int | float, *, draws: int = 20, seed: int = 0
) -> list[list[Head]]:
    """`draws` independent sets of `k` heads (a count, or a share of all)."""
    if draws < 1:
        raise BadOption("draws", draws, "a count above 0")
    nothing = torch.empty(0)
    return [
        sorted(random_heads(model, nothing, nothing, seed=seed * 1_000_003 + draw).top(k))
        for draw in range(draws)
    ]
