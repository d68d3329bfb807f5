"""The two stages of iFAM (arXiv 2506.08915), as modules: parts from patch features, and a
classifier that reads selected patches only."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from seecause.errors import UnsupportedModel
from seecause.faithful.attention import Attend
from seecause.faithful.masks import Assignment
from seecause.faithful.packed import packed_class_rows
from seecause.faithful.parts import Modulation, distances, dot_products, new_prototypes
from seecause.faithful.tower import Tower, class_features, tokens_of


class PartStage(nn.Module):
    """Stage 1: K parts and the background."""

    def __init__(self, backbone: nn.Module, *, parts: int, classes: int, joint: bool):
        super().__init__()
        self.tower = Tower(backbone)
        self.prototypes = new_prototypes(parts, self.tower.width)
        self.modulation = Modulation(self.tower.width, parts + 1, joint=joint)
        self.classifier = new_head(self.tower.width, classes)

    def assign(self, features: Tensor) -> Assignment:
        """Patch features [B, N, D] against every prototype."""
        dots = dot_products(features, self.prototypes)
        return Assignment(dots, distances(features, self.prototypes, dots))


class MaskedStage(nn.Module):
    """Stage 2: the class token of a backbone whose rows see special tokens and selected patches
    only, from the first block on."""

    prefix: Tensor

    def __init__(self, backbone: nn.Module, *, classes: int):
        super().__init__()
        self.tower = Tower(backbone)
        layout = self.tower.parts.layout_at(*(self.tower.parts.size or self.tower.parts.patch))
        if layout.class_index is None:
            raise UnsupportedModel(
                type(backbone).__name__,
                "stage 2 is read from a class token, and it has none",
                "use a backbone with one, or stages=1",
            )
        self.fc_norm = nn.LayerNorm(self.tower.width)
        self.head = new_head(self.tower.width, classes)
        self.taps = nn.ModuleList(
            nn.Identity() for _ in self.tower.parts.blocks
        )  # where a verified view listens
        self.register_buffer(
            "prefix", torch.ones(layout.prefix, dtype=torch.bool)
        )  # special tokens are always visible

    def tokens(self, images: Tensor, attend: Attend) -> Tensor:
        """Every token after the last block, [B, T, D]. Hidden tokens read and are not read."""
        h, at = tokens_of(self.tower, images), self.tower.layout(images).at(images.device)
        for block, tap in zip(self.tower.parts.blocks, self.taps, strict=True):
            q, k, v = block.qkv(h, at)
            h = tap(block.finish(h, attend(q, k, v, block.scale)))
        return h

    def masked(self, images: Tensor, attend: Attend) -> Tensor:
        """Logits [B, C] of a run on all tokens."""
        index = cast(int, self.tower.layout(images).class_index)
        return self.read(self.tokens(images, attend)[:, index])

    def packed(self, images: Tensor, visible: Tensor) -> Tensor:
        """Logits [B, C] of a run on tokens visible [B, T] (bool) alone."""
        return self.read(packed_class_rows(self.tower, images, visible))

    def read(self, rows: Tensor) -> Tensor:
        return self.head(self.fc_norm(class_features(self.tower, rows)))


def new_head(width: int, classes: int) -> nn.Linear:
    """A linear classifier without bias."""
    head = nn.Linear(width, classes, bias=False)
    nn.init.trunc_normal_(head.weight, std=0.02)
    return head
