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

from seecause.engine.attend import Bank, Groups, Mask, Own, attend, merge
from seecause.engine.trace import Trace, suffix
from seecause.engine.walk import walk
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel
from seecause.types import wide, wide_dtype


@dataclass(frozen=True, eq=False)
class LiveRows:
    """Rows that are computed anew for each of n token sets, packed set by set: its special tokens
    first, then (perhaps) its chosen ones.

    Which rows there are is worked out on the CPU, so that nothing waits for the device.
    """

    sets: Tensor  # [n, T] the chosen tokens of each set, on the CPU
    marked: Tensor  # the same on the device
    is_special: Tensor  # [T] on the device
    special: tuple[int, ...]  # special tokens, alive in every set
    groups: Groups  # one group of rows per set
    tokens: Tensor  # [R] which token each row is
    special_rows: Tensor  # [n * p] where the special tokens are among the rows
    z: Tensor  # [B, R, D]

    @classmethod
    def start(cls, sets: Tensor, special: tuple[int, ...], states: Tensor) -> LiveRows:
        """The special tokens alone, one copy per set, as they are in `states` [b, T, D]."""
        device, n, p = states.device, len(sets), len(special)
        is_special = torch.zeros(sets.shape[1], dtype=torch.bool)
        is_special[list(special)] = True
        z = torch.cat([states[:, :0], *(states[:, t : t + 1] for t in special)], dim=1).repeat(
            1, n, 1
        )
        tokens, rows = torch.tensor(special, dtype=torch.long).repeat(n), torch.arange(n * p)
        sent = [t.to(device, non_blocking=True) for t in (sets, is_special, tokens, rows)]
        return cls(sets, sent[0], sent[1], special, Groups.even(n, p, device), sent[2], sent[3], z)

    def with_chosen(self, states: Tensor) -> LiveRows:
        """The chosen tokens beside the special ones, as they are in `states` [b, T, D]."""
        p, device = len(self.special), states.device
        present = torch.cat(
            [torch.ones(len(self.sets), p, dtype=torch.bool), self.sets], dim=1
        )  # [n, p + T]
        column = present.nonzero()[:, 1]
        named = torch.cat(
            [torch.tensor(self.special, dtype=torch.long), torch.arange(self.sets.shape[1])]
        )
        tokens, rows = (
            t.to(device, non_blocking=True) for t in (named[column], (column < p).nonzero()[:, 0])
        )
        z = (
            states[:, tokens].expand(len(self.z), -1, -1).clone()
            if len(states) < len(self.z)
            else states[:, tokens]
        )
        z[:, rows] = self.z
        return replace(
            self, groups=Groups(present.sum(dim=1), device), tokens=tokens, special_rows=rows, z=z
        )

    @property
    def has_chosen(self) -> bool:
        return len(self.tokens) > len(self.special_rows)


def read(
    model: VisionModel, context: Trace, donor: Trace, rows: LiveRows, *, replaced: bool
) -> Tensor:
    """Logits [B, n, C]. `replaced`: the chosen tokens are not the context's; they are live, or else
    the donor's."""
    readout, layout, n = model.readout, context.layout, len(rows.sets)
    live = readout.norm(rows.z)
    gone = rows.marked & replaced
    if readout.latent is not None:
        return _read_latent(model, context, donor, rows, live, gone)
    special = (
        live[:, rows.special_rows].unflatten(1, (n, len(rows.special))) if rows.special else live
    )
    parts = [special[:, :, rows.special.index(t)] for t in readout.read_prefix(layout)]
    if readout.has_mean:
        parts.append(_mean(model, context, donor, rows, live, gone).to(live.dtype))
    return readout.head(torch.cat(parts, dim=-1))


def _mean(
    model: VisionModel, context: Trace, donor: Trace, rows: LiveRows, live: Tensor, gone: Tensor
) -> Tensor:
    """The average over tokens with the chosen and the special ones replaced: [B, n, D], summed in
    float32 or better."""
    readout, final = model.readout, model.n_layers
    averaged = torch.zeros_like(rows.is_special)
    averaged[readout.averaged(context.layout)] = True
    kind = wide_dtype(live.dtype)
    total = (averaged & ~rows.is_special & ~gone).to(kind) @ wide(
        readout.norm(context.states[final])
    )  # [b, n, D]
    if not rows.has_chosen:
        total = total + (averaged & gone).to(kind) @ wide(readout.norm(donor.states[final]))
    counted = wide(live) * averaged[rows.tokens, None]
    return total.expand(len(live), -1, -1).index_add(1, rows.groups.owner, counted) / averaged.sum()


def _read_latent(
    model: VisionModel, context: Trace, donor: Trace, rows: LiveRows, live: Tensor, gone: Tensor
) -> Tensor:
    """A latent query per set reads frozen, replaced and live tokens."""
    readout, pool, n, final = model.readout, model.readout.latent, len(rows.sets), model.n_layers
    assert pool is not None
    part = readout.averaged(context.layout)
    queries = pool.query()
    per_set = queries.shape[2]
    q = queries.repeat(1, 1, n, 1).expand(len(live), -1, -1, -1)

    def bank(trace: Trace, keep: Tensor) -> Bank:  # keep [n, T] -> [1, 1, n*Q, A]
        return Bank(
            *pool.kv(readout.norm(trace.states[final])[:, part]),
            Mask(keep[:, part].repeat_interleave(per_set, dim=0)[None, None]),
        )

    banks = [bank(context, ~rows.is_special & ~gone)]
    if not rows.has_chosen:
        banks.append(bank(donor, gone))
    skipped = (
        0 if readout.over_prefix else len(rows.special)
    )  # special tokens the pool does not see
    seen = torch.ones(len(rows.tokens), dtype=torch.bool)
    seen[(rows.groups.starts[:-1].cpu()[:, None] + torch.arange(skipped)).flatten().long()] = False
    own = None
    if seen.any():
        kept = seen.nonzero()[:, 0].to(live.device)
        own = Own(
            *pool.kv(live[:, kept]),
            Groups.even(n, per_set, live.device),
            Groups(rows.groups.sizes - skipped, live.device),
        )
    o, _ = attend(q, banks, own, scale=pool.scale)
    return readout.head(pool.finish(o.unflatten(1, (n, per_set)).flatten(0, 1))).unflatten(
        0, (-1, n)
    )


Tail = Literal["patched", "blank", "source", "all"]


@dataclass(frozen=True)
class SweepPlan:
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
class BlankSummary:
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
    plan: SweepPlan

    def logits(self, chosen: Tensor, summary: BlankSummary | None = None) -> Tensor:
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

    def _class_rows(self, rows: LiveRows, until: int, summary: BlankSummary | None) -> LiveRows:
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
