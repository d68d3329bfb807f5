"""Put tokens of one run into another, for many token sets at once; or read mixtures of two runs.

The `context` run is frozen, except for *live* rows: the class token (and its distillation twin),
which sees the context's keys, but the donor's keys at the chosen tokens S(i). One live copy per set
i; all copies run together. What happens to the chosen tokens after layer `stop` is the tail:

    source    they keep the donor's keys and values to the end (stop has no effect)
    blank     they are the context's again
    patched   they become live rows themselves: group i = {class_i} + S(i), each group sees the
              context and itself
    all       every token of every copy is computed again

States are named as in the paper: l = 0 is the embedding, l = 1..L the block outputs. Block b
(0-based) turns state b into b + 1.

Which sets there are is a `selection`: S(i) is patch i and some around it, clipped at the border.
Tensors that depend on the sets alone (rows, groups, masks, the kernel's work lists) are computed on
the CPU on first use, sent to the device once, and cached in the model's memo, so that a sweep
copies nothing from the host.

A `Mixture` lies between an image's run and a blank's. A mask m in [0, 1]^N weighs every patch's two
keys inside one softmax (mosaic):

    scores of the image's key i + log m_i,   scores of the blank's key i + log(1 - m_i)

m = 1 is the image's run, m = 0 the blank's, and m in {0, 1} are the token sets of `Sweep` with the
tail `source`; between them the logits can be differentiated. Computed anew for each mask are the
special tokens (class, distillation, registers) and the readout: final patch states enter an average
as m_i x_i + (1 - m_i) b_i, an attention pool by their two keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.engine.attend import Bank, Groups, Mask, Own, attend, attend_groups, merge
from seecause.engine.chunks import in_chunks
from seecause.engine.trace import Trace, special_rows, suffix
from seecause.engine.walk import walk
from seecause.errors import BadOption
from seecause.models.block import TokenLayout, wide, wide_dtype
from seecause.models.view import Readout, VisionModel

Tail = Literal["patched", "blank", "source", "all"]
Select = Literal["none", "box1", "box2", "manhattan1"]
BlankSummary = dict[int, tuple[Tensor, Tensor]]
"""A context that is the same for every query (E-CAAP): its output o [1, R, H, dh] and lse [1, R, H]
by block."""
Scores = Callable[[Tensor], Tensor]  # logits [B, n, C] -> what is differentiated, [B, n]
_KEPT = 8


class RowGroups(NamedTuple):
    """Rows packed set by set: which token each is [R], where the special ones are [n * p]."""

    groups: Groups
    tokens: Tensor
    special_rows: Tensor


class TokenSets:
    """Sets chosen [n, N] (bool, over patches, on the CPU) beside the special tokens that are alive
    in every set."""

    def __init__(
        self, chosen: Tensor, layout: TokenLayout, special: tuple[int, ...], device: torch.device
    ):
        self.layout, self.special, self.device = layout, special, device
        self.sets = F.pad(chosen, (layout.prefix, 0))  # [n, T], on the CPU
        self._parts: dict[tuple[int, int], TokenSets] = {(0, len(chosen)): self}
        self._even: dict[int, Groups] = {}

    def __len__(self) -> int:
        return len(self.sets)

    def part(self, start: int, stop: int) -> TokenSets:
        """Some of the sets, one after the other."""
        if (start, stop) not in self._parts:
            chosen = self.sets[start:stop, self.layout.prefix :]
            self._parts[start, stop] = TokenSets(chosen, self.layout, self.special, self.device)
        return self._parts[start, stop]

    def even_groups(self, size: int) -> Groups:
        """As many groups as sets, all of one size."""
        if size not in self._even:
            self._even[size] = Groups.even(len(self), size, self.device)
        return self._even[size]

    @cached_property
    def marked(self) -> Tensor:
        """The chosen tokens of each set, [n, T]."""
        return self._send(self.sets)

    @cached_property
    def is_special(self) -> Tensor:
        """[T]."""
        mark = torch.zeros(self.sets.shape[1], dtype=torch.bool)
        mark[list(self.special)] = True
        return self._send(mark)

    @cached_property
    def class_rows(self) -> RowGroups:
        """The special tokens alone, set by set."""
        n, p = len(self), len(self.special)
        tokens = torch.tensor(self.special, dtype=torch.long).repeat(n)
        return RowGroups(self.even_groups(p), self._send(tokens), self._send(torch.arange(n * p)))

    @cached_property
    def _columns(self) -> Tensor:
        """Column index [R], on the CPU, of each packed row: first the special tokens, then all
        tokens, offset by the number of special tokens."""
        special = torch.ones(len(self), len(self.special), dtype=torch.bool)
        return torch.cat([special, self.sets], dim=1).nonzero()[:, 1]

    @cached_property
    def grouped_rows(self) -> RowGroups:
        """The special tokens, then the chosen ones, set by set."""
        p, column = len(self.special), self._columns
        named = [torch.tensor(self.special, dtype=torch.long), torch.arange(self.sets.shape[1])]
        return RowGroups(
            Groups(self.sets.sum(dim=1) + p, self.device),
            self._send(torch.cat(named)[column]),
            self._send((column < p).nonzero()[:, 0]),
        )

    @cached_property
    def chosen_rows(self) -> tuple[Tensor, Groups]:
        """Indices of the chosen tokens among the grouped rows, and their groups."""
        places = (self._columns >= len(self.special)).nonzero()[:, 0]
        return self._send(places), Groups(self.sets.sum(dim=1), self.device)

    @cached_property
    def origin(self) -> Tensor:
        """Source index [R] of each grouped row: first the donor's tokens, then the special rows."""
        rows = self.grouped_rows
        origin = rows.tokens.clone()
        special = torch.arange(len(rows.special_rows), device=self.device)
        origin[rows.special_rows] = self.sets.shape[1] + special
        return origin

    @cached_property
    def donor_mask(self) -> Mask:
        """Class rows on the donor's tokens: those of their set."""
        return Mask(self._class_keep)

    @cached_property
    def context_mask(self) -> Mask:
        """Class rows on the context's tokens, beside the donor's."""
        return Mask(~self.is_special & ~self._class_keep)

    @cached_property
    def whole_mask(self) -> Mask:
        """Class rows on all of the context's tokens, special ones aside."""
        return Mask((~self.is_special).expand_as(self._class_keep))

    @cached_property
    def outside_masks(self) -> tuple[Mask, Mask]:
        """Grouped rows on the context's tokens outside their group; and their special rows."""
        outside = ~(self.marked | self.is_special)  # [n, T]
        every, special = (
            Mask(outside[rows.groups.owner.long()][None, None])
            for rows in (self.grouped_rows, self.class_rows)
        )
        return every, special

    @property
    def _class_keep(self) -> Tensor:
        return self.marked.repeat_interleave(len(self.special), dim=0)[None, None]  # [1, 1, n*p, T]

    def _send(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)


def token_sets(
    model: VisionModel, chosen: Tensor, layout: TokenLayout, special: tuple[int, ...]
) -> TokenSets:
    """The sets of a selection [n, N] on the model's device: cached, so that derived tensors
    are reused."""
    known: dict[object, tuple[Tensor, TokenSets]] = model.memo.setdefault("token sets", {})
    key = (id(chosen), chosen._version, layout, special, model.device)
    if key not in known:
        while len(known) >= _KEPT:
            known.pop(next(iter(known)))
        known[key] = (chosen, TokenSets(chosen, layout, special, model.device))
    return known[key][1]


def selection(grid: tuple[int, ...], select: Select | Tensor = "box1") -> Tensor:
    """Row i marks S(i): bool [N, N], or any given matrix of that shape (all false selects nothing).
    In a film, times are neighbours as rows and columns are."""
    n = math.prod(grid)
    if isinstance(select, Tensor):
        if select.shape != (n, n):
            expected = f"bool [{n}, {n}] for a {' x '.join(map(str, grid))} grid"
            raise BadOption("select", f"tensor {list(select.shape)}", expected)
        return select.bool().cpu()
    return _around(grid, select)


@lru_cache(maxsize=32)
def _around(grid: tuple[int, ...], select: Select) -> Tensor:
    """The patches [N, N] around each patch. Cached, because token sets are cached by the identity
    of this tensor."""
    places = torch.cartesian_prod(*map(torch.arange, grid))  # [N, 2 or 3]
    apart = (places[:, None] - places).abs()
    if select == "manhattan1":
        return apart.sum(dim=-1) <= 1
    return apart.amax(dim=-1) <= {"none": 0, "box1": 1, "box2": 2}[select]


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
        rows = sets.class_rows
        z = self._class_rows(sets, plan.stop if unfinished else layers, summary)
        if unfinished and plan.tail == "all":
            return self._recompute(sets, z)
        if unfinished:
            rows, z = self._grouped_rows(sets, z)
        # unless the tail is "blank", the readout must read the new states of the chosen tokens
        replaced = plan.tail != "blank" or plan.stop >= layers
        return self._read(sets, rows, z, sets.marked & replaced)

    def _read(self, sets: TokenSets, rows: RowGroups, z: Tensor, gone: Tensor) -> Tensor:
        """Logits [B, n, C] of live rows z [B, R, D]. Tokens that are `gone` [n, T] are not the
        context's: they are live, or else the donor's."""
        readout, special = self.model.readout, sets.special
        live = readout.norm(z)
        if readout.latent is not None:
            return self._read_latent(sets, rows, live, gone)
        first = live if rows is sets.class_rows else live[:, rows.special_rows]
        copies = first.unflatten(1, (len(sets), len(special))) if special else first
        parts = [copies[:, :, special.index(t)] for t in readout.read_prefix(self.context.layout)]
        if readout.has_mean:
            parts.append(self._mean(sets, rows, live, gone).to(live.dtype))
        return readout.head(torch.cat(parts, dim=-1))

    def _mean(self, sets: TokenSets, rows: RowGroups, live: Tensor, gone: Tensor) -> Tensor:
        """The average over tokens with the chosen and the special ones replaced: [B, n, D], summed
        in float32 or better."""
        averaged = torch.zeros_like(sets.is_special)
        averaged[self.model.readout.averaged(self.context.layout)] = True
        kind = wide_dtype(live.dtype)
        staying = (averaged & ~sets.is_special & ~gone).to(kind)  # [n, T]
        total = staying @ wide(self._final(self.context))  # [b, n, D]
        if rows is sets.class_rows:
            total = total + (averaged & gone).to(kind) @ wide(self._final(self.donor))
        counted = wide(live) * averaged[rows.tokens, None]
        total = total.expand(len(live), -1, -1).index_add(1, rows.groups.owner, counted)
        return total / averaged.sum()

    def _read_latent(self, sets: TokenSets, rows: RowGroups, live: Tensor, gone: Tensor) -> Tensor:
        """A latent query per set reads frozen, replaced and live tokens."""
        readout, pool, n = self.model.readout, self.model.readout.latent, len(sets)
        assert pool is not None
        part, each = readout.averaged(self.context.layout), pool.query().shape[2]

        def bank(trace: Trace, keep: Tensor) -> Bank:  # keep [n, T] -> [1, 1, n*Q, A]
            seen = keep[:, part].repeat_interleave(each, dim=0)[None, None]
            return Bank(*pool.kv(self._final(trace)[:, part]), Mask(seen))

        banks = [bank(self.context, ~sets.is_special & ~gone)]
        if rows is sets.class_rows:
            banks.append(bank(self.donor, gone))
        groups = rows.groups
        if not readout.over_prefix:  # special tokens are not pooled
            seen, groups = sets.chosen_rows
            live = live[:, :0] if rows is sets.class_rows else live[:, seen]
        own = None
        if live.shape[1]:
            own = Own(*pool.kv(live), sets.even_groups(each), groups)
        return _pooled(readout, len(live), n, banks, own)

    def _final(self, trace: Trace) -> Tensor:
        """Normed states behind the last block, [b, T, D]."""
        return self.model.readout.norm(trace.states[self.model.n_layers])

    def _class_rows(self, sets: TokenSets, until: int, summary: BlankSummary | None) -> Tensor:
        """The live special tokens [B, n * p, D] from state `start` to state `until`."""
        plan, n, p, rows = self.plan, len(sets), len(self.plan.live), sets.class_rows
        states = self.context.states[plan.start]
        # all sets have the same first states
        z = states[:, rows.tokens].expand(self._batch(), n * p, -1)
        if not plan.live:
            return z
        donor_blocks = plan.donor_blocks(self.model.n_layers)
        steps = walk(self.model, z, self.context.at.take(rows.tokens), start=plan.start, stop=until)
        for step in steps:
            mixed = step.index in donor_blocks
            # a token has the same position in both runs
            bias = step.block.bias(step.at, self.context.at)
            banks = [self.donor.bank(step.index, sets.donor_mask, bias)] if mixed else []
            if summary is None:
                keep = sets.context_mask if mixed else sets.whole_mask
                banks.insert(0, self.context.bank(step.index, keep, bias))
            lse = attend_groups(step, banks, rows.groups, rows.groups)
            if summary is not None:
                o, blank_lse = summary[step.index]
                parts = [step.o.to(lse.dtype), o], [lse, blank_lse.expand_as(lse)]
                step.o = merge(*parts)[0].to(z.dtype)
        return steps.h

    def _grouped_rows(self, sets: TokenSets, special: Tensor) -> tuple[RowGroups, Tensor]:
        """Live special tokens [B, n * p, D] and chosen tokens together from state `stop` to the end
        (in the last block only the special ones, where no other row is read)."""
        stop, last = self.plan.stop, self.model.n_layers - 1
        rows, keep = sets.grouped_rows, sets.outside_masks[0]
        keys, donor = rows.groups, self.donor.states[stop]
        at = self.context.at.where(~sets.is_special, self.donor.at).take(rows.tokens)
        steps = walk(self.model, self._gather(donor, special, sets, dim=1), at, start=stop)
        for step in steps:
            if step.index == stop:  # chosen tokens have the projections of the donor's own run
                theirs = step.block.qkv(donor, self.donor.at)
                own_at = self.context.at.take(sets.class_rows.tokens)
                ours = step.block.qkv(special, own_at) if sets.special else theirs
                step.q, step.k, step.v = (
                    self._gather(x, y if sets.special else y[:, :, :0], sets, dim=2)
                    for x, y in zip(theirs, ours, strict=True)
                )
            if step.index == last and self.model.readout.reads_rows:
                step.take(rows.special_rows)
                rows, keep = sets.class_rows, sets.outside_masks[1]
            bias = step.block.bias(step.at, self.context.at)
            banks = [self.context.bank(step.index, keep, bias)]
            attend_groups(step, banks, rows.groups, keys)
        return rows, steps.h

    def _gather(self, donor: Tensor, special: Tensor, sets: TokenSets, *, dim: int) -> Tensor:
        """Grouped rows along `dim`, from those of the donor's tokens and the special ones."""
        both = [x.expand(self._batch(), *x.shape[1:]).movedim(dim, 1) for x in (donor, special)]
        rows = torch.cat(both, dim=1)  # [B, T + special, ..]
        # whole rows of one long matrix are copied several times as fast as along an inner axis
        first = torch.arange(len(rows), device=rows.device)[:, None] * rows.shape[1]
        taken = rows.flatten(0, 1).index_select(0, (first + sets.origin).flatten())
        return taken.unflatten(0, (len(rows), -1)).movedim(1, dim)

    def _recompute(self, sets: TokenSets, z: Tensor) -> Tensor:
        """Logits of every token of every copy from state `stop` on, with special tokens z."""
        marked, stop, batch = sets.marked[None, :, :, None], self.plan.stop, self._batch()

        def mixed(ours: Tensor, theirs: Tensor) -> Tensor:  # [b, T, ..] each -> [B, n, T, ..]
            both = torch.where(marked, theirs[:, None], ours[:, None])
            return both.expand(batch, -1, -1, -1)

        state = mixed(self.context.states[stop], self.donor.states[stop]).clone()
        for place, token in enumerate(self.plan.live):
            state[:, :, token] = z.unflatten(1, (len(sets), -1))[:, :, place]
        theirs = cast(Tensor, self.donor.at.facts)  # used where there are facts
        at = self.context.at.with_facts(lambda ours: mixed(ours, theirs).flatten(0, 1))
        logits = suffix(self.model, state.flatten(0, 1), at, stop)
        return logits.unflatten(0, (batch, len(sets)))

    def _batch(self) -> int:
        return max(self.context.batch, self.donor.batch)


def _pooled(
    readout: Readout, batch: int, count: int, banks: Sequence[Bank], own: Own | None
) -> Tensor:
    """Logits [B, n, C] of a latent pool whose queries read banks, and keys of their own, in each of
    `count` copies."""
    pool = readout.latent
    assert pool is not None
    q = pool.query().repeat(1, 1, count, 1).expand(batch, -1, -1, -1)
    o, _ = attend(q, banks, own, scale=pool.scale)
    pooled = pool.finish(o.unflatten(1, (count, -1)).flatten(0, 1))
    return readout.head(pooled).unflatten(0, (batch, count))


@dataclass(eq=False)
class Mixture:
    """Mixtures of two recorded runs; `blank` may have batch 1 for all images.
    Needs the blank's state `start`, keys and values from block `start` on, and both final states
    where more than rows are read."""

    model: VisionModel
    blank: Trace
    source: Trace
    start: int = 0

    def logits(self, masks: Tensor) -> Tensor:
        """Masks [B, n, N] in [0, 1] -> logits [B, n, C], differentiable in the masks."""
        live = special_rows(self.model, self.source.layout)
        z = self._special(masks, live) if live else masks.new_zeros(*masks.shape[:2], 0, 0)
        return self._read(masks, z)

    def _special(self, masks: Tensor, live: range) -> Tensor:
        """The special tokens under each mask from state `start` to the end, [B, n, p, D]."""
        batch, count, p = len(masks), masks.shape[1], len(live)
        z = self.blank.states[self.start][:, live.start : live.stop]
        z = z.repeat(1, count, 1).expand(batch, -1, -1)  # [B, n * p, D]
        groups = Groups.even(count, p, z.device)
        at = self.blank.at.take(torch.arange(p, device=z.device).repeat(count))
        weights = _log_weights(masks.repeat_interleave(p, dim=1))
        first = self.source.layout.prefix
        steps = walk(self.model, z, at, start=self.start)
        for step in steps:
            bias = step.block.bias(step.at, self.blank.at)
            bias = None if bias is None else bias[..., first:]
            banks = [
                _weighted(trace.kv[step.index], weight if bias is None else weight + bias, first)
                for trace, weight in zip((self.blank, self.source), weights, strict=True)
            ]
            attend_groups(step, banks, groups, groups)
        return steps.h.unflatten(1, (count, p))

    def _read(self, masks: Tensor, special: Tensor) -> Tensor:
        """Logits [B, n, C] from special tokens [B, n, p, D] and the final states of both runs."""
        readout, layout = self.model.readout, self.source.layout
        normed = special
        if special.numel():
            normed = readout.norm(special.flatten(1, 2)).unflatten(1, special.shape[1:3])
        if readout.latent is not None:
            return self._read_latent(masks, normed)
        parts = [normed[:, :, t] for t in readout.read_prefix(layout)]
        if readout.has_mean:
            blank, source = (wide(x) for x in self._final_patches())
            total = blank.sum(dim=1, keepdim=True) + masks @ source - masks @ blank  # [B, n, D]
            count = layout.n_patches
            if readout.over_prefix:
                total, count = total + wide(normed).sum(dim=2), count + layout.prefix
            parts.append((total / count).to(self.model.dtype))
        return readout.head(torch.cat(parts, dim=-1))

    def _read_latent(self, masks: Tensor, normed: Tensor) -> Tensor:
        """The pool's queries are the rows: they read both runs' final keys under every mask."""
        readout, pool = self.model.readout, self.model.readout.latent
        assert pool is not None
        (batch, count), each = masks.shape[:2], pool.query().shape[2]
        weights = _log_weights(masks.repeat_interleave(each, dim=1))
        banks = [
            _weighted(pool.kv(states), weight)
            for states, weight in zip(self._final_patches(), weights, strict=True)
        ]
        own = None
        if readout.over_prefix and normed.numel():
            asking, telling = (
                Groups.even(count, size, masks.device) for size in (each, normed.shape[2])
            )
            own = Own(*pool.kv(normed.flatten(1, 2)), asking, telling)
        return _pooled(readout, batch, count, banks, own)

    def _final_patches(self) -> tuple[Tensor, Tensor]:
        """Normed patch states that the readout reads: the blank's [1, N, D], the source's."""
        final, patches = self.model.n_layers, self.source.layout.patches
        norm = self.model.readout.norm
        blank, source = (norm(run.states[final]) for run in (self.blank, self.source))
        return blank[:, patches], source[:, patches]


def slopes(run: Mixture, masks: Tensor, score: Scores, *, together: int) -> Tensor:
    """Derivatives [B, n, N] of scores [B, n] at masks [n, N], the same for every image; `together`
    masks at a time."""

    def some_masks(a: int, b: int) -> Tensor:
        with torch.enable_grad():
            mixed = masks[a:b].expand(run.source.batch, -1, -1).clone().requires_grad_()
            total = score(run.logits(mixed)).sum()  # images do not see each other
            return torch.autograd.grad(total, mixed)[0]

    return torch.cat(list(in_chunks(some_masks, len(masks), together, what="masks")), dim=1)


def mask_bytes(model: VisionModel, layout: TokenLayout) -> int:
    """Bytes that one mask of one image keeps for the backward pass: activations of all blocks."""
    block, element = model.blocks[0], torch.finfo(model.dtype).bits // 8
    rows = max(1, len(special_rows(model, layout)))
    scores = block.heads * layout.n_patches * 2 * max(4, element) * 5  # where attention is explicit
    return model.n_layers * rows * (block.heads * block.head_dim * element * 24 + scores)


def _log_weights(masks: Tensor) -> tuple[Tensor, Tensor]:
    """Masks [B, R, N] -> log(1 - m) and log m, [B, 1, R, N] each: of the blank, of the source."""
    spread = wide(masks)[:, None]
    return torch.log1p(-spread), torch.log(spread)


def _weighted(kv: tuple[Tensor, Tensor], weight: Tensor, first: int = 0) -> Bank:
    """Keys and values from token `first` on, with log-weights."""
    return Bank(kv[0][:, :, first:], kv[1][:, :, first:], bias=weight)
