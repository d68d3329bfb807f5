"""Views of torchvision's `VisionTransformer` (ViT-B/16 ... ViT-H/14, with either stem)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seecause.errors import UnsupportedModel
from seecause.models.block import Block, Constant, chain, packed, silent
from seecause.models.layout import TokenLayout
from seecause.models.parts import Parts

CLASSES = ("VisionTransformer",)


def find(module: Any, kind: str) -> Parts:
    """The parts of a torchvision vision transformer."""
    if kind not in CLASSES:
        raise UnsupportedModel(
            f"torchvision {kind}",
            "its rows do not attend to all rows of one token sequence",
            "torchvision's VisionTransformer works",
        )
    patch, size = (module.patch_size,) * 2, (module.image_size,) * 2
    layout = TokenLayout(grid=(size[0] // patch[0], size[1] // patch[1]), prefix=1, class_index=0)
    classifies = any(not isinstance(layer, nn.Identity) for layer in module.heads.children())
    return Parts(
        family="torchvision.VisionTransformer",
        embed=partial(_embed, module),
        layout_at=lambda height, width: layout,
        blocks=[_block(native, f"blocks.{i}") for i, native in enumerate(module.encoder.layers)],
        norm=module.encoder.ln,
        patch=patch,
        native_tokens=lambda images: module.encoder(_with_class(module, images)),
        pool="cls",
        head=module.heads if classifies else None,
        native_logits=module,
        size=size,
    )


def _with_class(module: Any, images: Tensor) -> Tensor:
    return torch.cat(
        [module.class_token.expand(len(images), -1, -1), module._process_input(images)], dim=1
    )


def _embed(module: Any, images: Tensor) -> Tensor:
    return _with_class(module, images) + module.encoder.pos_embedding


def _block(native: Any, name: str) -> Block:
    attention = native.self_attention
    shared: dict[str, Any] = {
        "name": name,
        "native": native,
        "norm": native.ln_1,
        "feed": chain(native.ln_2, native.mlp),
    }
    if isinstance(attention, Constant):
        return Block(**shared, **silent(attention.rows))
    return Block(**shared, **packed(attention, name))
