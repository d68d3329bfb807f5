"""A few text rows of thousands of copies as GPU kernels (Triton), where a plain run spends its time
on reading and writing the same rows again and again, and a run back on launching.

Each is the same function as a plain one, which stays the reference and the way without Triton and
on a CPU: `rotate_rows`, `with_own_text`, `read_shared`, `norm_of_rows` and `gated_feed` choose. All
but `own_text` have a derivative, with respect to rows and soft masks; weights, tables and shared
keys have none.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seecause.engine.kernel import device_of, lanes_last, power_of_two, strided, triton_kernels

Part = tuple[Tensor, Tensor]  # [B, R, H, dh] and its log-sum-exp [B, R, H]
HALF_PRECISION = (torch.float16, torch.bfloat16)
MOST_ROWS = 64  # text rows that one program holds
WIDEST = 1 << 14  # lanes that one program holds
ROWS, KEYS = 64, 64  # of a tile on the way back from shared keys
SIZE = 2048  # entries of a gate that one program has


def usable(x: Tensor) -> bool:
    """Whether rows of heads [.., dh] run here."""
    width = x.shape[-1]
    return 32 <= width <= 256 and not width & (width - 1) and usable_for_states(x)


def usable_for_states(x: Tensor) -> bool:
    """Whether states [.., D] run here: on CUDA in half precision, outside of a compiler (which
    fuses the plain way)."""
    fits = x.is_cuda and x.dtype in HALF_PRECISION and x.shape[-1] <= WIDEST
    return fits and not torch.compiler.is_compiling() and triton_kernels() is not None


def has_slope(*tensors: Tensor) -> bool:
    """Whether a derivative is asked for."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rows x [B, H, R, dh] by cosines and sines [2, R, dh], in the layout [B, R, H, dh]."""
    return _Rotated.apply(x, table) if has_slope(x) else _rotated(x, table)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """States x [.., D] over their root mean square, times weight [D]."""
    return _Normed.apply(x, weight, eps) if has_slope(x) else _normed(x, weight, eps)


def gated(gate: Tensor, value: Tensor) -> Tensor:
    """silu(gate) value, of equal shapes."""
    return _Gated.apply(gate, value) if has_slope(gate, value) else _gated(gate, value)


def own_text(
    q: Tensor, k: Tensor, v: Tensor, picture: Part, average: Part, choose: Tensor, *, scale: float
) -> Tensor:
    """Rows q [1|B, H, R, dh] over their own k, v [1|B, Hkv, R, dh], looking back, merged with what
    they saw of the picture or the average, [1|B, R, H, dh] each, whichever `choose` [1|B, R, H]
    says: [B, R, H, dh]."""
    flags = choose.contiguous().view(torch.uint8)
    return _text_rows((q, k, v, *picture, *average, flags), scale, hard=True)


def soft_text(
    q: Tensor, k: Tensor, v: Tensor, picture: Part, average: Part, choose: Tensor, *, scale: float
) -> Tensor:
    """The same for a soft `choose` [1|B, R, H] in float32: so much with the picture, the rest with
    the average. Differentiable in everything."""
    return _SoftText.apply(q, k, v, *picture, *average, choose, scale)


def shared_read_slope(
    q: Tensor, k: Tensor, v: Tensor, read: Part, slopes: Part, *, scale: float
) -> Tensor:
    """The slope of rows q [1, H, R, dh] that read keys and values [1, Hkv, K, dh], from the slopes
    of what they `read`: of outputs [1, R, H, dh] and of their log-sum-exp [1, R, H]."""
    _, heads, rows, width = q.shape
    dq = torch.empty(1, rows, heads, width, dtype=q.dtype, device=q.device).transpose(1, 2)
    q, k, v, o, d_o = map(lanes_last, (q, k, v, read[0], slopes[0]))
    tensors = (q, k, v, o, read[1], d_o, slopes[1], dq)
    arguments = [a for t in tensors for a in (t, t.stride(1), t.stride(2))]
    with device_of(q):
        _kernels().shared_read_back[(-(-rows // ROWS), heads)](
            *arguments, rows, k.shape[2], scale, SHARE=heads // k.shape[1], ROWS=ROWS, KEYS=KEYS,
            WIDTH=width, EXACT=q.dtype == torch.float32, num_warps=4, num_stages=2,
        )  # fmt: skip
    return dq


class _Rotated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return _rotated(x, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        return _rotated(slope, *ctx.saved_tensors, back=True), None


class _Normed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _normed(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return _normed(x, weight, ctx.eps, slope), None, None


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gate, value)
        return _gated(gate, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        gate, value, slope = (x.contiguous() for x in (*ctx.saved_tensors, slope))
        d_gate, d_value = torch.empty_like(gate), torch.empty_like(value)
        with device_of(gate):
            _kernels().gated_back[(-(-gate.numel() // SIZE),)](
                gate, value, slope, d_gate, d_value, gate.numel(), SIZE=SIZE
            )
        return d_gate, d_value


class _SoftText(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.scale = arguments
        ctx.save_for_backward(*tensors)
        return _text_rows(tensors, ctx.scale, hard=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        tensors, (batch, rows, heads, width) = ctx.saved_tensors, slope.shape
        q, k = tensors[:2]
        made = [torch.empty_like(slope, memory_format=torch.contiguous_format) for _ in range(5)]
        made += [torch.empty(batch, rows, heads, device=q.device) for _ in range(3)]
        with device_of(q):
            _kernels().text_rows_back[(heads, batch)](
                *_strided((*tensors, slope)), *made, rows, heads, ctx.scale,
                **_text_shape(rows, heads, k, width),
            )  # fmt: skip
        dq, dk, dv, d_seen, d_blind, d_seen_lse, d_blind_lse, d_choose = made
        dk, dv = (x.unflatten(2, (k.shape[1], -1)).sum(dim=3) for x in (dk, dv))
        by_head = [x.transpose(1, 2) for x in (dq, dk, dv)]
        # autograd itself adds up the slopes of what served all copies
        return *by_head, d_seen, d_seen_lse, d_blind, d_blind_lse, d_choose, None


def _rotated(x: Tensor, table: Tensor, *, back: bool = False) -> Tensor:
    batch, heads, rows, width = x.shape
    out = torch.empty(batch, rows, heads, width, dtype=x.dtype, device=x.device).transpose(1, 2)
    x, table = lanes_last(x), lanes_last(table)
    with device_of(x):
        _kernels().rotated[(batch * rows,)](
            x, *x.stride()[:3], out, *out.stride()[:3], table, table.stride(1), table.stride(0),
            rows, heads, HEADS=power_of_two(heads), HALF=width // 2, BACK=back, num_warps=4,
        )  # fmt: skip
    return out


def _normed(x: Tensor, weight: Tensor, eps: float, slope: Tensor | None = None) -> Tensor:
    """The norm of states, or their slope from that of the norm."""
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = lanes_last(x.reshape(-1, width))
    shape = {"LANES": power_of_two(width), "num_warps": 8 if width > 2048 else 4}
    given: list[Any] = [rows, rows.stride(0), weight]
    kernel = _kernels().rms_norm
    if slope is not None:
        slope = lanes_last(slope.reshape(-1, width))
        given += [slope, slope.stride(0)]
        kernel = _kernels().rms_norm_back
    with device_of(x):
        kernel[(len(rows),)](*given, out, width, eps, **shape)
    return out


def _gated(gate: Tensor, value: Tensor) -> Tensor:
    gate, value = gate.contiguous(), value.contiguous()
    out = torch.empty_like(gate)
    with device_of(gate):
        _kernels().gated[(-(-gate.numel() // SIZE),)](gate, value, out, gate.numel(), SIZE=SIZE)
    return out


def _text_rows(tensors: Sequence[Tensor], scale: float, *, hard: bool) -> Tensor:
    """The kernel over q, k, v, both parts and `choose`: [B, R, H, dh]."""
    q, k = tensors[:2]
    batch, (_, heads, rows, width) = max(map(len, tensors)), q.shape
    out = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device)
    with device_of(q):
        shape = _text_shape(rows, heads, k, width)
        _kernels().text_rows[(heads, batch)](
            *_strided((*tensors, out)), rows, scale, HARD=hard, **shape
        )
    return out


def _text_shape(rows: int, heads: int, k: Tensor, width: int) -> dict[str, Any]:
    exact, tile = k.dtype == torch.float32, max(16, power_of_two(rows))
    sizes = {"SHARE": heads // k.shape[1], "ROWS": tile, "WIDTH": width, "EXACT": exact}
    return {**sizes, "num_warps": 4}


def _strided(tensors: Sequence[Tensor]) -> list[Any]:
    """Each with the strides of its first three axes; one copy serves all."""
    return [a for x in tensors for a in strided(lanes_last(x) if x.ndim == 4 else x)]


@cache
def _kernels() -> Any:
    return importlib.import_module("seecause.engine.text_kernel_triton")
