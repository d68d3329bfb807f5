"""Tiny transformers models: ViT, DeiT, DINOv2 (with registers), DINOv3, I-JEPA, CLIP, MetaCLIP 2,
SigLIP.

Where a config takes square pictures only, positions are interpolated to `SIZE`.
"""

from collections.abc import Callable
from typing import Any

import transformers as hf
from torch import Tensor, nn

from tests.families.native import HALF, SIZE, TEXT, Native, matrix, prompts

BASE: dict[str, Any] = dict(
    hidden_size=24, num_hidden_layers=4, num_attention_heads=3, intermediate_size=48, patch_size=8
)
OTHER_SIZE = {**HALF, "size": SIZE}  # not the size in the config
LABELS = {"num_labels": 7}


def _native(module: Any, options: dict, forward: Callable[[Tensor], Tensor]) -> Native:
    stack = max(
        (m for m in module.modules() if isinstance(m, nn.ModuleList)), key=len
    )  # text towers are shorter
    return Native(module, stack, forward, options)


def _classifier(module: Any, options: dict, **asked: bool) -> Native:
    return _native(module, options, lambda images: module(images, **asked).logits)


def _resized(module: Any) -> Native:
    return _classifier(module, OTHER_SIZE, interpolate_pos_encoding=True)


def hf_vit() -> Native:
    config = hf.ViTConfig(**BASE, **LABELS, image_size=SIZE, qkv_bias=False)
    return _classifier(hf.ViTForImageClassification(config), HALF)


def hf_vit_other_size() -> Native:
    config = hf.ViTConfig(
        **BASE, id2label=dict(enumerate("abcdefg")), image_size=32, hidden_dropout_prob=0.1
    )
    return _resized(hf.ViTForImageClassification(config))


def hf_vit_backbone() -> Native:
    module, head = hf.ViTModel(hf.ViTConfig(**BASE, image_size=SIZE)), matrix(24)
    return _native(
        module,
        {**HALF, "head": head, "pool": "mean"},
        lambda x: module(x).last_hidden_state[:, 1:].mean(1) @ head.to(x.dtype).T,
    )


def hf_deit() -> Native:
    return _classifier(
        hf.DeiTForImageClassification(hf.DeiTConfig(**BASE, **LABELS, image_size=SIZE)), HALF
    )


def hf_deit_distilled() -> Native:
    return _classifier(
        hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**BASE, **LABELS, image_size=SIZE)),
        HALF,
    )


def hf_dinov2() -> Native:
    config = hf.Dinov2Config(**BASE, **LABELS, image_size=32, mlp_ratio=2, drop_path_rate=0.1)
    return _classifier(hf.Dinov2ForImageClassification(config), OTHER_SIZE)


def hf_dinov2_swiglu() -> Native:
    config = hf.Dinov2Config(
        **BASE, **LABELS, image_size=32, mlp_ratio=2, use_swiglu_ffn=True, qkv_bias=False
    )
    return _classifier(hf.Dinov2ForImageClassification(config), OTHER_SIZE)


def hf_dinov2_registers() -> Native:
    config = hf.Dinov2WithRegistersConfig(
        **BASE, **LABELS, image_size=32, mlp_ratio=2, num_register_tokens=3
    )
    return _classifier(hf.Dinov2WithRegistersForImageClassification(config), OTHER_SIZE)


def hf_dinov3() -> Native:
    config = hf.DINOv3ViTConfig(**BASE, image_size=32, num_register_tokens=2, use_gated_mlp=True)
    module, head = hf.DINOv3ViTModel(config), matrix(24)
    return _native(
        module, {**OTHER_SIZE, "head": head}, lambda x: module(x).pooler_output @ head.to(x.dtype).T
    )


def _dual(kind: str) -> Any:
    """The config of a model with two towers: vision as in BASE, and a short text tower."""
    text = dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        vocab_size=64, max_position_embeddings=8,
        projection_dim=16, projection_size=24, bos_token_id=0, eos_token_id=63, pad_token_id=63,
    )  # fmt: skip
    config = getattr(hf, f"{kind}Config")
    vision = {**BASE, "image_size": 32, "projection_dim": 16}
    return config(
        text_config=text, vision_config=vision,
        **({} if kind == "Siglip" else {"projection_dim": 16}), **LABELS,
    )  # fmt: skip


def _zero_shot(module: Any) -> Native:
    def forward(images: Tensor) -> Tensor:
        return module(
            input_ids=prompts(), pixel_values=images, interpolate_pos_encoding=True
        ).logits_per_image

    return _native(module, OTHER_SIZE | TEXT, forward)


def hf_clip() -> Native:
    return _zero_shot(hf.CLIPModel(_dual("CLIP")))


def hf_clip_tower() -> Native:
    module, head = hf.CLIPVisionModelWithProjection(_dual("CLIP").vision_config), matrix(16)
    return _native(
        module,
        {**OTHER_SIZE, "head": head},
        lambda x: module(x, interpolate_pos_encoding=True).image_embeds @ head.to(x.dtype).T,
    )


def hf_clip_classifier() -> Native:
    return _resized(hf.CLIPForImageClassification(_dual("CLIP")))


def hf_metaclip_2() -> Native:
    return _zero_shot(hf.MetaClip2Model(_dual("MetaClip2")))


def hf_metaclip_2_classifier() -> Native:
    return _resized(hf.MetaClip2ForImageClassification(_dual("MetaClip2")))


def hf_ijepa() -> Native:
    config = hf.IJepaConfig(**BASE, **LABELS, image_size=32)
    return _resized(hf.IJepaForImageClassification(config))


def hf_siglip() -> Native:
    return _zero_shot(hf.SiglipModel(_dual("Siglip")))


def hf_siglip_tower() -> Native:
    module, head = hf.SiglipVisionModel(_dual("Siglip").vision_config), matrix(24)
    return _native(
        module,
        {**OTHER_SIZE, "head": head},
        lambda x: module(x, interpolate_pos_encoding=True).pooler_output @ head.to(x.dtype).T,
    )


def hf_siglip_classifier() -> Native:
    return _resized(hf.SiglipForImageClassification(_dual("Siglip")))


FAMILIES = {
    f.__name__: f
    for f in (
        hf_vit, hf_vit_other_size, hf_vit_backbone, hf_deit, hf_deit_distilled, hf_dinov2,
        hf_dinov2_swiglu, hf_dinov2_registers, hf_dinov3,
        hf_clip, hf_clip_tower, hf_clip_classifier, hf_metaclip_2, hf_metaclip_2_classifier,
        hf_ijepa, hf_siglip, hf_siglip_tower, hf_siglip_classifier,
    )
}  # fmt: skip
