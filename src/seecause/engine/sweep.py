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

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from seecause.engine.attend import Bank, Mask, Own, attend, merge, own_bias
from seecause.engine.token_sets import RowGroups, TokenSets, token_sets
from seecause.engine.trace import Trace, suffix
from seecause.engine.walk import Step, walk
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel
from seecause.types import wide, wide_dtype


@dataclass(frozen=True, eq=False)
class LiveRows:
    """Rows that are computed anew for each of n token sets, packed set by set: its special tokens
    first, then (perhaps) its chosen ones."""

    sets: TokenSets
    groups: RowGroups
    z: Tensor  # [B, R, D]

    @property
    def tokens(self) -> Tensor:
        """Which token each row is, [R]."""
        return self.groups.tokens

    @property
    def has_chosen(self) -> bool:
        return len(self.tokens) > len(self.groups.special_rows)


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

    def context_states(self, model: VisionModel) -> set[int]:
        """States of the context that are read; the last only where others than special tokens
        are."""
        return {self.start} | self._final(model) | ({self.stop} if self.tail == "all" else set())

    def donor_states(self, model: VisionModel) -> set[int]:
        """States of the donor that are read."""
        return self._final(model) | ({self.stop} if self.unfinished(model.n_layers) else set())

    def unfinished(self, n_layers: int) -> bool:
        """Whether chosen tokens are computed again behind `stop`."""
        return self.stop < n_layers and self.tail in ("patched", "all")

    def _final(self, model: VisionModel) -> set[int]:
        return set() if model.readout.reads_rows else {model.n_layers}


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

    def logits(self, chosen: TokenSets | Tensor, summary: BlankSummary | None = None) -> Tensor:
        """Logits [B, n, C] of n token sets, or of patches [n, N] (bool, on the CPU)."""
        layers, plan, sets = self.model.n_layers, self.plan, chosen
        if isinstance(sets, Tensor):
            sets = token_sets(self.model, sets, self.context.layout, plan.live)
        unfinished = plan.unfinished(layers)
        rows = self._class_rows(sets, plan.stop if unfinished else layers, summary)
        if unfinished and plan.tail == "all":
            return self._recompute(rows)
        if unfinished:
            rows = self._grouped_rows(rows)
        # the chosen tokens are no longer the context's when the answer is read
        replaced = plan.tail != "blank" or plan.stop >= layers
        return self._read(rows, rows.sets.marked & replaced)

    def _read(self, rows: LiveRows, gone: Tensor) -> Tensor:
        """Logits [B, n, C]. Tokens that are `gone` [n, T] are not the context's: they are live, or
        else the donor's."""
        readout, special = self.model.readout, rows.sets.special
        live = readout.norm(rows.z)
        if readout.latent is not None:
            return self._read_latent(rows, live, gone)
        first = live[:, rows.groups.special_rows] if rows.has_chosen else live
        copies = first.unflatten(1, (len(rows.sets), len(special))) if special else first
        parts = [copies[:, :, special.index(t)] for t in readout.read_prefix(self.context.layout)]
        if readout.has_mean:
            parts.append(self._mean(rows, live, gone).to(live.dtype))
        return readout.head(torch.cat(parts, dim=-1))

    def _mean(self, rows: LiveRows, live: Tensor, gone: Tensor) -> Tensor:
        """The average over tokens with the chosen and the special ones replaced: [B, n, D], summed
        in float32 or better."""
        readout, is_special = self.model.readout, rows.sets.is_special
        averaged = torch.zeros_like(is_special)
        averaged[readout.averaged(self.context.layout)] = True
        kind = wide_dtype(live.dtype)
        staying = (averaged & ~is_special & ~gone).to(kind)  # [n, T]
        total = staying @ wide(self._final(self.context))  # [b, n, D]
        if not rows.has_chosen:
            total = total + (averaged & gone).to(kind) @ wide(self._final(self.donor))
        counted = wide(live) * averaged[rows.tokens, None]
        total = total.expand(len(live), -1, -1).index_add(1, rows.groups.groups.owner, counted)
        return total / averaged.sum()

    def _read_latent(self, rows: LiveRows, live: Tensor, gone: Tensor) -> Tensor:
        """A latent query per set reads frozen, replaced and live tokens."""
        readout, pool, n = self.model.readout, self.model.readout.latent, len(rows.sets)
        assert pool is not None
        part = readout.averaged(self.context.layout)
        queries = pool.query()
        per_set = queries.shape[2]
        q = queries.repeat(1, 1, n, 1).expand(len(live), -1, -1, -1)

        def bank(trace: Trace, keep: Tensor) -> Bank:  # keep [n, T] -> [1, 1, n*Q, A]
            seen = keep[:, part].repeat_interleave(per_set, dim=0)[None, None]
            return Bank(*pool.kv(self._final(trace)[:, part]), Mask(seen))

        banks = [bank(self.context, ~rows.sets.is_special & ~gone)]
        if not rows.has_chosen:
            banks.append(bank(self.donor, gone))
        # special tokens that the pool does not see
        skipped = 0 if readout.over_prefix else len(rows.sets.special)
        seen = rows.sets.seen_rows(rows.groups, skipped)
        own = None
        if seen is not None:
            own = Own(*pool.kv(live[:, seen[0]]), rows.sets.even_groups(per_set), seen[1])
        o, _ = attend(q, banks, own, scale=pool.scale)
        pooled = pool.finish(o.unflatten(1, (n, per_set)).flatten(0, 1))
        return readout.head(pooled).unflatten(0, (-1, n))

    def _final(self, trace: Trace) -> Tensor:
        """Normed states behind the last block, [b, T, D]."""
        return self.model.readout.norm(trace.states[self.model.n_layers])

    def _class_rows(self, sets: TokenSets, until: int, summary: BlankSummary | None) -> LiveRows:
        """The live special tokens from state `start` to state `until`."""
        plan, n, p, rows = self.plan, len(sets), len(self.plan.live), sets.class_rows
        states = self.context.states[plan.start]
        first = torch.cat([states[:, :0], *(states[:, t : t + 1] for t in plan.live)], dim=1)
        z = _copies(first, n).expand(self._batch(), n * p, -1)  # all sets begin alike
        if not plan.live:
            return LiveRows(sets, rows, z)
        donor_blocks = plan.donor_blocks(self.model.n_layers)
        steps = walk(self.model, z, self.context.at.take(rows.tokens), start=plan.start, stop=until)
        for step in steps:
            if step.index == plan.start:
                self._share(step, first, rows.tokens[:p])
            mixed = step.index in donor_blocks
            bias = step.block.bias(step.at, self.context.at)  # tokens have one place in both runs
            banks = [self.donor.bank(step.index, sets.donor_mask, bias)] if mixed else []
            if summary is None:
                keep = sets.context_mask if mixed else sets.whole_mask
                banks.insert(0, self.context.bank(step.index, keep, bias))
            beside = own_bias(step.block, step.at, step.at, rows.groups, rows.groups)
            own = Own(step.k, step.v, rows.groups, rows.groups, beside)
            step.o, lse = attend(step.q, banks, own, scale=step.block.scale)
            if summary is not None:
                o, blank_lse = summary.parts[step.index]
                parts = [step.o.to(lse.dtype), o], [lse, blank_lse.expand_as(lse)]
                step.o = merge(*parts)[0].to(z.dtype)
        return LiveRows(sets, rows, steps.h)

    def _share(self, step: Step, first: Tensor, tokens: Tensor) -> None:
        """In the first block all copies ask and tell the same: projected once from the special
        tokens `first` [b, p, D]."""
        n, batch = len(step.at.index) // len(tokens), self._batch()
        projected = step.block.qkv(first, self.context.at.take(tokens))
        step.q, step.k, step.v = (
            _copies(x.flatten(0, 1), n).unflatten(0, x.shape[:2]).expand(batch, -1, -1, -1)
            for x in projected
        )

    def _grouped_rows(self, special: LiveRows) -> LiveRows:
        """Live special tokens and chosen tokens together from state `stop` to the end (in the last
        block only the special ones, where no other row is read)."""
        stop, last, sets = self.plan.stop, self.model.n_layers - 1, special.sets
        rows, keep = sets.grouped_rows, sets.outside_mask
        keys, donor = rows.groups, self.donor.states[stop]
        at = self.context.at.where(~sets.is_special, self.donor.at).take(rows.tokens)
        steps = walk(self.model, self._gather(donor, special.z, sets, dim=1), at, start=stop)
        for step in steps:
            if step.index == stop:  # chosen tokens ask and tell as in the donor's own run
                theirs = step.block.qkv(donor, self.donor.at)
                own_at = self.context.at.take(special.tokens)
                ours = step.block.qkv(special.z, own_at) if sets.special else theirs
                step.q, step.k, step.v = (
                    self._gather(x, y if sets.special else y[:, :, :0], sets, dim=2)
                    for x, y in zip(theirs, ours, strict=True)
                )
            if step.index == last and self.model.readout.reads_rows:
                step.take(rows.special_rows)
                rows, keep = special.groups, sets.special_outside_mask
            beside = own_bias(step.block, step.at, step.keys_at, rows.groups, keys)
            own = Own(step.k, step.v, rows.groups, keys, beside)
            bias = step.block.bias(step.at, self.context.at)
            banks = [self.context.bank(step.index, keep, bias)]
            step.o, _ = attend(step.q, banks, own, scale=step.block.scale)
        return LiveRows(sets, rows, steps.h)

    def _gather(self, donor: Tensor, special: Tensor, sets: TokenSets, *, dim: int) -> Tensor:
        """Grouped rows along `dim`, from those of the donor's tokens and the special ones."""
        both = [x.expand(self._batch(), *x.shape[1:]).movedim(dim, 1) for x in (donor, special)]
        rows = torch.cat(both, dim=1)  # [B, T + special, ..]
        # whole rows of one long matrix are copied several times as fast as along an inner axis
        first = torch.arange(len(rows), device=rows.device)[:, None] * rows.shape[1]
        taken = rows.flatten(0, 1).index_select(0, (first + sets.origin).flatten())
        return taken.unflatten(0, (len(rows), -1)).movedim(1, dim)

    def _recompute(self, rows: LiveRows) -> Tensor:
        """Every token of every copy from state `stop` on."""
        marked, stop = rows.sets.marked, self.plan.stop
        theirs, ours = self.donor.states[stop][:, None], self.context.states[stop][:, None]
        state = torch.where(marked[None, :, :, None], theirs, ours)  # [B, n, T, D]
        state = state.expand(self._batch(), -1, -1, -1).clone()
        for place, token in enumerate(self.plan.live):
            state[:, :, token] = rows.z.unflatten(1, (len(marked), -1))[:, :, place]
        at = self.context.at.with_facts(lambda facts: self._mixed(facts, marked))
        logits = suffix(self.model, state.flatten(0, 1), at, stop)
        return logits.unflatten(0, (self._batch(), len(marked)))

    def _mixed(self, facts: Tensor, marked: Tensor) -> Tensor:
        """Facts [B * n, T, F] of every copy: the donor's where tokens are marked [n, T]."""
        assert self.donor.at.facts is not None
        mixed = torch.where(marked[None, :, :, None], self.donor.at.facts[:, None], facts[:, None])
        return mixed.expand(self._batch(), -1, -1, -1).flatten(0, 1)

    def _batch(self) -> int:
        return max(self.context.batch, self.donor.batch)


def _copies(x: Tensor, n: int) -> Tensor:
    """x [b, p, ..], n times in a row along the second axis; a single row is not even copied."""
    if x.shape[1] == 1:
        return x.expand(-1, n, *x.shape[2:])
    return x.repeat(1, n, *[1] * (x.ndim - 2))
