"""Packed attention weights (`nn.MultiheadAttention` and its relatives), split exactly.

`nn.MultiheadAttention` never calls its output projection as a module, so hooks there never fire; weights are read at each call instead.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from seecause.errors import UnsupportedModel


def check(attention: Any, where: str) -> None:
    """Refuse the rare options that add keys or change the order of axes."""
    extra = getattr(attention, "bias_k", None) is not None or getattr(attention, "add_zero_attn", False)
    if attention.in_proj_weight is None or extra or not getattr(attention, "batch_first", True):
        raise UnsupportedModel(f"{type(attention).__name__} ({where})", "only packed, batch-first attention without extra keys is split")


def project(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [B, R, D] -> q, k, v [B, R, H, dh]."""
    q, k, v = _some(attention, x, 0, 3)
    return q, k, v


def query(attention: Any, x: Tensor) -> Tensor:
    """Rows [B, R, D] -> q alone, [B, R, H, dh]."""
    return _some(attention, x, 0, 1)[0]


def key_value(attention: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [B, R, D] -> k, v [B, R, H, dh]."""
    k, v = _some(attention, x, 1, 3)
    return k, v


def mix(attention: Any, x: Tensor) -> Tensor:
    """The output projection, [B, R, H*dh] -> [B, R, D]."""
    return F.linear(x, attention.out_proj.weight, attention.out_proj.bias)


def _some(attention: Any, x: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
    heads, width = attention.num_heads, attention.head_dim
    part = slice(first * heads * width, last * heads * width)
    bias = attention.in_proj_bias
    packed = F.linear(x, attention.in_proj_weight[part], None if bias is None else bias[part])
    return packed.unflatten(-1, (last - first, heads, width)).unbind(-3)
