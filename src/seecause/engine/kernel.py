"""Banked attention as one GPU kernel (Triton): every bank in one pass over its keys, no scores in
memory.

The same function as the explicit form in `attend.py`, which stays the reference; this one is used
on CUDA when no gradient is asked for. A key block that no row of a tile keeps is skipped, so a bank
of which each row sees nine keys costs little.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from seecause.engine.attend import Bank, Own

# a tile of rows, a block of keys: the fastest of fourteen pairs tried on an H200
ROWS, KEYS = 64, 32  # masks are words of 32 bits
WARPS, STAGES = 4, 2
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LOG2_E = 1.4426950408889634  # the kernel works in powers of two


@cache
def triton_modules() -> tuple[Any, Any] | None:
    """triton and the kernel written in it, imported on first use; CPU-only builds of torch come
    without."""
    try:
        triton = importlib.import_module("triton")
        return triton, importlib.import_module("seecause.engine.kernel_triton")
    except ImportError:
        return None


def usable(q: Tensor, banks: Sequence[Bank], own: Own | None) -> bool:
    """Whether the kernel computes this: on CUDA, no gradient, at most two banks, no bias."""
    tensors = [
        q,
        *(t for b in banks for t in (b.k, b.v)),
        *((own.k, own.v) if own is not None else ()),
    ]
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    plain = all(part is None or part.bias is None for part in (*banks, own))
    simple = len(banks) <= 2 and plain and q.shape[-1] <= 256
    fits = q.is_cuda and q.dtype in DTYPES and simple and not differentiable
    return fits and triton_modules() is not None


def attend(
    q: Tensor, banks: Sequence[Bank], own: Own | None, scale: float
) -> tuple[Tensor, Tensor]:
    """See `attend.attend`: q [B, H, R, dh] -> o [B, R, H, dh] in q's dtype, lse [B, R, H]
    float32."""
    modules = triton_modules()
    assert modules is not None  # `usable` said so
    triton, kernel_triton = modules
    batch, heads, rows, width = q.shape
    q = _rows_last(q)
    o = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, rows, heads, dtype=torch.float32, device=q.device)
    first, second = (banks[i] if i < len(banks) else None for i in range(2))
    alone = own is not None and own.queries.single and own.keys.single  # each row's own key
    kv_heads = next(keys.k.shape[1] for keys in (*banks, own) if keys is not None)
    on_device = (
        torch.cuda.device(q.device) if q.is_cuda else nullcontext()
    )  # Triton launches on the current one
    with on_device:
        kernel_triton.banked[(triton.cdiv(rows, ROWS), heads, batch)](
            q, *q.stride()[:3], o, *o.stride()[:3], lse, *lse.stride(), rows, scale * LOG2_E,
            *_bank_arguments(first, q), *_bank_arguments(second, q), *_own_arguments(own, q),
            BANK0=first is not None, KEEP0=_has(first, "keep"), CHOOSE0=_has(first, "choose"),
            BANK1=second is not None, KEEP1=_has(second, "keep"), CHOOSE1=_has(second, "choose"),
            ALONE=alone, OWN=own is not None and not alone,
            SHARE=heads // kv_heads,
            WIDTH=width, LANES=max(16, triton.next_power_of_2(width)), ROWS=ROWS, KEYS=KEYS,
            EXACT=q.dtype == torch.float32, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return o, lse


def _has(bank: Bank | None, what: str) -> bool:
    return bank is not None and getattr(bank, what) is not None


def _bank_arguments(bank: Bank | None, q: Tensor) -> list[Any]:
    """Pointers and strides; whatever is absent is passed as q and never read."""
    if bank is None:
        return [q, 0, 0, 0, q, 0, 0, 0, 0, q, 0, 0, 0, q, 0, q, 0]
    k, v = _rows_last(bank.k), _rows_last(bank.v)
    arguments: list[Any] = [
        k,
        _spread(k, 0),
        k.stride(1),
        k.stride(2),
        v,
        _spread(v, 0),
        v.stride(1),
        v.stride(2),
        k.shape[2],
    ]
    if bank.keep is None:
        arguments += [q, 0, 0, 0, q, 0]
    else:
        keep, work = bank.keep.words, bank.keep.worklist
        arguments += [keep, _spread(keep, 0), _spread(keep, 1), keep.stride(2)]
        arguments += [work, work.stride(0)]
    return (
        [*arguments, q, 0]
        if bank.choose is None
        else [*arguments, bank.choose.contiguous().view(torch.uint8), bank.choose.shape[1]]
    )


def _own_arguments(own: Own | None, q: Tensor) -> list[Any]:
    if own is None:
        return [q, 0, 0, 0, q, 0, 0, 0, q, q]
    k, v = _rows_last(own.k), _rows_last(own.v)
    return [k, *k.stride()[:3], v, *v.stride()[:3], own.queries.owner, own.keys.starts]


def _rows_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _spread(x: Tensor, axis: int) -> int:
    """The stride of an axis that may be shared."""
    return 0 if x.shape[axis] == 1 else x.stride(axis)
