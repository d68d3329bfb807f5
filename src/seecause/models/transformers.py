"""Views of transformers' models whose tokens attend to all tokens: vision towers, VideoMAE,
V-JEPA 2.

ViT, DeiT, DINOv2 (with registers), DINOv3, CLIP and SigLIP differ in what follows the tower, so a
table says how each is read (`READINGS`). Blocks are found by structure: releases rename modules,
but a block keeps its shape,

    norm -> attention -> [LayerScale] -> + -> norm -> MLP -> [LayerScale] -> +

Tokens of VideoMAE and V-JEPA 2 are tubelets of a film. V-JEPA 2's are read by one query behind
further blocks, whose names begin with pooler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seecause.errors import UnsupportedModel
from seecause.models.block import (
    At,
    Block,
    Fn,
    Named,
    Size,
    TokenLayout,
    apart,
    chain,
    first_or_none,
    mean_of_halves,
    mix_packed,
    packed,
    pair,
    project_packed,
    same,
)
from seecause.models.parts import (
    TABLES,
    Parts,
    TextInput,
    as_inputs,
    class_names,
    is_multi_label,
    require_text,
    unwrapped,
)
from seecause.models.preprocess import Film, Preprocess
from seecause.models.view import Kind, LatentPool

Rotate = Callable[[Tensor, At], Tensor]


def first(module: Any, *names: str) -> Any:
    """`first_or_none`; raises if there is none."""
    part = first_or_none(module, *names)
    if part is not None:
        return part
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
    stack = next(part for part in tower.modules() if isinstance(part, nn.ModuleList))
    rope = getattr(tower, "rope_embeddings", None)
    rotate = None if rope is None else partial(_rotate, rope)
    return [_block(native, f"blocks.{i}", rotate) for i, native in enumerate(stack)]


def _block(native: Any, name: str, rotate: Rotate | None) -> Block:
    native = unwrapped(native)  # blocks may be compiled one by one
    outer = first(native, "attention", "self_attn")
    attention = getattr(outer, "attention", outer)  # some keep the output projection outside
    q, k, v = (
        first(attention, *names)
        for names in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
    )
    heads = first(attention, "num_attention_heads", "num_heads")
    width = q.out_features // heads
    if (mlp := getattr(native, "mlp", None)) is None:  # VideoMAE keeps its halves in the block
        mlp = chain(native.intermediate, native.output.dense, native.output.dropout)
    return Block(
        name=name,
        native=native,
        heads=heads,
        head_dim=width,
        scale=first_or_none(attention, "scaling", "scale") or width**-0.5,
        project=apart(q, k, v, width),
        norm=first(native, "norm1", "layernorm_before", "layer_norm1"),
        rotate=rotate,
        mix=first(outer, "o_proj", "out_proj", "output.dense", "proj"),
        branch=getattr(native, "layer_scale1", same),
        feed=chain(
            first(native, "norm2", "layernorm_after", "layer_norm2"),
            mlp,
            getattr(native, "layer_scale2", same),
        ),
    )


def _rotate(rope: Any, x: Tensor, at: At) -> Tensor:
    """Rotate patch rows by DINOv3's own table; special rows stay as they are. x [B, H, R, dh]."""
    from transformers.models.dinov3_vit.modeling_dinov3_vit import rotate_half

    if "rope" not in at.memo:
        high, wide = pair(rope.config.patch_size)
        rows, columns = at.layout.grid
        cos, sin = rope(x.new_empty(1, 0, rows * high, columns * wide))  # [N, dh], by that shape
        still = cos.new_zeros(at.layout.prefix, cos.shape[-1])
        both = [torch.cat([still + 1, cos]), torch.cat([still, sin])]
        at.memo["rope"] = torch.stack(both)  # [2, T, dh]
    cos, sin = at.memo["rope"][:, at.index]  # [R, dh]
    if at.index.ndim == 2:  # [B, R, dh]: one set of positions per image
        cos, sin = cos[:, None], sin[:, None]
    return x * cos + rotate_half(x) * sin


def latent_pool(pool: Any) -> LatentPool:
    """SigLIP's attention pool: one learnt query, then an MLP."""
    attention = pool.attention

    def query() -> Tensor:
        (q,) = project_packed(attention, 0, 1, pool.probe)
        return q.transpose(1, 2)

    def kv(rows: Tensor) -> tuple[Tensor, Tensor]:
        k, v = project_packed(attention, 1, 3, rows)
        return k.transpose(1, 2), v.transpose(1, 2)

    def finish(o: Tensor) -> Tensor:
        x = mix_packed(attention, o.flatten(2))
        return (x + pool.mlp(pool.layernorm(x)))[:, 0]

    return LatentPool(packed(attention)["scale"], query, kv, finish)


@dataclass(frozen=True)
class Reading:
    """How a class reads its tower."""

    pool: Kind
    heads: tuple[str, ...] = ()  # classifiers; the logits of two are averaged
    zero_shot: bool = False
    raw: bool = False  # the tower's `last_hidden_state` comes before its final norm
    normed: bool = True  # whether the final norm is used at all


READINGS = {name: Reading(**entry) for name, entry in TABLES["transformers"]["readings"].items()}
REFUSED = TABLES["transformers"]["refused"]


def find(module: Any, kind: str, *, text: TextInput | None = None) -> Parts:
    """The parts of a transformers vision model, of its class `kind` or of one derived from it."""
    if kind in FAMILIES:
        return FAMILIES[kind](module)
    reading = _reading(kind)
    tower = tower_of(module)
    patch, size = pair(tower.config.patch_size), pair(tower.config.image_size)
    norm = (
        chain(
            first(tower, "layernorm", "norm", "post_layernorm"),
            getattr(module, "visual_projection", same),
        )
        if reading.normed
        else same
    )
    before = getattr(tower, "pre_layrnorm", same)
    # transformers interpolates positions of square grids only
    square = size[0] // patch[0] == size[1] // patch[1]
    interpolates = square and isinstance(tower.config.patch_size, int)
    enter = partial(_resize, tower.embeddings, size)

    def embed(images: Tensor) -> Tensor:
        tokens = tower.embeddings(**enter(images))
        return before(tokens[0] if isinstance(tokens, tuple) else tokens)

    def native_tokens(images: Tensor) -> Tensor:
        tokens = tower(return_dict=True, **enter(images)).last_hidden_state
        return norm(tokens) if reading.raw else tokens

    parts = Parts(
        family=f"transformers.{type(module).__name__}",
        embed=embed,
        layout_at=partial(_layout, tower.embeddings, patch),
        blocks=blocks_of(tower),
        norm=norm,
        patch=patch,
        native_tokens=native_tokens,
        pool=reading.pool,
        latent=(
            latent_pool(tower.head) if isinstance(getattr(tower, "head", None), nn.Module) else None
        ),
        head=_head([getattr(module, name) for name in reading.heads]),
        native_logits=lambda images: module(return_dict=True, **enter(images)).logits,
        classes=class_names(module.config) if reading.heads else (),
        sigmoid=is_multi_label(module.config),
        fixed_size=not (hasattr(tower, "rope_embeddings") or interpolates),
        size=size,
    )
    if reading.zero_shot:
        _add_text(module, parts, require_text(module, text), enter)
    elif reading.pool == "latent" and parts.latent is None:
        parts.pool = None
    return parts


def _reading(kind: str) -> Reading:
    if kind in READINGS:
        return READINGS[kind]
    from seecause.models.dense import DENSE_FAMILIES

    reasons = [why for start, why in REFUSED.items() if kind.startswith(start)]
    raise UnsupportedModel(
        f"transformers {kind}",
        reasons[0] if reasons else "no adapter knows it",
        f"classes that work: {', '.join((*CLASSES, *DENSE_FAMILIES))}",
    )


def _layout(embeddings: Any, patch: Size, height: int, width: int) -> TokenLayout:
    special = ("cls_token", "class_embedding", "distillation_token")  # one has either of the first
    registers = embeddings.register_tokens.shape[1] if hasattr(embeddings, "register_tokens") else 0
    grid = (height // patch[0], width // patch[1])
    count = sum(hasattr(embeddings, name) for name in special)
    return TokenLayout.of_special(grid, count, registers)


def _resize(embeddings: Any, size: Size, images: Tensor) -> Named:
    """The arguments of a tower: images, and for images of another size the option that interpolates
    positions, if the tower has it."""
    asks = "interpolate_pos_encoding" in inspect.signature(embeddings.forward).parameters
    other = asks and tuple(images.shape[-2:]) != size
    return {"pixel_values": images} | ({"interpolate_pos_encoding": True} if other else {})


def _head(classifiers: Sequence[nn.Module]) -> Fn | None:
    if not classifiers or any(isinstance(layer, nn.Identity) for layer in classifiers):
        return None
    if len(classifiers) == 1:
        return classifiers[0]
    return mean_of_halves(*classifiers)


def _add_text(module: Any, parts: Parts, text: TextInput, enter: Any) -> None:
    """The zero-shot head of a dual model, through its own text tower."""
    from transformers import PreTrainedTokenizerBase

    device, options = next(module.parameters()).device, Named()
    if isinstance(text.tokenize, PreTrainedTokenizerBase):  # SigLIP was trained on the full length
        length = module.config.text_config.max_position_embeddings
        options = {"padding": "max_length", "max_length": length, "truncation": True}
        options["return_tensors"] = "pt"

    def encode(prompts: list[str]) -> Tensor:
        tokens = as_inputs(text.tokenize(prompts, **options), device)
        return module.get_text_features(**tokens, return_dict=True).pooler_output

    def embed(images: Tensor) -> Tensor:
        return module.get_image_features(return_dict=True, **enter(images)).pooler_output

    parts.add_text(module, text, encode=encode, embed=embed)


def _film(module: Any, size: Size, frames: int, channels: int, **parts: Any) -> Parts:
    """The parts of a model of films, where `embed` and `native_tokens` take frames."""
    config, (high, wide) = module.config, size
    (down, across), times = pair(config.patch_size), frames // config.tubelet_size
    as_film = partial(Film.of_frame, high=high, frames=frames, tubelet=config.tubelet_size)
    film = as_film(Preprocess((high, wide), (0.0,) * channels, (1.0,) * channels))
    layout = TokenLayout((times * (high // down), wide // across), prefix=0, times=times)
    embed, native_tokens = parts.pop("embed"), parts.pop("native_tokens")
    return Parts(
        family=f"transformers.{type(module).__name__}",
        embed=lambda strips: embed(film.unfolded(strips)),
        layout_at=lambda height, width: layout,
        norm=same,
        patch=(down, across),
        native_tokens=lambda strips: native_tokens(film.unfolded(strips)),
        adapt_preprocess=as_film,
        native_logits=lambda strips: module(film.unfolded(strips)).logits,
        classes=class_names(config),
        sigmoid=is_multi_label(config),
        size=(times * high, wide),
        **parts,
    )


def _videomae(module: Any) -> Parts:
    tower, config = module.videomae, module.config
    if module.fc_norm is None:
        raise UnsupportedModel(
            "transformers VideoMAEForVideoClassification",
            "it reads its first tubelet alone (use_mean_pooling=False)",
            "use one that averages its tubelets",
        )
    return _film(
        module,
        pair(config.image_size),
        config.num_frames,
        config.num_channels,
        embed=lambda frames: tower.embeddings(frames, None),
        blocks=blocks_of(tower),
        native_tokens=lambda frames: tower(frames).last_hidden_state,
        pool="mean",
        after_pool=module.fc_norm,
        head=chain(module.fc_norm, module.classifier),
    )


def _vjepa2(module: Any) -> Parts:
    """V-JEPA 2: an encoder, its norm, the blocks of the pooler, and one query that reads them."""
    encoder, pooler, config = module.vjepa2.encoder, module.pooler, module.config
    cross = pooler.cross_attention_layer
    layers, attention = pooler.self_attention_layers, cross.cross_attn
    blocks = [
        _block(native, f"blocks.{i}", partial(_rotate_in_film, native.attention))
        for i, native in enumerate(encoder.layer)
    ]
    feed = blocks[-1].feed

    def normed(middle: Tensor) -> Tensor:  # the norm between encoder and pooler
        return encoder.layernorm(middle + feed(middle)) - middle

    blocks[-1] = replace(
        blocks[-1], native=encoder.layernorm, holder=blocks[-1].native, feed=normed
    )
    blocks += [_block(native, f"pooler.{i}", None) for i, native in enumerate(layers)]

    def native_tokens(frames: Tensor) -> Tensor:
        rows = encoder(frames).last_hidden_state
        for layer in layers:
            rows = layer(rows, attention_mask=None)[0]
        return rows

    def apart_by_head(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)

    def kv(rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = cross.layer_norm1(rows)
        return apart_by_head(attention.k_proj(rows)), apart_by_head(attention.v_proj(rows))

    def finish(o: Tensor) -> Tensor:
        x = pooler.query_tokens + o.flatten(2)
        return (x + cross.mlp(cross.layer_norm2(x)))[:, 0]

    def query() -> Tensor:
        return apart_by_head(attention.q_proj(pooler.query_tokens))

    return _film(
        module,
        pair(config.crop_size),
        config.frames_per_clip,
        config.in_chans,
        embed=encoder.embeddings,
        blocks=blocks,
        native_tokens=native_tokens,
        pool="latent",
        latent=LatentPool(attention.scale, query, kv, finish),
        head=module.classifier,
    )


def _rotate_in_film(attention: Any, x: Tensor, at: At) -> Tensor:
    """Rotate rows x [B, H, R, dh] by their time, row and column, as the native module does."""
    tokens = at.index if at.index.ndim == 2 else at.index[None]
    places = attention.get_position_ids(x, masks=tokens)  # [B, H, R] each
    return attention.apply_rotary_embeddings(x, [place[:, :1] for place in places])


FAMILIES = {
    "VideoMAEForVideoClassification": _videomae,
    "VJEPA2ForVideoClassification": _vjepa2,
}
CLASSES = (*READINGS, *FAMILIES)
