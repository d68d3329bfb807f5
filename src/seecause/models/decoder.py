"""The language decoder of a transformers vision-language model, as blocks: Llama, Qwen2, Qwen2-VL,
Qwen3-VL and their like.

    embeddings (words and picture) -> blocks, causal, rotary -> norm -> vocabulary

A head is a query head; grouped queries share keys. Positions may have one axis or three: the native
rotary module turns them into one table per sequence, and rows take theirs from it.

A LLaVA whose text may read the picture through a few known heads only: planted truth for head
attribution.

`config.text_config.image_readers` lists them as [layer, head]; `config.text_config.image_span` is
where the image tokens stand, [start, stop). In every other head, rows after the picture see no
image key at all, so ablating such a head does nothing, exactly.

The class is transformers' own; the restriction is an attention function of its registry, which must
be asked for:

    model = load_reading_few(folder)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.engine.walk import walk
from seecause.errors import UnsupportedModel
from seecause.models.block import Block, chain, same
from seecause.models.hf_view import first
from seecause.models.layout import At, TokenLayout

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration

ATTENTION = "few_image_readers"


def may_read(
    text_config: Any, layer: int, rows: Tensor, keys: Tensor, span: tuple[int, int] | None = None
) -> Tensor:
    """[H, R, K] bool: which keys (token indices [K]) the rows (token indices [R]) of each head may
    see, causality apart."""
    start, stop = span or text_config.image_span
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
    image_span: tuple[int, int] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' registry. Rows are the last R of K tokens; `image_span` overrides
    the configuration's."""
    rows, keys = query.shape[2], key.shape[2]
    index = torch.arange(keys, device=query.device)
    attention: Any = module
    reading = index[keys - rows :]
    allowed = may_read(attention.config, int(attention.layer_idx), reading, index, image_span)[None]
    if attention_mask is None:
        attention_mask = index <= index[keys - rows :, None]  # causal
    mask = (
        allowed & attention_mask
        if attention_mask.dtype == torch.bool
        else attention_mask.masked_fill(~allowed, torch.finfo(query.dtype).min)
    )
    grouped = query.shape[1] != key.shape[1]
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def restrict(model: Any) -> Any:
    """Switch the restriction on, in place, by the heads in the model's configuration."""
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


def load_reading_few(folder: str | Path, **options: Any) -> LlavaForConditionalGeneration:
    """transformers' `from_pretrained`, then the restriction."""
    from transformers import LlavaForConditionalGeneration

    return restrict(LlavaForConditionalGeneration.from_pretrained(folder, **options))


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
        cos, sin = (_one_table(self.rotary, x) for x in self.rotary(like, positions))  # [1, S, dh]
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
        if getattr(config, "_attn_implementation", None) == ATTENTION
        else None
    )


def _one_table(rotary: Any, table: Tensor) -> Tensor:
    """[1, S, dh]. transformers before 5.17 gives Qwen's three axes apart: [3, 1, S, dh]."""
    if table.ndim == 3:
        return table
    sections = table.split(rotary.config.rope_parameters["mrope_section"] * 2, dim=-1)
    return torch.cat([axes[index % 3] for index, axes in enumerate(sections)], dim=-1)


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


NATIVE_RUN = threading.Lock()  # a native model's own forward; `arriving` stops it by a hook


def arriving(module: nn.Module, decoder: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the native model hands to its decoder: embeddings with the picture in them, positions,
    deepstack features. The decoder itself does not run. One thread at a time: the hook would stop
    the others, too."""

    def stop(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
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
