"""Randomness as a function: every number is a hash of (sample seed, purpose), never the state of a
generator.

So an image depends on its own latent alone: not on its place in the batch, the batch size or what
was drawn before. Only additions, products, roots and comparisons are used on the way to a pixel.
Those are rounded the same in vectorised and in scalar loops; `torch.sin` and friends are not, and
would change last bits with the batch size.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def bits(seed: Tensor, purpose: int) -> Tensor:
    """Uniform integers in [0, 2**32), shaped like `seed` (int64, up to 62 bits used)."""
    low, high = seed & _WORD, seed >> 32
    return _scramble(low ^ _scramble(high ^ _scramble_int(purpose)))


def uniform(seed: Tensor, purpose: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform float32 in [low, high), shaped like `seed`."""
    unit = (bits(seed, purpose) >> 8).to(torch.float32) * 2.0**-24
    return unit * (high - low) + low


def lattice(seed: Tensor, purpose: int, rows: int, columns: int) -> Tensor:
    """Uniform values [B, rows, columns] in [0, 1), one grid for each seed [B]."""
    cell = torch.arange(rows * columns, device=seed.device)  # [rows * columns]
    mixed = _scramble(bits(seed, purpose)[:, None] ^ _scramble(cell + 1))
    return ((mixed >> 8).to(torch.float32) * 2.0**-24).view(-1, rows, columns)


def smooth_noise(seed: Tensor, purpose: int, cells: int, size: int) -> Tensor:
    """Value noise [B, size, size] in [0, 1): a lattice of `cells` bumps a side, blended by a cubic
    step."""
    values = lattice(seed, purpose, cells + 1, cells + 1)
    place = (torch.arange(size, device=seed.device, dtype=torch.float32) + 0.5) * (cells / size)
    first = place.to(torch.int64)  # [size]
    step = place - first
    step = step * step * (3 - 2 * step)
    above = values[:, first]
    rows = above + (values[:, first + 1] - above) * step[:, None]  # [B, size, cells + 1]
    return rows[..., first] + (rows[..., first + 1] - rows[..., first]) * step


def sine(turns: Tensor) -> Tensor:
    """A sine of angles in turns (1 = full circle), within 0.1 %, made of exact operations."""
    x = turns - torch.floor(turns) - 0.5
    y = 16 * x * x.abs() - 8 * x
    return y * (0.775 + 0.225 * y.abs())


def _scramble(x: Tensor) -> Tensor:
    """A 32-bit integer mixer (lowbias32) held in int64, where the low word of a wrapped product is
    still right."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _scramble_int(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
