"""The two stages of iFAM (arXiv 2506.08915) as modules: parts from patch features, and a classifier
that reads selected patches only. Each has its own copy of a backbone, a native vision transformer
read through its view, so that any family works."""

from __future__ import annotations

import copy
import re
from typing import Any, cast

import torch
from torch import Tensor, nn

from seecause.engine.attend import Groups
from seecause.engine.graphs import ModuleOwner, captured
from seecause.engine.walk import walk
from seecause.errors import BadImage, UnsupportedModel
from seecause.faithful.attention import Attend, has_kernel, reads_packed
from seecause.faithful.parts import (
    Assignment,
    Modulation,
    distances,
    dot_products,
    new_prototypes,
)
from seecause.models.hf_view import tower_of
from seecause.models.layout import TokenLayout
from seecause.models.parts import Parts, find_parts

_TOKENS = re.compile(
    r"(^|\.)((cls|class|reg|register|dist|distillation)_(tokens?|embedding)"
    r"|pos(ition|itional)?_embed\w*)(\.weight)?$"
)
_STEP = 32  # packed rows come in multiples of at least so many
# no path leads from them to a patch or class token
_UNUSED = re.compile(r"(^|\.)(pooler|mask_token)(\.|$)")


class Backbone(nn.Module):
    """A copy of `backbone` without its classifier, always in eval mode: its own dropout is no part
    of the method."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.native = _without_classifier(copy.deepcopy(backbone)).requires_grad_(True)
        self._parts: Parts | None = None
        self.train(False)
        for name, parameter in self.native.named_parameters():
            parameter.requires_grad_(_UNUSED.search(name) is None)
        name, remedy = type(backbone).__name__, "use a plain vision transformer"
        if self.parts.facts is not None or not self.parts.blocks:
            raise UnsupportedModel(name, "it decides by itself what each token sees", remedy)
        block = self.parts.blocks[0]
        if block.additive is not None or block.kv_heads != block.heads:
            reason = "its attention has a bias of its own or shares keys between heads"
            raise UnsupportedModel(name, reason, remedy)

    @property
    def parts(self) -> Parts:
        """The view of the native module. It points into that module, so every copy of a tower finds
        its own."""
        if self._parts is None:
            parts = find_parts(self.native)
            if not isinstance(parts, Parts):
                name = type(self.native).__name__
                raise UnsupportedModel(name, "it has no tokens", "use a vision transformer")
            self._parts = parts
        return self._parts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": None}

    def train(self, mode: bool = True) -> Backbone:
        super().train(False)
        return self

    @property
    def width(self) -> int:
        """Channels of a token."""
        native: Any = self.native
        config = getattr(native, "config", None)
        for owner, name in (
            (native, "num_features"),
            (native, "hidden_dim"),
            (config, "hidden_size"),
        ):
            if getattr(owner, name, None):
                return int(getattr(owner, name))
        block = self.parts.blocks[0]
        return block.heads * block.head_dim

    def layout(self, images: Tensor) -> TokenLayout:
        """The tokens of these images, or what is wrong with them."""
        parts, (height, width) = self.parts, images.shape[-2:]
        wrong_size = parts.fixed_size and parts.size not in (None, (height, width))
        if images.ndim != 4 or height % parts.patch[0] or width % parts.patch[1] or wrong_size:
            raise BadImage(
                f"images of shape {list(images.shape)}",
                f"expected [B, 3, H, W] of {parts.size}, in patches of {parts.patch}",
                "resize them",
            )
        return parts.layout_at(height, width)

    def features(self, images: Tensor) -> Tensor:
        """Patch tokens after the final norm, [B, N, D], by the module's own forward."""
        return self.parts.native_tokens(images)[:, self.layout(images).patches]

    def freeze(self) -> None:
        """Only special tokens and positions stay trainable."""
        for name, parameter in self.native.named_parameters():
            parameter.requires_grad_(is_token(name))

    def class_features(self, rows: Tensor) -> Tensor:
        """Class rows [B, D] of the last block, after the final norm."""
        return self.parts.norm(rows[:, None])[:, 0]


class PartStage(nn.Module):
    """Stage 1: K parts and the background."""

    def __init__(self, backbone: nn.Module, *, parts: int, classes: int, joint: bool):
        super().__init__()
        self.tower = Backbone(backbone)
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
        self.tower = Backbone(backbone)
        layout = self.tower.parts.layout_at(*(self.tower.parts.size or self.tower.parts.patch))
        if layout.class_index is None:
            reason = "stage 2 is read from a class token, and it has none"
            remedy = "use a backbone with one, or stages=1"
            raise UnsupportedModel(type(backbone).__name__, reason, remedy)
        self.fc_norm = nn.LayerNorm(self.tower.width)
        self.head = new_head(self.tower.width, classes)
        # where a verified view listens
        self.taps = nn.ModuleList(nn.Identity() for _ in self.tower.parts.blocks)
        self.graphs = ModuleOwner(self)
        # special tokens are always visible
        self.register_buffer("prefix", torch.ones(layout.prefix, dtype=torch.bool))

    def tokens(self, images: Tensor, attend: Attend) -> Tensor:
        """Every token after the last block, [B, T, D]. Hidden tokens read and are not read."""
        at = self.tower.layout(images).at(images.device)
        steps = walk(self.tower.parts, self.tower.parts.embed(images), at)
        for step, tap in zip(steps, self.taps, strict=True):
            step.o = attend(step.q, step.k, step.v, step.block.scale)
            step.out = tap(step.out)
        return steps.h

    def masked(self, images: Tensor, attend: Attend) -> Tensor:
        """Logits [B, C] of a run on all tokens."""
        index = cast(int, self.tower.layout(images).class_index)
        return self.read(self.tokens(images, attend)[:, index])

    def packed(self, images: Tensor, visible: Tensor) -> Tensor:
        """Logits [B, C] of a run on tokens visible [B, T] (bool) alone, the rows of all images end
        to end. Same answer as the masked run, whatever else is in the batch."""
        return self.packed_rows(images, *packed_places(visible))

    def packed_rows(self, images: Tensor, places: Tensor, sizes: Tensor, total: Tensor) -> Tensor:
        """The same from what `packed_places` tells."""
        # the only time that a GPU is waited for, before anything of this stage runs
        count = int(total)
        if torch.is_grad_enabled() or not has_kernel(images.device, images.dtype):
            return self._packed(images, places[:count], sizes)
        # rows of no image fill up the last group: totals come again, and their graphs with them
        step = min(self.tower.layout(images).tokens, max(_STEP, len(places) // 32))
        places = places[: -(-count // step) * step]
        return captured(self.graphs, "packed", lambda: self._filled, images, places, sizes)

    def _filled(self, images: Tensor, places: Tensor, sizes: Tensor) -> Tensor:
        """`_packed`, where more places than the sizes tell are a group of their own."""
        rest = len(places) - sizes.sum(dim=0, keepdim=True)
        return self._packed(images, places, torch.cat([sizes, rest]))

    def _packed(self, images: Tensor, places: Tensor, sizes: Tensor) -> Tensor:
        """Tokens places [R] of images that lie end to end, in groups of these sizes: the first of
        them are the images."""
        layout = self.tower.layout(images)
        groups = Groups(sizes, images.device, bound=layout.tokens)
        h = self.tower.parts.embed(images).flatten(0, 1)[places][None]  # [1, R, D]
        at = layout.at(images.device).take(places % layout.tokens)
        class_rows = groups.starts[: len(images)].long() + cast(int, layout.class_index)
        attend, last = reads_packed(groups), len(self.tower.parts.blocks) - 1
        steps = walk(self.tower.parts, h, at)
        for step in steps:
            step.o = attend(step.q, step.k, step.v, step.block.scale)
            if step.index == last:  # no other row is read
                step.take(class_rows)
        return self.read(steps.h[0])

    def read(self, rows: Tensor) -> Tensor:
        """Class rows [B, D] of the last block -> logits."""
        return self.head(self.fc_norm(self.tower.class_features(rows)))


def new_head(width: int, classes: int) -> nn.Linear:
    """A linear classifier without bias."""
    head = nn.Linear(width, classes, bias=False)
    nn.init.trunc_normal_(head.weight, std=0.02)
    return head


def is_token(name: str) -> bool:
    """Whether a parameter of a backbone is a special token or a position embedding."""
    return _TOKENS.search(name) is not None


def _without_classifier(module: Any) -> nn.Module:
    """The backbone alone: what is never run must not be trained, saved or counted."""
    if hasattr(module, "reset_classifier"):  # timm
        module.reset_classifier(0)
    elif hasattr(module, "classifier"):  # transformers
        return tower_of(module)
    elif hasattr(module, "heads"):  # torchvision
        module.heads = nn.Sequential(nn.Identity())
    return module


def visible_tokens(mask: Tensor, prefix: Tensor) -> Tensor:
    """Patches [B, N] and the special tokens [P] before them, as one key mask [B, P + N]."""
    return torch.cat([prefix.expand(len(mask), -1), mask], dim=1)


def packed_places(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of tokens visible [B, T] (bool): all places [B * T], the visible ones first, how many each
    image has [B], and how many there are. Nothing waits."""
    places = (~visible).flatten().to(torch.uint8).argsort(stable=True)
    sizes = visible.sum(dim=1)
    return places, sizes, sizes.sum()
