"""Where the stages of torchvision's, timm's and transformers' networks are.

    ResNet     stem, layer1 ... layer4
    DenseNet   stem, denseblock1, transition1 ... denseblock4; the last norm belongs to the rest
    VGG        conv1 ... conv5, each with its pooling
    others     stem, stage1 ... stage4: a stage begins where the map gets smaller

transformers' blocks read sequences and are told the grid; here features stand as [B, h, w, C]
between them. Its PVT (not v2) reads the answer from a class token of the last stage, which is
therefore in the rest.

The cells are those of the stage at two thirds of the depth (stride 16 in most, so 14 x 14 at 224
pixels). Rows of shifted windows are put back by the blocks themselves: between stages the features
of Swin are a grid, and the verified wrap looks whether changed pixels move the cells they should.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.models.block import Fn, chain, same
from seecause.models.heads import class_names, is_multi_label
from seecause.models.layout import pair
from seecause.models.preprocess import from_timm
from seecause.models.staged_view import Stage, StagedParts

Split = tuple[list[Stage], list[Fn]]  # stages, and what follows the last of them


def find(module: Any, library: str, kind: str) -> StagedParts | None:
    """The parts of a network of stages; None for what is none."""
    if library == "transformers" and kind in TRANSFORMERS:
        return _find_hf(module, kind)
    stages, steps = _split(module, library, kind)
    if not stages:
        return None
    config = getattr(module, "pretrained_cfg", None) if library == "timm" else None
    head = steps[-1] if library == "torchvision" else _timm_head(module)
    return StagedParts(
        family=f"{library}.{kind}",
        stages=stages,
        rest=chain(*steps),
        cells=_two_thirds(stages),
        classifies=_classifies(head),
        native=module,
        preprocess=from_timm(config) if config else None,
        fixed_size=_is_fixed(module, kind),
        size=_built_for(module),
    )


def _find_hf(module: Any, kind: str) -> StagedParts:
    config = module.config
    stages, steps = TRANSFORMERS[kind](getattr(module, module.base_model_prefix))
    fixed = not kind.startswith(("ConvNext", "PvtV2"))
    size = getattr(config, "image_size", None) if fixed else None
    return StagedParts(
        family=f"transformers.{kind}",
        stages=stages,
        rest=chain(*steps, module.classifier),
        cells=_two_thirds(stages, beyond=int(kind.startswith("PvtFor"))),
        classifies=_classifies(module.classifier),
        native=lambda images: module(images, return_dict=True).logits,
        classes=class_names(config),
        sigmoid=is_multi_label(config),
        fixed_size=fixed,
        size=None if size is None else pair(size),
    )


def _timm_head(module: Any) -> nn.Module:
    """Some heads that were never made cannot be asked for."""
    return module.get_classifier() if module.num_classes else nn.Identity()


def _split(module: Any, library: str, kind: str) -> Split:
    """The stages of a module, and all that follows them; nothing for what has none."""
    splits = CONVOLUTIONAL | (ALTERNATING if library == "torchvision" else TRANSFORMING)
    if library not in ("timm", "torchvision") or kind not in splits:
        return [], []
    stages, behind = splits[kind](module)
    if library == "timm":
        return stages, [*behind, module.forward_head]
    return stages, [*behind, *READ[kind](module)]


def _resnet(module: Any) -> Split:
    activation = module.relu if hasattr(module, "relu") else module.act1
    stem = Stage("stem", (module.conv1, module.bn1, activation, module.maxpool))
    names = ("layer1", "layer2", "layer3", "layer4")
    return [stem, *(Stage(name, (getattr(module, name),)) for name in names)], []


def _densenet(module: Any) -> Split:
    named = dict(module.features.named_children())
    blocks = [name for name in named if name.startswith(("denseblock", "transition"))]
    order = list(named)
    before, behind = order[: order.index(blocks[0])], order[order.index(blocks[-1]) + 1 :]
    stem = Stage("stem", tuple(named[name] for name in before))
    stages = [stem, *(Stage(name, (named[name],)) for name in blocks)]
    return stages, [named[name] for name in behind]


def _vgg(module: Any) -> Split:
    groups: list[list[nn.Module]] = [[]]
    for layer in module.features:
        groups[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            groups.append([])
    *blocks, behind = groups
    stages = [Stage(f"conv{i}", tuple(block)) for i, block in enumerate(blocks, start=1)]
    return stages, list(behind)


def _alternating(last: bool, module: Any) -> Split:
    """torchvision keeps a stem, stages and what makes the map smaller between them in one list."""
    enter, leave = (_to_rows, _to_map) if last else (same, same)
    stem, first, *later = module.features
    groups = [(first,), *zip(later[::2], later[1::2], strict=True)]
    stages = [Stage(f"stage{n}", group, enter, leave) for n, group in enumerate(groups, start=1)]
    return [Stage("stem", (stem,), leave=leave), *stages], [enter]


def _to_map(features: Tensor) -> Tensor:
    """[B, h, w, C] -> [B, C, h, w]."""
    return features.movedim(-1, 1)


def _to_rows(features: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, h, w, C]; native modules take views of it."""
    return features.movedim(1, -1).contiguous()


@dataclass(frozen=True)
class Where:
    """Attributes of a timm module that are its stem, its list of stages and its last norm, and
    which of their outputs have channels last."""

    stem: str = "stem"
    stages: str = "stages"
    norm: str = ""
    last: bool = False
    stem_last: bool = False
    fixed: bool = False  # built for one size of pictures


TIMM = {
    "SwinTransformer": Where("patch_embed", "layers", "norm", last=True, stem_last=True),
    "SwinTransformerV2": Where("patch_embed", "layers", "norm", last=True, stem_last=True),
    "SwinTransformerV2Cr": Where("patch_embed"),
    "ConvNeXt": Where(norm="norm_pre"),
    "MaxxVit": Where(norm="norm", fixed=True),
    "PyramidVisionTransformerV2": Where("patch_embed", stem_last=True),
    "EfficientVit": Where(),
    "EfficientVitLarge": Where(),
    "EfficientVitMsra": Where("patch_embed", fixed=True),
}


def _timm(where: Where, module: Any) -> Split:
    leave, enter = (_to_map, _to_rows) if where.last else (same, same)
    stem_leave, enters = (_to_map, _to_rows) if where.stem_last else (same, enter)
    stages = [Stage("stem", (getattr(module, where.stem),), leave=stem_leave)]
    for number, stage in enumerate(getattr(module, where.stages), start=1):
        stages.append(Stage(f"stage{number}", (stage,), enter=enters, leave=leave))
        enters = enter
    return stages, [enter, *([getattr(module, where.norm)] if where.norm else [])]


def _hiera(module: Any) -> Split:
    """timm's Hiera runs on tokens that lie in mask units, and can roll them up again."""
    first = partial(module.reroll, block_idx=0)
    steps = (module.patch_embed, module._pos_embed, module.unroll)
    stages, start = [Stage("stem", steps, leave=chain(first, _to_map))], 0
    reroll = first
    for number, end in enumerate(module.stage_ends, start=1):
        before, reroll = reroll, partial(module.reroll, block_idx=end)
        stages.append(
            Stage(
                f"stage{number}",
                tuple(module.blocks[start : end + 1]),
                enter=partial(_unrolled, before),
                leave=chain(reroll, _to_map),
            )
        )
        start = end + 1
    return stages, [partial(_unrolled, reroll)]


def _unrolled(reroll: Fn, features: Tensor) -> Tensor:
    """A map [B, C, h, w] -> tokens [B, h * w, C] in the order that `reroll` undoes: it is asked
    where each token goes."""
    rows = features.flatten(2).transpose(1, 2)
    places = reroll(torch.arange(rows.shape[1], device=rows.device)[None, :, None]).flatten()
    return rows[:, places.argsort()]


def _flat(name: str, step: Fn, native: nn.Module, enter: Fn = same) -> Stage:
    """A stage that gives features [B, h, w, C]; its last native module gives them as a sequence."""
    return Stage(name, (step,), enter=enter, leave=_to_map, native=native, flat=True)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _on_grid(block: Any, features: Tensor, *, stride: int = 1) -> Tensor:
    """A block or patch merging that reads a sequence and is told its grid, on features
    [B, h, w, C]."""
    grid = (features.shape[1], features.shape[2])
    rows = _first(block(features.flatten(1, 2), grid))
    return rows.unflatten(1, [math.ceil(side / stride) for side in grid])


def _swin_hf(tower: Any) -> Split:
    """transformers merges patches at the end of a stage; here, as in timm, a stage begins so."""

    def embedded(images: Tensor) -> Tensor:
        rows, grid = tower.embeddings(images)
        return rows.unflatten(1, grid)

    stages, merge = [_flat("stem", embedded, tower.embeddings)], ()
    for number, layer in enumerate(tower.encoder.layers, start=1):
        blocks = (partial(_on_grid, block) for block in layer.blocks)
        step = chain(*merge, *blocks)
        stages.append(_flat(f"stage{number}", step, layer.blocks[-1], enter=_to_rows))
        merge = () if layer.downsample is None else (partial(_on_grid, layer.downsample, stride=2),)

    def pooled(features: Tensor) -> Tensor:
        rows = tower.layernorm(_to_rows(features).flatten(1, 2))
        return tower.pooler(rows.transpose(1, 2)).flatten(1)

    return stages, [pooled]


def _convnext_hf(tower: Any) -> Split:
    stem = Stage("stem", (tower.embeddings,))
    stages = [Stage(f"stage{n}", (stage,)) for n, stage in enumerate(tower.encoder.stages, start=1)]
    return [stem, *stages], [_spatial_mean, tower.layernorm]


def _hiera_hf(tower: Any) -> Split:
    """transformers' Hiera embeds a grid row by row, which is _unrolled before the first stage."""
    from transformers.models.hiera.modeling_hiera import unroll

    config, encoder = tower.config, tower.encoder
    grid = tuple(encoder.schedule[0][1])

    def embedded(images: Tensor) -> Tensor:
        return tower.embeddings(images)[0].unflatten(1, grid)

    def enter_first(features: Tensor) -> Tensor:
        height, width = (n * stride for n, stride in zip(grid, config.patch_stride, strict=True))
        rows = features.flatten(2).transpose(1, 2)
        return unroll(rows, (height, width), config.patch_stride, tower.unroll_schedule)

    stages, enter = [_flat("stem", embedded, tower.embeddings)], enter_first
    for index, stage in enumerate(encoder.stages):
        reroll = partial(encoder.reroll, stage_idx=index)
        steps, leave = (stage, _first), chain(reroll, _to_map)
        stages.append(Stage(f"stage{index + 1}", steps, enter=enter, leave=leave, native=stage))
        enter = partial(_unrolled, reroll)
    return stages, [enter, tower.pooler]


def _pvt_rows(embed: Any, blocks: Any, features: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """A map [B, C, h, w] -> rows [B, h' * w', C'] behind the blocks, and their grid."""
    rows, height, width = embed(features.contiguous())
    for block in blocks:
        rows = block(rows, height, width, False)[0]
    return rows, (height, width)


def _pvt_stage(embed: Any, blocks: Any, norm: Fn, features: Tensor) -> Tensor:
    rows, grid = _pvt_rows(embed, blocks, features)
    return norm(rows).unflatten(1, grid)


def _pvt(tower: Any) -> Split:
    encoder = tower.encoder
    *pairs, (embed, blocks) = zip(encoder.patch_embeddings, encoder.block, strict=True)
    stages = [
        _flat(f"stage{number}", partial(_pvt_stage, *pair, same), pair[1][-1])
        for number, pair in enumerate(pairs, start=1)
    ]

    def pooled(features: Tensor) -> Tensor:
        return encoder.layer_norm(_pvt_rows(embed, blocks, features)[0])[:, 0]

    return stages, [pooled]


def _pvt_v2(tower: Any) -> Split:
    stages = []
    for number, layer in enumerate(tower.encoder.layers, start=1):
        step = partial(_pvt_stage, layer.patch_embedding, layer.blocks, layer.layer_norm)
        stages.append(_flat(f"stage{number}", step, layer.layer_norm))
    return stages, [_spatial_mean]


CONVOLUTIONAL: dict[str, Callable[[Any], Split]] = {
    "ResNet": _resnet,
    "DenseNet": _densenet,
    "VGG": _vgg,
}
ALTERNATING: dict[str, Callable[[Any], Split]] = {
    "SwinTransformer": partial(_alternating, True),
    "ConvNeXt": partial(_alternating, False),
}
TRANSFORMING: dict[str, Callable[[Any], Split]] = {
    "Hiera": _hiera,
    **{kind: partial(_timm, where) for kind, where in TIMM.items()},
}
TRANSFORMERS: dict[str, Callable[[Any], Split]] = {
    "SwinForImageClassification": _swin_hf,
    "Swinv2ForImageClassification": _swin_hf,
    "ConvNextForImageClassification": _convnext_hf,
    "ConvNextV2ForImageClassification": _convnext_hf,
    "HieraForImageClassification": _hiera_hf,
    "PvtForImageClassification": _pvt,
    "PvtV2ForImageClassification": _pvt_v2,
}
READ: dict[str, Callable[[Any], list[Fn]]] = {  # torchvision has no method for it
    "ResNet": lambda module: [module.avgpool, _pooled, module.fc],
    "DenseNet": lambda module: [_relu_mean, _pooled, module.classifier],
    "VGG": lambda module: [module.avgpool, _pooled, module.classifier],
    "SwinTransformer": lambda module: [
        module.norm, module.permute, module.avgpool, module.flatten, module.head,
    ],
    "ConvNeXt": lambda module: [module.avgpool, module.classifier],
}  # fmt: skip


def _is_fixed(module: Any, kind: str) -> bool:
    """Swin's patch embedding refuses other sizes unless it was told not to."""
    strict = getattr(getattr(module, "patch_embed", None), "strict_img_size", False)
    return bool(strict) or kind == "Hiera" or (kind in TIMM and TIMM[kind].fixed)


def _built_for(module: Any) -> tuple[int, int] | None:
    """The size of pictures that a timm module was built for, where it says so."""
    if hasattr(module, "tokens_spatial_shape"):
        sides = zip(module.tokens_spatial_shape, module.patch_stride, strict=True)
        height, width = (count * stride for count, stride in sides)
        return height, width
    size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    return None if size is None else tuple(size)


def _two_thirds(stages: Sequence[Stage], beyond: int = 0) -> str:
    """The stage at two thirds of the depth; the stem and transitions do not count, and `beyond`
    stages are in the rest."""
    names = [stage.name for stage in stages]
    blocks = [name for name in names if name != "stem" and not name.startswith("transition")]
    return blocks[math.ceil(2 * (len(blocks) + beyond) / 3) - 1]


def _classifies(head: Any) -> bool:
    """Whether a head makes classes of features, and is not a place where one was."""
    return any(isinstance(layer, nn.Linear | nn.Conv2d) for layer in head.modules())


def _relu_mean(features: Tensor) -> Tensor:
    # not in place: the features may be someone's
    return F.adaptive_avg_pool2d(F.relu(features), (1, 1))


def _pooled(features: Tensor) -> Tensor:
    return features.flatten(1)


def _spatial_mean(features: Tensor) -> Tensor:
    return features.mean(dim=(-2, -1))
