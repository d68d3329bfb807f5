"""Stage 1: parts as prototypes (PDiscoFormer, Aniraj et al., ECCV 2024).

A patch feature z belongs to part k by its distance to a prototype, and a part is what its patches
average to:

    l_k = -|z - p_k|^2,    A = softmax_k(l + Gumbel noise),    v_k = mean over patches of A_k z

The last of the K + 1 parts is the background. Distances and maps are in float32 or better: |z|^2 is
of the order of 1000, and their differences decide.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.types import wide


def dot_products(features: Tensor, prototypes: Tensor) -> Tensor:
    """Patch features z [B, N, D] against prototypes p [K + 1, D] -> z.p [B, K + 1, N]."""
    return wide(prototypes) @ wide(features).transpose(1, 2)


def distances(features: Tensor, prototypes: Tensor, dots: Tensor) -> Tensor:
    """|z - p_k|^2 [B, K + 1, N], from dot products that are known already."""
    return (
        wide(features).square().sum(dim=-1)[:, None]
        - 2 * dots
        + wide(prototypes).square().sum(dim=-1)[:, None]
    )


def part_maps(logits: Tensor, noise: Tensor | None = None) -> Tensor:
    """Soft assignment A [B, K + 1, N] of every patch; sums to 1 over parts."""
    return torch.softmax(logits if noise is None else logits + noise, dim=1)


def part_embeddings(maps: Tensor, features: Tensor) -> Tensor:
    """v [B, D, K + 1]: the mean over all patches of A_k z, not divided by the part's area."""
    return (maps @ wide(features)).transpose(1, 2) / features.shape[1]


def part_logits(
    embeddings: Tensor, classifier: Tensor, kept: Tensor | None = None, drop: float = 0.0
) -> Tensor:
    """Modulated embeddings [B, D, K + 1] and a shared classifier [C, D] -> what each foreground
    part votes for, [B, C, K].

    `kept` [B, K] leaves parts out, and the others make up for them: votes are scaled by 1 / (1 -
    drop).
    """
    votes = wide(classifier) @ embeddings[..., :-1]
    return votes if kept is None else votes * kept[:, None] / (1 - drop)


def mean_vote(votes: Tensor, removed: Tensor) -> Tensor:
    """Votes [B, C, K] -> the mean [B, C] over parts that are not removed [K] (bool); zero where
    none is left."""
    stay = (~removed).to(votes.dtype)
    return (votes * stay).sum(dim=-1) / stay.sum().clamp_min(1)


class Modulation(nn.Module):
    """Part embeddings [B, D, K + 1], normalised, then scaled and shifted by weights of their own
    for every part.

    `joint` normalises all D (K + 1) numbers of an image together, background included, as the
    released code does; otherwise each part by itself, as the paper writes it.
    """

    def __init__(self, width: int, channels: int, *, joint: bool = True, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, channels))
        self.bias = nn.Parameter(torch.zeros(width, channels))
        self.joint, self.eps = joint, eps

    def forward(self, embeddings: Tensor) -> Tensor:
        weight, bias = wide(self.weight), wide(self.bias)
        if self.joint:
            return F.layer_norm(embeddings, tuple(weight.shape), weight, bias, self.eps)
        each = F.layer_norm(embeddings.transpose(1, 2), weight.shape[:1], eps=self.eps).transpose(
            1, 2
        )
        return each * weight + bias


def new_prototypes(parts: int, width: int) -> nn.Parameter:
    """K + 1 prototypes, drawn as a 1 x 1 convolution's weights are."""
    bound = 1 / math.sqrt(width)
    return nn.Parameter(torch.empty(parts + 1, width).uniform_(-bound, bound))
