"""What several test files do with tiny models."""

import os
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from seecause.engine import graphs
from seecause.loading import wrap
from seecause.models.view import VisionModel
from tests.families.native import Native
from tests.tiny import pictures, tiny


def view(native: Native, *, check: bool = True) -> VisionModel:
    """A view of a tiny model, told what the module itself does not tell."""
    return wrap(native.module, check=check, **native.options)


def ready(
    family: str, batch: int = 2, dtype: torch.dtype = torch.float64, *, check: bool = False
) -> tuple[Native, VisionModel, Tensor]:
    """A tiny model of a family, its view, and images for both."""
    native = tiny(family, dtype)
    return native, view(native, check=check), pictures(native, batch)


def without_graphs() -> Any:
    """Plain runs inside of a `with` block, also where CUDA graphs are used."""
    return mock.patch.dict(os.environ, {graphs.SWITCH: "0"})


def hooks(module: nn.Module) -> int:
    """How many hooks hang on a module and everything in it."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(part, kind)) for part in module.modules() for kind in kinds)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(found: Any, expected: Any, atol: float = 1e-12) -> None:
    """Equal up to rounding."""
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)
