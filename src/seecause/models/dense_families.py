"""Transformers' detectors and models of pixels: where each is cut, and how its answers are read.

    DETR, Conditional DETR           the encoder's tokens; queries are learnt
    Deformable DETR, RT-DETR, D-FINE its places on several levels, which a query samples at a few
                                     points each; where queries are chosen by what the encoder saw
                                     (all but plain Deformable DETR), the explained picture's stay
    SegFormer                        the maps of its four stages
    DPT, Depth Anything              tokens of four blocks of the backbone
    Mask2Former                      the maps of its pixel decoder
    Segment Anything                 the map of its image encoder; the region is the prompt

The places of an encoder have already read each other, and feature maps have seen their
surroundings: a bright place says where the row read, and mostly, not only, what lies there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seecause.errors import UnsupportedModel
from seecause.models.dense_view import DenseParts
from seecause.models.hf_view import class_names
from seecause.models.readings import BoxReading, PixelReading, PromptReading
from seecause.models.seam import Seam


def _depth(outputs: Any) -> Tensor:
    return outputs.predicted_depth[:, None]


def _semantic(outputs: Any) -> Tensor:
    """Mask2Former: how much of each class queries put on each pixel."""
    classes = outputs.class_queries_logits.softmax(dim=-1)[..., :-1]  # [B, Q, C]
    masks = outputs.masks_queries_logits.sigmoid()  # [B, Q, h, w]
    return torch.einsum("bqc,bqhw->bchw", classes, masks)


def _log(mean: Tensor) -> Tensor:
    return mean.clamp_min(torch.finfo(mean.dtype).tiny).log()


def _query_boxes(module: Any, *, sigmoid: bool) -> DenseParts:
    names = class_names(module.config)
    before = ("model.backbone", "model.input_projection")
    return DenseParts(
        family="",
        seam=Seam("model.encoder", ("last_hidden_state",), before),
        reading=BoxReading(sigmoid=sigmoid, nothing=not sigmoid),
        classes=names if sigmoid or not names else (*names, "no object"),
    )


def _detr(module: Any) -> DenseParts:
    return _query_boxes(module, sigmoid=False)


def _conditional_detr(module: Any) -> DenseParts:
    return _query_boxes(module, sigmoid=True)


def _deformable_detr(module: Any) -> DenseParts:
    levels = range(len(module.model.input_proj))
    before = ("model.backbone", *(f"model.input_proj.{level}" for level in levels))
    last = len(module.model.decoder.class_embed) - 1 if module.config.two_stage else 0
    held = (f"model.decoder.class_embed.{last}",) if module.config.two_stage else ()
    return DenseParts(
        family="",
        seam=Seam("model.encoder", ("last_hidden_state",), before, held),
        reading=BoxReading(sigmoid=True, nothing=False),
        classes=class_names(module.config),
    )


def _rt_detr(module: Any) -> DenseParts:
    levels = range(len(module.model.encoder_input_proj))
    before = ("model.backbone", *(f"model.encoder_input_proj.{level}" for level in levels))
    fixed = getattr(module.config, "anchor_image_size", None)
    return DenseParts(
        family="",
        seam=Seam("model.encoder", ("last_hidden_state",), before, ("model.enc_score_head",)),
        reading=BoxReading(sigmoid=True, nothing=False),
        classes=class_names(module.config),
        fixed_size=fixed is not None,
        size=None if fixed is None else (fixed[0], fixed[1]),
    )


def _segformer(module: Any) -> DenseParts:
    return DenseParts(
        family="",
        seam=Seam("segformer", ("hidden_states",)),
        reading=PixelReading(lambda outputs: outputs.logits),
        classes=class_names(module.config),
    )


def _dpt(module: Any) -> DenseParts:
    config = module.config
    if config.is_hybrid:
        raise UnsupportedModel("transformers DPT, hybrid", "it reads a convolutional stem besides")
    reading = (
        PixelReading(_depth, values=True)
        if hasattr(module, "head") and "Depth" in type(module).__name__
        else PixelReading(lambda outputs: outputs.logits)
    )
    if getattr(module, "backbone", None) is not None:
        return _backbone_depth(module, reading)
    entries = tuple(index + 1 for index in config.backbone_out_indices)
    side = config.image_size
    return DenseParts(
        family="",
        seam=Seam("dpt", ("hidden_states",), prefix=1, entries=entries),
        reading=reading,
        classes=("depth",) if reading.values else class_names(config),
        fixed_size=True,
        size=(side, side),
    )


def _depth_anything(module: Any) -> DenseParts:
    return _backbone_depth(module, PixelReading(_depth, values=True))


def _backbone_depth(module: Any, reading: PixelReading) -> DenseParts:
    return DenseParts(
        family="",
        seam=Seam("backbone", ("feature_maps",), prefix=1),
        reading=reading,
        classes=("depth",) if reading.values else class_names(module.config),
    )


def _mask2former(module: Any) -> DenseParts:
    return DenseParts(
        family="",
        seam=Seam(
            "model.pixel_level_module", ("decoder_last_hidden_state", "decoder_hidden_states")
        ),
        reading=PixelReading(_semantic, _log),
        classes=class_names(module.config),
    )


def _sam(module: Any) -> DenseParts:
    side = module.config.vision_config.image_size
    middle = torch.full((1, 1, 1, 2), side / 2)
    return DenseParts(
        family="",
        seam=Seam("vision_encoder", ("last_hidden_state",)),
        reading=PromptReading(),
        inputs={"input_points": middle.to(next(module.parameters()))},
        fixed_size=True,
        size=(side, side),
    )


DENSE_FAMILIES: dict[str, Callable[[Any], DenseParts]] = {
    "DetrForObjectDetection": _detr,
    "ConditionalDetrForObjectDetection": _conditional_detr,
    "DeformableDetrForObjectDetection": _deformable_detr,
    "RTDetrForObjectDetection": _rt_detr,
    "RTDetrV2ForObjectDetection": _rt_detr,
    "DFineForObjectDetection": _rt_detr,
    "SegformerForSemanticSegmentation": _segformer,
    "DPTForDepthEstimation": _dpt,
    "DepthAnythingForDepthEstimation": _depth_anything,
    "Mask2FormerForUniversalSegmentation": _mask2former,
    "SamModel": _sam,
}


_BARE = "it has no answers of its own; wrap the whole model, ...ForObjectDetection"
REFUSED = {  # beginnings of class names, and why
    "DetrForSegmentation": "its masks are read off attention; DetrForObjectDetection works",
    "Detr": _BARE,
    "ConditionalDetr": _BARE,
    "DeformableDetr": _BARE,
    "RTDetr": _BARE,
    "DFine": _BARE,
    "Yolos": _BARE,
    "GroundingDino": (
        "its sentence reads the picture inside the encoder, and queries read the sentence, so that"
        " places of pictures cannot be exchanged alone"
    ),
    "Owl": "its boxes are compared with sentences",
    "MaskFormer": "its pixels are read by another decoder; Mask2Former works",
    "OneFormer": "it is asked for a task in words; Mask2Former works",
    "Sam2": "it remembers other frames; SamModel works",
}


def dense_parts(module: Any) -> DenseParts | None:
    """The parts of a detector or a model of pixels; None for any other module."""
    for kind in type(module).__mro__:
        if kind.__name__ in DENSE_FAMILIES and kind.__module__.startswith("transformers."):
            parts = DENSE_FAMILIES[kind.__name__](module)
            parts.family = f"transformers.{type(module).__name__}"
            return parts
    name = type(module).__name__
    for start, reason in REFUSED.items():
        if name.startswith(start):
            works = ", ".join(("YolosForObjectDetection", *DENSE_FAMILIES))
            raise UnsupportedModel(f"transformers {name}", reason, f"classes that work: {works}")
    return None
