"""Views of vision transformers that attend by `nn.MultiheadAttention`: torchvision's, open_clip's.

torchvision: `VisionTransformer` (ViT-B/16 ... ViT-H/14, with either stem). open_clip: CLIP models
with their own vision transformer, or a timm one, and a zero-shot text head; a bare visual tower
takes `head=` on its projected embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from seecause.errors import UnsupportedModel
from seecause.models import timm
from seecause.models.block import Block, Fn, Packed, TokenLayout, chain, packed, pair, same
from seecause.models.parts import Parts, TextInput, as_inputs, require_text
from seecause.models.preprocess import Preprocess, from_timm

DUAL = ("CLIP", "CustomTextCLIP")
TOWERS = ("VisionTransformer", "TimmModel")
CLASSES = (*DUAL, *TOWERS)  # torchvision has a VisionTransformer, too


def find(module: Any, kind: str, *, text: TextInput | None = None) -> Parts:
    """The parts of a vision transformer of torchvision, or of an open_clip model or visual
    tower."""
    if any(cls.__module__.startswith("torchvision.") for cls in type(module).__mro__):
        return _torchvision(module, kind)
    return _open_clip(module, kind, text)


def _torchvision(module: Any, kind: str) -> Parts:
    if kind != "VisionTransformer":
        raise UnsupportedModel(
            f"torchvision {kind}",
            "its rows do not attend to all rows of one token sequence",
            "torchvision's VisionTransformer works",
        )
    patch, size = (module.patch_size,) * 2, (module.image_size,) * 2
    layout = TokenLayout(grid=(size[0] // patch[0], size[1] // patch[1]), prefix=1, class_index=0)
    classifies = any(not isinstance(layer, nn.Identity) for layer in module.heads.children())

    def with_class(images: Tensor) -> Tensor:
        tokens = module._process_input(images)
        return torch.cat([module.class_token.expand(len(images), -1, -1), tokens], dim=1)

    return Parts(
        family="torchvision.VisionTransformer",
        embed=lambda images: with_class(images) + module.encoder.pos_embedding,
        layout_at=lambda height, width: layout,
        blocks=[
            Block(
                name=f"blocks.{index}",
                native=native,
                norm=native.ln_1,
                feed=chain(native.ln_2, native.mlp),
                **packed(native.self_attention),
            )
            for index, native in enumerate(module.encoder.layers)
        ],
        norm=module.encoder.ln,
        patch=patch,
        native_tokens=lambda images: module.encoder(with_class(images)),
        pool="cls",
        head=module.heads if classifies else None,
        native_logits=module,
        size=size,
    )


def _open_clip(module: Any, kind: str, text: TextInput | None) -> Parts:
    visual = module.visual if kind in DUAL else module
    tower = type(visual).__name__
    if tower not in TOWERS:
        raise UnsupportedModel(
            f"open_clip {tower}",
            "no adapter knows it",
            f"what works: {', '.join(DUAL)} with {' or '.join(TOWERS)} as visual tower",
        )
    own = tower == "VisionTransformer"
    parts, project = (_own(visual), same) if own else _timm(visual)
    parts.family = f"open_clip.{kind}"
    if kind in DUAL:
        given, device = require_text(module, text), next(module.parameters()).device

        def encode(prompts: list[str]) -> Tensor:
            return module.encode_text(as_inputs(given.tokenize(prompts), device)["input_ids"])

        parts.add_text(module, given, encode=encode, embed=module.encode_image, project=project)
    elif project is not same:
        raise UnsupportedModel(
            f"open_clip {kind} alone",
            "it projects after pooling, where head= would be",
            "wrap the whole CLIP with classes= and tokenizer=",
        )
    return parts


def _own(visual: Any) -> Parts:
    """open_clip's vision transformer; its norm and projection act on single tokens."""
    if visual.attn_pool is not None or visual.pool_type != "tok":
        reason = f"pool_type={visual.pool_type!r} with attentional pooling or none is not split"
        raise UnsupportedModel("open_clip VisionTransformer", reason)
    layout = TokenLayout(grid=tuple(visual.grid_size), prefix=1, class_index=0)
    ending = chain(visual.ln_post, same if visual.proj is None else lambda x: x @ visual.proj)
    return Parts(
        family="",
        embed=visual._embeds,
        layout_at=lambda height, width: layout,
        blocks=[
            _open_clip_block(native, f"blocks.{i}")
            for i, native in enumerate(visual.transformer.resblocks)
        ],
        norm=ending,
        patch=tuple(visual.patch_size),
        native_tokens=lambda images: ending(visual.transformer(visual._embeds(images))),
        preprocess=_preprocess(visual),
        pool="cls",
        size=tuple(visual.image_size),
    )


def _timm(visual: Any) -> tuple[Parts, Fn]:
    """A timm tower (SigLIP, EVA): timm's view of the trunk, then open_clip's projection."""
    trunk = visual.trunk
    parts = replace(
        timm.find(trunk, type(trunk).__name__),
        head=None,
        native_logits=None,
        preprocess=_preprocess(visual),
    )
    steps = [
        step
        for step in (trunk.fc_norm, trunk.head, *visual.head)
        if not isinstance(step, nn.Identity)
    ]
    return parts, chain(*steps) if steps else same


def _open_clip_block(native: Any, name: str) -> Block:
    attention = native.attn
    if not isinstance(attention, nn.MultiheadAttention | Packed):
        kind = type(attention).__name__
        raise UnsupportedModel(f"open_clip {type(native).__name__} ({name})", f"it has a {kind}")
    return Block(
        name=name,
        native=native,
        norm=native.ln_1,
        branch=native.ls_1,
        feed=chain(native.ln_2, native.mlp, native.ls_2),
        **packed(attention),
    )


def _preprocess(visual: Any) -> Preprocess | None:
    """The preprocessing that open_clip's factory stored on the tower, if it made it."""
    config = getattr(visual, "preprocess_cfg", None)
    if not config or config.get("resize_mode") == "longest":  # pads: not supported
        return None
    size = (3, *pair(config["size"]))
    return from_timm({**config, "input_size": size, "crop_mode": config.get("resize_mode")})
