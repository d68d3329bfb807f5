"""Put tokens of one run into another, for many token sets at once.

The `context` run is frozen, except for *live* rows: the class token (and its distillation twin),
which sees the context's keys, but the donor's keys at the chosen tokens S(i). One live copy per set
i; all copies run together. What happens to the chosen tokens after layer `stop` is the tail:

    source    they keep the donor's keys and values to the end (stop has no effect)
    blank     they fall back to the context's
    patched   they become live rows themselves: group i = {class_i} + S(i), each group sees the
    context and itself
    all       every token of every copy is computed again

States are named as in the paper: l = 0 is the embedding, l = 1..L the block outputs. Block b
(0-based) turns state b into b + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.attend import Own, attend, merge
from seecause.engine.live import LiveRows, read
from seecause.engine.mask import Mask
from seecause.engine.trace import Trace, suffix
from seecause.engine.walk import walk
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel

Tail = Literal["patched", "blank", "source", "all"]


@dataclass(frozen=True)
class Plan:
    """Layers start..stop (inclusive, of states) where the donor's tokens are put in, the tail, and
    the live special tokens."""

    tail: Tail
    start: int
    stop: int
    live: tuple[int, ...]

    def donor_blocks(self, n_layers: int) -> range:
        """Blocks that read the donor's keys."""
        if self.tail == "source":
            return range(self.start, n_layers)
        ends = self.stop + 1 if self.tail == "blank" else self.stop
        return range(self.start, min(ends, n_layers))

    def context_blocks(self, n_layers: int) -> range:
        """Blocks whose context keys are read."""
        return range(self.start, self.stop if self.tail == "all" else n_layers)

    def context_states(self, n_layers: int) -> set[int]:
        return {self.start, n_layers} | ({self.stop} if self.tail == "all" else set())

    def donor_states(self, n_layers: int) -> set[int]:
        return {min(self.stop, n_layers), n_layers}


def live_tokens(layout: TokenLayout, *, registers: bool = False) -> tuple[int, ...]:
    """The special tokens that are computed again: class and distillation token, registers on
    request."""
    special = [i for i in (layout.class_index, layout.distill_index) if i is not None]
    return tuple(special + (list(layout.registers) if registers else []))


@dataclass(eq=False)
class Summary:
    """A context that is the same for every query: its output o [1, R, H, dh] and lse [1, R, H] per
    block (E-CAAP)."""

    parts: dict[int, tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Sweep:
    """Runs a plan on recorded runs. Batches of `context` and `donor` are equal, or one of them is
    1."""

    model: VisionModel
    context: Trace
    donor: Trace
    plan: Plan

    def logits(self, chosen: Tensor, summary: Summary | None = None) -> Tensor:
        """Token sets chosen [n, N] (bool, over patches, on the CPU) -> logits [B, n, C]."""
        layers, layout, plan = self.model.n_layers, self.context.layout, self.plan
        marked = F.pad(chosen, (layout.prefix, 0))  # [n, T]
        unfinished = plan.stop < layers and plan.tail in ("patched", "all")
        rows = self._class_rows(
            LiveRows.start(marked, plan.live, self.context.states[plan.start]),
            plan.stop if unfinished else layers,
            summary,
        )
        if unfinished and plan.tail == "all":
            return self._recompute(rows)
        if unfinished:
            rows = self._grouped_rows(rows)
        replaced = (
            plan.tail != "blank" or plan.stop >= layers
        )  # the chosen tokens are no longer the context's when the answer is read
        return read(self.model, self.context, self.donor, rows, replaced=replaced)

    def _class_rows(self, rows: LiveRows, until: int, summary: Summary | None) -> LiveRows:
        """The live special tokens from state `start` to state `until`."""
        plan, z = self.plan, rows.z.expand(self._batch(), -1, -1)
        if not plan.live:
            return replace(rows, z=z)
        at = self.context.at.take(rows.tokens)
        seen = rows.marked.repeat_interleave(len(plan.live), dim=0)[None, None]  # [1, 1, n*p, T]
        frozen = ~rows.is_special
        of_donor, beside_donor, without_donor = (
            Mask(seen),
            Mask(frozen & ~seen),
            Mask(frozen.expand_as(seen)),
        )
        donor_blocks = plan.donor_blocks(self.model.n_layers)
        steps = walk(self.model, z, at, start=plan.start, stop=until)
        for step in steps:
            mixed = step.index in donor_blocks
            banks = [self.donor.bank(step.index, of_donor)] if mixed else []
            if summary is None:
                context = self.context.bank(step.index, beside_donor if mixed else without_donor)
                banks.insert(0, context)
            own = Own(step.k, step.v, rows.groups, rows.groups)
            step.o, lse = attend(step.q, banks, own, scale=step.block.scale)
            if summary is not None:
                o, blank_lse = summary.parts[step.index]
                parts = [step.o.to(lse.dtype), o], [lse, blank_lse.expand_as(lse)]
                step.o = merge(*parts)[0].to(z.dtype)
        return replace(rows, z=steps.h)

    def _grouped_rows(self, special: LiveRows) -> LiveRows:
        """Live special tokens and chosen tokens together from state `stop` to the end (in the last
        block only the special ones, where no other row is read)."""
        stop, last = self.plan.stop, self.model.n_layers - 1
        rows = special.with_chosen(self.donor.states[stop])
        at = self.context.at.where(~rows.is_special, self.donor.at).take(rows.tokens)
        outside = ~(rows.marked | rows.is_special)  # [n, T]
        keep = Mask(outside[rows.groups.owner][None, None])
        groups = rows.groups
        steps = walk(self.model, rows.z, at, start=stop)
        for step in steps:
            if step.index == last and self.model.readout.reads_rows:
                step.take(rows.special_rows)
                rows, keep = special, Mask(outside[special.groups.owner][None, None])
            own = Own(step.k, step.v, rows.groups, groups)
            banks = [self.context.bank(step.index, keep)]
            step.o, _ = attend(step.q, banks, own, scale=step.block.scale)
        return replace(rows, z=steps.h)

    def _recompute(self, rows: LiveRows) -> Tensor:
        """Every token of every copy from state `stop` on."""
        n, stop = len(rows.marked), self.plan.stop
        state = torch.where(
            rows.marked[None, :, :, None],
            self.donor.states[stop][:, None],
            self.context.states[stop][:, None],
        )  # [B, n, T, D]
        state = state.expand(self._batch(), -1, -1, -1).clone()
        for place, token in enumerate(self.plan.live):
            state[:, :, token] = rows.z.unflatten(1, (n, -1))[:, :, place]
        at = self.context.at.with_facts(lambda facts: self._mixed(facts, rows.marked))
        return suffix(self.model, state.flatten(0, 1), at, stop).unflatten(0, (self._batch(), n))

    def _mixed(self, facts: Tensor, marked: Tensor) -> Tensor:
        """Facts [B * n, T, F] of every copy: the donor's where tokens are marked [n, T]."""
        assert self.donor.at.facts is not None
        mixed = torch.where(marked[None, :, :, None], self.donor.at.facts[:, None], facts[:, None])
        return mixed.expand(self._batch(), -1, -1, -1).flatten(0, 1)

    def _batch(self) -> int:
        return max(len(next(iter(trace.states.values()))) for trace in (self.context, self.donor))
