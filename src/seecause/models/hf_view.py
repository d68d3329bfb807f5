"""Views of transformers' vision towers: ViT, DeiT, DINOv2 (with registers), DINOv3, CLIP and
SigLIP.

The classes of one library differ in what follows the tower, so a table says how each is read:

    class token | class + distillation token | class + mean | mean | SigLIP's latent pool
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from seecause.errors import UnsupportedModel
from seecause.models.block import Fn, chain, same
from seecause.models.hf_blocks import blocks_of, first, latent_pool, tower_of
from seecause.models.layout import TokenLayout
from seecause.models.parts import Parts
from seecause.models.readout import Kind
from seecause.models.text_head import TextHead, TextInput, as_inputs, require_text, text_matrix


@dataclass(frozen=True)
class Reading:
    """How a class reads its tower."""

    pool: Kind
    heads: tuple[str, ...] = ()  # classifiers; the logits of two are averaged
    zero_shot: bool = False
    raw: bool = False  # the tower's `last_hidden_state` comes before its final norm
    normed: bool = True  # whether the final norm is used at all


CLASSIFIER = ("classifier",)
READINGS = {
    "ViTModel": Reading("cls"),
    "ViTForImageClassification": Reading("cls", CLASSIFIER),
    "DeiTModel": Reading("cls"),
    "DeiTForImageClassification": Reading("cls", CLASSIFIER),
    "DeiTForImageClassificationWithTeacher": Reading(
        "cls+dist", ("cls_classifier", "distillation_classifier")
    ),
    "Dinov2Model": Reading("cls"),
    "Dinov2ForImageClassification": Reading("cls+mean", CLASSIFIER),
    "Dinov2WithRegistersModel": Reading("cls"),
    "Dinov2WithRegistersForImageClassification": Reading("cls+mean", CLASSIFIER),
    "DINOv3ViTModel": Reading("cls"),
    "CLIPVisionModel": Reading("cls", raw=True),
    "CLIPVisionModelWithProjection": Reading("cls", raw=True),
    "CLIPModel": Reading("cls", zero_shot=True, raw=True),
    "CLIPForImageClassification": Reading("mean", CLASSIFIER, raw=True, normed=False),
    "SiglipVisionModel": Reading("latent"),
    "SiglipModel": Reading("latent", zero_shot=True),
    "SiglipForImageClassification": Reading("mean", CLASSIFIER),
}
REFUSED = {  # beginnings of class names, and why
    "Beit": "its attention carries a relative position bias",
    "Data2VecVision": "its attention carries a relative position bias",
    "Swin": "its attention is windowed",
    "Siglip2": (
        "it packs patches of any shape into padded sequences (fixed-size SigLIP 2 checkpoints load"
        " as SiglipModel)"
    ),
    "Llava": (
        "it is a vision-language model; sc.lvlm.classifier (`seecause heads ... --classify"
        " name_ll`) asks it for classes"
    ),
    "InternVL": (
        "it is a vision-language model; sc.lvlm.classifier (`seecause heads ... --classify"
        " name_ll`) asks it for classes"
    ),
    "TimmWrapper": "it holds a timm model; wrap its `timm_model`",
}


def find(module: Any, *, text: TextInput | None = None) -> Parts:
    """The parts of a transformers vision model."""
    reading = _reading(module)
    tower = tower_of(module)
    patch, size = _pair(tower.config.patch_size), _pair(tower.config.image_size)
    norm = (
        chain(
            first(tower, "layernorm", "norm", "post_layernorm"),
            getattr(module, "visual_projection", same),
        )
        if reading.normed
        else same
    )
    before = getattr(tower, "pre_layrnorm", same)
    resize = partial(_resize, tower.embeddings, size)

    def native_tokens(images: Tensor) -> Tensor:
        tokens = tower(images, return_dict=True, **resize(images)).last_hidden_state
        return norm(tokens) if reading.raw else tokens

    parts = Parts(
        family=f"transformers.{type(module).__name__}",
        embed=lambda images: before(tower.embeddings(images, **resize(images))),
        layout_at=partial(_layout, tower.embeddings, patch),
        blocks=blocks_of(tower),
        norm=norm,
        patch=patch,
        native_tokens=native_tokens,
        pool=reading.pool,
        latent=(
            latent_pool(tower.head) if isinstance(getattr(tower, "head", None), nn.Module) else None
        ),
        head=_head([getattr(module, name) for name in reading.heads], tower.config.hidden_size),
        native_logits=lambda images: module(images, return_dict=True, **resize(images)).logits,
        classes=_class_names(module.config) if reading.heads else (),
        sigmoid=getattr(module.config, "problem_type", None) == "multi_label_classification",
        fixed_size=not (
            hasattr(tower, "rope_embeddings") or _interpolates(tower.config, patch, size)
        ),
        size=size,
    )
    if reading.zero_shot:
        _add_text(module, parts, require_text(module, text), resize)
    elif reading.pool == "latent" and parts.latent is None:
        parts.pool = None
    return parts


def _reading(module: Any) -> Reading:
    for cls in type(module).__mro__:
        if cls.__name__ in READINGS:
            return READINGS[cls.__name__]
    name = type(module).__name__
    reason = next(
        (why for start, why in REFUSED.items() if name.startswith(start)), "no adapter knows it"
    )
    raise UnsupportedModel(
        f"transformers {name}", reason, f"classes that work: {', '.join(READINGS)}"
    )


def _layout(embeddings: Any, patch: tuple[int, int], height: int, width: int) -> TokenLayout:
    has_class = any(hasattr(embeddings, name) for name in ("cls_token", "class_embedding"))
    distilled = hasattr(embeddings, "distillation_token")
    special = int(has_class) + int(distilled)
    registers = embeddings.register_tokens.shape[1] if hasattr(embeddings, "register_tokens") else 0
    return TokenLayout(
        grid=(height // patch[0], width // patch[1]),
        prefix=special + registers,
        class_index=0 if has_class else None,
        distill_index=1 if distilled else None,
        registers=tuple(range(special, special + registers)),
    )


def _resize(embeddings: Any, size: tuple[int, int], images: Tensor) -> dict[str, bool]:
    """Ask for interpolated positions where the tower wants to be asked and the pictures have
    another size."""
    asks = "interpolate_pos_encoding" in inspect.signature(embeddings.forward).parameters
    return {"interpolate_pos_encoding": True} if asks and tuple(images.shape[-2:]) != size else {}


def _interpolates(config: Any, patch: tuple[int, int], size: tuple[int, int]) -> bool:
    """transformers interpolates positions of square grids only."""
    return size[0] // patch[0] == size[1] // patch[1] and isinstance(config.patch_size, int)


def _head(classifiers: Sequence[nn.Module], width: int) -> Fn | None:
    if not classifiers or any(isinstance(layer, nn.Identity) for layer in classifiers):
        return None
    if len(classifiers) == 1:
        return classifiers[0]
    on_class, on_distillation = classifiers
    return lambda pooled: (on_class(pooled[..., :width]) + on_distillation(pooled[..., width:])) / 2


def _add_text(module: Any, parts: Parts, text: TextInput, resize: Any) -> None:
    """The zero-shot head of a dual model, through its own text tower."""
    device = next(module.parameters()).device
    length = module.config.text_config.max_position_embeddings

    def encode(prompts: list[str]) -> Tensor:
        return module.get_text_features(
            **as_inputs(_tokens(text, prompts, length), device), return_dict=True
        ).pooler_output

    head = TextHead(
        text_matrix(encode, text.classes, text.templates),
        module.logit_scale,
        getattr(module, "logit_bias", None),
    )
    parts.head = parts.extra = head
    parts.native_logits = lambda images: head(
        module.get_image_features(images, return_dict=True, **resize(images)).pooler_output
    )
    parts.classes, parts.sigmoid = text.classes, head.bias is not None


def _tokens(text: TextInput, prompts: list[str], length: int) -> Any:
    """Tokens of prompts. A transformers tokenizer is asked to pad to the full length, which SigLIP
    was trained on."""
    from transformers import PreTrainedTokenizerBase

    if isinstance(text.tokenize, PreTrainedTokenizerBase):
        return text.tokenize(
            prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        )
    return text.tokenize(prompts)


def _class_names(config: Any) -> tuple[str, ...]:
    """Class names, unless they are the placeholders LABEL_0, LABEL_1 ..."""
    names = tuple(str(config.id2label[index]) for index in sorted(config.id2label))
    return () if names == tuple(f"LABEL_{i}" for i in range(len(names))) else names


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
