"""Mosaic by definition: one native forward of three pictures (mixed, blank, source), with the
attention of the mixed one's special rows replaced.

    rows of the first picture: softmax over the special keys of its own run, the blank's patch keys
    with log(1 - m) added to their scores and the source's patch keys with log m added

Its patch rows go their own way and are never read: the final norm's output at patches is replaced
by m x + (1 - m) b for readouts that average them, and an attention pool's query reads both runs'
keys as every other row does. Plain autograd gives the gradient. Nothing of the package is used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mixed_logits(
    forward: Callable[[Tensor], Tensor],
    mask: Tensor,
    blank: Tensor,
    picture: Tensor,
    *,
    prefix: int,
    norm: nn.Module | None = None,
) -> Tensor:
    """Logits [C] of one picture [1, 3, H, W] under one mask [N], differentiable in the mask.
    `norm`: the last one before tokens are averaged."""
    tokens = prefix + len(mask)
    native = F.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        o = native(q, k, v, *args, **options)
        pooled = len(q) == 3 and q.shape[2] != k.shape[2]
        if len(q) != 3 or not (pooled or k.shape[2] == tokens):
            return o  # of a text
        special = 0 if pooled else prefix
        scale = options.get("scale") or q.shape[-1] ** -0.5
        rows = q[0] if pooled else q[0, :, :special]  # [H, R, dh]
        keys = torch.cat([k[0, :, :special], k[1, :, special:], k[2, :, special:]], dim=1)
        values = torch.cat([v[0, :, :special], v[1, :, special:], v[2, :, special:]], dim=1)
        weight = torch.cat([mask.new_zeros(special), torch.log1p(-mask), torch.log(mask)])
        added = args[0] if args else options.get("attn_mask")
        if added is not None:  # relative positions: both runs' keys have those of their place
            own = added.expand(3, *added.shape[1:])[0, :, : rows.shape[1]]
            weight = weight + torch.cat([own, own[..., special:]], dim=-1)
        share = torch.softmax(rows @ keys.transpose(1, 2) * scale + weight, dim=-1)
        mixed = torch.cat([share @ values, o[0, :, rows.shape[1] :]], dim=1)
        return torch.cat([mixed[None], o[1:]])

    def average(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        between = mask[:, None] * out[2, prefix:] + (1 - mask[:, None]) * out[1, prefix:]
        return torch.cat([torch.cat([out[0, :prefix], between])[None], out[1:]])

    handle = None if norm is None else norm.register_forward_hook(average)
    try:
        with replaced(attention):
            return forward(torch.cat([blank, blank, picture]))[0]
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def replaced(attention: Callable[..., Tensor]) -> Iterator[None]:
    """Every call of the fused attention goes to `attention`."""
    native = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = native
