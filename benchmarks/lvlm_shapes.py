"""Randomly initialised vision-language models of well-known shapes, and native inputs for one noise
picture. Built on the device; no downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

Inputs = Callable[[int], dict[str, Any]]  # seed -> native inputs
Built = tuple[Any, Inputs]
TEXT_ROWS = 22  # the paper's question in LLaVA's template

VICUNA = dict(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32064,
)
CLIP_L = dict(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    image_size=336,
    patch_size=14,
    projection_dim=768,
)

QWEN2: dict[str, Any] = dict(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, vocab_size=152064,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
)  # fmt: skip
QWEN2_TOWER = dict(
    depth=32, embed_dim=1280, hidden_size=3584, num_heads=16, mlp_ratio=4, patch_size=14
)


def _make(kind: str, config: Any, where: torch.device, dtype: torch.dtype) -> Any:
    """A native model with random weights, drawn where it will run."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(where):
            return getattr(hf, kind)(config).eval()
    finally:
        torch.set_default_dtype(before)


def _ids(before: int, image: int, token: int, where: torch.device) -> dict[str, Tensor]:
    """`before` words, the picture, TEXT_ROWS words."""
    words = torch.randint(
        1, min(token, 30000), (before + TEXT_ROWS,), generator=torch.Generator().manual_seed(5)
    )
    ids = torch.cat([words[:before], torch.full((image,), token), words[before:]])[None].to(where)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _noise(*shape: int, seed: int, where: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(where, dtype)


def _built(
    kind: str, config: Any, ids: dict[str, Tensor], pixels: tuple[int, ...], where: torch.device,
    dtype: torch.dtype,
) -> Built:  # fmt: skip
    """A model, and its inputs for a picture of noise by its seed."""

    def inputs(seed: int) -> dict[str, Any]:
        return ids | {"pixel_values": _noise(*pixels, seed=seed, where=where, dtype=dtype)}

    return _make(f"{kind}ForConditionalGeneration", config, where, dtype), inputs


def _llava(
    where: torch.device,
    dtype: torch.dtype,
    kind: str = "Llava",
    *,
    text: dict[str, int] = VICUNA,
    vision: dict[str, int] = CLIP_L,
    token: int = 32000,
    images: int = 576,  # tokens
    crops: tuple[int, ...] = (1,),
    more: dict[str, Tensor] | None = None,
) -> Built:
    config = getattr(hf, f"{kind}Config")(
        vision_config=hf.CLIPVisionConfig(**vision),
        text_config=hf.LlamaConfig(**text),
        image_token_index=token,
    )
    pixels = (*crops, 3, vision["image_size"], vision["image_size"])
    return _built(kind, config, _ids(5, images, token, where) | (more or {}), pixels, where, dtype)


def llava_next(where: torch.device, dtype: torch.dtype) -> Built:
    """A 640 x 480 picture: 576 + 36 x 48 + 36 image tokens."""
    more = {"image_sizes": torch.tensor([[480, 640]], device=where)}
    return _llava(where, dtype, "LlavaNext", images=2340, crops=(1, 5), more=more)


def qwen2_vl(where: torch.device, dtype: torch.dtype) -> Built:
    """A 640 x 480 picture: 17 x 23 image tokens after the system turn."""
    config = hf.Qwen2VLConfig(
        text_config=QWEN2, vision_config=QWEN2_TOWER, image_token_id=151655, video_token_id=151656
    )
    ids = _ids(15, 391, 151655, where)
    ids |= {
        "mm_token_type_ids": (ids["input_ids"] == 151655).int(),
        "image_grid_thw": torch.tensor([[1, 34, 46]], device=where),
    }
    return _built("Qwen2VL", config, ids, (34 * 46, 3 * 2 * 14 * 14), where, dtype)


def toy(where: torch.device, dtype: torch.dtype) -> Built:
    """Small enough for a laptop; shows that everything runs."""
    vision = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=48, patch_size=8, projection_dim=32,
    )  # fmt: skip
    text = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=200,
    )  # fmt: skip
    return _llava(where, dtype, text=text, vision=vision, token=199, images=36)


SHAPES: dict[str, Callable[[torch.device, torch.dtype], Built]] = {
    "llava-1.5-7b": _llava,
    "llava-next-7b": llava_next,
    "qwen2-vl-7b": qwen2_vl,
    "toy": toy,
}
