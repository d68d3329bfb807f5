"""What several test files do with tiny models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from seecause.loading import wrap
from seecause.models.view import VisionModel
from tests.families.native import Native


def view(native: Native, *, check: bool = True) -> VisionModel:
    """A view of a tiny model, told what the module itself does not tell."""
    return wrap(native.module, check=check, **native.options)


def hooks(module: nn.Module) -> int:
    """How many hooks hang on a module and everything in it."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(part, kind)) for part in module.modules() for kind in kinds)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(found: Any, expected: Any, atol: float = 1e-12) -> None:
    """Equal up to rounding."""
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)
