"""The vision tower of a transformers vision-language model, as blocks: LLaVA's (CLIP or SigLIP) and
InternVL's.

    picture -> embed -> blocks -> the states of one layer, without the class token -> projector ->
    image tokens of the decoder

LLaVA reads its tower before the last block (`vision_feature_layer` -2). That block stays in the
list as one that nobody reads: rows leave it as they came, so its heads do nothing, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from seecause.engine.walk import walk
from seecause.errors import UnsupportedModel
from seecause.models import hf_view
from seecause.models.block import Block, Fn, apart, chain, same, times
from seecause.models.layout import TokenLayout, pair

SPEAKING = ("LlavaForConditionalGeneration", "InternVLForConditionalGeneration")


@dataclass(eq=False)
class VisionTower:
    """A vision tower in native parts, and what turns its states into image tokens."""

    embed: Fn  # pictures [B, 3, H, W] -> [B, T, D]
    blocks: list[Block]
    features: Fn  # states behind the last block [B, T, D] -> image tokens of the decoder [B, N, D']
    layout_at: Callable[[int, int], TokenLayout]
    patch: tuple[int, int]
    size: tuple[int, int]  # of pictures: height, width
    read: int  # blocks that matter; those behind them are not read

    def tokens(self, images: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] -> image tokens [B, N, D']."""
        at = self.layout_at(images.shape[-2], images.shape[-1]).at(images.device)
        return self.features(walk(self, self.embed(images), at, stop=self.read).end())


def vision_tower(module: Any) -> VisionTower:
    """The tower of a vision-language model, or why it cannot be split."""
    name = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in SPEAKING), None)
    if name is None:
        raise UnsupportedModel(
            type(module).__name__,
            "its pictures are tiled or packed; masks need one in one piece",
            f"use {' or '.join(SPEAKING)}",
        )
    config, inner = module.config, module.model
    layer = config.vision_feature_layer
    if not isinstance(layer, int):
        raise UnsupportedModel(
            type(module).__name__, f"it reads several layers of its tower at once, {list(layer)}"
        )
    drop = int(config.vision_feature_select_strategy == "default")  # the class token
    parts = _internvl(inner, layer, drop) if name == SPEAKING[1] else _llava(inner, drop)
    read = layer if layer >= 0 else len(parts.blocks) + 1 + layer
    unread = [_unread(b, config.vision_config.hidden_size) for b in parts.blocks[read:]]
    return replace(parts, read=read, blocks=[*parts.blocks[:read], *unread])


def _llava(inner: Any, drop: int) -> VisionTower:
    parts = hf_view.find(inner.vision_tower, type(inner.vision_tower).__name__)
    assert parts.size is not None

    def features(states: Tensor) -> Tensor:
        return inner.multi_modal_projector(states[:, drop:])

    blocks, layout_at = parts.blocks, parts.layout_at
    return VisionTower(
        parts.embed, blocks, features, layout_at, parts.patch, parts.size, len(blocks)
    )


def _internvl(inner: Any, layer: int, drop: int) -> VisionTower:
    tower = inner.vision_tower
    size, patch = pair(tower.config.image_size), pair(tower.config.patch_size)
    grid = (size[0] // patch[0], size[1] // patch[1])
    norm = tower.layernorm if layer == -1 else same  # earlier layers are read as they are

    def features(states: Tensor) -> Tensor:
        picture = norm(states)[:, drop:].unflatten(1, grid).contiguous()
        return inner.multi_modal_projector(
            inner.pixel_shuffle(picture, scale_factor=inner.config.downsample_ratio).flatten(1, 2)
        )

    def layout_at(height: int, width: int) -> TokenLayout:
        return TokenLayout(grid=(height // patch[0], width // patch[1]), prefix=1, class_index=0)

    blocks = [
        _internvl_block(native, f"blocks.{index}")
        for index, native in enumerate(tower.encoder.layer)
    ]
    return VisionTower(tower.embeddings, blocks, features, layout_at, patch, size, len(blocks))


def _internvl_block(native: Any, name: str) -> Block:
    """InternViT: LayerScale under names of its own, and norms of queries and keys over all heads at
    once (so removing a head leaves the others alone only at the output projection, which is where
    heads are removed)."""
    attention = native.attention
    q = chain(attention.q_proj, attention.q_norm)
    k = chain(attention.k_proj, attention.k_norm)
    return Block(
        name=name,
        native=native,
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        project=apart(q, k, attention.v_proj, attention.head_dim),
        norm=native.layernorm_before,
        mix=attention.projection_layer,
        branch=times(native, "lambda_1"),
        feed=chain(native.layernorm_after, native.mlp, times(native, "lambda_2")),
    )


def _unread(block: Block, width: int) -> Block:
    """The block, with nothing to add to its rows."""
    nothing = partial(_nothing, width)
    return replace(block, mix=nothing, branch=same, feed=nothing)


def _nothing(width: int, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], width)
