"""A native convolutional network, named and split: stages, one after the other, then the rest to
logits.

    stem -> layer1 -> ... -> layer4 -> rest

A feature map has no tokens; its cells take their place. The layout is the feature grid at one stage
(`cells`), so that maps and pixel interventions use the same cells whatever stage is patched.

Where torchvision's and timm's ResNet, DenseNet and VGG are split, and how a view is put together
from it.

    ResNet     stem, layer1 ... layer4
    DenseNet   stem, denseblock1, transition1 ... denseblock4; the last norm belongs to the rest
    VGG        conv1 ... conv5, each with its pooling

The cells are those of the block at two thirds of the depth (layer3, denseblock3, conv4: stride 16,
so 14 x 14 at 224 pixels).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause.errors import BadOption, UnknownName, UnsupportedModel
from seecause.models.base import Architecture, ImageModel
from seecause.models.block import Fn, chain
from seecause.models.heads import beside, linear
from seecause.models.layout import TokenLayout
from seecause.models.preprocess import Preprocess, complete, from_timm


@dataclass(frozen=True, eq=False)
class Stage:
    """Native modules that run one after the other; the last one's output is the stage's feature
    map."""

    name: str
    modules: tuple[nn.Module, ...]

    def __call__(self, features: Tensor) -> Tensor:
        for module in self.modules:
            features = module(features)
        return features


@dataclass(eq=False, kw_only=True, repr=False)
class ConvModel(ImageModel):
    """A view of a native convolutional classifier. `model(images)` gives logits, through the native
    modules."""

    architecture: ClassVar[Architecture] = "conv"

    stages: list[Stage]
    rest: Fn  # the last stage's feature map [B, C, h, w] -> logits
    cells: str  # the stage whose feature grid is the layout

    @property
    def readout_name(self) -> str:
        return "feature map"

    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images [B, 3, H, W] -> logits [B, C]."""
        with self.settled():
            self.check(images)
            return self._run(0, images)

    def stage_outputs(self, images: Tensor) -> dict[str, Tensor]:
        """The feature map after every stage, in order; each [B, C, h, w]."""
        features_by_stage, features = {}, images
        for stage in self.stages:
            features = features_by_stage[stage.name] = stage(features)
        return features_by_stage

    def run_to(self, stage: str, images: Tensor) -> Tensor:
        """Images -> the feature map after `stage`."""
        for step in self.stages[: self.after(stage)]:
            images = step(images)
        return images

    def run_from(self, stage: str, features: Tensor) -> Tensor:
        """The feature map after `stage` -> logits: only what comes later runs."""
        return self._run(self.after(stage), features)

    def after(self, stage: str) -> int:
        """How many stages have run when `stage` is done."""
        names = [step.name for step in self.stages]
        if stage not in names:
            raise UnknownName("stage", stage, names)
        return names.index(stage) + 1

    def forward_bytes(self, layout: TokenLayout, after: str | None = None) -> int:
        """What one image holds at its widest; with `after`, in the part of the run that follows
        that stage.

        Stages end in a pooling or stride that quarters their maps, and keep about two of them:
        eight times the largest feature map between stages.
        """
        key = ("feature sizes", layout.grid)
        if key not in self.memo:
            size = (layout.grid[0] * self.patch[0], layout.grid[1] * self.patch[1])
            blank = torch.zeros(
                1, len(self.preprocess.mean), *size, device=self.device, dtype=self.dtype
            )
            with torch.no_grad():
                self.memo[key] = [
                    blank.numel(),
                    *(features.numel() for features in self.stage_outputs(blank).values()),
                ]
        first = 0 if after is None else self.after(after)
        return 8 * max(self.memo[key][first:]) * torch.finfo(self.dtype).bits // 8

    def _run(self, first: int, features: Tensor) -> Tensor:
        for stage in self.stages[first:]:
            features = stage(features)
        return self.rest(features)


@dataclass
class ConvParts:
    """The named pieces of one native convolutional network."""

    family: str
    stages: list[Stage]
    rest: Fn  # the last feature map -> the module's own answer
    cells: str
    classifies: bool  # False: the module's answer is pooled features
    preprocess: Preprocess | None = None
    extra: nn.Module | None = None


def find(module: Any, library: str, kind: str) -> ConvParts:
    """The parts of a ResNet, DenseNet or VGG of torchvision or timm."""
    stages, behind = SPLITS[kind](module)
    if library == "timm":
        head, config = module.get_classifier(), getattr(module, "pretrained_cfg", None)
        rest = chain(*behind, module.forward_head)
        preprocess = from_timm(config) if config else None
    else:  # torchvision has no method for the rest of its forward
        head, preprocess = module.fc if kind == "ResNet" else module.classifier, None
        rest = chain(*behind, _relu_mean if kind == "DenseNet" else module.avgpool, _flat, head)
    return ConvParts(
        f"{library}.{kind}", stages, rest, _two_thirds(stages), _classifies(head), preprocess
    )


def _resnet(module: Any) -> tuple[list[Stage], list[nn.Module]]:
    activation = module.relu if hasattr(module, "relu") else module.act1
    stem = Stage("stem", (module.conv1, module.bn1, activation, module.maxpool))
    return [
        stem,
        *(
            Stage(name, (getattr(module, name),))
            for name in ("layer1", "layer2", "layer3", "layer4")
        ),
    ], []


def _densenet(module: Any) -> tuple[list[Stage], list[nn.Module]]:
    named = dict(module.features.named_children())
    blocks = [name for name in named if name.startswith(("denseblock", "transition"))]
    order = list(named)
    before, behind = order[: order.index(blocks[0])], order[order.index(blocks[-1]) + 1 :]
    stem = Stage("stem", tuple(named[name] for name in before))
    return [stem, *(Stage(name, (named[name],)) for name in blocks)], [
        named[name] for name in behind
    ]


def _vgg(module: Any) -> tuple[list[Stage], list[nn.Module]]:
    groups: list[list[nn.Module]] = [[]]
    for layer in module.features:
        groups[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            groups.append([])
    *blocks, behind = groups
    return [Stage(f"conv{i}", tuple(block)) for i, block in enumerate(blocks, start=1)], behind


SPLITS: dict[str, Callable[[Any], tuple[list[Stage], list[nn.Module]]]] = {
    "ResNet": _resnet,
    "DenseNet": _densenet,
    "VGG": _vgg,
}


def _two_thirds(stages: Sequence[Stage]) -> str:
    """The block at two thirds of the depth; the stem and transitions do not count."""
    blocks = [
        stage.name
        for stage in stages
        if stage.name != "stem" and not stage.name.startswith("transition")
    ]
    return blocks[math.ceil(2 * len(blocks) / 3) - 1]


def _classifies(head: nn.Module) -> bool:
    return any(isinstance(layer, nn.Linear | nn.Conv2d) for layer in head.modules())


def _relu_mean(features: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(
        F.relu(features), (1, 1)
    )  # not in place: the features may be someone's


def _flat(features: Tensor) -> Tensor:
    return features.flatten(1)


def assemble_conv(
    module: nn.Module,
    parts: ConvParts,
    *,
    name: str,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: tuple[int, int] | None = None,
    classes: Sequence[str] | None = None,
    head: nn.Module | Tensor | None = None,
    pool: str | None = None,
    sigmoid: bool | None = None,
    preprocess: Preprocess | None = None,
) -> ConvModel:
    """A view from what the adapter found and what the caller adds. `head` is for networks whose own
    classifier was taken off."""
    kind = type(module).__name__
    if pool is not None:
        raise BadOption(
            "pool",
            pool,
            f"None: {kind} pools by itself; it is a convolutional network, not a vision transformer"
            " with a class token",
        )
    if head is None and not parts.classifies:
        raise UnsupportedModel(
            kind, "it has no classifier", "pass head= (a matrix [classes, width] or a module)"
        )
    if head is not None and parts.classifies:
        raise BadOption(
            "head",
            type(head).__name__,
            f"None: {kind} has a classifier of its own; replace that by nn.Identity() first",
        )
    added = linear(head) if isinstance(head, Tensor) else head
    if added is not None:
        added = beside(added, next(module.parameters()))
    steps = complete(preprocess or parts.preprocess, mean=mean, std=std, size=size, of=kind)
    cell = _cell(module, parts, (len(steps.mean), *steps.size))
    return ConvModel(
        module=module,
        name=name,
        family=parts.family,
        stages=parts.stages,
        rest=parts.rest if added is None else chain(parts.rest, added),
        cells=parts.cells,
        preprocess=steps,
        layout_at=lambda height, width: TokenLayout(
            grid=(height // cell[0], width // cell[1]), prefix=0
        ),
        patch=cell,
        native=module if added is None else chain(module, added),
        classes=tuple(classes or ()),
        sigmoid=bool(sigmoid),
        fixed_size=False,
        extra=added,
    )


@torch.no_grad()
def _cell(module: nn.Module, parts: ConvParts, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Pixels of one cell, from a run up to the stage of the cells."""
    like = next(module.parameters())
    features = torch.zeros(1, *shape, device=like.device, dtype=like.dtype)
    for stage in parts.stages:
        features = stage(features)
        if stage.name == parts.cells:
            break
    (height, width), (rows, columns) = shape[1:], features.shape[-2:]
    if height % rows or width % columns:
        raise BadOption(
            "size",
            shape[1:],
            f"a multiple of the stride at {parts.cells}: {rows} x {columns} cells do not tile"
            f" {height} x {width} pixels",
        )
    return height // rows, width // columns
