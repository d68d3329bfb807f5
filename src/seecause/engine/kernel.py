"""Banked attention as GPU kernels (Triton): every bank in one pass over its keys, no scores in
memory. The same functions as the explicit form in `attend.py`, which stays the reference.

    attend        without a gradient, at most two banks with masks. A key block that no row of a
                  tile keeps is skipped, so a bank of which each row sees nine keys costs little
    attend_soft   two banks whose keys have log-weights, differentiable in the rows and in the
                  weights, not in the banks; the step back computes scores again (mosaic: special
                  tokens under many masks)
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
SOFT_ROWS, SOFT_KEYS = 32, 64
MOST_EACH = 16  # rows of a group of `attend_soft`
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LOG2_E = 1.4426950408889634  # the kernels work in powers of two


@cache
def triton_kernels() -> Any:
    """The kernels, imported on first use; None where torch came without Triton, as for a CPU."""
    try:
        return importlib.import_module("seecause.engine.kernel_triton")
    except ImportError:
        return None


def usable(q: Tensor, banks: Sequence[Bank], own: Own | None) -> bool:
    """Whether `attend` computes this: on CUDA, no gradient, at most two banks, no bias."""
    parts = (*banks, *([] if own is None else [own]))
    tensors = [q, *(tensor for part in parts for tensor in (part.k, part.v))]
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    plain = all(part.bias is None for part in parts)
    simple = len(banks) <= 2 and plain and q.shape[-1] <= 256
    fits = q.is_cuda and q.dtype in DTYPES and simple and not differentiable
    return fits and triton_kernels() is not None


def attend(
    q: Tensor, banks: Sequence[Bank], own: Own | None, scale: float
) -> tuple[Tensor, Tensor]:
    """See `attend.attend`: q [B, H, R, dh] -> o [B, R, H, dh] in q's dtype, lse [B, R, H]
    float32."""
    batch, heads, rows, width = q.shape
    q = lanes_last(q)
    o = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, rows, heads, dtype=torch.float32, device=q.device)
    first, second = (banks[i] if i < len(banks) else None for i in range(2))
    alone = own is not None and own.queries.single and own.keys.single  # each row's own key
    kv_heads = next(keys.k.shape[1] for keys in (*banks, own) if keys is not None)
    with device_of(q):
        triton_kernels().banked[(-(-rows // ROWS), heads, batch)](
            q, *q.stride()[:3], o, *o.stride()[:3], lse, *lse.stride(), rows, scale * LOG2_E,
            *_bank_arguments(first, q), *_bank_arguments(second, q), *_own_arguments(own, q),
            BANK0=first is not None, KEEP0=_has(first, "keep"), CHOOSE0=_has(first, "choose"),
            BANK1=second is not None, KEEP1=_has(second, "keep"), CHOOSE1=_has(second, "choose"),
            ALONE=alone, OWN=own is not None and not alone,
            SHARE=heads // kv_heads,
            WIDTH=width, LANES=_lanes(width), ROWS=ROWS, KEYS=KEYS,
            EXACT=q.dtype == torch.float32, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return o, lse


def _has(bank: Bank | None, what: str) -> bool:
    return bank is not None and getattr(bank, what) is not None


def _bank_arguments(bank: Bank | None, q: Tensor) -> list[Any]:
    """Pointers and strides; whatever is absent is passed as q and never read."""
    if bank is None:
        return [q, 0, 0, 0, q, 0, 0, 0, 0, q, 0, 0, 0, q, 0, q, 0]
    arguments = [*strided(lanes_last(bank.k)), *strided(lanes_last(bank.v)), bank.k.shape[2]]
    if bank.keep is None:
        arguments += [q, 0, 0, 0, q, 0]
    else:
        keep, work = bank.keep.words, bank.keep.worklist
        by_head = 0 if keep.shape[1] == 1 else keep.stride(1)
        arguments += [keep, strided(keep)[1], by_head, keep.stride(2), work, work.stride(0)]
    if bank.choose is None:
        return [*arguments, q, 0]
    return [*arguments, bank.choose.contiguous().view(torch.uint8), bank.choose.shape[1]]


def _own_arguments(own: Own | None, q: Tensor) -> list[Any]:
    if own is None:
        return [q, 0, 0, 0, q, 0, 0, 0, q, q]
    k, v = lanes_last(own.k), lanes_last(own.v)
    return [k, *k.stride()[:3], v, *v.stride()[:3], own.queries.owner, own.keys.starts]


def soft_usable(q: Tensor, banks: Sequence[Bank], own: Own | None) -> bool:
    """Whether `attend_soft` computes this: on CUDA, two weighted banks that need no gradient,
    groups of one size."""
    return q.is_cuda and soft_fits(q, banks, own) and triton_kernels() is not None


def soft_fits(q: Tensor, banks: Sequence[Bank], own: Own | None) -> bool:
    """The same, wherever it runs."""
    if own is None or len(banks) != 2 or q.dtype not in DTYPES or q.shape[-1] > 128:
        return False
    each = own.queries.each
    if own.bias is not None or each is None or each != own.keys.each or each > MOST_EACH:
        return False
    heads = {q.shape[1], own.k.shape[1], *(bank.k.shape[1] for bank in banks)}
    learning = torch.is_grad_enabled() and any(
        b.k.requires_grad or b.v.requires_grad for b in banks
    )
    return len(heads) == 1 and not learning and all(_weighted(q, bank) for bank in banks)


def _weighted(q: Tensor, bank: Bank) -> bool:
    """Whether all that a bank has are log-weights for every image and row, the same for all
    heads."""
    shape = (len(q), 1, q.shape[2], bank.k.shape[2])
    return (
        bank.bias is not None
        and bank.bias.shape == shape
        and bank.bias.dtype == torch.float32
        and bank.keep is None
        and bank.choose is None
    )


def attend_soft(q: Tensor, banks: Sequence[Bank], own: Own, scale: float) -> tuple[Tensor, Tensor]:
    """See `attend.attend`. The log-sum-exp carries no gradient."""
    first, second = banks
    o, lse = _Soft.apply(
        q, first.bias, second.bias, own.k, own.v, first.k, first.v, second.k, second.v,
        scale, own.queries.each,
    )  # fmt: skip
    return o, lse.transpose(1, 2) / LOG2_E


class _Soft(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, w0: Tensor, w1: Tensor, ko: Tensor, vo: Tensor,
        k0: Tensor, v0: Tensor, k1: Tensor, v1: Tensor, scale: float, each: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        batch, heads, rows, width = q.shape
        q, ko, vo, k0, v0, k1, v1 = map(lanes_last, (q, ko, vo, k0, v0, k1, v1))
        w0, w1 = w0.contiguous(), w1.contiguous()
        o = q.new_empty(batch, rows, heads, width)
        lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
        used = SOFT_ROWS // each * each
        with device_of(q):
            triton_kernels().forward[(-(-rows // used), heads, batch)](
                q, *q.stride()[:3], o, *o.stride()[:3], lse, rows, heads, scale * LOG2_E,
                *_soft_bank(k0, v0, w0), *_soft_bank(k1, v1, w1), *strided(ko), *strided(vo),
                EACH=each, USED=used, **_soft_shape(q),
            )  # fmt: skip
        ctx.save_for_backward(q, w0, w1, ko, vo, k0, v0, k1, v1, o, lse)
        ctx.scale, ctx.each = scale, each
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore
        q, w0, w1, ko, vo, k0, v0, k1, v1, o, lse = ctx.saved_tensors
        batch, heads, rows, _ = q.shape
        do = lanes_last(grad_o)
        delta = torch.empty_like(lse)  # [B, H, R]
        dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
        slopes = [torch.empty_like(w0), torch.empty_like(w1)]
        used = SOFT_ROWS // ctx.each * ctx.each
        read = (q, *q.stride()[:3], do, *do.stride()[:3], lse, delta, rows, heads)
        kernels, shape = triton_kernels(), _soft_shape(q)
        with device_of(q):
            kernels.back_rows[(-(-rows // used), heads, batch)](
                *read, ctx.scale * LOG2_E, ctx.scale, o, *o.stride()[:3],
                *_soft_bank(k0, v0, w0), *_soft_bank(k1, v1, w1), *strided(ko), *strided(vo),
                dq, dk, dv, EACH=ctx.each, USED=used, **shape,
            )  # fmt: skip
            for k, v, w, dw in ((k0, v0, w0, slopes[0]), (k1, v1, w1, slopes[1])):
                tiles = (-(-k.shape[2] // SOFT_KEYS), -(-rows // SOFT_ROWS), batch)
                kernels.back_weights[tiles](
                    *read, ctx.scale * LOG2_E, *_soft_bank(k, v, w), dw, **shape
                )
        return dq, *slopes, dk, dv, None, None, None, None, None, None


def _soft_shape(q: Tensor) -> dict[str, Any]:
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    width = q.shape[-1]
    lanes = _lanes(width)
    stages = 3 if lanes * q.element_size() <= 256 else 2  # what shared memory holds
    sizes = {"ROWS": SOFT_ROWS, "KEYS": SOFT_KEYS, "WIDTH": width, "LANES": lanes, "EXACT": exact}
    return {**sizes, "num_warps": 4, "num_stages": stages}


def _soft_bank(k: Tensor, v: Tensor, w: Tensor) -> list[Any]:
    return [*strided(k), *strided(v), w, k.shape[2]]


def strided(x: Tensor) -> list[Any]:
    """A pointer and the strides of its first three axes; one image may serve all."""
    return [x, 0 if len(x) == 1 else x.stride(0), x.stride(1), x.stride(2)]


def lanes_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def power_of_two(count: int) -> int:
    """The next one."""
    return 1 << (count - 1).bit_length()


def _lanes(width: int) -> int:
    return max(16, power_of_two(width))


def device_of(x: Tensor) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
