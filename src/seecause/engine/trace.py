"""Recorded runs: the keys, values and states that other runs borrow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seecause.engine.attend import Bank
from seecause.engine.mask import Mask
from seecause.models.block import fused
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel


@dataclass(eq=False)
class Trace:
    """One run of a model. `states[l]` is the output of block l (1-based, 0 = embedding), [B, T, D];
    `kv[b]` what block b (0-based) computed from `states[b]`."""

    layout: TokenLayout
    logits: Tensor | None
    states: dict[int, Tensor] = field(default_factory=dict)
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def bank(self, block: int, keep: Mask | None = None) -> Bank:
        k, v = self.kv[block]
        return Bank(k, v, keep)


def record(
    model: VisionModel,
    images: Tensor,
    *,
    states: Collection[int] = (),
    kv: Collection[int] = (),
    until: int | None = None,
) -> Trace:
    """Run the model with fused attention and keep what was asked for. Stops after block `until` (no
    logits then)."""
    layout = model.check(images)
    at, h = layout.at(images.device), model.embed(images)
    trace = Trace(layout, None)
    last = model.n_layers if until is None else until
    for index, block in enumerate(model.blocks):
        if index in states:
            trace.states[index] = h
        if index >= last and index not in kv:
            break
        q, k, v = block.qkv(h, at)
        if index in kv:
            trace.kv[index] = (k, v)
        if index >= last:
            break
        h = block.finish(h, fused(q, k, v, block.scale, block.bias(at, at)), model.gate(index))
    else:
        if model.n_layers in states:
            trace.states[model.n_layers] = h
        if until is None:
            trace.logits = model.readout(h, layout)
    return trace


def suffix(model: VisionModel, h: Tensor, layout: TokenLayout, start: int) -> Tensor:
    """Logits of states h [B, T, D] that enter block `start` (0-based)."""
    at = layout.at(h.device)
    for index in range(start, model.n_layers):
        h = model.blocks[index](h, at, model.gate(index))
    return model.readout(h, layout)


def trace_bytes(model: VisionModel, layout: TokenLayout) -> int:
    """Memory that recording every key and value of one image takes (queries stay alive beside
    packed projections)."""
    element = torch.finfo(model.dtype).bits // 8
    return sum(
        layout.tokens * (b.heads + 2 * b.kv_heads) * b.head_dim * element for b in model.blocks
    )
