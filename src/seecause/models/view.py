"""The view of a native vision transformer, split into named parts.

    embed -> blocks -> readout

The readout says which of the last block's tokens are read, and how:

    class token | class + distillation token | mean | class + mean | latent query

Every kind is `head(pool(norm(h)))`: `norm` acts on rows, `pool` picks or averages, `head` does the
rest (a norm after pooling, a projection, a text matrix).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from seecause.engine.walk import walk
from seecause.files import digest
from seecause.models.base import Architecture, ImageModel
from seecause.models.block import At, Block, Fn, TokenLayout, fused, same, span

# words: through a language model (lvlm.classifier)
Kind = Literal["cls", "cls+dist", "mean", "cls+mean", "latent", "words"]


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
        """The special tokens that the head reads, in the order it expects."""
        read = [layout.class_index] if self.kind in ("cls", "cls+mean", "cls+dist") else []
        read += [layout.distill_index] if self.kind == "cls+dist" else []
        return tuple(token for token in read if token is not None)

    def averaged(self, layout: TokenLayout) -> slice:
        """The tokens that mean and latent readouts read."""
        return slice(0 if self.over_prefix else layout.prefix, layout.tokens)

    @property
    def reads_rows(self) -> bool:
        """Whether only a few rows are read, so that the last block need not compute the others."""
        return not self.has_mean and self.latent is None

    def rows(self, layout: TokenLayout) -> slice | list[int] | None:
        """The rows that the readout uses; None: all."""
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


@dataclass(eq=False, kw_only=True, repr=False)
class VisionModel(ImageModel):
    """A view of a native vision transformer. `model(images)` gives logits, through the native
    modules.

    `gates` [L, H], when set, multiplies the heads everywhere: in `model(images)` and in every
    method. H is that of the widest block; a block with fewer heads reads as many as it has.
    """

    architecture: ClassVar[Architecture] = "transformer"

    embed: Fn  # images [B, 3, H, W] -> tokens entering the first block [B, T, D]
    blocks: list[Block]
    readout: Readout
    gates: Tensor | None = None
    # the class that each class of the module is merged into (background)
    merged: tuple[int, ...] = ()
    # images [B, 3, H, W] -> facts about each token [B, T, F] (block.py)
    facts: Fn | None = None
    # of a module of a user's own: the path of the linear layer that gives logits ("" if there is
    # none), and which of several outputs is read
    last: str | None = None
    output: int | str | None = None

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    @property
    def n_heads(self) -> int:
        """Heads of the widest block."""
        return max(block.heads for block in self.blocks)

    def at(self, images: Tensor) -> At:
        """The positions of all tokens of these images, with the facts that blocks may read."""
        at = self.layout_at(images.shape[-2], images.shape[-1]).at(images.device)
        return at if self.facts is None else replace(at, facts=self.facts(images).detach())

    @property
    def readout_name(self) -> str:
        return self.readout.kind

    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images [B, 3, H, W] -> logits [B, C]."""
        with self.eval_mode():
            layout = self.check(images)
            return self.readout(walk(self, self.embed(images), self.at(images)).end(), layout)

    def forward_bytes(self, layout: TokenLayout) -> int:
        """States, packed projections and the MLP of one image."""
        width = max(block.heads * block.head_dim for block in self.blocks)
        return layout.tokens * width * (torch.finfo(self.dtype).bits // 8) * 14

    def gate(self, layer: int) -> Tensor | None:
        """The gates of one block, [H], or None."""
        if self.gates is None:
            return None
        return self.gates[layer, : self.blocks[layer].heads].to(self.device, self.dtype)

    @contextmanager
    def gated(self, gates: Tensor) -> Iterator[VisionModel]:
        """Multiply every head by `gates` [L, H] inside the block."""
        before, gates = self.gates, gates.to(self.device, self.dtype)
        self.gates = gates if before is None else gates * before
        try:
            yield self
        finally:
            self.gates = before

    def state_key(self) -> tuple[Any, ...]:
        """Includes the values of the gates, because a new gate tensor can be allocated at the
        address of an old one."""
        return (*super().state_key(), self._gate_values())

    def fingerprint(self) -> str:
        """A digest of the weights, the gates, and the mapping of merged classes."""
        marks = [
            digest(repr(values), length=8)
            for values in (self._gate_values(), self.merged)
            if values
        ]
        return "-".join([super().fingerprint(), *marks])

    def _gate_values(self) -> tuple[float, ...] | None:
        """The gates as numbers, copied to the host when they changed."""
        gates = self.gates
        if gates is None:
            return None
        version = None if gates.is_inference() else gates._version
        known = self.memo.get("gates")
        if version is None or known is None or known[0] is not gates or known[1] != version:
            values = tuple(gates.detach().flatten().tolist())
            known = self.memo["gates"] = (gates, version, values)
        return known[2]
