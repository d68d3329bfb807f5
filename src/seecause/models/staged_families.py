"""Where the stages of torchvision's and timm's networks are (transformers': `staged_hf.py`).

    ResNet     stem, layer1 ... layer4
    DenseNet   stem, denseblock1, transition1 ... denseblock4; the last norm belongs to the rest
    VGG        conv1 ... conv5, each with its pooling
    others     stem, stage1 ... stage4: a stage begins where the map gets smaller

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
from seecause.models.preprocess import from_timm
from seecause.models.staged_view import Stage, StagedParts

Split = tuple[list[Stage], list[Fn]]  # stages, and what follows the last of them


def find(module: Any, library: str, kind: str) -> StagedParts | None:
    """The parts of a network of stages; None for what is none."""
    if library == "transformers":
        from seecause.models import staged_hf

        return staged_hf.find(module, kind) if kind in staged_hf.TRANSFORMERS else None
    stages, steps = _split(module, library, kind)
    if not stages:
        return None
    config = getattr(module, "pretrained_cfg", None) if library == "timm" else None
    head = steps[-1] if library == "torchvision" else _timm_head(module)
    return StagedParts(
        family=f"{library}.{kind}",
        stages=stages,
        rest=chain(*steps),
        cells=two_thirds(stages),
        classifies=classifies(head),
        native=module,
        preprocess=from_timm(config) if config else None,
        fixed_size=_is_fixed(module, kind),
        size=_built_for(module),
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
    enter, leave = (channels_last, channels_first) if last else (same, same)
    stem, first, *later = module.features
    groups = [(first,), *zip(later[::2], later[1::2], strict=True)]
    stages = [Stage(f"stage{n}", group, enter, leave) for n, group in enumerate(groups, start=1)]
    return [Stage("stem", (stem,), leave=leave), *stages], [enter]


def channels_first(features: Tensor) -> Tensor:
    """[B, h, w, C] -> [B, C, h, w]."""
    return features.movedim(-1, 1)


def channels_last(features: Tensor) -> Tensor:
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
    leave, enter = (channels_first, channels_last) if where.last else (same, same)
    stem = Stage(
        "stem",
        (getattr(module, where.stem),),
        leave=channels_first if where.stem_last else same,
    )
    stages = [
        Stage(
            f"stage{number}",
            (stage,),
            enter=channels_last if number == 1 and where.stem_last else enter,
            leave=leave,
        )
        for number, stage in enumerate(getattr(module, where.stages), start=1)
    ]
    return [stem, *stages], [enter, *([getattr(module, where.norm)] if where.norm else [])]


def _hiera(module: Any) -> Split:
    """timm's Hiera runs on tokens that lie in mask units, and can roll them up again."""
    first = partial(module.reroll, block_idx=0)
    steps = (module.patch_embed, module._pos_embed, module.unroll)
    stages, start = [Stage("stem", steps, leave=chain(first, channels_first))], 0
    reroll = first
    for number, end in enumerate(module.stage_ends, start=1):
        before, reroll = reroll, partial(module.reroll, block_idx=end)
        stages.append(
            Stage(
                f"stage{number}",
                tuple(module.blocks[start : end + 1]),
                enter=partial(unrolled, before),
                leave=chain(reroll, channels_first),
            )
        )
        start = end + 1
    return stages, [partial(unrolled, reroll)]


def unrolled(reroll: Fn, features: Tensor) -> Tensor:
    """A map [B, C, h, w] -> tokens [B, h * w, C] in the order that `reroll` undoes: it is asked
    where each token goes."""
    rows = features.flatten(2).transpose(1, 2)
    places = reroll(torch.arange(rows.shape[1], device=rows.device)[None, :, None]).flatten()
    return rows[:, places.argsort()]


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


def two_thirds(stages: Sequence[Stage], beyond: int = 0) -> str:
    """The stage at two thirds of the depth; the stem and transitions do not count, and `beyond`
    stages are in the rest."""
    names = [stage.name for stage in stages]
    blocks = [name for name in names if name != "stem" and not name.startswith("transition")]
    return blocks[math.ceil(2 * (len(blocks) + beyond) / 3) - 1]


def classifies(head: Any) -> bool:
    """Whether a head makes classes of features, and is not a place where one was."""
    return any(isinstance(layer, nn.Linear | nn.Conv2d) for layer in head.modules())


def _relu_mean(features: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(
        F.relu(features), (1, 1)
    )  # not in place: the features may be someone's


def _pooled(features: Tensor) -> Tensor:
    return features.flatten(1)


def spatial_mean(features: Tensor) -> Tensor:
    return features.mean(dim=(-2, -1))
