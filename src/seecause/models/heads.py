"""Heads for backbones that have none: a matrix, texts or prototypes by cosine, or likeness to
reference pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CosineHead(nn.Module):
    """`scale * cos(pooled, row)` for every row of `matrix` [C, D]: text, prototype or
    reference-image embeddings."""

    matrix: Tensor

    def __init__(self, matrix: Tensor, *, scale: float = 100.0):
        super().__init__()
        self.register_buffer("matrix", F.normalize(matrix.detach(), dim=-1))
        self.scale = scale

    def forward(self, pooled: Tensor) -> Tensor:
        return self.scale * F.normalize(pooled, dim=-1) @ self.matrix.T


@dataclass(frozen=True, eq=False)
class Similarity:
    """Likeness to reference pictures, one "class" each: normalised images [K, 3, H, W], embedded by
    the backbone itself when it is wrapped.

    Each is judged by itself (`prob` is a sigmoid), so that one reference is enough.
    """

    images: Tensor
    scale: float = 10.0

    @torch.no_grad()
    def head(self, pooled: Callable[[Tensor], Tensor]) -> CosineHead:
        return CosineHead(pooled(self.images), scale=self.scale)


def linear(matrix: Tensor) -> nn.Module:
    """A linear head without bias from its matrix [C, D]."""
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, dtype=matrix.dtype)
    with torch.no_grad():
        layer.weight.copy_(matrix)
    return layer
