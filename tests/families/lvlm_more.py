"""Tiny vision-language models whose image tokens stand in other ways, with native inputs made by
hand: no processor, no download."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.models.cohere2 import modeling_cohere2

from tests.families.lvlm import exact_norms
from tests.families.native import need
from tests.tiny import scramble

BEFORE, IMAGE, BEHIND = [1, 8, 9], 4, [10, 11, 12, 13, 14]  # ids of a prompt
MARK, OTHER_MARK = 5, 6  # ids of what stands between image tokens
TEXT: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=40, max_position_embeddings=256, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
TOWER: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    image_size=32, patch_size=8,
)  # fmt: skip


@dataclass
class BareLVLM:
    """A native model, its inputs for a seed, and how its image tokens should be described."""

    module: Any
    pixels: Callable[[torch.Generator], dict[str, Tensor]]
    block: list[int]  # ids from the first image token to the last
    places: str

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        ids = torch.tensor([[*BEFORE, *self.block, *BEHIND]])
        made = self.pixels(torch.Generator().manual_seed(seed))
        for name, value in made.items():
            if value.is_floating_point():
                made[name] = value.double()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **made}


def _noise(*shape: int, **more: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda draw: {"pixel_values": torch.randn(shape, generator=draw), **more}


def _kinds(block: list[int]) -> Tensor:
    row = [0] * len(BEFORE) + [int(i == IMAGE) for i in block] + [0] * len(BEHIND)
    return torch.tensor([row])


def llava_onevision() -> BareLVLM:
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**TOWER, vision_use_head=False),
        text_config=hf.Qwen2Config(**TEXT), image_token_index=IMAGE, video_token_index=7,
        image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    pixels = _noise(1, 3, 3, 32, 32, image_sizes=torch.tensor([[32, 64]]))
    module = hf.LlavaOnevisionForConditionalGeneration(config)
    return BareLVLM(module, pixels, [IMAGE] * (16 + 4 * 9), "4 x 4 + 4 x 8 with newlines")


def vipllava() -> BareLVLM:
    config = hf.VipLlavaConfig(
        vision_config=hf.CLIPVisionConfig(**TOWER), text_config=hf.LlamaConfig(**TEXT),
        image_token_index=IMAGE, vision_feature_layers=[-2, -1],
    )  # fmt: skip
    module = hf.VipLlavaForConditionalGeneration(config)
    return BareLVLM(module, _noise(1, 3, 32, 32), [IMAGE] * 16, "4 x 4")


def _grid(rows: int, columns: int, block: list[int]) -> Callable[[torch.Generator], dict[str, Any]]:
    """Patches of a frame of rows x columns, for towers that take them flat."""
    shape, grid = (rows * columns, 3 * 2 * 8 * 8), torch.tensor([[1, rows, columns]])
    return _noise(*shape, image_grid_thw=grid, mm_token_type_ids=_kinds(block))


def qwen3_vl_moe() -> BareLVLM:
    vision = dict(
        depth=3, hidden_size=16, out_hidden_size=32, num_heads=2, intermediate_size=24,
        patch_size=8, num_position_embeddings=16, deepstack_visual_indexes=[0, 2],
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
    text = {
        **TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "head_dim": 8, "rope_parameters": {**rope, "mrope_interleaved": True},
    }  # fmt: skip
    config = hf.Qwen3VLMoeConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=7
    )
    block = [IMAGE] * 6
    module = hf.Qwen3VLMoeForConditionalGeneration(config)
    module.set_experts_implementation("eager")  # fused ones know no float64
    return BareLVLM(module, _grid(4, 6, block), block, "2 x 3")


def glm4v(kind: str = "Glm4v") -> BareLVLM:
    vision = dict(
        depth=2, hidden_size=16, out_hidden_size=32, num_heads=2, intermediate_size=24,
        patch_size=8, image_size=32, temporal_patch_size=2, spatial_merge_size=2,
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    text = {**TEXT, "rope_parameters": {**rope, "mrope_section": [1, 1, 0]}}
    config = getattr(hf, f"{kind}Config")(
        vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=7,
        image_start_token_id=20, image_end_token_id=21, video_start_token_id=22,
        video_end_token_id=23,
    )  # fmt: skip
    block = [IMAGE] * 6
    module = getattr(hf, f"{kind}ForConditionalGeneration")(config)
    return BareLVLM(module, _grid(4, 6, block), block, "2 x 3")


def glm46v() -> BareLVLM:
    return glm4v("Glm46V")


def gemma3() -> BareLVLM:
    text = hf.Gemma3TextConfig(
        **TEXT, head_dim=8, sliding_window=64, query_pre_attn_scalar=6,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**TOWER, vision_use_head=False), text_config=text,
        image_token_index=IMAGE, boi_token_index=20, eoi_token_index=21, mm_tokens_per_image=4,
    )  # fmt: skip
    block = [IMAGE] * 4
    pixels = _noise(1, 3, 32, 32, token_type_ids=_kinds(block))
    return BareLVLM(hf.Gemma3ForConditionalGeneration(config), pixels, block, "2 x 2")


def _tiles(*marks: list[int]) -> list[int]:
    """Tiles of four image tokens with marks between them."""
    block = [IMAGE] * 4
    for mark in marks:
        block = [*block, *mark, *[IMAGE] * 4]
    return block


def idefics3(kind: str = "Idefics3") -> BareLVLM:
    config = getattr(hf, f"{kind}Config")(
        vision_config=TOWER, text_config=hf.LlamaConfig(**TEXT), image_token_id=IMAGE,
        scale_factor=2,
    )  # fmt: skip
    module = getattr(hf, f"{kind}ForConditionalGeneration")(config)
    block = _tiles([MARK], [OTHER_MARK, MARK])
    return BareLVLM(module, _noise(1, 3, 3, 32, 32), block, "2 x 2 + 1 x 1 + 2 x 2 + 1 x 2 + 2 x 2")


def smolvlm() -> BareLVLM:
    return idefics3("SmolVLM")


def mistral3() -> BareLVLM:
    tower = {**TOWER, "head_dim": 8, "image_size": 48}
    config = hf.Mistral3Config(
        vision_config=hf.PixtralVisionConfig(**tower), image_token_index=IMAGE,
        text_config=hf.MistralConfig(**TEXT, head_dim=8, sliding_window=None),
        spatial_merge_size=2, vision_feature_layer=-1,
    )  # fmt: skip
    row = [IMAGE] * 3
    pixels = _noise(1, 3, 32, 48, image_sizes=torch.tensor([[32, 48]]))
    block = [*row, MARK, *row]
    module = hf.Mistral3ForConditionalGeneration(config)
    return BareLVLM(module, pixels, block, "1 x 3 with newlines + 1 x 3")


def pixtral() -> BareLVLM:
    config = hf.LlavaConfig(
        vision_config=hf.PixtralVisionConfig(**TOWER, head_dim=8),
        text_config=hf.MistralConfig(**TEXT, head_dim=8, sliding_window=None),
        image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    row = [IMAGE] * 4
    pixels = _noise(1, 3, 24, 32, image_sizes=torch.tensor([[24, 32]]))
    block = [*row, MARK, *row, MARK, *row]
    module = hf.LlavaForConditionalGeneration(config)
    return BareLVLM(module, pixels, block, "2 x 4 with newlines + 1 x 4")


def ovis2() -> BareLVLM:
    tower = {**TOWER, "hidden_stride": 2, "vocab_size": 24, "num_visual_indicator_tokens": 5}
    config = hf.Ovis2Config(
        vision_config=tower, text_config=hf.Qwen2Config(**TEXT), image_token_id=IMAGE,
        visual_indicator_token_ids=[MARK, OTHER_MARK, 20, 21, 22], hidden_size=32,
    )  # fmt: skip
    block = _tiles([OTHER_MARK], [20])
    module = hf.Ovis2ForConditionalGeneration(config)
    return BareLVLM(module, _noise(3, 3, 32, 32), block, "2 x 2 + 1 x 1 + 2 x 2 + 1 x 1 + 2 x 2")


def perception_lm() -> BareLVLM:
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    vision = hf.TimmWrapperConfig(architecture="test_vit", model_args={**shape, "global_pool": ""})
    config = hf.PerceptionLMConfig(
        vision_config=vision, text_config=hf.LlamaConfig(**TEXT), image_token_id=IMAGE,
        projector_pooling_ratio=2,
    )  # fmt: skip
    module = hf.PerceptionLMForConditionalGeneration(config)
    return BareLVLM(module, _noise(1, 3, 3, 32, 32), [IMAGE] * 12, "2 x 2 + 2 x 2 + 2 x 2")


def aya_vision() -> BareLVLM:
    text = hf.Cohere2Config(
        **TEXT, head_dim=8, sliding_window=64, layer_types=["sliding_attention", "full_attention"]
    )
    config = hf.AyaVisionConfig(
        vision_config=hf.SiglipVisionConfig(**TOWER, vision_use_head=False), text_config=text,
        image_token_index=IMAGE, vision_feature_layer=-1,
    )  # fmt: skip
    module = hf.AyaVisionForConditionalGeneration(config)
    block = _tiles([MARK], [OTHER_MARK])
    return BareLVLM(module, _noise(3, 3, 32, 32), block, "2 x 2 + 1 x 1 + 2 x 2 + 1 x 1 + 2 x 2")


GRANITE: dict[str, Any] = dict(
    embedding_multiplier=1.5, residual_multiplier=0.6, attention_multiplier=0.3, logits_scaling=2.0
)


def granite_vision() -> BareLVLM:
    """LLaVA-NeXT around Granite."""
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**TOWER), text_config=hf.GraniteConfig(**TEXT, **GRANITE),
        image_token_index=IMAGE, image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
    )  # fmt: skip
    pixels = _noise(1, 3, 3, 32, 32, image_sizes=torch.tensor([[32, 64]]))
    module = hf.LlavaNextForConditionalGeneration(config)
    return BareLVLM(module, pixels, [IMAGE] * (16 + 4 * 9), "4 x 4 + 4 x 8 with newlines")


def granite4_vision() -> BareLVLM:
    tower = {**TOWER, "hidden_size": 64, "num_attention_heads": 4}
    text = {**TEXT, **GRANITE}
    config = hf.Granite4VisionConfig(
        vision_config=hf.SiglipVisionConfig(**tower, vision_use_head=False), text_config=text,
        image_token_index=IMAGE, image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
        vision_feature_select_strategy="full", downsample_rate="1/2",
        deepstack_layer_map=[[-1, 0]], spatial_target_layers=[1, 1, 1, 1],
        qformer_config={"model_type": "blip_2_qformer", "num_hidden_layers": 1,
        "hidden_size": 64, "encoder_hidden_size": 64, "num_attention_heads": 1,
        "intermediate_size": 24, "cross_attention_frequency": 1, "use_qformer_text_input": False},
    )  # fmt: skip
    pixels = _noise(1, 3, 3, 32, 32, image_sizes=torch.tensor([[32, 64]]))
    module = hf.Granite4VisionForConditionalGeneration(config)
    return BareLVLM(module, pixels, [IMAGE] * (4 + 2 * 5), "2 x 2 + 2 x 4 with newlines")


def molmo2() -> BareLVLM:
    need("Molmo2Config")
    tower = {**TOWER, "image_size": [32, 32], "num_key_value_heads": 2, "head_dim": 8}
    adapter = {
        "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 24, "text_hidden_size": 32, "vision_feature_layer": [1, 0],
    }  # fmt: skip
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    config = hf.Molmo2Config(
        vision_config=tower, adapter_config=adapter, image_patch_id=IMAGE,
        text_config={**TEXT, "head_dim": 8, "additional_vocab_size": 8, **rope},
    )  # fmt: skip
    row = [*[IMAGE] * 4, OTHER_MARK]
    block = [MARK, *[IMAGE] * 4, MARK, MARK, *row, *row, MARK]
    kinds = _kinds(block)
    kinds[:, len(BEFORE) : len(BEFORE) + len(block)] = 1
    pooling = torch.arange(48).view(12, 4)  # twelve tokens of four patches each, of three crops
    pixels = _noise(
        3, 16, 192, image_token_pooling=pooling, image_grids=torch.tensor([[2, 2, 2, 4]]),
        image_num_crops=torch.tensor([3]), mm_token_type_ids=kinds,
    )  # fmt: skip
    places = "1 x 1 + 2 x 2 + 1 x 2 + 2 x 4 with newlines + 1 x 1"
    return BareLVLM(hf.Molmo2ForConditionalGeneration(config), pixels, block, places)


MORE: dict[str, Callable[[], BareLVLM]] = {
    f.__name__: f
    for f in (
        llava_onevision, vipllava, qwen3_vl_moe, glm4v, glm46v, gemma3, idefics3, smolvlm, mistral3,
        pixtral, ovis2, perception_lm, aya_vision, granite_vision, granite4_vision, molmo2,
    )
}  # fmt: skip


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Cohere 2's rotation of neighbours, which it computes in single precision."""
    half = modeling_cohere2.rotate_half
    return tuple(x * cos[:, None] + half(x) * sin[:, None] for x in (q, k))


def bare_lvlm(family: str, seed: int = 0) -> BareLVLM:
    """A scrambled model of one family in float64, its norms exact, and Cohere's rotation."""
    modeling_cohere2.apply_rotary_pos_emb = _turned
    torch.manual_seed(seed)
    bare = MORE[family]()
    scramble(bare.module, seed)
    bare.module.double()
    exact_norms(bare.module)
    bare.module.eval().requires_grad_(False)
    return bare
