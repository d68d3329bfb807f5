"""Packed attention weights (`nn.MultiheadAttention` and its relatives), split exactly.

`nn.MultiheadAttention` never calls its output projection as a module, so hooks there never fire;
weights are read at each call instead.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from seecause.errors import UnsupportedModel


def check(attention: Any, where: str) -> None:
    """Refuse the rare options that add keys or change the order of axes."""
    extra = getattr(attention, "bias_k", None) is not None or getattr(
        attention, "add_zero_attn", False
    )
    if attention.in_proj_weight is None or extra or not getattr(attention, "batch_first", True):
        raise UnsupportedModel(
            f"{type(attention).__name__} ({where})",
            "only packed, batch-first attention without extra keys is split",
        )


def described(attention: Any) -> dict[str, Any]:
    """What a `Block` is told of such an attention."""
    width = attention.head_dim
    return {
        "heads": attention.num_heads,
        "head_dim": width,
        "scale": width**-0.5,
        "project": partial(project, attention),
        "mix": partial(mix, attention),
    }


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


class Packed(nn.Module):
    """`nn.MultiheadAttention` (batch first, self-attention) whose heads need not fill its width."""

    batch_first = True

    def __init__(
        self, weight: Tensor, bias: Tensor | None, out: nn.Linear, *, heads: int, head_dim: int
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.out_proj = heads, head_dim, out
        self.in_proj_weight = nn.Parameter(weight, requires_grad=False)  # [3 * H * dh, D]
        self.in_proj_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, None]:
        q, k, v = (part.transpose(1, 2) for part in project(self, query))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return self.out_proj(o.transpose(1, 2).flatten(2)), None


def first_or_none(module: Any, *names: str) -> Any:
    """The first attribute that exists, under any of the names it has had; dots reach inside."""
    for name in names:
        part = module
        for step in name.split("."):
            part = getattr(part, step, None)
        if part is not None:
            return part
    return None
