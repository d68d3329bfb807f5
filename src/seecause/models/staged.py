"""Networks of stages: ResNet, DenseNet, VGG, Swin and ConvNeXt.

    stem -> stage -> ... -> stage -> rest

A feature map has cells in place of tokens. The layout is the feature grid at one stage
(`cells`), the one at two thirds of the depth (stride 16 in most, so 14 x 14 at 224 pixels), so that
maps and pixel interventions use the same cells whatever stage is patched. Where a network keeps its
features with channels last, its stages convert them to a map [B, C, h, w] and back.

    ResNet     stem, layer1 ... layer4
    DenseNet   stem, denseblock1, transition1 ... denseblock4; the last norm belongs to the rest
    VGG        conv1 ... conv5, each with its pooling
    others     stem, stage1 ... stage4: a stage begins where the map gets smaller

Shifted windows are undone by the blocks themselves: between stages the features of Swin are a grid,
and the verified wrap checks that changed pixels move the cells they should.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.errors import BadOption, UnknownName, UnsupportedModel
from seecause.models.base import Architecture, ImageModel
from seecause.models.block import Fn, Size, TokenLayout, chain, same
from seecause.models.parts import WrapOptions, head_for
from seecause.models.preprocess import Preprocess, from_timm


@dataclass(frozen=True, eq=False)
class Stage:
    """Native modules that run in sequence. `leave` converts the output of the last one to the
    stage's feature map [B, C, h, w]; `enter` converts the previous map to the input of the first
    one."""

    name: str
    modules: tuple[Fn, ...]
    enter: Fn = same
    leave: Fn = same

    def __call__(self, features: Tensor) -> Tensor:
        features = self.enter(features)
        for module in self.modules:
            features = module(features)
        return self.leave(features)

    @property
    def listened(self) -> nn.Module:
        """The module whose output the verified wrap compares."""
        module = self.modules[-1]
        assert isinstance(module, nn.Module)
        return module


@dataclass(eq=False, kw_only=True, repr=False)
class StagedModel(ImageModel):
    """A view of a native classifier of stages. `model(images)` gives logits, through the native
    modules."""

    architecture: ClassVar[Architecture] = "staged"

    stages: list[Stage]
    rest: Fn  # the last stage's feature map [B, C, h, w] -> logits
    cells: str  # the stage whose feature grid is the layout

    @property
    def readout_name(self) -> str:
        return "feature map"

    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images [B, 3, H, W] -> logits [B, C]."""
        with self.eval_mode():
            self.check(images)
            return self._run(0, images)

    def stage_outputs(self, images: Tensor) -> dict[str, Tensor]:
        """The feature map after every stage, in order; each [B, C, h, w]."""
        features_by_stage, features = {}, images
        with self.eval_mode():
            for stage in self.stages:
                features = features_by_stage[stage.name] = stage(features)
        return features_by_stage

    def run_to(self, stage: str, images: Tensor) -> Tensor:
        """Images -> the feature map after `stage`."""
        with self.eval_mode():
            for step in self.stages[: self.after(stage)]:
                images = step(images)
        return images

    def run_from(self, stage: str, features: Tensor) -> Tensor:
        """The feature map after `stage` -> logits: only what comes later runs."""
        with self.eval_mode():
            return self._run(self.after(stage), features)

    def after(self, stage: str) -> int:
        """How many stages have run when `stage` is done."""
        names = [step.name for step in self.stages]
        if stage not in names:
            raise UnknownName("stage", stage, names)
        return names.index(stage) + 1

    def forward_bytes(self, layout: TokenLayout, after: str | None = None) -> int:
        """An estimate of the peak memory of a run on one image; with `after`, of the part of the
        run after that stage.

        Stages end in a pooling or stride that quarters their maps, and keep about two of them:
        eight times the largest feature map between stages.
        """
        key = ("feature sizes", layout.grid)
        if key not in self.memo:
            size = (layout.grid[0] * self.patch[0], layout.grid[1] * self.patch[1])
            blank = self.zeros(size)
            with torch.no_grad():
                maps = [blank, *self.stage_outputs(blank).values()]
            self.memo[key] = [features.numel() for features in maps]
        first = 0 if after is None else self.after(after)
        return 8 * max(self.memo[key][first:]) * torch.finfo(self.dtype).bits // 8

    def _run(self, first: int, features: Tensor) -> Tensor:
        for stage in self.stages[first:]:
            features = stage(features)
        return self.rest(features)


@dataclass
class StagedParts:
    """The named pieces of one native network."""

    family: str
    stages: list[Stage]
    rest: Fn  # the last feature map -> the module's own output
    cells: str
    classifies: bool  # False: the module returns pooled features
    native: Fn  # the module's own output [B, classes]
    preprocess: Preprocess | None = None
    classes: Sequence[str] = ()
    fixed_size: bool = False
    size: Size | None = None

    @torch.no_grad()
    def assemble(self, module: nn.Module, options: WrapOptions) -> StagedModel:
        """A view of these parts, with the options of the caller; a head is for networks whose own
        classifier was removed."""
        kind, head = type(module).__name__, options.head
        if options.pool is not None:
            raise BadOption("pool", options.pool, f"None: {kind} pools by itself")
        if head is None and not self.classifies:
            raise UnsupportedModel(
                kind, "it has no classifier", "pass head= (a matrix [classes, width] or a module)"
            )
        if head is not None and self.classifies:
            own = f"None: {kind} has a classifier of its own; replace that by nn.Identity() first"
            raise BadOption("head", type(head).__name__, own)
        added = None if head is None else head_for(head, next(module.parameters()))
        steps = options.preprocess_for(self, kind)
        model = StagedModel(
            module=module,
            name=options.name,
            family=self.family,
            stages=self.stages,
            rest=self.rest if added is None else chain(self.rest, added),
            cells=self.cells,
            preprocess=steps,
            layout_at=TokenLayout.of_cells((1, 1)),
            patch=(1, 1),
            native=self.native if added is None else chain(self.native, added),
            classes=options.class_names(self),
            sigmoid=bool(options.sigmoid),
            fixed_size=self.fixed_size,
            extra=added,
        )
        (high, wide), blank = steps.size, model.zeros(steps.size)
        rows, columns = model.run_to(self.cells, blank).shape[-2:]
        if high % rows or wide % columns:
            reason = f"{rows} x {columns} cells do not tile {high} x {wide} pixels"
            expected = f"a multiple of the stride at {self.cells}: {reason}"
            raise BadOption("size", steps.size, expected)
        model.patch = (high // rows, wide // columns)
        model.layout_at = TokenLayout.of_cells(model.patch)
        return model


Split = tuple[list[Stage], list[Fn]]  # stages, and what follows the last of them


def staged_parts(module: Any, library: str, kind: str) -> StagedParts | None:
    """The parts of a network of stages; None for what is none."""
    split = SPLITS.get(library, {}).get(kind)
    if split is None:
        return None
    stages, behind = split(module)
    if library == "timm":  # some heads that were never made cannot be asked for
        steps = [module.forward_head]
        head = module.get_classifier() if module.num_classes else nn.Identity()
    else:
        steps = READ[kind](module)
        head = steps[-1]
    config = getattr(module, "pretrained_cfg", None)
    embedding = getattr(module, "patch_embed", None)  # of timm's Swin
    size = getattr(embedding, "img_size", None)
    return StagedParts(
        family=f"{library}.{kind}",
        stages=stages,
        rest=chain(*behind, *steps),
        cells=_two_thirds(stages),
        classifies=any(isinstance(layer, nn.Linear | nn.Conv2d) for layer in head.modules()),
        native=module,
        preprocess=from_timm(config) if config else None,
        fixed_size=bool(getattr(embedding, "strict_img_size", False)),
        size=None if size is None else tuple(size),
    )


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


def _timm_swin(module: Any) -> Split:
    stages = [Stage("stem", (module.patch_embed,), leave=_to_map)]
    for number, layer in enumerate(module.layers, start=1):
        stages.append(Stage(f"stage{number}", (layer,), enter=_to_rows, leave=_to_map))
    return stages, [_to_rows, module.norm]


def _timm_convnext(module: Any) -> Split:
    stages = [Stage(f"stage{n}", (stage,)) for n, stage in enumerate(module.stages, start=1)]
    return [Stage("stem", (module.stem,)), *stages], [module.norm_pre]


CONVOLUTIONAL: dict[str, Callable[[Any], Split]] = {
    "ResNet": _resnet,
    "DenseNet": _densenet,
    "VGG": _vgg,
}
SPLITS: dict[str, dict[str, Callable[[Any], Split]]] = {
    "timm": {
        **CONVOLUTIONAL,
        "SwinTransformer": _timm_swin,
        "SwinTransformerV2": _timm_swin,
        "ConvNeXt": _timm_convnext,
    },
    "torchvision": {
        **CONVOLUTIONAL,
        "SwinTransformer": partial(_alternating, True),
        "ConvNeXt": partial(_alternating, False),
    },
}
FLATTEN = nn.Flatten(1)
READ: dict[str, Callable[[Any], list[Fn]]] = {  # readouts, which torchvision has no method for
    "ResNet": lambda module: [module.avgpool, FLATTEN, module.fc],
    # not in place: the features may be someone's
    "DenseNet": lambda module: [F.relu, nn.AdaptiveAvgPool2d(1), FLATTEN, module.classifier],
    "VGG": lambda module: [module.avgpool, FLATTEN, module.classifier],
    "SwinTransformer": lambda module: [
        module.norm, module.permute, module.avgpool, module.flatten, module.head,
    ],
    "ConvNeXt": lambda module: [module.avgpool, module.classifier],
}  # fmt: skip


def _two_thirds(stages: Sequence[Stage]) -> str:
    """The stage at two thirds of the depth; the stem and transitions do not count."""
    names = [stage.name for stage in stages]
    blocks = [name for name in names if name != "stem" and not name.startswith("transition")]
    return blocks[math.ceil(2 * len(blocks) / 3) - 1]
