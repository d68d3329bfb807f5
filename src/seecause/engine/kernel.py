"""GPU kernels (Triton) and when they apply. The plain functions in `attend.py` and `lvlm/cache.py`
compute the same results; they are the reference, and run on a CPU or without Triton.

Banked attention, every bank in one pass over its keys, no scores in memory:

    attend        without a gradient, at most two banks with masks. A key block that no row of a
                  tile keeps is skipped, so a bank of which each row sees nine keys costs little
    attend_soft   two banks whose keys have log-weights, differentiable in the rows and in the
                  weights, not in the banks; the backward pass computes scores again (mosaic:
                  special tokens under many masks)

Text rows of a vision-language model, a few rows of thousands of copies, where a plain run spends
its time on reading and writing the same rows: `rotate`, `own_text` and `shared_read_slope`. They
have derivatives with respect to rows and masks; weights, tables and shared keys have none.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from seecause.engine.attend import has_slope

if TYPE_CHECKING:
    from seecause.engine.attend import Bank, Own, Part

# a tile of rows, a block of keys: the fastest of fourteen pairs tried on an H200
ROWS, KEYS = 64, 32  # masks are words of 32 bits
WARPS, STAGES = 4, 2
SOFT_ROWS, SOFT_KEYS = 32, 64
MOST_EACH = 16  # maximum number of rows in a group of `attend_soft`
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HALF_PRECISION = (torch.float16, torch.bfloat16)
LOG2_E = 1.4426950408889634  # the attention kernels work in powers of two
MOST_ROWS = 64  # text rows that one program holds
SHARED_TILE = 64  # rows and keys of a tile in the backward pass of shared keys


@cache
def triton_kernels() -> Any:
    """The kernels, imported on first use; None if torch is installed without Triton."""
    try:
        return importlib.import_module("seecause.engine.kernel_triton")
    except ImportError:
        return None


def usable(x: Tensor) -> bool:
    """Whether kernels can run where x is."""
    return x.is_cuda and triton_kernels() is not None


def fits(q: Tensor, banks: Sequence[Bank], own: Own | None) -> bool:
    """Whether `attend` computes this: no gradient, at most two banks, no bias."""
    parts = (*banks, *([] if own is None else [own]))
    differentiable = has_slope(q, *(tensor for part in parts for tensor in (part.k, part.v)))
    simple = len(banks) <= 2 and all(part.bias is None for part in parts) and q.shape[-1] <= 256
    return q.dtype in DTYPES and simple and not differentiable


def attend(q: Tensor, banks: Sequence[Bank], own: Own | None, scale: float) -> Part:
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
            BANK0=first is not None, KEEP0=first is not None and first.keep is not None,
            BANK1=second is not None, KEEP1=second is not None and second.keep is not None,
            ALONE=alone, OWN=own is not None and not alone,
            SHARE=heads // kv_heads,
            WIDTH=width, LANES=_lanes(width), ROWS=ROWS, KEYS=KEYS,
            EXACT=q.dtype == torch.float32, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return o, lse


def _bank_arguments(bank: Bank | None, q: Tensor) -> list[Any]:
    """Pointers and strides; whatever is absent is passed as q and never read."""
    if bank is None:
        return [q, 0, 0, 0, q, 0, 0, 0, 0, q, 0, 0, 0, q, 0]
    keep = [q, 0, 0, 0, q, 0]
    if bank.keep is not None:
        words, work = bank.keep.words, bank.keep.worklist
        by_head = 0 if words.shape[1] == 1 else words.stride(1)
        keep = [words, strided(words)[1], by_head, words.stride(2), work, work.stride(0)]
    return [*strided(bank.k), *strided(bank.v), bank.k.shape[2], *keep]


def _own_arguments(own: Own | None, q: Tensor) -> list[Any]:
    if own is None:
        return [q, 0, 0, 0, q, 0, 0, 0, q, q]
    k, v = lanes_last(own.k), lanes_last(own.v)
    return [k, *k.stride()[:3], v, *v.stride()[:3], own.queries.owner, own.keys.starts]


def soft_fits(q: Tensor, banks: Sequence[Bank], own: Own | None) -> bool:
    """Whether `attend_soft` computes this: two banks that need no gradient, whose keys have a
    log-weight for every image and row and nothing else, and groups of one size."""
    if own is None or len(banks) != 2 or q.dtype not in DTYPES or q.shape[-1] > 128:
        return False
    each = own.queries.each
    if own.bias is not None or each is None or each != own.keys.each or each > MOST_EACH:
        return False
    heads = {q.shape[1], own.k.shape[1], *(bank.k.shape[1] for bank in banks)}
    learning = has_slope(*(tensor for bank in banks for tensor in (bank.k, bank.v)))
    return (
        len(heads) == 1
        and not learning
        and all(
            bank.keep is None
            and bank.bias is not None
            and bank.bias.dtype == torch.float32
            and bank.bias.shape == (len(q), 1, q.shape[2], bank.k.shape[2])
            for bank in banks
        )
    )


def attend_soft(q: Tensor, banks: Sequence[Bank], own: Own, scale: float) -> Part:
    """See `attend.attend`. The log-sum-exp carries no gradient."""
    first, second = banks
    o, lse = _Soft.apply(
        q, first.bias, second.bias, own.k, own.v, first.k, first.v, second.k, second.v,
        scale, own.queries.each,
    )  # fmt: skip
    return o, lse.transpose(1, 2) / LOG2_E


class _Soft(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, w0: Tensor, w1: Tensor, ko: Tensor, vo: Tensor,
        k0: Tensor, v0: Tensor, k1: Tensor, v1: Tensor, scale: float, each: int,
    ) -> Part:  # fmt: skip
        batch, heads, rows, width = q.shape
        q, w0, w1 = lanes_last(q), w0.contiguous(), w1.contiguous()
        o = q.new_empty(batch, rows, heads, width)
        lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
        tensors = (q, w0, w1, ko, vo, k0, v0, k1, v1, o, lse)
        _soft(tensors, (q, 0, 0, 0, q, q, q, q), scale, each, back=False)
        ctx.save_for_backward(*tensors)
        ctx.scale, ctx.each = scale, each
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore
        q, w0, w1, _, _, k0, v0, k1, v1, _, lse = ctx.saved_tensors
        (batch, heads, rows, _), do = q.shape, lanes_last(grad_o)
        delta = torch.empty_like(lse)  # [B, H, R]
        dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
        slope = (do, *do.stride()[:3], delta, dq, dk, dv)
        _soft(ctx.saved_tensors, slope, ctx.scale, ctx.each, back=True)
        weights = [torch.empty_like(w0), torch.empty_like(w1)]
        banks = [_soft_bank(k0, v0, w0), _soft_bank(k1, v1, w1)]
        with device_of(q):
            for bank, d_w in zip(banks, weights, strict=True):
                tiles = (-(-d_w.shape[-1] // SOFT_KEYS), -(-rows // SOFT_ROWS), batch)
                triton_kernels().back_weights[tiles](
                    q, *q.stride()[:3], do, *do.stride()[:3], lse, delta, rows, heads,
                    ctx.scale * LOG2_E, *bank, d_w, **_soft_shape(q),
                )  # fmt: skip
        return dq, *weights, dk, dv, None, None, None, None, None, None


def _soft(
    tensors: Sequence[Tensor], slope: Sequence[Any], scale: float, each: int, *, back: bool
) -> None:
    """Fill the outputs and log-sum-exps, the last two `tensors`; or, `back`, what follows the slope
    of the outputs in `slope`."""
    q, w0, w1, ko, vo, k0, v0, k1, v1, o, lse = tensors
    (batch, heads, rows, _), used = q.shape, SOFT_ROWS // each * each
    with device_of(q):
        triton_kernels().soft[(-(-rows // used), heads, batch)](
            q, *q.stride()[:3], o, *o.stride()[:3], lse, rows, heads, scale * LOG2_E, scale,
            *_soft_bank(k0, v0, w0), *_soft_bank(k1, v1, w1), *strided(ko), *strided(vo), *slope,
            EACH=each, USED=used, BACK=back, **_soft_shape(q),
        )  # fmt: skip


def _soft_shape(q: Tensor) -> dict[str, Any]:
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    width = q.shape[-1]
    lanes = _lanes(width)
    stages = 3 if lanes * q.element_size() <= 256 else 2  # what shared memory holds
    sizes = {"ROWS": SOFT_ROWS, "KEYS": SOFT_KEYS, "WIDTH": width, "LANES": lanes, "EXACT": exact}
    return {**sizes, "num_warps": 4, "num_stages": stages}


def _soft_bank(k: Tensor, v: Tensor, w: Tensor) -> list[Any]:
    return [*strided(k), *strided(v), w, k.shape[2]]


def fits_rows(x: Tensor) -> bool:
    """Whether the kernels for text rows take rows of heads [.., dh]: on CUDA in half precision,
    outside of a compiler, which fuses the plain way."""
    width, plain = x.shape[-1], torch.compiler.is_compiling()
    right = 32 <= width <= 256 and not width & (width - 1) and x.dtype in HALF_PRECISION
    return right and usable(x) and not plain


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rows x [B, H, R, dh] by cosines and sines [2, R, dh], in the layout [B, R, H, dh]."""
    return _Rotated.apply(x, table)


def own_text(
    q: Tensor, k: Tensor, v: Tensor, image: Part, average: Part, choose: Tensor, *, scale: float
) -> Tensor:
    """Rows q [1|B, H, R, dh] over their own k, v [1|B, Hkv, R, dh], looking back, merged with what
    they saw of the image, as much as `choose` [1|B, R, H] says, and for the rest of the average,
    [1|B, R, H, dh] each: [B, R, H, dh]. Differentiable in everything."""
    return _OwnText.apply(q, k, v, *image, *average, choose.float(), scale)


def shared_read_slope(
    q: Tensor, k: Tensor, v: Tensor, read: Part, slopes: Part, *, scale: float
) -> Tensor:
    """The gradient of rows q [1, H, R, dh] that read keys and values [1, Hkv, K, dh], from the
    gradients of what they `read`: of outputs [1, R, H, dh] and of their log-sum-exp [1, R, H]."""
    _, heads, rows, width = q.shape
    dq = torch.empty(1, rows, heads, width, dtype=q.dtype, device=q.device).transpose(1, 2)
    q, k, v, o, d_o = map(lanes_last, (q, k, v, read[0], slopes[0]))
    tensors = (q, k, v, o, read[1], d_o, slopes[1], dq)
    arguments = [a for t in tensors for a in (t, t.stride(1), t.stride(2))]
    with device_of(q):
        triton_kernels().shared_read_back[(-(-rows // SHARED_TILE), heads)](
            *arguments, rows, k.shape[2], scale, SHARE=heads // k.shape[1],
            ROWS=SHARED_TILE, KEYS=SHARED_TILE, WIDTH=width, EXACT=q.dtype == torch.float32,
            num_warps=4, num_stages=2,
        )  # fmt: skip
    return dq


class _Rotated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return _rotated(x, table)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:  # pyright: ignore
        return _rotated(slope, *ctx.saved_tensors, back=True), None


def _rotated(x: Tensor, table: Tensor, *, back: bool = False) -> Tensor:
    batch, heads, rows, width = x.shape
    out = torch.empty(batch, rows, heads, width, dtype=x.dtype, device=x.device).transpose(1, 2)
    x, table = lanes_last(x), lanes_last(table)
    with device_of(x):
        triton_kernels().rotated[(batch * rows,)](
            x, *x.stride()[:3], out, *out.stride()[:3], table, table.stride(1), table.stride(0),
            rows, heads, HEADS=_power_of_two(heads), HALF=width // 2, BACK=back, num_warps=4,
        )  # fmt: skip
    return out


class _OwnText(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.scale = arguments
        ctx.save_for_backward(*tensors)
        q = tensors[0]
        batch, (_, heads, rows, width) = max(map(len, tensors)), q.shape
        out = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device)
        _text_rows(tensors, out, [q] * 8, ctx.scale, back=False)
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:  # pyright: ignore
        tensors = ctx.saved_tensors
        made = [torch.empty_like(slope, memory_format=torch.contiguous_format) for _ in range(5)]
        made += [torch.empty(slope.shape[:3], device=slope.device) for _ in range(3)]
        _text_rows(tensors, slope, made, ctx.scale, back=True)
        dq, dk, dv, d_seen, d_blind, d_seen_lse, d_blind_lse, d_choose = made
        dk, dv = (x.unflatten(2, (tensors[1].shape[1], -1)).sum(dim=3) for x in (dk, dv))
        by_head = [x.transpose(1, 2) for x in (dq, dk, dv)]
        # autograd adds up the gradients of tensors shared by all copies
        return *by_head, d_seen, d_seen_lse, d_blind, d_blind_lse, d_choose, None


def _text_rows(
    tensors: Sequence[Tensor], rows: Tensor, slopes: list[Tensor], scale: float, *, back: bool
) -> None:
    """Fill the outputs `rows` [B, R, H, dh]; or, `back`, all `slopes` from the slope `rows`."""
    batch, count, heads, width = rows.shape
    k, tile = tensors[1], max(16, _power_of_two(count))
    with device_of(rows):
        triton_kernels().text_rows[(heads, batch)](
            *(argument for x in (*tensors, rows) for argument in strided(x)), *slopes,
            count, heads, scale, SHARE=heads // k.shape[1], ROWS=tile, WIDTH=width,
            EXACT=k.dtype == torch.float32, BACK=back, num_warps=4,
        )  # fmt: skip


def strided(x: Tensor) -> list[Any]:
    """A pointer and the strides of the first three axes; a single image or copy serves all."""
    x = lanes_last(x) if x.ndim == 4 else x
    return [x, 0 if len(x) == 1 else x.stride(0), x.stride(1), x.stride(2)]


def lanes_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _power_of_two(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _lanes(width: int) -> int:
    return max(16, _power_of_two(width))


def device_of(x: Tensor) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
