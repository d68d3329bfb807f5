"""Put tokens of one run into another, for many token sets at once.

The `context` run is frozen, except for *live* rows: the class token (and its distillation twin), which sees the context's keys,
but the donor's keys at the chosen tokens S(i). One live copy per set i; all copies run together. What happens to the chosen tokens
after layer `stop` is the tail:

    source    they keep the donor's keys and values to the end (stop has no effect)
    blank     they fall back to the context's
    patched   they become live rows themselves: group i = {class_i} + S(i), each group sees the context and itself
    all       every token of every copy is computed again

States are named as in the paper: l = 0 is the embedding, l = 1..L the block outputs. Block b (0-based) turns state b into b + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.attend import Bank, Own, attend, merge
from seecause.engine.mask import Mask
from seecause.engine.trace import Trace, suffix
from seecause.models.layout import TokenLayout
from seecause.models.view import VisionModel

Tail = Literal["patched", "blank", "source", "all"]


@dataclass(frozen=True)
class Plan:
    """Layers start..stop (inclusive, of states) where the donor's tokens are put in, the tail, and the live special tokens."""

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
    """The special tokens that are computed again: class and distillation token, registers on request."""
    special = [i for i in (layout.class_index, layout.distill_index) if i is not None]
    return tuple(special + (list(layout.registers) if registers else []))


@dataclass(eq=False)
class Summary:
    """A context that is the same for every query: its output o [1, R, H, dh] and lse [1, R, H] per block (E-CAAP)."""

    parts: dict[int, tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Sweep:
    """Runs a plan on recorded runs. Batches of `context` and `donor` are equal, or one of them is 1."""

    model: VisionModel
    context: Trace
    donor: Trace
    plan: Plan

    @property
    def layout(self) -> TokenLayout:
        return self.context.layout

    def logits(self, chosen: Tensor, summary: Summary | None = None) -> Tensor:
        """Token sets chosen [n, N] (bool, over patches) -> logits [B, n, C]."""
        layers = self.model.n_layers
        marked = F.pad(chosen, (self.layout.prefix, 0))  # [n, T]
        patched = self.plan.tail == "patched" and self.plan.stop < layers
        unfrozen = self.plan.tail == "all" and self.plan.stop < layers
        z = self._class_rows(marked, self.plan.stop if patched or unfrozen else layers, summary)
        if unfrozen:
            return self._recompute(marked, z)
        if patched:
            groups = Groups.of(marked, self.plan.live, self.layout)
            return self._read(marked, self._grouped_rows(marked, groups, z), groups)
        return self._read(marked, z, None)

    def _class_rows(self, marked: Tensor, until: int, summary: Summary | None) -> Tensor:
        """The live special tokens from state `start` to state `until`: [B, n * p, D]."""
        plan, n, p = self.plan, len(marked), len(self.plan.live)
        z = self.context.states[plan.start][:, list(plan.live)].repeat(1, n, 1)
        z = z.expand(self._batch(), -1, -1)
        if p == 0:
            return z
        at = self.layout.at(z.device).take(torch.tensor(plan.live, device=z.device).repeat(n))
        rows = marked.repeat_interleave(p, dim=0)[None, None]  # [1, 1, n*p, T]
        frozen = ~_one_hot(plan.live, self.layout.tokens, z.device)
        of_donor, beside_donor, without_donor = Mask(rows), Mask(frozen & ~rows), Mask(frozen.expand_as(rows))
        donor_blocks = plan.donor_blocks(self.model.n_layers)
        for index in range(plan.start, until):
            q, k, v = self.model.blocks[index].qkv(z, at)
            mixed = index in donor_blocks
            banks = [self.donor.bank(index, of_donor)] if mixed else []
            if summary is None:
                banks.insert(0, self.context.bank(index, beside_donor if mixed else without_donor))
            o, lse = attend(q, banks, Own(k, v, groups=n), scale=self.model.blocks[index].scale)
            if summary is not None:
                o = merge([o.to(lse.dtype), summary.parts[index][0]], [lse, summary.parts[index][1].expand_as(lse)])[0].to(z.dtype)
            z = self.model.blocks[index].finish(z, o, self.model.gate(index))
        return z

    def _grouped_rows(self, marked: Tensor, groups: Groups, z: Tensor) -> Tensor:
        """Live special tokens and chosen tokens together from state `stop` to the end: [B, n * g, D] (only the special rows of
        the last block, where no other row is read)."""
        n, p = len(marked), len(self.plan.live)
        donor = self.donor.states[self.plan.stop][:, groups.chosen.flatten()].unflatten(1, (n, -1))  # [b, n, s, D]
        z = torch.cat([z.unflatten(1, (n, p)) if p else donor[:, :, :0].expand(self._batch(), -1, -1, -1), donor.expand(self._batch(), -1, -1, -1)], dim=2)
        z = z.flatten(1, 2)
        at = self.layout.at(z.device).take(groups.index.flatten())
        outside = ~(marked | _one_hot(self.plan.live, self.layout.tokens, z.device))  # [n, T]
        keep = Mask(outside.repeat_interleave(groups.width, dim=0)[None, None])
        last = self.model.n_layers - 1
        for index in range(self.plan.stop, self.model.n_layers):
            block = self.model.blocks[index]
            q, k, v = block.qkv(z, at)
            if index == last and self.model.readout.kind in ("cls", "cls+dist"):  # nothing else is read
                q, z = (t.unflatten(d, (n, groups.width)).narrow(d + 1, 0, p).flatten(d, d + 1) for t, d in ((q, 2), (z, 1)))
                keep = Mask(outside.repeat_interleave(p, dim=0)[None, None])
            o, _ = attend(q, [self.context.bank(index, keep)], Own(k, v, groups=n, keep=groups.valid), scale=block.scale)
            z = block.finish(z, o, self.model.gate(index))
        return z

    def _recompute(self, marked: Tensor, z: Tensor) -> Tensor:
        """Every token of every copy from state `stop` on."""
        n, stop = len(marked), self.plan.stop
        state = torch.where(marked[None, :, :, None], self.donor.states[stop][:, None], self.context.states[stop][:, None])  # [B, n, T, D]
        state = state.expand(self._batch(), -1, -1, -1).clone()
        if self.plan.live:
            state[:, :, list(self.plan.live)] = z.unflatten(1, (n, -1))
        return suffix(self.model, state.flatten(0, 1), self.layout, stop).unflatten(0, (self._batch(), n))

    def _read(self, marked: Tensor, z: Tensor, groups: Groups | None) -> Tensor:
        """Logits [B, n, C] from live rows and the frozen rest."""
        readout, n, p = self.model.readout, len(marked), len(self.plan.live)
        live = readout.norm(z).unflatten(1, (n, -1)) if z.shape[1] else z.unflatten(1, (n, 0)) if n else z
        if readout.latent is not None:
            return self._read_latent(marked, live, groups)
        prefix = [live[:, :, self.plan.live.index(t)] for t in readout.read_prefix(self.layout)]
        if readout.has_mean:
            prefix.append(self._mean(marked, live, p, groups).to(z.dtype))
        return readout.head(torch.cat(prefix, dim=-1))

    def _mean(self, marked: Tensor, live: Tensor, p: int, groups: Groups | None) -> Tensor:
        """The average over tokens with S(i) replaced: [B, n, D]."""
        readout, tokens = self.model.readout, self.layout.tokens
        averaged = torch.zeros(tokens, dtype=torch.bool, device=marked.device)
        averaged[readout.averaged(self.layout)] = True
        wide = torch.float64 if live.dtype == torch.float64 else torch.float32
        frozen = readout.norm(self.context.states[self.model.n_layers]).to(wide)
        special = _one_hot(self.plan.live, tokens, marked.device)
        gone = marked if self.plan.tail != "blank" else torch.zeros_like(marked)
        total = (averaged & ~special & ~gone).to(wide) @ frozen  # [b, n, D]
        if self.plan.tail != "blank":
            if groups is None:
                total = total + (averaged & gone).to(wide) @ readout.norm(self.donor.states[self.model.n_layers]).to(wide)
            else:
                total = total + (live[:, :, p:].to(wide) * groups.valid[:, p:, None]).sum(dim=2)
        inside = [j for j, t in enumerate(self.plan.live) if bool(averaged[t])]
        total = total + live[:, :, inside].to(wide).sum(dim=2)
        return total / int(averaged.sum())

    def _read_latent(self, marked: Tensor, live: Tensor, groups: Groups | None) -> Tensor:
        """A latent query per set reads frozen, replaced and live tokens."""
        readout, pool, n = self.model.readout, self.model.readout.latent, len(marked)
        assert pool is not None
        part = readout.averaged(self.layout)
        final = self.model.n_layers
        queries = pool.query()
        q = queries.repeat(1, 1, n, 1).expand(self._batch(), -1, -1, -1)
        special = _one_hot(self.plan.live, self.layout.tokens, marked.device)
        gone = marked & (self.plan.tail != "blank")

        def rows(keep: Tensor) -> Mask:  # [n, T] -> [1, 1, n*Q, A]
            return Mask(keep[:, part].repeat_interleave(queries.shape[2], dim=0)[None, None])

        banks = [Bank(*pool.kv(readout.norm(self.context.states[final])[:, part]), rows(~special & ~gone))]
        if groups is None and self.plan.tail != "blank":
            banks.append(Bank(*pool.kv(readout.norm(self.donor.states[final])[:, part]), rows(gone)))
        read = [j for j, t in enumerate(self.plan.live) if t >= (part.start or 0)]  # live special tokens the pool sees
        kept = read + list(range(len(self.plan.live), live.shape[2]))
        own = None
        if kept:
            valid = groups.valid[:, kept] if groups is not None else None
            own = Own(*pool.kv(live[:, :, kept].flatten(1, 2)), groups=n, keep=valid)
        o, _ = attend(q, banks, own, scale=pool.scale)
        pooled = pool.finish(o.unflatten(1, (n, -1)).flatten(0, 1))
        return readout.head(pooled).unflatten(0, (-1, n))

    def _batch(self) -> int:
        return max(len(self.context.states[self.plan.start]), len(next(iter(self.donor.states.values()))))


@dataclass(frozen=True, eq=False)
class Groups:
    """Live rows of the patched tail: for each set its special tokens, then its chosen tokens, padded to one width g."""

    index: Tensor  # [n, g] token of each row
    chosen: Tensor  # [n, s] the chosen tokens alone
    valid: Tensor  # [n, g] false on padding

    @property
    def width(self) -> int:
        return self.index.shape[1]

    @classmethod
    def of(cls, marked: Tensor, live: tuple[int, ...], layout: TokenLayout) -> Groups:
        counts = marked.sum(dim=1)
        size = max(1, int(counts.max()))
        chosen = marked.int().argsort(dim=1, descending=True, stable=True)[:, :size]
        special = torch.tensor(live, dtype=torch.long, device=marked.device).expand(len(marked), -1)
        valid = torch.arange(size, device=marked.device)[None] < counts[:, None]
        return cls(
            index=torch.cat([special, chosen], dim=1),
            chosen=chosen,
            valid=torch.cat([torch.ones_like(special, dtype=torch.bool), valid], dim=1),
        )


def _one_hot(tokens: tuple[int, ...], total: int, device: torch.device) -> Tensor:
    mark = torch.zeros(total, dtype=torch.bool, device=device)
    mark[list(tokens)] = True
    return mark
