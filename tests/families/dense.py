"""Small detectors and models of pixels of transformers, from configs alone."""

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
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "num_queries": 5,
}  # fmt: skip


def _backbone(stages: int, *levels: int) -> Any:
    return hf.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8, 8, 8][:stages], depths=[1] * stages,
        layer_type="basic", out_features=[f"stage{level}" for level in levels or (stages,)],
    )  # fmt: skip


def _detector(kind: str, backbone: Any, options: dict[str, Any]) -> Any:
    config = getattr(hf, f"{kind}Config")(backbone_config=backbone, **options, **LABELS)
    return getattr(hf, f"{kind}ForObjectDetection")(config)


RT_DETR: dict[str, Any] = {
    "encoder_hidden_dim": 16, "encoder_in_channels": [8, 8, 8], "feat_strides": [8, 16, 32],
    "encoder_ffn_dim": 16, "encoder_attention_heads": 2, "d_model": 16, "num_queries": 5,
    "decoder_in_channels": [16, 16, 16], "decoder_ffn_dim": 16, "num_feature_levels": 3,
    "decoder_n_points": 2, "decoder_layers": 2, "decoder_attention_heads": 2,
    "anchor_image_size": None, "disable_custom_kernels": True,
}  # fmt: skip


def _rt_backbone() -> Any:
    return hf.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip


def _d_fine() -> Any:
    backbone = hf.HGNetV2Config(
        stem_channels=[3, 4, 8], stage_in_channels=[8, 8, 8, 8],
        stage_mid_channels=[4, 4, 4, 4], stage_out_channels=[8, 8, 8, 8],
        stage_num_blocks=[1, 1, 1, 1], stage_numb_of_layers=[1, 1, 1, 1],
        stage_downsample=[False, True, True, True], stage_light_block=[False] * 4,
        stage_kernel_size=[3, 3, 3, 3], hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    return _detector("DFine", backbone, {**RT_DETR, "decoder_n_points": [2, 2, 2]})


def _rf_detr() -> Any:
    from transformers.models.rf_detr.configuration_rf_detr import RfDetrDinov2Config

    backbone = RfDetrDinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=64,
        patch_size=8, num_windows=2, out_features=["stage1", "stage2"],
    )  # fmt: skip
    options = dict(
        d_model=16, decoder_layers=2, decoder_self_attention_heads=2,
        decoder_cross_attention_heads=2, decoder_n_points=2, decoder_ffn_dim=16, num_queries=5,
        group_detr=2, disable_custom_kernels=True,
    )  # fmt: skip
    return _detector("RfDetr", backbone, options)


def _segformer() -> Any:
    config = hf.SegformerConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=8, mlp_ratios=[2, 2, 2, 2], **LABELS,
    )  # fmt: skip
    return hf.SegformerForSemanticSegmentation(config)


def _mask2former() -> Any:
    backbone = hf.SwinConfig(
        embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
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


DENSE: dict[str, Callable[[], Any]] = {
    "detr": lambda: _detector("Detr", _backbone(3), WIDTHS),
    "table_transformer": lambda: _detector("TableTransformer", _backbone(3), WIDTHS),
    "rt_detr": lambda: _detector("RTDetr", _rt_backbone(), RT_DETR),
    "rt_detr_v2": lambda: _detector("RTDetrV2", _rt_backbone(), RT_DETR),
    "rf_detr": _rf_detr, "d_fine": _d_fine, "segformer": _segformer, "mask2former": _mask2former,
}  # fmt: skip


def tiny_dense(family: str, dtype: torch.dtype = torch.float64) -> Native:
    """A scrambled model of one family."""
    torch.manual_seed(0)
    module = scramble(DENSE[family]()).to(dtype).requires_grad_(False)
    size = (64, 64) if family == "rf_detr" else SIZE  # others lose their places in its windows
    return Native(module, [], module, {**HALF, "size": size}, size=size)
