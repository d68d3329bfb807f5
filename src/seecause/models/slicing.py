"""Attention with fewer heads: rows of Q, K and V and columns of O are cut out of native modules, in
place.

The bias of O belongs to no head and stays. A block that would lose its last head keeps one whose
columns of O are zero. Projections are found by structure, since releases rename them:

    packed qkv        timm
    q, k, v apart     transformers, timm without fusion; grouped keys and values go with their whole
    group
    in_proj_weight    `nn.MultiheadAttention` (torchvision, open_clip), which fixes its own width,
    so `Packed` takes its place
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.errors import UnsupportedModel
from seecause.models.block import first_or_none, project_packed

PLACES = ("attn", "attention", "self_attn", "self_attention")
QUERY, KEY, VALUE = ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")
OUTPUT = ("proj", "o_proj", "out_proj", "output.dense", "projection_layer")
# whichever a module keeps
COUNTS = ("num_heads", "num_attention_heads", "attn_dim", "all_head_size")
ZEROED = "zero its columns of the output projection instead: ablate, or export with form='zeroed'"


def _uncut(module: nn.Module, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"cutting heads out of {type(module).__name__}", reason, ZEROED)


def find_attention(block: nn.Module) -> tuple[str, Any]:
    """The name and the module of a native block's attention."""
    for name in PLACES:
        if isinstance(getattr(block, name, None), nn.Module):
            return name, getattr(block, name)
    raise _uncut(block, "its attention is not a module of its own")


def find_output(attention: nn.Module) -> Any:
    """The output projection of an attention module."""
    projection = first_or_none(attention, *OUTPUT)
    if not isinstance(projection, nn.Linear):
        raise _uncut(attention, "no linear output projection is in it")
    return projection


def slice_heads(block: nn.Module, keep: Sequence[int]) -> None:
    """Leave only the heads `keep` (in this order) in the attention of a native block; one that does
    nothing where none is left."""
    name, attention = find_attention(block)
    norm = getattr(attention, "norm", None)
    if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
        raise _uncut(attention, "a norm before its output projection sees all heads at once")
    if type(attention).__name__ == "EvaAttention":
        attention = _free_width(attention)
        setattr(block, name, attention)
    inner = getattr(attention, "attention", attention)  # DINOv2 keeps the output outside of it
    left = keep or [0]
    if hasattr(inner, "in_proj_weight"):
        setattr(block, name, _packed(inner, left))
    elif getattr(inner, "qkv", None) is not None:
        _slice_fused(inner, left)
    else:
        _slice_apart(inner, find_output(attention), left)
    if not keep:
        zero_heads(block, [0], of=1)


def zero_heads(block: Any, heads: Sequence[int], *, of: int) -> None:
    """Zero the columns of the output projection that read `heads`; `of` is how many heads the block
    has. The architecture stays, and so does the bias of O."""
    weight = output_weight(block)  # [D, H * dh]
    with torch.no_grad():
        weight[:, columns(heads, weight.shape[1] // of).to(weight.device)] = 0


def columns(heads: Sequence[int], head_dim: int) -> Tensor:
    """The places of `heads` among H * dh features."""
    return (
        torch.tensor(list(heads), dtype=torch.long)[:, None] * head_dim + torch.arange(head_dim)
    ).flatten()


def kept_groups(keep: Sequence[int], heads: int, kv_heads: int) -> list[int]:
    """Which keys and values stay when the query heads `keep` do. Groups that stay must stay equally
    large."""
    share = heads // kv_heads
    sizes = [sum(head // share == group for head in keep) for group in range(kv_heads)]
    if len({size for size in sizes if size}) > 1:
        raise UnsupportedModel(
            f"keeping query heads {list(keep)} of {heads} with {kv_heads} keys and values",
            f"keys and values are shared by {share} query heads each, and groups of"
            f" {[s for s in sizes if s]} are not equally large",
            f"remove whole groups, or {ZEROED}",
        )
    return [group for group, size in enumerate(sizes) if size]


def output_weight(block: Any) -> Tensor:
    """The weights [D, H * dh] that read a native block's heads."""
    return find_output(find_attention(block)[1]).weight


def _slice_fused(attention: Any, keep: Sequence[int]) -> None:
    """timm: rows [Q | K | V], each (H, dh)."""
    width = attention.num_heads * attention.head_dim
    rows = columns(keep, attention.head_dim)
    _keep_rows(attention.qkv, torch.cat([rows, rows + width, rows + 2 * width]))
    _finish_slicing(attention, attention.proj, keep, attention.head_dim, of=attention.num_heads)


def _free_width(eva: Any) -> nn.Module:
    """timm's `EvaAttention`, whose forward fixes the width of all heads together, as an
    `AttentionRope` that computes the same, and whose forward does not."""
    from timm.layers import AttentionRope

    fused = eva.qkv is not None
    twin: Any = AttentionRope(
        eva.proj.out_features, num_heads=eva.num_heads, attn_head_dim=eva.head_dim,
        qkv_fused=fused, num_prefix_tokens=eva.num_prefix_tokens,
        rotate_half=eva.rotate_half,
    )  # fmt: skip
    for name in ("qkv", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "gate", "proj"):
        setattr(twin, name, getattr(eva, name))
    if eva.q_bias is not None:  # the key bias is zero and lives outside the linear layer
        twin.qkv.bias = nn.Parameter(
            torch.cat([eva.q_bias, torch.zeros_like(eva.q_bias), eva.v_bias]), requires_grad=False
        )
    return twin.eval()


def _slice_apart(attention: Any, out: nn.Linear, keep: Sequence[int]) -> None:
    q, k, v = (first_or_none(attention, *names) for names in (QUERY, KEY, VALUE))
    if not all(isinstance(layer, nn.Linear) for layer in (q, k, v)):
        raise _uncut(attention, "its query, key and value projections are not where they were")
    head_dim = _head_dim(attention, q)
    heads, kv_heads = q.out_features // head_dim, k.out_features // head_dim
    groups = kept_groups(keep, heads, kv_heads)
    _keep_rows(q, columns(keep, head_dim))
    for layer in (k, v):
        _keep_rows(layer, columns(groups, head_dim))
    _finish_slicing(attention, out, keep, head_dim, of=heads, groups=len(groups))


def _head_dim(attention: Any, q: nn.Linear) -> int:
    for name in ("head_dim", "attention_head_size"):
        if hasattr(attention, name):
            return int(getattr(attention, name))
    return q.out_features // int(first_or_none(attention, "num_heads", "num_attention_heads"))


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
        q, k, v = (part.transpose(1, 2) for part in project_packed(self, 0, 3, query))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return self.out_proj(o.transpose(1, 2).flatten(2)), None


def _packed(attention: Any, keep: Sequence[int]) -> Packed:
    heads, head_dim = attention.num_heads, attention.head_dim
    rows = columns(keep, head_dim)
    all_rows = torch.cat([rows + part * heads * head_dim for part in range(3)]).to(
        attention.in_proj_weight.device
    )
    bias = attention.in_proj_bias
    _keep_columns(attention.out_proj, rows)
    weight = attention.in_proj_weight[all_rows].clone()
    return Packed(
        weight,
        None if bias is None else bias[all_rows].clone(),
        attention.out_proj,
        heads=len(keep),
        head_dim=head_dim,
    )


def _finish_slicing(
    attention: Any,
    out: nn.Linear,
    keep: Sequence[int],
    head_dim: int,
    *,
    of: int,
    groups: int | None = None,
) -> None:
    """Columns of O, rows of an output gate, and the numbers a module keeps about its heads."""
    kept = columns(keep, head_dim)
    _keep_columns(out, kept)
    if isinstance(getattr(attention, "gate", None), nn.Linear):
        _keep_rows(attention.gate, kept)
    shared = None if groups is None else len(keep) // groups
    own = {"num_key_value_heads": groups, "num_key_value_groups": shared}  # transformers
    own |= {"num_kv_heads": groups or len(keep), "num_kv_groups": shared or 1}  # timm
    for name, count in own.items():
        if hasattr(attention, name):
            setattr(attention, name, count)
    for name in COUNTS:
        if isinstance(getattr(attention, name, None), int):
            setattr(attention, name, getattr(attention, name) * len(keep) // of)


def _keep_rows(layer: nn.Linear, rows: Tensor) -> None:
    rows = rows.to(layer.weight.device)
    layer.weight = nn.Parameter(layer.weight.detach()[rows].clone(), requires_grad=False)
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[rows].clone(), requires_grad=False)
    layer.out_features = len(rows)


def _keep_columns(layer: nn.Linear, kept: Tensor) -> None:
    layer.weight = nn.Parameter(
        layer.weight.detach()[:, kept.to(layer.weight.device)].clone(), requires_grad=False
    )
    layer.in_features = len(kept)
