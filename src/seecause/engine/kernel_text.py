"""A few text rows of thousands of copies as GPU kernels (Triton), where a plain run spends its time
on reading and writing the same rows again and again.

Each is the same function as a plain one, which stays the reference and the way where a derivative
is asked for, without Triton, and on a CPU: `rotate_rows`, `with_own_text`, `norm_of_rows` and
`gated_feed` choose.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from seecause.engine.kernel import triton_modules

Part = tuple[Tensor, Tensor]  # [B, R, H, dh] and its log-sum-exp [B, R, H]
HALF_PRECISION = (torch.float16, torch.bfloat16)
MOST_ROWS = 64  # text rows that one program holds
WIDEST = 1 << 14  # lanes that one program holds


def usable(x: Tensor) -> bool:
    """Whether rows of heads [.., dh] run here."""
    width = x.shape[-1]
    return 32 <= width <= 256 and not width & (width - 1) and usable_for_states(x)


def usable_for_states(x: Tensor) -> bool:
    """Whether states [.., D] run here: on CUDA in half precision, without a derivative, outside of
    a compiler (which fuses the plain way)."""
    fits = x.is_cuda and x.dtype in HALF_PRECISION and x.shape[-1] <= WIDEST
    plain = torch.is_grad_enabled() and x.requires_grad
    return fits and not plain and not torch.compiler.is_compiling() and triton_modules() is not None


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rows x [B, H, R, dh] by cosines and sines [2, R, dh], in the layout [B, R, H, dh]."""
    triton, kernels = _modules()
    batch, heads, rows, width = x.shape
    out = torch.empty(batch, rows, heads, width, dtype=x.dtype, device=x.device).transpose(1, 2)
    x, table = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, table))
    with _on(x):
        kernels.rotated[(batch * rows,)](
            x, *x.stride()[:3], out, *out.stride()[:3], table, table.stride(1), table.stride(0),
            rows, heads, HEADS=triton.next_power_of_2(heads), HALF=width // 2, num_warps=4,
        )  # fmt: skip
    return out


def own_text(
    q: Tensor, k: Tensor, v: Tensor, picture: Part, average: Part, choose: Tensor, *, scale: float
) -> Tensor:
    """Rows q [1|B, H, R, dh] over their own k, v [1|B, Hkv, R, dh], looking back, merged with what
    they saw of the picture or the average, whichever `choose` [B, R, H] says: [B, R, H, dh]."""
    triton, kernels = _modules()
    _, heads, rows, width = q.shape
    out = torch.empty(len(choose), rows, heads, width, dtype=q.dtype, device=q.device)
    flags = choose.contiguous().view(torch.uint8)
    tensors = [t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v)]
    rest = [t for part in (picture, average) for t in part]
    rest[0], rest[2] = (t if t.stride(-1) == 1 else t.contiguous() for t in (rest[0], rest[2]))
    arguments = [a for t in (*tensors, *rest, flags, out) for a in (t, *_strides(t, len(choose)))]
    with _on(q):
        kernels.own_text[(heads, len(choose))](
            *arguments, rows, scale, SHARE=heads // k.shape[1],
            ROWS=max(16, triton.next_power_of_2(rows)), WIDTH=width,
            EXACT=q.dtype == torch.float32, num_warps=4,
        )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """States x [.., D] over their root mean square, times weight [D]."""
    triton, kernels = _modules()
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with _on(x):
        kernels.rms_norm[(len(rows),)](
            rows, rows.stride(0), weight, out, width, eps,
            LANES=triton.next_power_of_2(width), num_warps=8 if width > 2048 else 4,
        )  # fmt: skip
    return out


def gated(gate: Tensor, value: Tensor) -> Tensor:
    """silu(gate) value, of equal shapes."""
    _, kernels = _modules()
    gate, value = gate.contiguous(), value.contiguous()
    out, size = torch.empty_like(gate), 2048
    with _on(gate):
        kernels.gated[(-(-gate.numel() // size),)](gate, value, out, gate.numel(), SIZE=size)
    return out


def _strides(t: Tensor, batch: int) -> tuple[int, int, int]:
    """Of the first three axes; one copy serves all."""
    first = 0 if len(t) == 1 and batch > 1 else t.stride(0)
    return first, t.stride(1), t.stride(2)


def _modules() -> tuple[Any, Any]:
    modules = triton_modules()
    assert modules is not None  # `usable` said so
    return modules


def _on(x: Tensor) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
