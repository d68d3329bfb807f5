"""Banked attention as one GPU kernel (Triton): every bank in one pass over its keys, no scores in memory.

The same function as the explicit form in `attend.py`, which stays the reference; this one is used on CUDA when no gradient is asked for.
A key block that no row of a tile keeps is skipped, so a bank of which each row sees nine keys costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seecause.engine.mask import KEYS, ROWS

if TYPE_CHECKING:
    from seecause.engine.attend import Bank, Own

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only builds of torch come without it
    triton = None

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LOG2_E = 1.4426950408889634  # the kernel works in powers of two


def usable(q: Tensor, banks: Sequence[Bank], own: Own | None) -> bool:
    """Whether the kernel computes this: on CUDA, no gradient, at most two banks, no bias."""
    tensors = [q, *(t for b in banks for t in (b.k, b.v)), *((own.k, own.v) if own is not None else ())]
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    simple = len(banks) <= 2 and all(b.bias is None for b in banks) and q.shape[-1] <= 256
    return triton is not None and q.is_cuda and q.dtype in DTYPES and simple and not differentiable


def attend(q: Tensor, banks: Sequence[Bank], own: Own | None, scale: float) -> tuple[Tensor, Tensor]:
    """See `attend.attend`: q [B, H, R, dh] -> o [B, R, H, dh] in q's dtype, lse [B, R, H] float32."""
    batch, heads, rows, width = q.shape
    q = _rows_last(q)
    o = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, rows, heads, dtype=torch.float32, device=q.device)
    first, second = (banks[i] if i < len(banks) else None for i in range(2))
    alone = own is not None and own.keep is None and own.groups == rows == own.k.shape[2]  # each row's own key
    _banked[(triton.cdiv(rows, ROWS), heads, batch)](
        q, *q.stride()[:3], o, *o.stride()[:3], lse, *lse.stride(), rows, scale * LOG2_E,
        *_bank_arguments(first, q), *_bank_arguments(second, q), *_own_arguments(own, q),
        BANK0=first is not None, KEEP0=_has(first, "keep"), CHOOSE0=_has(first, "choose"),
        BANK1=second is not None, KEEP1=_has(second, "keep"), CHOOSE1=_has(second, "choose"),
        ALONE=alone, OWN=own is not None and not alone, OWN_KEEP=_has(own, "keep"),
        SHARE=heads // (banks[0].k if banks else own.k).shape[1],  # type: ignore[union-attr]
        WIDTH=width, LANES=max(16, triton.next_power_of_2(width)), ROWS=ROWS, KEYS=KEYS, EXACT=q.dtype == torch.float32, num_warps=4, num_stages=2,
    )  # fmt: skip
    return o, lse


def _has(holder: Bank | Own | None, what: str) -> bool:
    return holder is not None and getattr(holder, what) is not None


def _bank_arguments(bank: Bank | None, q: Tensor) -> list[Any]:
    """Pointers and strides; whatever is absent is passed as q and never read."""
    if bank is None:
        return [q, 0, 0, 0, q, 0, 0, 0, 0, q, 0, 0, 0, q, 0, q, 0]
    k, v = _rows_last(bank.k), _rows_last(bank.v)
    found: list[Any] = [k, _spread(k, 0), k.stride(1), k.stride(2), v, _spread(v, 0), v.stride(1), v.stride(2), k.shape[2]]
    if bank.keep is None:
        found += [q, 0, 0, 0, q, 0]
    else:
        keep, work = bank.keep.bytes, bank.keep.worklist
        found += [keep, _spread(keep, 0), _spread(keep, 1), keep.stride(2), work, work.stride(0)]
    return [*found, q, 0] if bank.choose is None else [*found, bank.choose.contiguous().view(torch.uint8), bank.choose.shape[1]]


def _own_arguments(own: Own | None, q: Tensor) -> list[Any]:
    if own is None:
        return [q, 0, 0, 0, q, 0, 0, 0, 0, 1, 1, q]
    k, v = _rows_last(own.k), _rows_last(own.v)
    keep = q if own.keep is None else own.keep.contiguous().view(torch.uint8)
    return [k, *k.stride()[:3], v, *v.stride()[:3], k.shape[2], q.shape[2] // own.groups, k.shape[2] // own.groups, keep]


def _rows_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _spread(x: Tensor, axis: int) -> int:
    """The stride of an axis that may be shared."""
    return 0 if x.shape[axis] == 1 else x.stride(axis)


if triton is not None:

    @triton.jit
    def _absorb(q, k_ptr, v_ptr, k_row, v_row, columns, present, visible, peak, total, acc, scale, WIDTH: tl.constexpr, LANES: tl.constexpr, EXACT: tl.constexpr):  # noqa: ANN001, ANN202, E501
        """One block of keys into the running softmax; `visible` [ROWS, KEYS] says who sees what."""
        lanes = tl.arange(0, LANES)
        inside = present[:, None] & (lanes < WIDTH)[None, :]
        k = tl.load(k_ptr + columns[:, None] * k_row + lanes[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + columns[:, None] * v_row + lanes[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
        scores = tl.where(visible, scores, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, axis=1))
        ground = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - ground[:, None])
        fade = tl.exp2(peak - ground)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
        return new, total * fade + tl.sum(weights, axis=1), acc

    @triton.jit
    def _read_bank(  # noqa: ANN202
        q, rows, n_rows, tile, batch, head, kv_head,  # noqa: ANN001
        k_ptr, k_b, k_h, k_row, v_ptr, v_b, v_h, v_row, n_keys, keep_ptr, keep_b, keep_h, keep_row, work_ptr, work_row, choose_ptr, choose_b,  # noqa: ANN001
        peak, total, acc, scale,  # noqa: ANN001
        KEEP: tl.constexpr, CHOOSE: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        """All key blocks of one bank that this tile needs."""
        k_ptr += batch * k_b + kv_head * k_h
        v_ptr += batch * v_b + kv_head * v_h
        keep_ptr += batch * keep_b + head * keep_h
        blocks = tl.cdiv(n_keys, KEYS)
        if KEEP:
            blocks = tl.load(work_ptr + tile * work_row)
        if CHOOSE:
            blocks = tl.where(tl.load(choose_ptr + batch * choose_b + head) != 0, blocks, 0)
        for step in range(0, blocks):
            start = step * KEYS
            if KEEP:
                start = tl.load(work_ptr + tile * work_row + 1 + step) * KEYS
            columns = start + tl.arange(0, KEYS)
            present = columns < n_keys
            visible = (rows[:, None] < n_rows) & present[None, :]
            if KEEP:
                visible = tl.load(keep_ptr + rows[:, None] * keep_row + columns[None, :], mask=visible, other=0) != 0
            peak, total, acc = _absorb(q, k_ptr, v_ptr, k_row, v_row, columns, present, visible, peak, total, acc, scale, WIDTH, LANES, EXACT)
        return peak, total, acc

    @triton.jit
    def _banked(  # noqa: ANN202
        q_ptr, q_b, q_h, q_row, o_ptr, o_b, o_row, o_h, lse_ptr, lse_b, lse_row, lse_h, n_rows, scale,  # noqa: ANN001
        k0, k0_b, k0_h, k0_row, v0, v0_b, v0_h, v0_row, n0, keep0, keep0_b, keep0_h, keep0_row, work0, work0_row, choose0, choose0_b,  # noqa: ANN001
        k1, k1_b, k1_h, k1_row, v1, v1_b, v1_h, v1_row, n1, keep1, keep1_b, keep1_h, keep1_row, work1, work1_row, choose1, choose1_b,  # noqa: ANN001
        ko, ko_b, ko_h, ko_row, vo, vo_b, vo_h, vo_row, n_own, per_query, per_key, own_keep,  # noqa: ANN001
        BANK0: tl.constexpr, KEEP0: tl.constexpr, CHOOSE0: tl.constexpr, BANK1: tl.constexpr, KEEP1: tl.constexpr, CHOOSE1: tl.constexpr,
        ALONE: tl.constexpr, OWN: tl.constexpr, OWN_KEEP: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
        ROWS: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
    ):  # fmt: skip
        tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        kv_head = head // SHARE
        rows = tile * ROWS + tl.arange(0, ROWS)
        lanes = tl.arange(0, LANES)
        real = (rows[:, None] < n_rows) & (lanes < WIDTH)[None, :]
        q = tl.load(q_ptr + batch * q_b + head * q_h + rows[:, None] * q_row + lanes[None, :], mask=real, other=0.0)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, LANES], tl.float32)
        ko += batch * ko_b + kv_head * ko_h
        vo += batch * vo_b + kv_head * vo_h
        if ALONE:  # start from each row's own key
            own_k = tl.load(ko + rows[:, None] * ko_row + lanes[None, :], mask=real, other=0.0)
            peak = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), axis=1) * scale
            total = tl.full([ROWS], 1.0, tl.float32)
            acc = tl.load(vo + rows[:, None] * vo_row + lanes[None, :], mask=real, other=0.0).to(tl.float32)
        if BANK0:
            peak, total, acc = _read_bank(
                q, rows, n_rows, tile, batch, head, kv_head,
                k0, k0_b, k0_h, k0_row, v0, v0_b, v0_h, v0_row, n0, keep0, keep0_b, keep0_h, keep0_row, work0, work0_row, choose0, choose0_b,
                peak, total, acc, scale, KEEP0, CHOOSE0, WIDTH, LANES, KEYS, EXACT,
            )  # fmt: skip
        if BANK1:
            peak, total, acc = _read_bank(
                q, rows, n_rows, tile, batch, head, kv_head,
                k1, k1_b, k1_h, k1_row, v1, v1_b, v1_h, v1_row, n1, keep1, keep1_b, keep1_h, keep1_row, work1, work1_row, choose1, choose1_b,
                peak, total, acc, scale, KEEP1, CHOOSE1, WIDTH, LANES, KEYS, EXACT,
            )  # fmt: skip
        if OWN:  # the keys of the groups this tile's rows belong to
            first = (tile * ROWS // per_query) * per_key
            last = tl.minimum(((tl.minimum(tile * ROWS + ROWS, n_rows) - 1) // per_query + 1) * per_key, n_own)
            group = rows // per_query
            for start in range(first, last, KEYS):
                columns = start + tl.arange(0, KEYS)
                present = columns < last
                visible = (rows[:, None] < n_rows) & present[None, :] & (group[:, None] == (columns // per_key)[None, :])
                if OWN_KEEP:
                    visible = visible & (tl.load(own_keep + columns, mask=present, other=0)[None, :] != 0)
                peak, total, acc = _absorb(q, ko, vo, ko_row, vo_row, columns, present, visible, peak, total, acc, scale, WIDTH, LANES, EXACT)
        safe = tl.where(total > 0, total, 1.0)
        tl.store(o_ptr + batch * o_b + rows[:, None] * o_row + head * o_h + lanes[None, :], (acc / safe[:, None]).to(o_ptr.dtype.element_ty), mask=real)
        lse = tl.where(total > 0, (peak + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
        tl.store(lse_ptr + batch * lse_b + rows * lse_row + head * lse_h, lse, mask=rows < n_rows)
