"""Attention over several banks of keys and values, merged exactly.

A row may read keys of its own run, of the blank image's run, of another image's. Each source is a
`Bank`; the parts are merged by their log-sum-exp in float32, which equals one softmax over all keys
that are kept:

    lse = log sum_s exp(lse_s),   o = sum_s exp(lse_s - lse) o_s

An empty bank has lse = -inf and adds nothing. Keys are never repeated: grouped queries share them,
and a bank with batch 1 serves every image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from seecause.engine.walk import Step
from seecause.models.block import wide

Part = tuple[Tensor, Tensor]  # an output over some keys and its log-sum-exp, float32 or float64


def has_slope(*tensors: Tensor) -> bool:
    """Whether one of the tensors requires a gradient now."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class Groups:
    """Rows in consecutive groups of different sizes [G], packed without padding. Derived tensors
    are computed once, on `device`.

    Group sizes are copied to the host only when `sizes` is read. `starts` never synchronises;
    `longest` does not either if `bound` (an upper limit of the sizes) is given.
    """

    def __init__(self, sizes: Tensor, device: torch.device | str, *, bound: int | None = None):
        self._sizes, self.device, self._bound = sizes.long(), torch.device(device), bound
        self.each: int | None = None  # rows of every group, if all are equal

    @cached_property
    def sizes(self) -> Tensor:
        """[G], on the CPU."""
        return self._sizes.cpu()

    @classmethod
    def even(cls, count: int, size: int, device: torch.device | str) -> Groups:
        groups = cls(torch.full((count,), size), device)
        groups.each = size
        return groups

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def rows(self) -> int:
        return int(self.sizes.sum())

    @property
    def width(self) -> int:
        """Rows of the largest group."""
        return int(self.sizes.max()) if len(self) else 0

    @property
    def longest(self) -> int:
        """The bound that was given, else `width`: no group has more rows."""
        return self.width if self._bound is None else self._bound

    @cached_property
    def single(self) -> bool:
        """Every group is one row."""
        return bool((self.sizes == 1).all())

    @cached_property
    def starts(self) -> Tensor:
        """First row of each group, and the end: int32 [G + 1]."""
        return self._send(F.pad(self._sizes.cumsum(0), (1, 0)).int())

    @cached_property
    def owner(self) -> Tensor:
        """The group of each row, int32 [R]."""
        return self._send(torch.arange(len(self)).repeat_interleave(self.sizes).int())

    @cached_property
    def padded(self) -> Tensor:
        """Rows of each group, [G, width]; padding repeats row 0 of the sequence."""
        return self._send(pad_sequence([*torch.arange(self.rows).split(self.sizes.tolist())], True))

    @cached_property
    def valid(self) -> Tensor:
        """False on padding, [G, width]."""
        return self._send(self._valid)

    @cached_property
    def unpadded(self) -> Tensor:
        """The index of each row in the flattened padding, [R]."""
        return self._send(self._valid.flatten().nonzero()[:, 0])

    @property
    def _valid(self) -> Tensor:
        return torch.arange(self.width) < self.sizes[:, None]

    def _send(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)


class Mask:
    """keep [1|B, 1|H, R, K] (bool). Made once and used by every block of a run."""

    def __init__(self, keep: Tensor):
        self.keep = keep

    @cached_property
    def words(self) -> Tensor:
        """The mask as bits, one int32 for each row and block of 32 keys: [1|B, 1|H, R, blocks]."""
        bits = F.pad(self.keep, (0, -self.keep.shape[-1] % 32)).unflatten(-1, (-1, 32))
        places = torch.arange(32, device=bits.device)
        return (bits.long() << places).sum(dim=-1).to(torch.int32)

    @cached_property
    def worklist(self) -> Tensor:
        """For each tile of rows: how many key blocks any of its rows sees (in any image and head),
        then which. int32 [tiles, 1 + blocks]."""
        from seecause.engine import kernel

        flat = self.keep.flatten(0, 1).any(dim=0)  # [R, K]
        rows, keys = flat.shape
        padded = F.pad(flat, (0, -keys % kernel.KEYS, 0, -rows % kernel.ROWS))
        tiles = padded.unflatten(0, (-1, kernel.ROWS)).unflatten(2, (-1, kernel.KEYS))
        seen = tiles.any(dim=3).any(dim=1)  # [tiles, blocks]
        order = seen.int().argsort(dim=1, descending=True, stable=True)
        return torch.cat([seen.sum(dim=1, keepdim=True), order], dim=1).int().contiguous()


@dataclass(frozen=True, eq=False)
class Bank:
    """Keys and values k, v [1|B, Hkv, K, dh] that many rows read.

    `keep` [1|B, 1|H, R, K] says which keys a row sees; `bias` [1|B, 1|H, R, K] is added to the
    scores, such as log-weights of keys, which can be differentiated (mosaic).
    """

    k: Tensor
    v: Tensor
    keep: Mask | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Own:
    """Live keys and values k, v [B, Hkv, K, dh]: query rows and keys come in the same number of
    groups, and a row sees its group's keys only. With one row and one key per group this is each
    row's own key. `bias` [1|B, H, R, keys of the largest group] is added to the scores.
    """

    k: Tensor
    v: Tensor
    queries: Groups
    keys: Groups
    bias: Tensor | None = None


def attend(
    q: Tensor,
    banks: Sequence[Bank],
    own: Own | None = None,
    *,
    scale: float,
) -> Part:
    """Rows q [B, H, R, dh] over all banks and their own group -> o [B, R, H, dh], lse [B, R, H]
    (float32 or float64).

    Uses a fused kernel when no gradient is asked for, and one with a gradient for two banks with
    log-weights; the explicit form below is their exact, differentiable twin.
    """
    if q.is_cuda:
        from seecause.engine import kernel

        if kernel.usable(q):
            if own is not None and kernel.soft_fits(q, banks, own):
                return kernel.attend_soft(q, banks, own, scale)
            if kernel.fits(q, banks, own):
                return kernel.attend(q, banks, own, scale)
    return explicit(q, banks, own, scale=scale)


def explicit(q: Tensor, banks: Sequence[Bank], own: Own | None = None, *, scale: float) -> Part:
    """`attend` in plain torch, with all scores in memory; differentiable."""
    parts = [_softmax_part(_bank_scores(q, bank, scale), bank.v) for bank in banks]
    if own is not None:
        parts.append(_own_part(q, own, scale))
    o, lse = merge([o for o, _ in parts], [lse for _, lse in parts])
    return o.to(q.dtype).transpose(1, 2), lse.transpose(1, 2)


def attend_groups(step: Step, banks: Sequence[Bank], queries: Groups, keys: Groups) -> Tensor:
    """Set `step.o`: its rows (in groups `queries`) over all banks and the keys of their own group
    (in as many groups `keys`), with what the block adds to the scores. Returns the lse."""
    block, beside = step.block, None
    if block.additive is not None:
        theirs = step.keys_at.index[keys.padded][queries.owner.long()]  # of each row [R, keys]
        rows = step.at.take(step.at.index[:, None])
        beside = block.bias(rows, step.keys_at.take(theirs))  # [R, H, 1, keys]
        beside = None if beside is None else beside[:, :, 0].transpose(0, 1)[None]
    own = Own(step.k, step.v, queries, keys, beside)
    step.o, lse = attend(step.q, banks, own, scale=block.scale)
    return lse


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> Part:
    """Partial outputs [.., R, dh] with their lse [.., R] -> the output and lse over all keys; rows
    without a key give 0."""
    total = torch.logsumexp(torch.stack(list(lses)), dim=0)
    ground = total.masked_fill(total == -torch.inf, 0)  # -inf - -inf would be NaN
    merged = sum(
        (o * torch.exp(lse - ground)[..., None] for o, lse in zip(outputs, lses, strict=True)),
        torch.zeros_like(outputs[0]),
    )
    return merged, total


def merge_pair(first: Part, second: Part) -> Tensor:
    """`merge` of two parts that broadcast, for rows that have a key in the first: one sigmoid.
    Output [.., R, dh] in the first one's dtype."""
    share = torch.sigmoid(second[1] - first[1])[..., None]  # exp(lse') / (exp(lse) + exp(lse'))
    start = wide(first[0])
    return (start + share * (wide(second[0]) - start)).to(first[0].dtype)


def attention_weights(q: Tensor, bank: Bank, *, scale: float) -> Tensor:
    """Probabilities [B, H, R, K] of rows over one bank: the only place where they are formed."""
    return torch.softmax(_bank_scores(q, bank, scale), dim=-1)


def _own_part(q: Tensor, own: Own, scale: float) -> Part:
    """Every group attends to itself: pad groups to one width and fold them into the batch."""
    if own.queries.each is not None and own.keys.each is not None:
        return _even_part(q, own, scale)
    batch = len(q)
    q, k, v = (
        x[:, :, groups.padded].transpose(1, 2).flatten(0, 1)  # [B*G, H, g, dh]
        for x, groups in ((q, own.queries), (own.k, own.keys), (own.v, own.keys))
    )
    scores = _scores(q, k, scale)
    if own.bias is not None:
        added = own.bias[:, :, own.queries.padded].transpose(1, 2)  # [1|B, G, H, g, keys]
        scores = scores + added.expand(batch, -1, -1, -1, -1).flatten(0, 1)
    scores = scores.masked_fill(~own.keys.valid.repeat(batch, 1)[:, None, None, :], -torch.inf)
    o, lse = (
        part.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)  # [B, H, G*g, ..]
        for part in _softmax_part(scores, v)
    )
    return o[:, :, own.queries.unpadded], lse[:, :, own.queries.unpadded]


def _even_part(q: Tensor, own: Own, scale: float) -> Part:
    """`_own_part` for groups of equal size. Uses elementwise multiplication and a sum instead of
    `bmm`, which is slow for thousands of tiny matrices."""
    share, count = q.shape[1] // own.k.shape[1], len(own.keys)
    q, k, v = (wide(x).unflatten(2, (count, -1)) for x in (q, own.k, own.v))  # [B, H, G, g, dh]
    if share > 1:
        k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
    scores = (q[..., :, None, :] * k[..., None, :, :]).sum(dim=-1) * scale  # [B, H, G, g, keys]
    if own.bias is not None:
        scores = scores + own.bias.unflatten(2, (count, -1))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    o = (weights[..., None] * v[..., None, :, :]).sum(dim=-2)
    return o.flatten(2, 3), lse.flatten(2, 3)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q [B, H, R, dh] against k [1|B, Hkv, K, dh] -> [B, H, R, K] in float32 or better, without
    repeating keys."""
    return _shared(wide(q) * scale, wide(k).transpose(-1, -2))


def _shared(x: Tensor, y: Tensor) -> Tensor:
    """x [B, H, R, a] @ y [1|B, Hkv, a, b]: heads and images that share y are folded into rows, so
    that y is read once."""
    batch, heads, rows, _ = x.shape
    kv = y.shape[1]
    x = x.unflatten(1, (kv, heads // kv))  # [B, Hkv, g, R, a]
    if y.shape[0] == 1 and batch > 1:
        out = x.transpose(0, 1).flatten(1, 3) @ y[0]  # [Hkv, B*g*R, b]
        return out.unflatten(1, (batch, heads // kv, rows)).transpose(0, 1).flatten(1, 2)
    return (x.flatten(2, 3) @ y).unflatten(2, (heads // kv, rows)).flatten(1, 2)


def _bank_scores(q: Tensor, bank: Bank, scale: float) -> Tensor:
    """Attention scores of q against the keys of `bank`; -inf for keys that are masked out."""
    scores = _scores(q, bank.k, scale)
    if bank.bias is not None:
        scores = scores + bank.bias
    if bank.keep is not None:
        scores = scores.masked_fill(~bank.keep.keep, -torch.inf)
    return scores


def _softmax_part(scores: Tensor, v: Tensor) -> Part:
    """Scores [B, H, R, K] and v -> output [B, H, R, dh] and lse [B, H, R], both wide; empty rows
    give 0 and -inf."""
    top = scores.amax(dim=-1, keepdim=True).detach()
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1)
    weights = weights / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    return _shared(weights.to(v.dtype), v).to(scores.dtype), torch.log(total) + top[..., 0]
