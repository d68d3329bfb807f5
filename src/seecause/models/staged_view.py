"""A native network of stages, named and split: stages, one after the other, then the rest to
logits.

    stem -> stage -> ... -> stage -> rest

A feature map has no tokens; its cells take their place. The layout is the feature grid at one stage
(`cells`), so that maps and pixel interventions use the same cells whatever stage is patched. Where
a network keeps its features in another order (channels last, a sequence, Hiera's mask units), its
stages say how they become a map [B, C, h, w] and what they make of one; nothing else changes.

Where the stages of each family are: `staged_families.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from seecause.errors import BadOption, UnknownName, UnsupportedModel
from seecause.models.base import Architecture, ImageModel
from seecause.models.block import Fn, chain, same
from seecause.models.heads import Similarity, head_like, linear, read_features
from seecause.models.layout import TokenLayout
from seecause.models.parts import WrapOptions
from seecause.models.preprocess import Preprocess


@dataclass(frozen=True, eq=False)
class Stage:
    """Native modules that run one after the other; what the last one gives is the stage's feature
    map [B, C, h, w] in the network's own order, which `leave` brings to a map. `enter` turns the
    map before it into what its first module reads."""

    name: str
    modules: tuple[Fn, ...]
    enter: Fn = same
    leave: Fn = same
    native: nn.Module | None = None  # gives the stage's features; None: the last of `modules`
    flat: bool = False  # whether it gives them as a sequence [B, h * w, C]

    def __call__(self, features: Tensor) -> Tensor:
        features = self.enter(features)
        for module in self.modules:
            features = module(features)
        return self.leave(features)

    @property
    def listened(self) -> nn.Module:
        """Where the verified wrap listens."""
        module = self.modules[-1] if self.native is None else self.native
        assert isinstance(module, nn.Module)
        return module

    def heard(self, output: Tensor, size: tuple[int, int]) -> Tensor:
        """What was listened to, as a feature map of a size; as it is where it cannot be one."""
        if self.flat and output.shape[1] != size[0] * size[1]:
            return output
        return self.leave(output.unflatten(1, size) if self.flat else output)


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
        with self.settled():
            self.check(images)
            return self._run(0, images)

    def stage_outputs(self, images: Tensor) -> dict[str, Tensor]:
        """The feature map after every stage, in order; each [B, C, h, w]."""
        features_by_stage, features = {}, images
        with self.settled():
            for stage in self.stages:
                features = features_by_stage[stage.name] = stage(features)
        return features_by_stage

    def run_to(self, stage: str, images: Tensor) -> Tensor:
        """Images -> the feature map after `stage`."""
        with self.settled():
            for step in self.stages[: self.after(stage)]:
                images = step(images)
        return images

    def run_from(self, stage: str, features: Tensor) -> Tensor:
        """The feature map after `stage` -> logits: only what comes later runs."""
        with self.settled():
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
    rest: Fn  # the last feature map -> the module's own answer
    cells: str
    classifies: bool  # False: the module's answer is pooled features
    native: Callable[[Tensor], Tensor]  # the module's own answer [B, classes]
    preprocess: Preprocess | None = None
    classes: Sequence[str] = ()
    sigmoid: bool = False
    fixed_size: bool = False
    size: tuple[int, int] | None = None
    extra: nn.Module | None = None


def assemble_staged(module: nn.Module, parts: StagedParts, options: WrapOptions) -> StagedModel:
    """A view from what the adapter found and what the caller adds; a head is for networks whose own
    classifier was taken off."""
    kind, head = type(module).__name__, options.head
    if options.pool is not None:
        raise BadOption(
            "pool",
            options.pool,
            f"None: {kind} pools by itself; it is a network of stages, not a vision transformer"
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
    if isinstance(head, Similarity):
        raise BadOption("head", "Similarity", f"a matrix or a module, which {kind} can end in")
    added = linear(head) if isinstance(head, Tensor) else head
    if added is not None:
        added = head_like(added, next(module.parameters()))
    steps = options.preprocess_for(parts, kind)
    cell = _cell(module, parts, (len(steps.mean), *steps.size))
    return StagedModel(
        module=module,
        name=options.name,
        family=parts.family,
        stages=parts.stages,
        rest=parts.rest if added is None else chain(parts.rest, added),
        cells=parts.cells,
        preprocess=steps,
        layout_at=TokenLayout.of_cells(cell),
        patch=cell,
        native=chain(parts.native, *([] if added is None else [partial(read_features, added)])),
        classes=options.class_names(parts),
        sigmoid=parts.sigmoid if options.sigmoid is None else options.sigmoid,
        fixed_size=parts.fixed_size,
        extra=added,
    )


@torch.no_grad()
def _cell(module: nn.Module, parts: StagedParts, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Pixels of one cell, from a run up to the stage of the cells."""
    like = next(module.parameters())
    features = torch.zeros(1, *shape, device=like.device, dtype=like.dtype)
    try:
        for stage in parts.stages:
            features = stage(features)
            if stage.name == parts.cells:
                break
    except (AssertionError, RuntimeError, ValueError) as error:  # windows that do not fit
        raise BadOption("size", shape[1:], f"what {parts.family} was built for ({error})") from None
    (height, width), (rows, columns) = shape[1:], features.shape[-2:]
    if height % rows or width % columns:
        raise BadOption(
            "size",
            shape[1:],
            f"a multiple of the stride at {parts.cells}: {rows} x {columns} cells do not tile"
            f" {height} x {width} pixels",
        )
    return height // rows, width // columns
