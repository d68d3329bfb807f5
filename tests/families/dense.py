"""Small detectors and models of pixels of transformers, from configs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from tests.families.native import HALF, Native
from tests.tiny import scramble

SIZE = (64, 96)
NAMES = ("cat", "frog", "train")
LABELS = {
    "id2label": dict(enumerate(NAMES)),
    "label2id": {name: index for index, name in enumerate(NAMES)},
}
WIDTHS: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_queries": 5,
}


def _backbone(stages: int, *levels: int) -> Any:
    return hf.ResNetConfig(
        embedding_size=4,
        hidden_sizes=[4, 8, 8, 8][:stages],
        depths=[1] * stages,
        layer_type="basic",
        out_features=[f"stage{level}" for level in levels or (stages,)],
    )


def _detr() -> Any:
    return hf.DetrForObjectDetection(
        hf.DetrConfig(backbone_config=_backbone(3), **WIDTHS, **LABELS)
    )


def _conditional_detr() -> Any:
    config = hf.ConditionalDetrConfig(backbone_config=_backbone(3), **WIDTHS, **LABELS)
    return hf.ConditionalDetrForObjectDetection(config)


def _deformable_detr(**options: Any) -> Any:
    config = hf.DeformableDetrConfig(
        backbone_config=_backbone(3, 2, 3),
        num_feature_levels=3,
        encoder_n_points=2,
        decoder_n_points=2,
        **{**WIDTHS, "d_model": 32},  # groups of 32 are normed
        **LABELS,
        **options,
    )
    return hf.DeformableDetrForObjectDetection(config)


def _two_stage() -> Any:
    return _deformable_detr(two_stage=True, two_stage_num_proposals=5, with_box_refine=True)


RT_DETR: dict[str, Any] = {
    "encoder_hidden_dim": 16,
    "encoder_in_channels": [8, 8, 8],
    "feat_strides": [8, 16, 32],
    "encoder_ffn_dim": 16,
    "encoder_attention_heads": 2,
    "d_model": 16,
    "num_queries": 5,
    "decoder_in_channels": [16, 16, 16],
    "decoder_ffn_dim": 16,
    "num_feature_levels": 3,
    "decoder_n_points": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "anchor_image_size": None,
    "disable_custom_kernels": True,
}


def _rt_backbone() -> Any:
    return hf.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )


def _rt_detr() -> Any:
    config = hf.RTDetrConfig(backbone_config=_rt_backbone(), **RT_DETR, **LABELS)
    return hf.RTDetrForObjectDetection(config)


def _rt_detr_v2() -> Any:
    config = hf.RTDetrV2Config(backbone_config=_rt_backbone(), **RT_DETR, **LABELS)
    return hf.RTDetrV2ForObjectDetection(config)


def _d_fine() -> Any:
    backbone = hf.HGNetV2Config(
        stem_channels=[3, 4, 8],
        stage_in_channels=[8, 8, 8, 8],
        stage_mid_channels=[4, 4, 4, 4],
        stage_out_channels=[8, 8, 8, 8],
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[1, 1, 1, 1],
        stage_downsample=[False, True, True, True],
        stage_light_block=[False] * 4,
        stage_kernel_size=[3, 3, 3, 3],
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )
    options = {**RT_DETR, "decoder_n_points": [2, 2, 2]}
    return hf.DFineForObjectDetection(hf.DFineConfig(backbone_config=backbone, **options, **LABELS))


def sentence_tokens(sentences: list[str]) -> dict[str, torch.Tensor]:
    """Of one sentence, with the ids that BERT has for its beginning, its end and a full stop."""
    words = sentences[0].replace(".", " . ").split()
    ids = [1012 if word == "." else 10 + sum(map(ord, word)) % 80 for word in words]
    return {"input_ids": torch.tensor([[101, *ids, 102]])}


def _grounding_dino() -> Any:
    text = hf.BertConfig(
        vocab_size=1030, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32,
    )  # fmt: skip
    config = hf.GroundingDinoConfig(
        backbone_config=_backbone(3, 2, 3),
        text_config=text,
        num_feature_levels=3,
        encoder_n_points=2,
        decoder_n_points=2,
        max_text_len=16,
        disable_custom_kernels=True,
        **{**WIDTHS, "d_model": 32},  # groups of 32 are normed
    )
    return hf.GroundingDinoForObjectDetection(config)


def _segformer() -> Any:
    config = hf.SegformerConfig(
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=8,
        mlp_ratios=[2, 2, 2, 2],
        **LABELS,
    )
    return hf.SegformerForSemanticSegmentation(config)


def _dpt() -> Any:
    config = hf.DPTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=64,
        patch_size=16,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[4, 4, 8, 8],
        fusion_hidden_size=8,
        is_hybrid=False,
    )
    return hf.DPTForDepthEstimation(config)


def _depth_anything() -> Any:
    backbone = hf.Dinov2Config(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=64,
        patch_size=16,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
        apply_layernorm=True,
    )
    config = hf.DepthAnythingConfig(
        backbone_config=backbone,
        patch_size=16,
        reassemble_hidden_size=16,
        neck_hidden_sizes=[4, 4, 8, 8],
        fusion_hidden_size=8,
        head_hidden_size=4,
    )
    return hf.DepthAnythingForDepthEstimation(config)


def _mask2former() -> Any:
    backbone = hf.SwinConfig(
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = hf.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,  # groups of 32 are normed
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=3,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=5,
        **LABELS,
    )
    return hf.Mask2FormerForUniversalSegmentation(config)


def _maskformer() -> Any:
    backbone = hf.MaskFormerSwinConfig(
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    decoder = hf.DetrConfig(backbone_config=_backbone(3), **WIDTHS)
    config = hf.MaskFormerConfig(
        backbone_config=backbone,
        decoder_config=decoder,
        fpn_feature_size=32,  # groups of 32 are normed
        mask_feature_size=16,
        **LABELS,
    )
    return hf.MaskFormerForInstanceSegmentation(config)


def _sam2() -> Any:
    backbone = hf.Sam2HieraDetConfig(
        hidden_size=8,
        image_size=[64, 64],
        window_positional_embedding_background_size=[4, 4],
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[8, 12, 16, 20],
        num_attention_heads_per_stage=[1, 1, 2, 2],
        window_size_per_stage=[4, 4, 4, 2],
        global_attention_blocks=[3],  # none that begins a stage
        mlp_ratio=2.0,
    )
    vision = hf.Sam2VisionConfig(
        backbone_config=backbone,
        backbone_channel_list=[20, 16, 12, 8],
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
        fpn_hidden_size=16,
    )
    prompt = hf.Sam2PromptEncoderConfig(
        hidden_size=16, image_size=64, patch_size=16, mask_input_channels=4
    )
    decoder = hf.Sam2MaskDecoderConfig(
        hidden_size=16, mlp_dim=16, num_hidden_layers=1, num_attention_heads=2,
        iou_head_hidden_dim=8,
    )  # fmt: skip
    return hf.Sam2Model(
        hf.Sam2Config(
            vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder
        )
    )


def _sam() -> Any:
    vision = hf.SamVisionConfig(
        hidden_size=16,
        output_channels=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        patch_size=16,
        window_size=2,
        global_attn_indexes=[1],
        mlp_dim=16,
        num_pos_feats=8,
    )
    prompt = hf.SamPromptEncoderConfig(
        hidden_size=16, image_size=64, patch_size=16, mask_input_channels=4
    )
    decoder = hf.SamMaskDecoderConfig(
        hidden_size=16,
        mlp_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        iou_head_hidden_dim=8,
    )
    return hf.SamModel(
        hf.SamConfig(
            vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder
        )
    )


def _yolos(middle: bool = True) -> Any:
    config = hf.YolosConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=[32, 48],
        patch_size=8,
        num_detection_tokens=4,
        use_mid_position_embeddings=middle,
        **LABELS,
    )
    return hf.YolosForObjectDetection(config)


DENSE: dict[str, Callable[[], Any]] = {
    "detr": _detr,
    "conditional_detr": _conditional_detr,
    "deformable_detr": _deformable_detr,
    "deformable_detr_two_stage": _two_stage,
    "rt_detr": _rt_detr,
    "rt_detr_v2": _rt_detr_v2,
    "d_fine": _d_fine,
    "grounding_dino": _grounding_dino,
    "segformer": _segformer,
    "dpt": _dpt,
    "depth_anything": _depth_anything,
    "mask2former": _mask2former,
    "maskformer": _maskformer,
    "sam": _sam,
    "sam2": _sam2,
}
SQUARE = ("dpt", "sam", "sam2")  # of 64 pixels


def tiny_dense(family: str, dtype: torch.dtype = torch.float64) -> Native:
    """A scrambled model of one family."""
    torch.manual_seed(0)
    module = scramble(DENSE[family]()).to(dtype).requires_grad_(False)
    size = (64, 64) if family in SQUARE else SIZE
    options = {**HALF, "size": size}
    if family == "grounding_dino":
        options |= {"classes": NAMES, "tokenizer": sentence_tokens}
    return Native(module, [], module, options, size=size)


def tiny_yolos(middle: bool = True) -> Native:
    """A scrambled YOLOS in float64."""
    torch.manual_seed(0)
    module = scramble(_yolos(middle)).double().requires_grad_(False)
    return Native(module, list(module.vit.encoder.layer), module, HALF)
