"""Attention of many masked copies of the same text rows.

The copies differ in which heads see the picture, so they read two banks that all of them share, the
picture's keys and the average picture's, and their own text. Copies are folded into rows, so a bank
is read by one large product and never copied:

    o = merge(choose(picture, average), own text)          by log-sum-exp, as one softmax over the
    chosen keys
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from seecause.engine.attend import Bank, attend
from seecause.engine.mask import Mask
from seecause.types import wide

Part = tuple[Tensor, Tensor]  # o [B, R, H, dh] and its log-sum-exp [B, R, H], float32 or float64

_HALF = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)  # the first with the fused kernel


def read_shared(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, bias: Tensor | None = None
) -> Part:
    """Rows q [B, H, R, dh] over keys all of them share, k and v [1, Hkv, K, dh]; bias [1, H, R, K]
    hides some of them."""
    if bias is not None:
        return attend(q, [Bank(k, v, bias=bias)], scale=scale)
    batch, _, rows, _ = q.shape
    folded = q.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)  # [1, H, B*R, dh]
    o, lse = (
        _flash(folded, k, v, scale) if _has_flash(q) else attend(folded, [Bank(k, v)], scale=scale)
    )
    return o[0].unflatten(0, (batch, rows)), lse[0].unflatten(0, (batch, rows))


def read_own(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Part:
    """The last R rows of each copy over its own text q [B, H, R, dh], k and v [B, Hkv, K, dh],
    looking back only."""
    rows, keys = q.shape[2], k.shape[2]
    if _has_flash(q) and rows in (1, keys):
        return _flash(q, k, v, scale, causal=rows == keys)
    back = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    return attend(q, [Bank(k, v, Mask(back[None, None]))], scale=scale)


def blend(own: Part, picture: Part | None, average: Part | None, choose: Tensor) -> Tensor:
    """Each row and head [B, R, H] takes the picture where `choose` says so, else the average; then
    its own text is merged in. [B, R, H, dh]"""
    if picture is None or average is None:
        seen, lse = picture or average  # type: ignore[misc]
    else:
        seen, lse = (
            torch.where(choose[..., None], picture[0], average[0]),
            torch.where(choose, picture[1], average[1]),
        )
    share = torch.sigmoid(lse - own[1])[..., None]  # exp(lse) / (exp(lse) + exp(own))
    start = wide(own[0])
    return (start + share * (wide(seen) - start)).to(own[0].dtype)


@cache
def compiled_blend() -> Callable[..., Tensor]:
    """The same in one kernel."""
    return torch.compile(blend)


def _has_flash(q: Tensor) -> bool:
    if q.is_cuda:
        return (
            q.dtype in _HALF
            and q.shape[-1] % 8 == 0
            and q.shape[-1] <= 256
            and _capability(q.device) >= _AMPERE
        )
    return q.device.type == "cpu"  # elsewhere (mps, xpu) the plain way


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False) -> Part:
    """The fused kernels under torch's attention, called by name because they also return the
    log-sum-exp. They take fewer key heads than query heads."""
    if q.is_cuda:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    else:
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    return o.transpose(1, 2), lse.transpose(1, 2)
