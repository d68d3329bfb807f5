"""From the last block's output to logits: which tokens are read, and how.

    class token | class + distillation token | mean | class + mean | latent query

Every kind is `head(pool(norm(h)))`: `norm` acts on rows, `pool` picks or averages, `head` does the
rest (a norm after pooling, a projection, a text matrix).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from seecause.models.block import Fn, fused, same
from seecause.models.layout import TokenLayout, span

Kind = Literal[
    "cls", "cls+dist", "mean", "cls+mean", "latent", "words"
]  # words: through a language model (lvlm.classifier)


@dataclass(eq=False)
class LatentPool:
    """Attention pooling: a constant query reads the final tokens. It takes banks like any block."""

    scale: float
    query: Callable[[], Tensor]  # -> [1, H, Q, dh]
    kv: Callable[[Tensor], tuple[Tensor, Tensor]]  # normed rows [B, R, D] -> k, v [B, H, R, dh]
    finish: Fn  # [B, Q, H, dh] -> pooled [B, D]


@dataclass(eq=False)
class Readout:
    """Reads logits from the final states."""

    kind: Kind
    head: Fn  # pooled [..., P] -> logits [..., C]
    norm: Fn = same  # rows [B, R, D] -> [B, R, D]
    over_prefix: bool = False  # whether mean and latent also read the prefix tokens
    latent: LatentPool | None = None

    def read_prefix(self, layout: TokenLayout) -> tuple[int, ...]:
        """The special tokens the answer is read from, in the order `head` expects."""
        if self.kind in ("cls", "cls+mean"):
            return (_index(layout.class_index),)
        if self.kind == "cls+dist":
            return (_index(layout.class_index), _index(layout.distill_index))
        return ()

    def averaged(self, layout: TokenLayout) -> slice:
        """The tokens that mean and latent readouts read."""
        return slice(0 if self.over_prefix else layout.prefix, layout.tokens)

    @property
    def reads_rows(self) -> bool:
        """Whether a few rows are read, each for itself: the last block need not compute the
        others."""
        return not self.has_mean and self.latent is None

    def rows(self, layout: TokenLayout) -> slice | list[int] | None:
        """The only rows that are read; None: all."""
        return span(self.read_prefix(layout)) if self.reads_rows else None

    def of_rows(self, h: Tensor, layout: TokenLayout) -> Tensor:
        """Logits of final states that may have been narrowed to `rows`, [B, T or p, D]."""
        if not self.reads_rows:
            return self(h, layout)
        return self.head(self.norm(h).flatten(1))

    @property
    def has_mean(self) -> bool:
        return self.kind in ("mean", "cls+mean")

    def __call__(self, h: Tensor, layout: TokenLayout) -> Tensor:
        """Final states [B, T, D] -> logits [B, C]."""
        if self.latent is not None:
            rows = self.norm(h)[:, self.averaged(layout)]
            k, v = self.latent.kv(rows)
            q = self.latent.query().expand(h.shape[0], -1, -1, -1)
            return self.head(self.latent.finish(fused(q, k, v, self.latent.scale)))
        if not self.has_mean:  # only the rows that are read need the norm
            return self.head(self.norm(h[:, span(self.read_prefix(layout))]).flatten(1))
        rows = self.norm(h)
        parts = [rows[:, t] for t in self.read_prefix(layout)]
        return self.head(torch.cat([*parts, rows[:, self.averaged(layout)].mean(dim=1)], dim=-1))


def _index(index: int | None) -> int:
    if index is None:
        raise ValueError("this readout needs a token that the layout does not have")
    return index
