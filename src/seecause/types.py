"""The one rule about precision: float64 stays, everything else is scored in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))
