"""What every family says about its tiny model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
SIZE = (32, 48)  # a 4 x 6 grid of 8-pixel patches
CLASSES = ["cat", "green frog", "lighthouse", "old train", "zebra"]
TEMPLATES = ["a drawing of the {} ."]


@dataclass
class Native:
    """A native model with what the slow twins need to know about it. `options` are what `sc.wrap`
    must be told."""

    module: nn.Module
    blocks: Sequence[nn.Module]
    forward: Callable[[Tensor], Tensor]
    options: dict
    size: tuple[int, int] = SIZE


def need(name: str) -> None:
    """Skip a test whose family the installed transformers has not got."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


def scramble_statistics(module: nn.Module) -> None:
    """Redraw what batch norms normalise by in eval mode."""
    generator = torch.Generator().manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d):
            layer.running_mean.copy_(0.3 * torch.randn(layer.num_features, generator=generator))
            layer.running_var.copy_(0.5 + torch.rand(layer.num_features, generator=generator))


def tokenize(prompts: list[str], length: int = 8, end: int = 63) -> Tensor:
    """Words to ids [n, length], below `end`, which closes every sentence and pads it."""
    ids = torch.full((len(prompts), length), end)
    for row, prompt in zip(ids, prompts, strict=True):
        words = [1 + sum(map(ord, word)) * 7 % (end - 1) for word in prompt.split()][: length - 1]
        row[: len(words)] = torch.tensor(words)
    return ids


def prompts() -> Tensor:
    """Tokens of the only prompt of each class."""
    return tokenize([template.format(name) for name in CLASSES for template in TEMPLATES])


TEXT: dict[str, Any] = {"classes": CLASSES, "templates": TEMPLATES, "tokenizer": tokenize}


def matrix(width: int, rows: int = 5) -> Tensor:
    """A head for backbones without one, [rows, width]."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(7))
