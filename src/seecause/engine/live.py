"""Live rows of a sweep, and how an answer is read from them and from the frozen rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seecause.engine.attend import Bank, Own, attend
from seecause.engine.groups import Groups
from seecause.engine.mask import Mask
from seecause.engine.trace import Trace
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
