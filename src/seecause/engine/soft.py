"""Attention over two banks whose keys have log-weights, as GPU kernels forward and back.

The same function as the explicit form in `attend.py`, which stays the reference: differentiable in
the rows and in the weights, not in the banks. Scores are never in memory; the step back computes
them again. Used on CUDA where `usable` says so (mosaic: special tokens under many masks).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seecause.engine.kernel import DTYPES, LOG2_E, triton_modules

if TYPE_CHECKING:
    from seecause.engine.attend import Bank, Own

ROWS, KEYS = 32, 64  # a tile of rows, a block of keys
MOST_EACH = 16  # rows of a group


def usable(q: Tensor, banks: Sequence[Bank], own: Own | None) -> bool:
    """Whether the kernels compute this: on CUDA, two weighted banks that need no gradient, groups
    of one size."""
    return q.is_cuda and fits(q, banks, own) and triton_modules() is not None


def fits(q: Tensor, banks: Sequence[Bank], own: Own | None) -> bool:
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


def attend(q: Tensor, banks: Sequence[Bank], own: Own, scale: float) -> tuple[Tensor, Tensor]:
    """See `attend.attend`. The log-sum-exp carries no gradient."""
    first, second = banks
    o, lse = _Soft.apply(
        q, first.bias, second.bias, own.k, own.v, first.k, first.v, second.k, second.v,
        scale, own.queries.each,
    )  # fmt: skip
    return o, lse.transpose(1, 2) / LOG2_E


@cache
def _kernels() -> Any:
    return importlib.import_module("seecause.engine.soft_kernel_triton")


class _Soft(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, w0: Tensor, w1: Tensor, ko: Tensor, vo: Tensor,
        k0: Tensor, v0: Tensor, k1: Tensor, v1: Tensor, scale: float, each: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        batch, heads, rows, width = q.shape
        q, ko, vo, k0, v0, k1, v1 = map(_lanes_last, (q, ko, vo, k0, v0, k1, v1))
        w0, w1 = w0.contiguous(), w1.contiguous()
        o = q.new_empty(batch, rows, heads, width)
        lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
        used = ROWS // each * each
        with _on(q.device):
            _kernels().forward[(-(-rows // used), heads, batch)](
                q, *q.stride()[:3], o, *o.stride()[:3], lse, rows, heads, scale * LOG2_E,
                *_bank(k0, v0, w0), *_bank(k1, v1, w1), *_strided(ko), *_strided(vo),
                EACH=each, USED=used, **_shape(q),
            )  # fmt: skip
        ctx.save_for_backward(q, w0, w1, ko, vo, k0, v0, k1, v1, o, lse)
        ctx.scale, ctx.each = scale, each
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore
        q, w0, w1, ko, vo, k0, v0, k1, v1, o, lse = ctx.saved_tensors
        batch, heads, rows, _ = q.shape
        do = _lanes_last(grad_o)
        delta = torch.empty_like(lse)  # [B, H, R]
        dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
        slopes = [torch.empty_like(w0), torch.empty_like(w1)]
        used = ROWS // ctx.each * ctx.each
        read = (q, *q.stride()[:3], do, *do.stride()[:3], lse, delta, rows, heads)
        with _on(q.device):
            _kernels().back_rows[(-(-rows // used), heads, batch)](
                *read, ctx.scale * LOG2_E, ctx.scale, o, *o.stride()[:3],
                *_bank(k0, v0, w0), *_bank(k1, v1, w1), *_strided(ko), *_strided(vo), dq, dk, dv,
                EACH=ctx.each, USED=used, **_shape(q),
            )  # fmt: skip
            for k, v, w, dw in ((k0, v0, w0, slopes[0]), (k1, v1, w1, slopes[1])):
                _kernels().back_weights[(-(-k.shape[2] // KEYS), -(-rows // ROWS), batch)](
                    *read, ctx.scale * LOG2_E, *_bank(k, v, w), dw, **_shape(q)
                )
        return dq, *slopes, dk, dv, None, None, None, None, None, None


def _shape(q: Tensor) -> dict[str, Any]:
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    width = q.shape[-1]
    lanes = max(16, 1 << (width - 1).bit_length())
    stages = 3 if lanes * q.element_size() <= 256 else 2  # what shared memory holds
    sizes = {"ROWS": ROWS, "KEYS": KEYS, "WIDTH": width, "LANES": lanes, "EXACT": exact}
    return {**sizes, "num_warps": 4, "num_stages": stages}


def _bank(k: Tensor, v: Tensor, w: Tensor) -> list[Any]:
    return [*_strided(k), *_strided(v), w, k.shape[2]]


def _strided(x: Tensor) -> list[Any]:
    """A pointer and its strides of images, heads and rows; one image may serve all."""
    return [x, 0 if len(x) == 1 else x.stride(0), x.stride(1), x.stride(2)]


def _lanes_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _on(device: torch.device) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
