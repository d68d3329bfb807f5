"""A LLaVA whose text may read the picture through a few known heads only: planted truth for head
attribution.

`config.text_config.image_readers` lists them as [layer, head]; `config.text_config.image_span` is
where the image tokens stand, [start, stop). In every other head, rows after the picture see no
image key at all, so ablating such a head does nothing, exactly.

The class is transformers' own; the restriction is an attention function of its registry, which must
be asked for:

    model = load_reading_few(folder)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seecause.errors import UnsupportedModel

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
