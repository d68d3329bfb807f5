"""The language decoder of a transformers vision-language model (Llama, Qwen, Gemma, GLM and
similar) as blocks.

    embeddings (words and image) -> blocks, causal, rotary -> norm -> vocabulary

A head is a query head; grouped queries share keys. Positions may have one axis or three: the native
rotary module turns them into a table per sequence and kind of block, and rows take theirs from it.

Planted truth for head attribution: a LLaVA whose text may read the image through a few heads
only, `config.text_config.image_readers` as [layer, head], with image tokens at `image_span` [start,
stop). In every other head, rows after the image see no image key at all, so ablating such a head
does nothing, exactly. The class is transformers' own; `restrict(model)` switches its attention
function.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.engine.walk import walk
from seecause.errors import UnsupportedModel
from seecause.models import transformers
from seecause.models.block import (
    At,
    Block,
    Fn,
    Named,
    Size,
    TokenLayout,
    apart,
    chain,
    pair,
    same,
    times,
)
from seecause.models.parts import TABLES

ATTENTION = "few_image_readers"
# what positions remember
TABLE, SWAP, IMAGES, PREFIX = "rope", "swap", "images", "prefix"


def may_read(text_config: Any, layer: int, rows: Tensor, keys: Tensor) -> Tensor:
    """[H, R, K] bool: which keys (token indices [K]) the rows (token indices [R]) of each head may
    see, causality apart."""
    start, stop = text_config.image_span
    reader = torch.zeros(text_config.num_attention_heads, dtype=torch.bool, device=rows.device)
    reader[[head for at, head in text_config.image_readers if at == layer]] = True
    crossing = (rows >= stop)[:, None] & ((keys >= start) & (keys < stop))  # [R, K]
    return reader[:, None, None] | ~crossing


def few_image_readers(
    module: nn.Module,
    query: Tensor,  # [B, H, R, dh]
    key: Tensor,  # [B, Hkv, K, dh]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' registry. Rows are the last R of K tokens."""
    rows, keys = query.shape[2], key.shape[2]
    index = torch.arange(keys, device=query.device)
    attention, reading = cast(Any, module), index[keys - rows :]
    allowed = may_read(attention.config, int(attention.layer_idx), reading, index)[None]
    if attention_mask is None:
        attention_mask = index <= reading[:, None]  # causal
    mask = allowed & attention_mask
    grouped = query.shape[1] != key.shape[1]
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def restrict(model: Any) -> Any:
    """Restrict attention, in place, to the image readers in the model's configuration."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if not getattr(model.config.text_config, "image_readers", None):
        raise UnsupportedModel(
            type(model).__name__,
            "its text_config names no image_readers",
            "load it with from_pretrained, or set them",
        )
    AttentionInterface.register(ATTENTION, few_image_readers)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation({"text_config": ATTENTION})
    return model


Additive = Callable[[At, At], Tensor]  # what `rows` add to their scores of `keys`

LVLM = TABLES["lvlm"]
FAMILIES, REFUSED, WITH_TOWER = LVLM["works"], LVLM["refused"], LVLM["with_tower"]


@dataclass(eq=False)
class Decoder:
    """The decoder of `module` in native parts."""

    native: Any  # the text model inside the vision-language model
    blocks: list[Block]
    norm: nn.Module
    head: nn.Linear  # [V, D]
    rotary: nn.Module
    window: int | None = None  # sequences longer than this would be cut by a sliding window
    tables: tuple[str, ...] = ()  # the rotary table of each block
    side_by_side: bool = False  # pairs of rotated numbers are neighbours, not halves
    reads_prefix: bool = False  # image tokens also see the question
    multiplier: float = 1.0  # of embeddings, before the first block (Granite)
    logit_scale: float = 1.0

    def logits(self, states: Tensor) -> Tensor:
        """Logits of the vocabulary for normed states [.., D]."""
        logits = self.head(states)
        return logits if self.logit_scale == 1 else logits * self.logit_scale

    def at(
        self, positions: Tensor, like: Tensor, images: Tensor | None = None, prefix: int = 0
    ) -> At:
        """All tokens of a sequence; positions [1, S] or [axes, 1, S] are where the native model
        puts them. `images` [S] numbers the image tokens' images, -1 for words; the first
        `prefix` tokens see each other both ways."""
        tokens, width, pairs = positions.shape[-1], self.blocks[0].head_dim, self.side_by_side
        memo: dict[Any, Tensor] = {PREFIX: torch.tensor(prefix, device=like.device)}
        for name in dict.fromkeys(self.tables):
            kind = name.removeprefix(TABLE)
            native = self.rotary(like, positions, *([kind] if kind else []))
            memo[name] = table = torch.stack([x[0].to(like) for x in native])
            if table.shape[-1] < width or pairs:
                memo[name], memo[SWAP] = _paired(table, width, side_by_side=pairs)
        if images is not None:
            memo[IMAGES] = images
        layout = TokenLayout(grid=(0, 0), prefix=tokens)
        return At(torch.arange(tokens, device=like.device), layout, memo)


def find(module: Any) -> Decoder:
    """The decoder of a vision-language model; raises `UnsupportedModel` if it cannot be split."""
    name = type(module).__name__
    text: Any = module.get_decoder() if hasattr(module, "get_decoder") else None
    config: Any = getattr(text, "config", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if any("linear" in kind or "mamba" in kind for kind in kinds):
        raise UnsupportedModel(name, LVLM["hybrid"])
    names = {cls.__name__ for cls in type(module).__mro__}
    if not names & FAMILIES.keys():
        reason = REFUSED.get(name, "no decoder view knows it")
        raise UnsupportedModel(name, reason, f"classes that work: {', '.join(FAMILIES)}")
    reads_prefix = bool(names & set(LVLM["prefix"]))
    additive = _both_ways_in_prefix if reads_prefix else causal
    additive = _both_ways if names & set(LVLM["both_ways"]) else additive
    attention = getattr(config, "_attn_implementation", None)
    # transformers up to 5.17 runs Gemma 2 by sdpa, which does not cap scores
    if getattr(config, "attn_logit_softcapping", None) and attention != "sdpa":
        reason = "it caps attention scores and logits (Gemma 2), which no view does"
        remedy = (
            "load it with attn_logit_softcapping and final_logit_softcapping set to None in its"
            " text_config, which changes its predictions slightly"
        )
        raise UnsupportedModel(name, reason, remedy)
    scaled = getattr(text, "rope_types", ["scaled"])
    if getattr(config, "norm_after", False) or getattr(config, "qk_norm_type", "") == "olmo":
        raise UnsupportedModel(name, "it norms the queries of all heads at once (Molmo2-O)")
    if "unscaled" in scaled and config.rope_parameters["rope_type"] != "default":
        raise UnsupportedModel(name, "its blocks rotate keys by two tables")
    slides = not kinds or "sliding_attention" in kinds
    try:
        turned = hasattr(text.rotary_emb, "layer_types")  # a table for each kind of block
        count = len(text.layers)
        tables = [TABLE + (config.layer_types[i] if turned else "") for i in range(count)]
        return Decoder(
            native=text,
            blocks=[_block(n, i, config, tables[i], additive) for i, n in enumerate(text.layers)],
            norm=text.norm,
            head=module.get_output_embeddings(),
            rotary=text.rotary_emb,
            window=getattr(config, "sliding_window", None) if slides else None,
            tables=tuple(tables),
            side_by_side=bool(names & set(LVLM["side_by_side"])),
            reads_prefix=reads_prefix,
            multiplier=getattr(text, "embedding_multiplier", 1.0),
            # inside LLaVA-NeXT the logits of Granite are not scaled
            logit_scale=1 / config.logits_scaling if "Granite4" in name else 1.0,
        )
    except AttributeError as part:  # an unknown text model
        raise UnsupportedModel(name, f"no view knows the parts of its decoder: {part}") from part


def norms_of(native: Any) -> tuple[Any, Any, Any]:
    """Norms of a decoder block beside its first: behind attention, before the MLP, behind it."""
    if hasattr(native, "pre_feedforward_layernorm"):  # Gemma 2 and 3
        before, behind = native.pre_feedforward_layernorm, native.post_feedforward_layernorm
        return native.post_attention_layernorm, before, behind
    if hasattr(native, "post_self_attn_layernorm"):  # GLM
        before, behind = native.post_attention_layernorm, native.post_mlp_layernorm
        return native.post_self_attn_layernorm, before, behind
    if hasattr(native, "residual_multiplier"):  # Granite
        scaled = times(native, "residual_multiplier")
        return scaled, native.post_attention_layernorm, scaled
    if is_parallel(native):
        return same, native.input_layernorm, same
    return same, native.post_attention_layernorm, same


def is_parallel(native: Any) -> bool:
    """Whether attention and MLP of a block read the same normed states (Cohere)."""
    return not hasattr(native, "post_attention_layernorm")


def _block(native: Any, index: int, config: Any, table: str, additive: Additive) -> Block:
    attention = native.self_attn
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    width = attention.head_dim
    if planted_span(config) is not None:
        additive = partial(_causal_for_readers, config, index)
    branch, before, behind = norms_of(native)

    return Block(
        name=f"layers.{index}",
        native=native,
        heads=q.out_features // width,
        kv_heads=k.out_features // width,
        head_dim=width,
        scale=attention.scaling,
        project=apart(q, k, v, width),
        norm=native.input_layernorm,
        q_norm=getattr(attention, "q_norm", same),
        k_norm=getattr(attention, "k_norm", same),
        rotate=partial(rotate, table=table) if turns(native) else unrotated,
        additive=additive,
        mix=attention.o_proj,
        branch=branch,
        feed=chain(before, native.mlp, behind),
        parallel=is_parallel(native),
    )


def turns(native: Any) -> bool:
    """Whether a block rotates its keys; Cohere does so in its windows only."""
    return not is_parallel(native) or native.self_attn.sliding_window is not None


def unrotated(x: Tensor, at: At) -> Tensor:
    """Rows without positions."""
    return x


def planted_span(config: Any) -> tuple[int, int] | None:
    """The span of image tokens in a decoder whose text reads the image through a few heads only;
    None for all other decoders."""
    few = getattr(config, "_attn_implementation", None) == ATTENTION
    return tuple(config.image_span) if few else None


def _paired(table: Tensor, width: int, *, side_by_side: bool) -> tuple[Tensor, Tensor]:
    """A table [2, S, r] for heads of `width` that turn r numbers or pair neighbours: [2, S, width],
    its sines signed, and which number each is paired with [width]."""
    turned = table.shape[-1]
    index = torch.arange(turned, device=table.device)
    first_of_pair = index % 2 == 0 if side_by_side else index < turned // 2
    partner = index ^ 1 if side_by_side else (index + turned // 2) % turned
    cos, sin = table[0], torch.where(first_of_pair, -table[1], table[1])
    rest = (0, width - turned)
    padded = torch.stack([F.pad(cos, rest, value=1.0), F.pad(sin, rest)])
    return padded, torch.cat([partner, torch.arange(turned, width, device=table.device)])


def rotate(x: Tensor, at: At, *, table: str = TABLE) -> Tensor:
    """Rotate rows x [B, H, R, dh] by the table of their sequence."""
    cos, sin = at.memo[table][:, at.index]  # [R, dh]
    if SWAP in at.memo:
        return x * cos + x[..., at.memo[SWAP]] * sin
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def causal(rows: At, keys: At) -> Tensor:
    """The causal bias: 0 for earlier keys, -inf for later ones: [1, 1, R, K]."""
    return _hide(keys.index > rows.index[:, None], rows)[None, None]


def _both_ways(rows: At, keys: At) -> Tensor:
    """Causal, but image tokens see all of their own image."""
    hidden = keys.index > rows.index[:, None]
    images = rows.memo.get(IMAGES)
    if images is not None:
        mine, theirs = (images[x.index.clamp(max=len(images) - 1)] for x in (rows, keys))
        hidden &= (mine[:, None] != theirs) | (theirs < 0)
    return _hide(hidden, rows)[None, None]


def _both_ways_in_prefix(rows: At, keys: At) -> Tensor:
    """Causal, but the first tokens, image and question, see all of each other."""
    hidden = (keys.index > rows.index[:, None]) & (keys.index >= rows.memo[PREFIX])
    return _hide(hidden, rows)[None, None]


def sees_all_before(block: Block) -> bool:
    """Whether its rows see every key that stands before them: such keys need no bias."""
    return block.additive in (causal, _both_ways, _both_ways_in_prefix)


def _causal_for_readers(config: Any, layer: int, rows: At, keys: At) -> Tensor:
    """The causal bias where only a few heads let text read the image: [1, H, R, K]."""
    return causal(rows, keys) + _hide(~may_read(config, layer, rows.index, keys.index), rows)[None]


def _hide(hidden: Tensor, rows: At) -> Tensor:
    dtype = next(table.dtype for table in rows.memo.values() if table.is_floating_point())
    shown = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return shown.masked_fill(hidden, -torch.inf)


def look_back(block: Block, q: Tensor, k: Tensor, v: Tensor, at: At) -> Tensor:
    """All rows of a sequence from its first on, each seeing itself and what came before: [B, R, H,
    dh]."""
    mask = None if block.additive is causal else block.bias(at, at)
    grouped = block.heads != block.kv_heads
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=block.scale, enable_gqa=grouped
    ).transpose(1, 2)


class _Arrived(Exception):
    def __init__(self, inputs: Named):
        self.inputs = inputs


# a native model's own forward, which `arriving` stops by a hook; an edit reads a prompt inside one
NATIVE_RUN = threading.RLock()


def arriving(module: nn.Module, decoder: nn.Module, inputs: Named) -> Named:
    """The inputs that the native model passes to its decoder: embeddings with the image in them,
    positions, deepstack features. The decoder itself does not run. One thread at a time, since the
    hook would stop other threads, too."""

    def stop(_: nn.Module, __: tuple[Any, ...], given: Named) -> None:
        raise _Arrived(given)

    with NATIVE_RUN:
        handle = decoder.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            module(**inputs, use_cache=False)
        except _Arrived as arrived:
            return arrived.inputs
        finally:
            handle.remove()
    raise UnsupportedModel(type(module).__name__, "its forward never calls the decoder")


Record = Callable[[int, Tensor, Tensor], None]  # layer, unrotated keys and values [B, Hkv, R, dh]


def run(
    decoder: Decoder,
    h: Tensor,
    at: At,
    *,
    deepstack: tuple[Tensor | None, ...] = (),
    image: slice = slice(0, 0),
    record: Record | None = None,
) -> Tensor:
    """States h [B, R, D] of a sequence's first rows through every block. Deepstack features [B, N,
    D] are added to image rows behind the first blocks."""
    steps = walk(decoder, h, at)
    for step in steps:
        q, k, v = step.block.unrotated(step.h)
        if record is not None:
            record(step.index, k, v)
        turn = step.block.rotate
        assert turn is not None
        step.o = look_back(step.block, turn(q, at), turn(k, at), v, at)
        step.out = with_deepstack(step.out, deepstack, step.index, image)
    return steps.h


def with_deepstack(
    h: Tensor, features: Sequence[Tensor | None], index: int, image: slice
) -> Tensor:
    """States h [B, R, D] behind a block, with what is added to image rows there."""
    feature = features[index] if index < len(features) else None
    if feature is None:
        return h
    image_rows = h[:, image] + feature.to(h)
    return torch.cat([h[:, : image.start], image_rows, h[:, image.stop :]], dim=1)


# The vision tower of a vision-language model (CLIP or SigLIP of LLaVA and LLaVA-NeXT, InternVL's)
# as blocks:
#
#     image -> embed -> blocks -> the states of one layer, without the class token -> projector ->
#     image tokens of the decoder
#
# LLaVA reads its tower before the last block (`vision_feature_layer` -2). That block stays in the
# list as one that nobody reads: rows leave it as they came, so its heads do nothing, exactly.


@dataclass(eq=False)
class VisionTower:
    """A vision tower in native parts, with the projection of its states to image tokens."""

    embed: Fn  # images [B, 3, H, W] -> [B, T, D]
    blocks: list[Block]
    features: Fn  # states behind the last block [B, T, D] -> image tokens of the decoder [B, N, D']
    layout_at: Callable[[int, int], TokenLayout]
    patch: Size
    size: Size  # of images: height, width

    def tokens(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] -> image tokens [B, N, D']."""
        at = self.layout_at(images.shape[-2], images.shape[-1]).at(images.device)
        return self.features(walk(self, self.embed(images), at).end())


def vision_tower(module: Any) -> VisionTower:
    """The tower of a vision-language model; raises `UnsupportedModel` if it cannot be split."""
    name = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in WITH_TOWER), None)
    if name is None:
        raise UnsupportedModel(
            type(module).__name__,
            "its images are tiled or packed; masks need one in one piece",
            f"use {' or '.join(WITH_TOWER)}",
        )
    config, inner = module.config, module.model
    side = config.vision_config.image_size
    if getattr(config, "image_grid_pinpoints", [[side, side]]) != [[side, side]]:
        raise UnsupportedModel(
            type(module).__name__,
            f"it cuts images into tiles ({config.image_grid_pinpoints}); masks need one tile",
            f"set image_grid_pinpoints = [[{side}, {side}]] in lvlm.module.config and in"
            " lvlm.processor.image_processor, which changes its predictions",
        )
    layer = config.vision_feature_layer
    if not isinstance(layer, int):
        raise UnsupportedModel(
            type(module).__name__, f"it reads several layers of its tower at once, {list(layer)}"
        )
    drop = int(config.vision_feature_select_strategy == "default")  # the class token
    parts = _internvl(inner, layer, drop) if name == WITH_TOWER[1] else _llava(inner, drop)
    read = layer if layer >= 0 else len(parts.blocks) + 1 + layer
    unread = [_unread(b, config.vision_config.hidden_size) for b in parts.blocks[read:]]
    return replace(parts, blocks=[*parts.blocks[:read], *unread])


def _llava(inner: Any, drop: int) -> VisionTower:
    parts = transformers.find(inner.vision_tower, type(inner.vision_tower).__name__)
    assert parts.size is not None

    def features(states: Tensor) -> Tensor:
        whole = inner.multi_modal_projector(states[:, drop:])
        if not hasattr(inner, "image_newline"):
            return whole
        tile = whole.unflatten(1, (math.isqrt(whole.shape[1]), -1))  # LLaVA-NeXT sees it twice
        newline = inner.image_newline.expand(*tile.shape[:2], 1, -1)
        return torch.cat([whole, torch.cat([tile, newline], dim=2).flatten(1, 2)], dim=1)

    return VisionTower(
        parts.embed, parts.blocks, features, parts.layout_at, parts.patch, parts.size
    )


def native_images(config: Any, images: Tensor) -> dict[str, Tensor]:
    """What a model with a `vision_tower` takes for images [B, 3, H, W] of one tile each."""
    if not hasattr(config, "image_grid_pinpoints"):
        return {"pixel_values": images}
    sizes = torch.tensor([images.shape[-2:]], device=images.device).expand(len(images), -1)
    return {"pixel_values": torch.stack([images, images], dim=1), "image_sizes": sizes}


def _internvl(inner: Any, layer: int, drop: int) -> VisionTower:
    tower = inner.vision_tower
    size, patch = pair(tower.config.image_size), pair(tower.config.patch_size)
    grid = (size[0] // patch[0], size[1] // patch[1])
    norm = tower.layernorm if layer == -1 else same  # earlier layers are read as they are

    def features(states: Tensor) -> Tensor:
        image_rows = norm(states)[:, drop:].unflatten(1, grid).contiguous()
        return inner.multi_modal_projector(
            inner.pixel_shuffle(image_rows, scale_factor=inner.config.downsample_ratio).flatten(
                1, 2
            )
        )

    def layout_at(height: int, width: int) -> TokenLayout:
        return TokenLayout(grid=(height // patch[0], width // patch[1]), prefix=1, class_index=0)

    blocks = [
        _internvl_block(native, f"blocks.{index}")
        for index, native in enumerate(tower.encoder.layer)
    ]
    return VisionTower(tower.embeddings, blocks, features, layout_at, patch, size)


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
    """The block without effect on its rows."""

    def nothing(x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], width)

    return replace(block, mix=nothing, branch=same, feed=nothing)


# Where the image tokens of one image come from in it.
#
#     LLaVA-1.5, VipLLaVA, Gemma 3,   one grid
#     PaliGemma
#     LLaVA-NeXT, LLaVA-OneVision,    a grid of the whole image, then a finer one whose rows end
#     Granite Vision, Molmo 2         with a newline token
#     InternVL, Idefics 3, SmolVLM,   tiles, then a grid of the whole image
#     Aya Vision
#     Ovis 2, PerceptionLM            a grid of the whole image, then tiles
#     Qwen2-VL ..., GLM-4V            one grid of merged patches, of the image's own shape, for each
#                                     frame of a video
#     Pixtral, Mistral 3              one grid whose rows end with a break, but the last
#
# What else stands between the first image token and the last (marks of rows and tiles) has seen a
# part of the image, so it belongs to the image, without a place in it.

# top, left, bottom, right, in shares of the image's height and width
ImageBox = tuple[float, float, float, float]
WHOLE: ImageBox = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Grid:
    """rows x columns tokens, row by row; with `newline`, each row ends with one token more that
    belongs to no place. No box: no place at all."""

    rows: int
    columns: int
    box: ImageBox | None = WHOLE
    newline: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * (self.columns + self.newline)


@dataclass(frozen=True)
class ImageTokens:
    """All image tokens of a prompt, in order. Two images with equal `parts` have comparable
    tokens."""

    parts: tuple[Grid, ...]

    @property
    def count(self) -> int:
        return sum(part.tokens for part in self.parts)

    def __str__(self) -> str:
        return " + ".join(
            f"{part.rows} x {part.columns}{' with newlines' if part.newline else ''}"
            for part in self.parts
        )

    def maps(self, values: Tensor) -> list[tuple[Grid, Tensor]]:
        """Values [..., N] of image tokens as maps [..., rows, columns], one for each grid that
        shows the image; newlines are left out."""
        shown = []
        pieces = values.split([part.tokens for part in self.parts], dim=-1)
        for part, piece in zip(self.parts, pieces, strict=True):
            if part.box is not None:
                grid = piece.unflatten(-1, (part.rows, part.columns + part.newline))
                shown.append((part, grid[..., : part.columns]))
        return shown


def image_tokens(
    config: Any,
    inputs: Mapping[str, Any],
    places: Tensor,
    size: Size | None = None,
    tiling: Any = None,
) -> ImageTokens:
    """The tokens of native inputs with one image, from the first image token to the last; `places`
    [N] bool says which of them are image tokens. The image's `size` (height, width) and the image
    processor `tiling` place tiles."""
    several = any(len(inputs.get(name, ())) > 1 for name in ("image_grid_thw", "image_sizes"))
    rest, parts = _grids(config, inputs, int(places.sum()), size, tiling), list[Grid]()
    if not several and sum(grid.tokens for grid in rest) == len(places):  # marks are newlines
        return ImageTokens(tuple(rest))
    for is_image, run in groupby(places.tolist()):
        left = len(list(run))
        if not is_image:
            parts.append(Grid(1, left, box=None))
        while is_image and left > 0 and rest:
            parts.append(rest.pop(0))
            left -= parts[-1].tokens
    tokens = ImageTokens(tuple(parts))
    if several or rest or tokens.count != len(places):
        raise UnsupportedModel(
            type(config).__name__,
            f"the places of its {len(places)} image tokens are not known: they are not {tokens}",
            "give one image",
        )
    return tokens


def _grids(
    config: Any, inputs: Mapping[str, Any], count: int, size: Size | None, tiling: Any
) -> list[Grid]:
    """The grids of `count` image tokens of one image."""
    vision = config.vision_config
    frames = inputs.get("image_grid_thw", inputs.get("video_grid_thw"))
    if frames is not None:
        count, rows, columns = frames[0].tolist()
        merge = vision.spatial_merge_size
        return [Grid(rows // merge, columns // merge)] * count
    if "image_sizes" in inputs and hasattr(config, "image_grid_pinpoints"):
        return _next(config, inputs["image_sizes"][0].tolist())
    if "image_sizes" in inputs:
        step = vision.patch_size * getattr(config, "spatial_merge_size", 1)
        rows, columns = (int(side) // step for side in inputs["image_sizes"][0])
        above = (rows - 1) / rows
        upper = Grid(rows - 1, columns, (0.0, 0.0, above, 1.0), newline=True)
        return [*([upper] if rows > 1 else ()), Grid(1, columns, (above, 0.0, 1.0, 1.0))]
    if hasattr(config, "mm_tokens_per_image"):
        side = math.isqrt(config.mm_tokens_per_image)
        return [Grid(side, side)]
    if "image_grids" in inputs:  # Molmo 2
        return _marked(inputs["image_grids"][0].tolist(), count)
    if hasattr(config, "projector_pooling_ratio"):  # PerceptionLM
        tiles = inputs["pixel_values"].shape[1]
        side, rows, columns = math.isqrt(count // tiles), 0, 0
        if size is not None and tiling is not None:
            given = {"img_width": size[1], "img_height": size[0], "tile_size": tiling.tile_size}
            fits = tiling._fit_image_to_canvas(**given)
            columns, rows = fits or tiling._find_closest_aspect_ratio(**given)
        return [Grid(side, side), *_tiles(side, tiles - 1, (rows, columns))]
    shape: Any = (0, 0)
    side, whole_first = _side(config), False
    if hasattr(config, "downsample_ratio") or hasattr(config, "downsample_factor"):
        ratio = getattr(config, "downsample_ratio", None) or 1 / config.downsample_factor
        side = int(side * ratio)
        if size is not None and tiling is not None:
            from transformers.models.got_ocr2.image_processing_got_ocr2 import (
                get_optimal_tiled_canvas,
            )

            tile = (tiling.size["height"], tiling.size["width"])
            most = (tiling.min_patches, tiling.max_patches)
            shape = get_optimal_tiled_canvas(size, tile, *most)[::-1]  # it gives columns first
    elif hasattr(config, "scale_factor"):  # Idefics 3, SmolVLM
        side //= config.scale_factor
        if size is not None and tiling is not None:
            shape = tiling.get_number_of_image_patches(*size)[1:]
    elif hasattr(config, "visual_indicator_token_ids"):  # Ovis 2: marks say where rows end
        side //= vision.hidden_stride
        marks, whole_first = inputs["input_ids"][0].tolist(), True
        rows = 1 + marks.count(config.visual_indicator_token_ids[3])
        shape = (rows, (count // side**2 - 1) // rows)
    elif count == side**2 + 1:  # "full" keeps the class token
        return [Grid(1, 1, box=None), Grid(side, side)]
    whole, tiles = [Grid(side, side)], _tiles(side, count // side**2 - 1, shape)
    return whole + tiles if whole_first else tiles + whole


def _side(config: Any) -> int:
    """Patches along a side of the tower's images."""
    side = pair(config.vision_config.image_size)[0] // pair(config.vision_config.patch_size)[0]
    return int(side * Fraction(getattr(config, "downsample_rate", None) or 1))  # of Granite 4


def _next(config: Any, size: Sequence[int]) -> list[Grid]:
    """LLaVA-NeXT's base view and its tiles put together, without the padding."""
    from transformers.models.llava_next.modeling_llava_next import (
        get_anyres_image_grid_shape,
        unpad_image,
    )

    side = _side(config)
    high, wide = get_anyres_image_grid_shape(
        size, config.image_grid_pinpoints, config.vision_config.image_size
    )
    _, rows, columns = unpad_image(torch.empty(1, high * side, wide * side), size).shape
    most = str(getattr(config, "vision_aspect_ratio", ""))  # of LLaVA-OneVision: anyres_max_9
    if most.startswith("anyres_max_"):
        ratio = math.sqrt(rows * columns / (int(most.removeprefix("anyres_max_")) * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
    return [Grid(side, side), Grid(rows, columns, newline=True)]


def _marked(grid: Sequence[int], count: int) -> list[Grid]:
    """Molmo 2's coarse and fine grid between marks; rows of one or both end with a mark, too."""
    low, low_columns, high, high_columns = grid
    ends = count - 4 - low * low_columns - high * high_columns  # how many rows end with a mark
    coarse = Grid(low, low_columns, newline=ends not in (0, high))
    fine = Grid(high, high_columns, newline=ends not in (0, coarse.newline * low))
    mark = Grid(1, 1, box=None)
    return [mark, coarse, Grid(1, 2, box=None), fine, mark]


def _tiles(side: int, count: int, shape: Size) -> list[Grid]:
    """Tiles in rows and columns, row by row; without a box if these are not known."""
    rows, columns = shape
    if rows * columns != count:
        return [Grid(side, side, box=None)] * count
    return [
        Grid(side, side, (r / rows, c / columns, (r + 1) / rows, (c + 1) / columns))
        for r in range(rows)
        for c in range(columns)
    ]
