"""A native convolutional network, named and split: stages, one after the other, then the rest to
logits.

    stem -> layer1 -> ... -> layer4 -> rest

A feature map has no tokens; its cells take their place. The layout is the feature grid at one stage
(`cells`), so that maps and pixel interventions use the same cells whatever stage is patched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from seecause.errors import UnknownName
from seecause.models.base import Architecture, ImageModel
from seecause.models.block import Fn
from seecause.models.layout import TokenLayout


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
        self.check(images)
        return self._run(0, images)

    def stage_outputs(self, images: Tensor) -> dict[str, Tensor]:
        """The feature map after every stage, in order; each [B, C, h, w]."""
        found, features = {}, images
        for stage in self.stages:
            features = found[stage.name] = stage(features)
        return found

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
