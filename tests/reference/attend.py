"""Banked attention by definition: gather the keys a row sees, one softmax, row by row."""

from collections.abc import Sequence

import torch
from torch import Tensor

Bank = tuple[Tensor, Tensor, Tensor, Tensor | None]
Own = tuple[Tensor, Tensor, list[int], list[int]]


def one_softmax(
    q: Tensor, banks: Sequence[Bank], own: Own | None, scale: float
) -> tuple[Tensor, Tensor]:
    """q [B, H, R, dh] -> o [B, R, H, dh], lse [B, R, H]."""
    batch, heads, rows, width = q.shape
    o = torch.zeros(batch, rows, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.full((batch, rows, heads), -torch.inf, dtype=q.dtype, device=q.device)
    for b in range(batch):
        for h in range(heads):
            for r in range(rows):
                keys, values = _seen(b, h, r, heads, banks, own)
                if len(keys):
                    scores = keys @ q[b, h, r] * scale
                    o[b, r, h] = torch.softmax(scores, dim=0) @ values
                    lse[b, r, h] = torch.logsumexp(scores, dim=0)
    return o, lse


def _seen(
    b: int, h: int, r: int, heads: int, banks: Sequence[Bank], own: Own | None
) -> tuple[Tensor, Tensor]:
    keys, values = [], []
    for k, v, keep, choose in banks:
        if choose is not None and not choose[b, h]:
            continue
        image, kv = b if len(k) > 1 else 0, h * k.shape[1] // heads
        seen = keep[b if len(keep) > 1 else 0, h if keep.shape[1] > 1 else 0, r]
        keys.append(k[image, kv][seen])
        values.append(v[image, kv][seen])
    if own is not None:
        k, v, per_query, per_key = own
        group = next(g for g in range(len(per_query)) if r < sum(per_query[: g + 1]))
        part, kv = slice(sum(per_key[:group]), sum(per_key[: group + 1])), h * k.shape[1] // heads
        keys.append(k[b, kv, part])
        values.append(v[b, kv, part])
    return torch.cat(keys), torch.cat(values)
