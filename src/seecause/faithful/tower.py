"""One stage's own copy of a backbone: a native vision transformer, read through its view so that
any family works."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

from seecause.errors import BadImage, UnsupportedModel
from seecause.models import adapters
from seecause.models.hf_blocks import tower_of
from seecause.models.layout import TokenLayout
from seecause.models.parts import Parts

_TOKENS = re.compile(
    r"(^|\.)((cls|class|reg|register|dist|distillation)_(tokens?|embedding)|pos(ition|itional)?_embed\w*)(\.weight)?$"
)
_UNUSED = re.compile(
    r"(^|\.)(pooler|mask_token)(\.|$)"
)  # no path leads from them to a patch or class token


class Tower(nn.Module):
    """A copy of `backbone` without its classifier, always in eval mode: its own dropout is no part
    of the method."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.native = _without_classifier(copy.deepcopy(backbone)).requires_grad_(True)
        self._parts: Parts | None = None
        self.train(False)
        for name, parameter in self.native.named_parameters():
            parameter.requires_grad_(_UNUSED.search(name) is None)
        if self.parts.facts is not None or not self.parts.blocks:
            raise UnsupportedModel(
                type(backbone).__name__,
                "it decides by itself what each token sees",
                "use a plain vision transformer",
            )
        block = self.parts.blocks[0]
        if block.additive is not None or block.kv_heads != block.heads:
            raise UnsupportedModel(
                type(backbone).__name__,
                "its attention has a bias of its own or shares keys between heads",
                "use a plain vision transformer",
            )

    @property
    def parts(self) -> Parts:
        """The view of the native module. It points into that module, so every copy of a tower finds
        its own."""
        if self._parts is None:
            found = adapters.find(self.native)
            if not isinstance(found, Parts):
                raise UnsupportedModel(
                    type(self.native).__name__, "it has no tokens", "use a vision transformer"
                )
            self._parts = found
        return self._parts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": None}

    def train(self, mode: bool = True) -> Tower:
        super().train(False)
        return self

    @property
    def width(self) -> int:
        """Channels of a token."""
        native: Any = self.native
        told = [getattr(native, name, None) for name in ("num_features", "hidden_dim")] + [
            getattr(getattr(native, "config", None), "hidden_size", None)
        ]
        block = self.parts.blocks[0]
        return next((int(value) for value in told if value), block.heads * block.head_dim)

    def layout(self, images: Tensor) -> TokenLayout:
        """The tokens of these images, or what is wrong with them."""
        parts, (height, width) = self.parts, images.shape[-2:]
        if (
            images.ndim != 4
            or height % parts.patch[0]
            or width % parts.patch[1]
            or (parts.fixed_size and parts.size not in (None, (height, width)))
        ):
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


def tokens_of(tower: Tower, images: Tensor) -> Tensor:
    """What enters the first block, [B, T, D]."""
    return tower.parts.embed(images)


def class_features(tower: Tower, rows: Tensor) -> Tensor:
    """Class rows [B, D] of the last block, after the final norm."""
    return tower.parts.norm(rows[:, None])[:, 0]


def visible_tokens(mask: Tensor, prefix: Tensor) -> Tensor:
    """Patches [B, N] and the special tokens [P] before them, as one key mask [B, P + N]."""
    return torch.cat([prefix.expand(len(mask), -1), mask], dim=1)
