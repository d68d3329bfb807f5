"""Recorded runs: the keys, values and states that other runs borrow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seecause.engine.attend import Bank
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.mask import Mask
from seecause.engine.walk import walk
from seecause.models.layout import At, TokenLayout
from seecause.models.view import VisionModel


@dataclass(eq=False)
class Trace:
    """One run of a model. `states[l]` is the output of block l (1-based, 0 = embedding), [B, T, D];
    `kv[b]` what block b (0-based) computed from `states[b]`."""

    at: At
    logits: Tensor | None
    states: dict[int, Tensor] = field(default_factory=dict)
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def layout(self) -> TokenLayout:
        return self.at.layout

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
    trace = Trace(model.at(images), None)
    steps = walk(model, model.embed(images), trace.at)
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


def enter(model: VisionModel, images: Tensor) -> tuple[Tensor, At]:
    """What enters the first block [B, T, D], and at which tokens; as many images at a time as
    fit."""
    size = fit(len(images), model.forward_bytes(model.check(images)), images.device)

    def run_images(a: int, b: int) -> tuple[Tensor, At]:
        return model.embed(images[a:b]), model.at(images[a:b])

    parts = list(in_chunks(run_images, len(images), size, what="images"))
    facts = [at.facts for _, at in parts if at.facts is not None]
    return torch.cat([h for h, _ in parts]), parts[0][1].with_facts(lambda _: torch.cat(facts))


def suffix(model: VisionModel, h: Tensor, at: At, start: int) -> Tensor:
    """Logits of states h [B, T, D] that enter block `start` (0-based)."""
    return model.readout(walk(model, h, at, start=start).end(), at.layout)


def trace_bytes(model: VisionModel, layout: TokenLayout) -> int:
    """Memory that recording every key and value of one image takes (queries stay alive beside
    packed projections)."""
    element = torch.finfo(model.dtype).bits // 8
    return sum(
        layout.tokens * (b.heads + 2 * b.kv_heads) * b.head_dim * element for b in model.blocks
    )
