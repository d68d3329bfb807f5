"""Views of timm's `VisionTransformer` (with its distilled DeiT) and `Eva` (rotary: EVA-02, DINOv3,
PE ...)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.errors import UnsupportedModel
from seecause.models.block import (
    At,
    Block,
    Fn,
    TokenLayout,
    apart,
    chain,
    mean_of_halves,
    same,
    times,
)
from seecause.models.parts import TABLES, Parts, unwrapped
from seecause.models.preprocess import from_timm
from seecause.models.view import Kind, LatentPool

CLASSES = ("VisionTransformer", "VisionTransformerDistilled", "Eva")
REFUSED = TABLES["timm"]["refused"]
POOLS: dict[str, Kind] = {"token": "cls", "avg": "mean"}
ATTENTIONS = ("Attention", "AttentionRope", "EvaAttention")


def find(module: Any, kind: str) -> Parts:
    """The parts of a timm vision transformer, of timm's class `kind` or of one derived from it."""
    if kind not in CLASSES:
        from seecause.models.staged import SPLITS

        known = ", ".join((*CLASSES, *SPLITS["timm"]))
        reason = REFUSED.get(kind, "no view of this class is written")
        raise UnsupportedModel(f"timm {kind}", reason, f"classes of timm that are read: {known}")
    rope = getattr(module, "rope", None)
    blocks = [
        _block(native, f"blocks.{i}", None if rope is None else partial(_rotate, module, i))
        for i, native in enumerate(module.blocks)
    ]
    distilled = kind == "VisionTransformerDistilled"
    pool: Kind = "cls+dist" if distilled else _pool(module)
    dynamic = bool(getattr(module, "dynamic_img_size", False))
    return Parts(
        family=f"timm.{kind}",
        embed=partial(_embed, module),
        layout_at=partial(_layout, module, distilled, dynamic),
        blocks=blocks,
        norm=module.norm,
        patch=tuple(module.patch_embed.patch_size),
        native_tokens=module.forward_features,
        preprocess=(
            from_timm(module.pretrained_cfg) if getattr(module, "pretrained_cfg", None) else None
        ),
        pool=pool,
        head=_head(module, distilled),
        native_logits=module,
        after_pool=chain(module.fc_norm),
        native_pooled=None if distilled else partial(_pooled, module),
        latent=_latent(module.attn_pool) if pool == "latent" else None,
        over_prefix=bool(getattr(module, "pool_include_prefix", False)),
        fixed_size=not dynamic,
        size=tuple(module.patch_embed.img_size) if module.patch_embed.img_size else None,
    )


def _embed(module: Any, images: Tensor) -> Tensor:
    tokens = module._pos_embed(module.patch_embed(images))
    if isinstance(tokens, tuple):  # Eva also returns its rotary table
        return module.norm_pre(tokens[0])
    return module.norm_pre(module.patch_drop(tokens))


def _layout(module: Any, distilled: bool, dynamic: bool, height: int, width: int) -> TokenLayout:
    patch = module.patch_embed.patch_size
    grid = (
        (height // patch[0], width // patch[1]) if dynamic else tuple(module.patch_embed.grid_size)
    )
    special = int(getattr(module, "cls_token", None) is not None) + int(distilled)
    return TokenLayout.of_special(grid, special, module.num_prefix_tokens - special)


def _block(native: Any, name: str, rotate: Callable[[Tensor, At], Tensor] | None) -> Block:
    native = unwrapped(native)  # blocks may be compiled one by one
    kind = type(native).__name__
    attention: Any = getattr(native, "attn", None)
    if type(attention).__name__ not in ATTENTIONS:
        raise UnsupportedModel(
            f"timm {kind} ({name})", f"its attention is {type(attention).__name__}"
        )
    if kind == "Block":
        norm, branch, feed = native.norm1, native.ls1, chain(native.norm2, native.mlp, native.ls2)
    elif kind == "EvaBlock":
        norm, branch = native.norm1, times(native, "gamma_1")
        feed = chain(native.norm2, native.mlp, times(native, "gamma_2"))
    elif kind in ("ResPostBlock", "EvaBlockPostNorm"):
        norm, branch, feed = same, native.norm1, chain(native.mlp, native.norm2)
    else:
        raise UnsupportedModel(f"timm {kind} ({name})", "no adapter for this kind of block")
    return Block(
        name=name,
        native=native,
        norm=norm,
        branch=branch,
        feed=feed,
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        project=partial(_project, attention),
        q_norm=getattr(attention, "q_norm", same),
        k_norm=getattr(attention, "k_norm", same),
        rotate=rotate,
        sub_norm=getattr(attention, "norm", same),
        mix=attention.proj,
    )


def _project(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = (attention.num_heads, attention.head_dim)
    if attention.qkv is None:
        return apart(attention.q_proj, attention.k_proj, attention.v_proj, shape[1])(x)
    if getattr(attention, "q_bias", None) is None:
        packed = attention.qkv(x)
    else:  # EVA keeps the key bias at zero, outside the linear layer
        packed = F.linear(
            x,
            attention.qkv.weight,
            torch.cat((attention.q_bias, attention.k_bias, attention.v_bias)),
        )
    q, k, v = packed.unflatten(-1, (3, *shape)).unbind(2)
    return q, k, v


def _rotate(module: Any, layer: int, x: Tensor, at: At) -> Tensor:
    """Rotate patch rows by timm's own table; prefix rows stay as they are. x [B, H, R, dh]."""
    from timm.layers import apply_rot_embed_cat

    if "rope" not in at.memo:
        shape = at.layout.grid if module.dynamic_img_size else None
        table = module.rope.get_embed(shape=shape)
        rest = table.new_zeros(*table.shape[:-2], at.layout.prefix, table.shape[-1])
        rest[..., table.shape[-1] // 2 :] = 1  # [sin | cos]: no rotation
        # [T, 2dh], or [depth, H, T, 2dh] when learnt per block
        at.memo["rope"] = torch.cat([rest, table], dim=-2)
    table = at.memo["rope"]
    if getattr(module, "rope_mixed", False):
        table = table[layer]
    rows = table[..., at.index, :]
    if at.index.ndim == 2:  # one set of positions per image
        rows = rows.unsqueeze(1) if rows.ndim == 3 else rows.transpose(0, 1)
    half = getattr(module.blocks[layer].attn, "rotate_half", False)
    return apply_rot_embed_cat(x, rows, half=half).type_as(x)


def _pool(module: Any) -> Kind:
    if getattr(module, "attn_pool", None) is not None:
        if type(module.attn_pool).__name__ != "AttentionPoolLatent":
            raise UnsupportedModel(
                f"timm pool {type(module.attn_pool).__name__}",
                "it mixes tokens again before pooling",
            )
        return "latent"
    if module.global_pool not in POOLS:
        raise UnsupportedModel(
            f"timm global_pool={module.global_pool!r}",
            "only token, avg and map pooling are read exactly",
        )
    return POOLS[module.global_pool]


def _pooled(module: Any, images: Tensor) -> Tensor:
    return module.forward_head(module.forward_features(images), pre_logits=True)


def _head(module: Any, distilled: bool) -> Fn | None:
    if isinstance(module.head, nn.Identity):
        return None
    if distilled:
        return mean_of_halves(module.head, module.head_dist)
    return chain(module.fc_norm, module.head)


def _latent(pool: Any) -> LatentPool:
    shape = (pool.num_heads, pool.head_dim)

    def query() -> Tensor:
        return pool.q_norm(pool.q(pool.latent).unflatten(-1, shape).transpose(1, 2))

    def kv(rows: Tensor) -> tuple[Tensor, Tensor]:
        k, v = pool.kv(rows).unflatten(-1, (2, *shape)).unbind(2)
        return pool.k_norm(k).transpose(1, 2), v.transpose(1, 2)

    def finish(o: Tensor) -> Tensor:
        x = pool.proj(o.flatten(2))
        x = x if pool.mlp is None else x + pool.mlp(pool.norm(x))
        return x.mean(dim=1) if pool.pool == "avg" else x[:, 0]

    return LatentPool(scale=pool.scale, query=query, kv=kv, finish=finish)
