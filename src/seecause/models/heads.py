"""Classifier heads for backbones that have none: a matrix, texts or prototypes by cosine, or
similarity to reference images.

Zero-shot heads: class names in prompt templates, read once by a native text tower.

    logits = exp(scale) * cos(image, text) (+ bias)

Each class is the mean of its prompts' unit embeddings, brought back to unit length. The matrix is
made when the model is wrapped: wrap again after changing the text tower.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seecause._pictures import first_line
from seecause.errors import BadOption, UnsupportedModel


class CosineHead(nn.Module):
    """`scale * cos(pooled, row)` for every row of `matrix` [C, D]: text, prototype or
    reference-image embeddings."""

    matrix: Tensor

    def __init__(self, matrix: Tensor, *, scale: float = 100.0):
        super().__init__()
        self.register_buffer("matrix", F.normalize(matrix.detach(), dim=-1))
        self.scale = scale

    def forward(self, pooled: Tensor) -> Tensor:
        return self.scale * F.normalize(pooled, dim=-1) @ self.matrix.T


@dataclass(frozen=True, eq=False)
class Similarity:
    """Similarity to reference images, one "class" each: normalised images [K, 3, H, W], embedded by
    the backbone itself when it is wrapped.

    Each is judged by itself (`prob` is a sigmoid), so that one reference is enough.
    """

    images: Tensor
    scale: float = 10.0

    @torch.no_grad()
    def head(self, pooled: Callable[[Tensor], Tensor]) -> CosineHead:
        head = CosineHead(pooled(self.images), scale=self.scale)
        return head.eval()


class UnitLinear(nn.Linear):
    """A linear layer on features of unit length: a repaired zero-shot head."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.normalize(input, dim=-1))


def linear(matrix: Tensor) -> nn.Module:
    """A linear head without bias from its matrix [C, D]."""
    if matrix.ndim != 2:
        raise BadOption("head", f"tensor {list(matrix.shape)}", "a matrix [classes, width]")
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, dtype=matrix.dtype)
    with torch.no_grad():
        layer.weight.copy_(matrix)
    return layer.eval().requires_grad_(False)


def head_like(head: nn.Module, like: Tensor) -> nn.Module:
    """A head on the device and in the dtype of `like`: itself where it is so, else a copy, since
    it is the caller's."""
    tensors = [*head.parameters(), *head.buffers()]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    placed = all(tensor.device == like.device for tensor in tensors)
    if placed and all(tensor.dtype == like.dtype for tensor in floating):
        return head
    return copy.deepcopy(head).to(like.device, like.dtype)


def read_features(head: nn.Module, features: Tensor) -> Tensor:
    """Logits of the caller's head; raises `BadOption` if it does not take these features."""
    try:
        return head(features)
    except torch.OutOfMemoryError:  # smaller chunks are the remedy
        raise
    except RuntimeError as failure:
        expected = f"one that takes features {list(features.shape)} ({first_line(failure)})"
        raise BadOption("head", type(head).__name__, expected) from failure


TEMPLATES = ("a photo of a {}.",)


@dataclass(frozen=True)
class TextInput:
    """Class names, prompt templates with `{}` for the name, and what turns prompts into tokens for
    the text tower."""

    classes: tuple[str, ...]
    templates: tuple[str, ...]
    tokenize: Callable[..., Any]

    def __post_init__(self) -> None:
        for template in self.templates:
            if "{}" not in template:
                raise BadOption("templates", template, "texts with {} where the class name goes")


class TextHead(nn.Module):
    """Scaled cosine similarity to the rows of `matrix` [C, D]; scale and bias are the native
    parameters, so edits to them are seen."""

    matrix: Tensor

    def __init__(
        self, matrix: Tensor, scale: nn.Parameter, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.scale, self.bias = scale, bias

    def forward(self, pooled: Tensor) -> Tensor:
        logits = self.scale.exp() * F.normalize(pooled, dim=-1) @ self.matrix.T
        return logits if self.bias is None else logits + self.bias


@torch.no_grad()
def text_matrix(
    encode: Callable[[list[str]], Tensor],
    classes: Sequence[str],
    templates: Sequence[str] = TEMPLATES,
    *,
    batch: int = 256,
) -> Tensor:
    """Unit rows [C, D], one per class. `encode` turns prompts into embeddings [n, D]."""
    prompts = [template.format(name) for name in classes for template in templates]
    rows = [
        F.normalize(encode(prompts[i : i + batch]), dim=-1) for i in range(0, len(prompts), batch)
    ]
    per_class = torch.cat(rows).unflatten(0, (len(classes), len(templates)))
    return F.normalize(per_class.mean(dim=1), dim=-1)


def require_text(module: nn.Module, text: TextInput | None) -> TextInput:
    """The text input of a model that has no classes of its own; raises if it was not given."""
    if text is None or not text.classes:
        raise UnsupportedModel(
            f"{type(module).__name__} without class names",
            "it compares images with texts and has no classes of its own",
            "pass classes=[...] and tokenizer= (templates= too, if not 'a photo of a {}.'), or wrap"
            " its vision tower with head=",
        )
    return text


def as_inputs(tokens: Any, device: torch.device) -> dict[str, Tensor]:
    """What a tokenizer gave (ids [n, L], or a mapping of tensors) as keyword arguments on a
    device."""
    named = tokens if isinstance(tokens, Mapping) else {"input_ids": tokens}
    return {name: torch.as_tensor(value, device=device) for name, value in named.items()}


def class_names(config: Any) -> tuple[str, ...]:
    """Class names in a config of transformers, unless they are placeholders: LABEL_0 ..."""
    names = tuple(str(config.id2label[index]) for index in sorted(config.id2label or ()))
    return () if names == tuple(f"LABEL_{i}" for i in range(len(names))) else names


def is_multi_label(config: Any) -> bool:
    """Whether a config of transformers says that classes are independent."""
    return getattr(config, "problem_type", None) == "multi_label_classification"
