"""Blocks of transformers' vision towers, found by structure: releases rename modules, but a block
keeps its shape.

norm -> attention -> [LayerScale] -> + -> norm -> MLP -> [LayerScale] -> +
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seecause.errors import UnsupportedModel
from seecause.models import multihead
from seecause.models.block import Block, chain, same
from seecause.models.constant import Constant, silent
from seecause.models.layout import At
from seecause.models.readout import LatentPool

Rotate = Callable[[Tensor, At], Tensor]


def first_or_none(module: Any, *names: str) -> Any:
    """The first attribute that exists, under any of the names it has had; dots reach inside."""
    for name in names:
        found = module
        for step in name.split("."):
            found = getattr(found, step, None)
        if found is not None:
            return found
    return None


def first(module: Any, *names: str) -> Any:
    """The same where one of them must be there."""
    found = first_or_none(module, *names)
    if found is not None:
        return found
    raise UnsupportedModel(
        f"transformers {type(module).__name__}",
        f"none of {', '.join(names)} is in it, so its parts are not where they were",
    )


def tower_of(module: nn.Module) -> Any:
    """The outermost module that embeds patches: the vision tower, with or without a classifier or
    text tower around it."""
    for part in module.modules():
        inside = getattr(part, "embeddings", None)
        if any(hasattr(inside, name) for name in ("patch_embeddings", "patch_embedding")):
            return part
    raise UnsupportedModel(
        f"transformers {type(module).__name__}", "no module in it embeds patches"
    )


def blocks_of(tower: nn.Module) -> list[Block]:
    """Every block of a tower, in order. The first list of modules in a tower is its stack."""
    stack = next((part for part in tower.modules() if isinstance(part, nn.ModuleList)), None)
    if stack is None:
        raise UnsupportedModel(f"transformers {type(tower).__name__}", "it has no list of blocks")
    rope = getattr(tower, "rope_embeddings", None)
    rotate = None if rope is None else partial(_rotate, rope)
    return [_block(native, f"blocks.{i}", rotate) for i, native in enumerate(stack)]


def _block(native: Any, name: str, rotate: Rotate | None) -> Block:
    outer = first(native, "attention", "self_attn")
    attention = getattr(
        outer, "attention", outer
    )  # some releases keep the output projection in an outer module
    shared: dict[str, Any] = {
        "name": name,
        "native": native,
        "norm": first(native, "norm1", "layernorm_before", "layer_norm1"),
        "branch": getattr(native, "layer_scale1", same),
        "feed": chain(
            first(native, "norm2", "layernorm_after", "layer_norm2"),
            _mlp(native),
            getattr(native, "layer_scale2", same),
        ),
    }
    mix = (
        outer.rows
        if isinstance(outer, Constant)
        else first(outer, "o_proj", "out_proj", "output.dense")
    )
    if isinstance(attention, Constant):
        return Block(**shared, **silent(mix))
    q, k, v = (
        first(attention, *names)
        for names in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
    )
    heads = first(attention, "num_attention_heads", "num_heads")
    shape = (heads, q.out_features // heads)

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q(x).unflatten(-1, shape), k(x).unflatten(-1, shape), v(x).unflatten(-1, shape)

    return Block(
        **shared,
        heads=heads,
        head_dim=shape[1],
        scale=first(attention, "scaling", "scale"),
        project=project,
        rotate=rotate,
        mix=mix,
    )


def _mlp(native: Any) -> Any:
    """Older releases keep the halves of ViT's MLP in the block, the second with a residual."""
    if hasattr(native, "mlp"):
        return native.mlp
    return chain(native.intermediate, native.output.dense, native.output.dropout)


def _rotate(rope: Any, x: Tensor, at: At) -> Tensor:
    """Rotate patch rows by DINOv3's own table; special rows stay as they are. x [B, H, R, dh]."""
    from transformers.models.dinov3_vit.modeling_dinov3_vit import rotate_half

    if "rope" not in at.memo:
        patch = rope.config.patch_size
        high, wide = (patch, patch) if isinstance(patch, int) else patch
        empty = x.new_empty(
            1, 0, at.layout.grid[0] * high, at.layout.grid[1] * wide
        )  # only its shape is read
        cos, sin = rope(empty)  # [N, dh]
        still = cos.new_zeros(at.layout.prefix, cos.shape[-1])
        at.memo["rope"] = torch.stack(
            [torch.cat([still + 1, cos]), torch.cat([still, sin])]
        )  # [2, T, dh]
    cos, sin = at.memo["rope"][
        :, at.index
    ]  # [R, dh], or [B, R, dh] with one set of positions per image
    if at.index.ndim == 2:
        cos, sin = cos[:, None], sin[:, None]
    return x * cos + rotate_half(x) * sin


def latent_pool(pool: Any) -> LatentPool:
    """SigLIP's attention pool: one learnt query, then an MLP."""
    attention = pool.attention
    multihead.check(attention, "pool")

    def kv(rows: Tensor) -> tuple[Tensor, Tensor]:
        k, v = multihead.key_value(attention, rows)
        return k.transpose(1, 2), v.transpose(1, 2)

    def finish(o: Tensor) -> Tensor:
        x = multihead.mix(attention, o.flatten(2))
        return (x + pool.mlp(pool.layernorm(x)))[:, 0]

    return LatentPool(
        scale=attention.head_dim**-0.5,
        query=lambda: multihead.query(attention, pool.probe).transpose(1, 2),
        kv=kv,
        finish=finish,
    )
