"""Recorded runs: the keys, values and states that other runs borrow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seecause.engine.attend import Bank
from seecause.engine.mask import Mask
from seecause.engine.walk import walk
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
    trace = Trace(layout, None)
    steps = walk(model, model.embed(images), layout.at(images.device))
    for step in steps:
        if step.index in states:
            trace.states[step.index] = step.h
        if step.index in kv:
            trace.kv[step.index] = (step.k, step.v)
        if until is not None and step.index >= until:
            return trace
    if model.n_layers in states:
        trace.states[model.n_layers] = steps.h
    if until is None:
        trace.logits = model.readout(steps.h, layout)
    return trace


def suffix(model: VisionModel, h: Tensor, layout: TokenLayout, start: int) -> Tensor:
    """Logits of states h [B, T, D] that enter block `start` (0-based)."""
    return model.readout(walk(model, h, layout.at(h.device), start=start).end(), layout)


def trace_bytes(model: VisionModel, layout: TokenLayout) -> int:
    """Memory that recording every key and value of one image takes (queries stay alive beside
    packed projections)."""
    element = torch.finfo(model.dtype).bits // 8
    return sum(
        layout.tokens * (b.heads + 2 * b.kv_heads) * b.head_dim * element for b in model.blocks
    )
