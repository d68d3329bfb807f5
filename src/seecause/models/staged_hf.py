"""Stages of transformers' classifiers that pool as they go: Swin (v2), ConvNeXt (V2), Hiera, PVT
(v2).

Their blocks read sequences and are told the grid; here features stand as [B, h, w, C] between them.
A stage begins where the map gets smaller, as in timm. PVT (not v2) reads its answer from a class
token of its last stage, which is therefore in the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from seecause.models.block import Fn, chain, same
from seecause.models.hf_view import class_names
from seecause.models.staged_families import (
    channels_first,
    channels_last,
    classifies,
    spatial_mean,
    two_thirds,
    unrolled,
)
from seecause.models.staged_view import Stage, StagedParts

Split = tuple[list[Stage], Fn]  # the stages, and from the last map to pooled features


def find(module: Any, kind: str) -> StagedParts:
    """The parts of one of `TRANSFORMERS`."""
    config = module.config
    stages, pooled = TRANSFORMERS[kind](getattr(module, module.base_model_prefix))
    fixed = not kind.startswith(("ConvNext", "PvtV2"))
    size = getattr(config, "image_size", None) if fixed else None
    return StagedParts(
        family=f"transformers.{kind}",
        stages=stages,
        rest=chain(pooled, module.classifier),
        cells=two_thirds(stages, beyond=int(kind.startswith("PvtFor"))),
        classifies=classifies(module.classifier),
        native=lambda images: module(images, return_dict=True).logits,
        classes=class_names(config),
        sigmoid=getattr(config, "problem_type", None) == "multi_label_classification",
        fixed_size=fixed,
        size=(size, size) if isinstance(size, int) else None if size is None else tuple(size),
    )


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _on_grid(block: Any, features: Tensor) -> Tensor:
    """A block that reads a sequence and is told its grid, on features [B, h, w, C]."""
    grid = (features.shape[1], features.shape[2])
    return _first(block(features.flatten(1, 2), grid)).unflatten(1, grid)


def _halved(merge: Any, features: Tensor) -> Tensor:
    """A patch merging that reads a sequence and is told its grid."""
    grid = (features.shape[1], features.shape[2])
    half = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
    return _first(merge(features.flatten(1, 2), grid)).unflatten(1, half)


def _embedded_swin(embed: Any, images: Tensor) -> Tensor:
    rows, grid = embed(images)
    return rows.unflatten(1, grid)


def _swin(tower: Any) -> Split:
    """transformers merges patches at the end of a stage; here, as in timm, a stage begins so."""
    embed, stages, merge = tower.embeddings, [], ()
    stem = Stage(
        "stem", (partial(_embedded_swin, embed),), leave=channels_first, native=embed, flat=True
    )
    for number, layer in enumerate(tower.encoder.layers, start=1):
        blocks = tuple(partial(_on_grid, block) for block in layer.blocks)
        ends = {"native": layer.blocks[-1], "flat": True}
        name, steps = f"stage{number}", (*merge, *blocks)
        stages.append(Stage(name, steps, enter=channels_last, leave=channels_first, **ends))
        merge = () if layer.downsample is None else (partial(_halved, layer.downsample),)

    def pooled(features: Tensor) -> Tensor:
        rows = tower.layernorm(channels_last(features).flatten(1, 2))
        return tower.pooler(rows.transpose(1, 2)).flatten(1)

    return [stem, *stages], pooled


def _convnext(tower: Any) -> Split:
    stem = Stage("stem", (tower.embeddings,))
    stages = [Stage(f"stage{n}", (stage,)) for n, stage in enumerate(tower.encoder.stages, start=1)]
    return [stem, *stages], chain(spatial_mean, tower.layernorm)


def _hiera_tokens(tower: Any) -> Split:
    """transformers' Hiera embeds a grid row by row, which is unrolled before the first stage."""
    from transformers.models.hiera.modeling_hiera import unroll

    config, encoder = tower.config, tower.encoder
    grid = tuple(encoder.schedule[0][1])

    def embedded(images: Tensor) -> Tensor:
        return tower.embeddings(images)[0].unflatten(1, grid)

    def enter_first(features: Tensor) -> Tensor:
        height, width = (n * stride for n, stride in zip(grid, config.patch_stride, strict=True))
        rows = features.flatten(2).transpose(1, 2)
        return unroll(rows, (height, width), config.patch_stride, tower.unroll_schedule)

    stem = Stage("stem", (embedded,), leave=channels_first, native=tower.embeddings, flat=True)
    stages, enter = [stem], enter_first
    for index, stage in enumerate(encoder.stages):
        reroll = partial(encoder.reroll, stage_idx=index)
        steps, leave = (chain(stage, _first),), chain(reroll, channels_first)
        stages.append(Stage(f"stage{index + 1}", steps, enter=enter, leave=leave, native=stage))
        enter = partial(unrolled, reroll)
    return stages, chain(enter, tower.pooler)


def _pvt_stage(embed: Any, blocks: Any, norm: Fn, features: Tensor) -> Tensor:
    """A map [B, C, h, w] -> features [B, h', w', C'] behind the blocks."""
    rows, height, width = embed(features)
    for block in blocks:
        rows = block(rows, height, width, False)[0]
    return norm(rows).unflatten(1, (height, width))


def _pvt(tower: Any) -> Split:
    encoder = tower.encoder
    pairs = list(zip(encoder.patch_embeddings, encoder.block, strict=True))
    stages = [
        Stage(
            f"stage{number}",
            (partial(_pvt_stage, embed, blocks, same),),
            leave=channels_first,
            native=blocks[-1],
            flat=True,
        )
        for number, (embed, blocks) in enumerate(pairs[:-1], start=1)
    ]

    def pooled(features: Tensor) -> Tensor:
        embed, blocks = pairs[-1]
        rows, height, width = embed(features.contiguous())
        for block in blocks:
            rows = block(rows, height, width, False)[0]
        return encoder.layer_norm(rows)[:, 0]

    return stages, pooled


def _pvt_v2(tower: Any) -> Split:
    stages = [
        Stage(
            f"stage{number}",
            (partial(_pvt_stage, layer.patch_embedding, layer.blocks, layer.layer_norm),),
            leave=channels_first,
            native=layer.layer_norm,
            flat=True,
        )
        for number, layer in enumerate(tower.encoder.layers, start=1)
    ]
    return stages, spatial_mean


TRANSFORMERS: dict[str, Callable[[Any], Split]] = {
    "SwinForImageClassification": _swin,
    "Swinv2ForImageClassification": _swin,
    "ConvNextForImageClassification": _convnext,
    "ConvNextV2ForImageClassification": _convnext,
    "HieraForImageClassification": _hiera_tokens,
    "PvtForImageClassification": _pvt,
    "PvtV2ForImageClassification": _pvt_v2,
}
