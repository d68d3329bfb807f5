"""Randomness as a function: every number is a hash of (sample seed, purpose), never the state of a
generator.

So an image depends on its own latent alone: not on its index in the batch, the batch size or
earlier draws. Only additions, products, roots and comparisons are used on the way to a pixel.
Those are rounded the same in vectorised and in scalar loops; `torch.sin` and friends are not, and
would change last bits with the batch size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def bits(seed: Tensor, purpose: int) -> Tensor:
    """Uniform integers in [0, 2**32), shaped like `seed` (int64, up to 62 bits used)."""
    low, high = seed & _WORD, seed >> 32
    return _scramble(low ^ _scramble(high ^ _scramble(purpose)))


def uniform(seed: Tensor, purpose: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform float32 in [low, high), shaped like `seed`."""
    unit = (bits(seed, purpose) >> 8).to(torch.float32) * 2.0**-24
    return unit * (high - low) + low


def lattice(seed: Tensor, purpose: int, rows: int, columns: int) -> Tensor:
    """Uniform values [B, rows, columns] in [0, 1), one grid for each seed [B]."""
    cell = torch.arange(rows * columns, device=seed.device)  # [rows * columns]
    mixed = _scramble(bits(seed, purpose)[:, None] ^ _scramble(cell + 1))
    return ((mixed >> 8).to(torch.float32) * 2.0**-24).view(-1, rows, columns)


def _scramble(x: Any) -> Any:
    """Mix an int, or int64 tensors that hold 32-bit integers (lowbias32); the low word of a product
    that wraps is still right."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
