"""The language decoder of a transformers vision-language model, as blocks: Llama, Qwen2, Qwen2-VL,
Qwen3-VL and their like.

    embeddings (words and picture) -> blocks, causal, rotary -> norm -> vocabulary

A head is a query head; grouped queries share keys. Positions may have one axis or three: the native
rotary module turns them into one table per sequence, and rows take theirs from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.engine.walk import walk
from seecause.errors import UnsupportedModel
from seecause.models.block import Block, chain, same
from seecause.models.hf_blocks import first
from seecause.models.image_readers import ATTENTION as FEW_READERS
from seecause.models.image_readers import may_read
from seecause.models.layout import At, TokenLayout

CLASSES = (
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)


@dataclass(eq=False)
class Decoder:
    """The decoder of `module` in native parts."""

    native: Any  # the text model inside the vision-language model
    blocks: list[Block]
    norm: nn.Module
    head: nn.Linear  # [V, D]
    rotary: nn.Module
    window: int | None = None  # sequences longer than this would be cut by a sliding window

    def at(self, positions: Tensor, like: Tensor) -> At:
        """All tokens of a sequence; positions [1, S] or [axes, 1, S] are where the native model
        puts them."""
        tokens = positions.shape[-1]
        cos, sin = self.rotary(like, positions)  # [1, S, dh]
        if cos.shape[-1] != self.blocks[0].head_dim:
            raise UnsupportedModel(
                type(self.native).__name__,
                f"it rotates {cos.shape[-1]} of {self.blocks[0].head_dim} dimensions of a head",
            )
        table = torch.stack([cos[0], sin[0]])  # [2, S, dh]
        return At(
            torch.arange(tokens, device=like.device),
            TokenLayout(grid=(0, 0), prefix=tokens),
            {"rope": table},
        )


def find(module: Any) -> Decoder:
    """The decoder of a vision-language model, or why it cannot be split."""
    name = type(module).__name__
    text: Any = module.get_decoder() if hasattr(module, "get_decoder") else None
    config = getattr(text, "config", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if any("linear" in kind or "mamba" in kind for kind in kinds):
        raise UnsupportedModel(
            name, "its decoder is a hybrid with linear attention, which has no keys to exchange"
        )
    if not any(cls.__name__ in CLASSES for cls in type(module).__mro__):
        raise UnsupportedModel(
            name, "no decoder view knows it", f"classes that work: {', '.join(CLASSES)}"
        )
    return Decoder(
        native=text,
        blocks=[_block(native, index, config) for index, native in enumerate(text.layers)],
        norm=text.norm,
        head=module.get_output_embeddings(),
        rotary=text.rotary_emb,
        window=(
            getattr(config, "sliding_window", None)
            if not kinds or "sliding_attention" in kinds
            else None
        ),
    )


def _block(native: Any, index: int, config: Any) -> Block:
    attention = native.self_attn
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    width = attention.head_dim
    few = planted_span(config) is not None

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            q(x).unflatten(-1, (-1, width)),
            k(x).unflatten(-1, (-1, width)),
            v(x).unflatten(-1, (-1, width)),
        )

    return Block(
        name=f"layers.{index}",
        native=native,
        heads=q.out_features // width,
        kv_heads=k.out_features // width,
        head_dim=width,
        scale=attention.scaling,
        project=project,
        norm=native.input_layernorm,
        q_norm=getattr(attention, "q_norm", same),
        k_norm=getattr(attention, "k_norm", same),
        rotate=rotate,
        additive=partial(_causal_for_readers, config, index) if few else causal,
        mix=first(attention, "o_proj"),
        feed=chain(native.post_attention_layernorm, native.mlp),
    )


def planted_span(config: Any) -> tuple[int, int] | None:
    """Where a decoder whose text may read the picture through a few heads only expects it; None for
    all other decoders."""
    return (
        tuple(config.image_span)
        if getattr(config, "_attn_implementation", None) == FEW_READERS
        else None
    )


def rotate(x: Tensor, at: At) -> Tensor:
    """Rotate rows x [B, H, R, dh] by the table of their sequence."""
    cos, sin = at.memo["rope"][:, at.index]  # [R, dh]
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def causal(rows: At, keys: At) -> Tensor:
    """0 where a row may look back, -inf where it would look ahead: [1, 1, R, K]."""
    return _hide(keys.index > rows.index[:, None], rows)[None, None]


def _causal_for_readers(config: Any, layer: int, rows: At, keys: At) -> Tensor:
    """The same, and only a few heads let text look at the picture: [1, H, R, K]."""
    return causal(rows, keys) + _hide(~may_read(config, layer, rows.index, keys.index), rows)[None]


def _hide(hidden: Tensor, rows: At) -> Tensor:
    return torch.zeros(
        hidden.shape, dtype=rows.memo["rope"].dtype, device=hidden.device
    ).masked_fill(hidden, -torch.inf)


def look_back(block: Block, q: Tensor, k: Tensor, v: Tensor, at: At) -> Tensor:
    """All rows of a sequence from its first on, each seeing itself and what came before: [B, R, H,
    dh]."""
    if block.additive is not causal:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=block.bias(at, at),
            scale=block.scale,
            enable_gqa=block.heads != block.kv_heads,
        ).transpose(1, 2)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=block.scale, enable_gqa=block.heads != block.kv_heads
    ).transpose(1, 2)


class _Arrived(Exception):
    def __init__(self, inputs: dict[str, Any]):
        self.inputs = inputs


def arriving(module: nn.Module, decoder: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the native model hands to its decoder: embeddings with the picture in them, positions,
    deepstack features. The decoder itself does not run."""

    def stop(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
        raise _Arrived(given)

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
    deepstack: tuple[Tensor, ...] = (),
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
        step.o = look_back(step.block, rotate(q, at), rotate(k, at), v, at)
        if step.index < len(deepstack):
            out = step.out
            picture = out[:, image] + deepstack[step.index].to(out)
            step.out = torch.cat([out[:, : image.start], picture, out[:, image.stop :]], dim=1)
    return steps.h
