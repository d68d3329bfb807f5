"""Masks: which heads, text rows and image tokens may see, and how they are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from seecause.errors import BadOption

Law = Literal["bernoulli", "fixed"]


def draw_masks(
    count: int, size: int, *, p: float = 0.75, law: Law = "bernoulli", seed: int = 0, start: int = 0
) -> Tensor:
    """Masks [count, size] that ablate a share p: each entry by itself (`bernoulli`), or exactly so
    many in each mask (`fixed`).

    Row i depends on `seed` and i + `start` only, in blocks of a thousand, so more masks can be
    asked for later.
    """
    if not 0 < p < 1:
        raise BadOption("p", p, "the share of heads to ablate, between 0 and 1")
    if law not in get_args(Law):
        raise BadOption("law", law, "bernoulli or fixed")
    check_seed(seed)
    stop, rows = start + count, []
    for block in range(start // _BLOCK, -(-stop // _BLOCK)):
        generator = torch.Generator().manual_seed((seed << 20) + block)
        lots = torch.rand(_BLOCK, size, generator=generator)
        on = lots >= p if law == "bernoulli" else _largest(lots, round((1 - p) * size))
        rows.append(on[max(0, start - block * _BLOCK) : stop - block * _BLOCK])
    return torch.cat(rows) if rows else torch.zeros(0, size, dtype=torch.bool)


_BLOCK = 1000
_SEEDS = 1 << 43  # with twenty bits for the block, a generator's seed


def check_seed(seed: int) -> None:
    if not 0 <= seed < _SEEDS:
        raise BadOption("seed", seed, f"0 to {_SEEDS - 1}")


def _largest(lots: Tensor, count: int) -> Tensor:
    largest = lots.argsort(dim=1, descending=True)[:, :count]
    return torch.zeros_like(lots, dtype=torch.bool).scatter_(1, largest, True)


@dataclass(frozen=True, eq=False)
class MaskBatch:
    """M masks on the CPU: heads [M, L, H], text [M, T] or None (all), image [M, N] or None (all). A
    first axis of 1 serves all."""

    heads: Tensor
    text: Tensor | None = None
    image: Tensor | None = None

    def __len__(self) -> int:
        return max(len(mask) for mask in (self.heads, self.text, self.image) if mask is not None)

    def order(self) -> Tensor:
        """Masks that agree in the first blocks come together. [M]"""
        if len(self.heads) == 1:
            return torch.arange(len(self))
        packed = np.packbits(self.heads.flatten(1).numpy(), axis=1)
        return torch.from_numpy(np.lexsort(packed.T[::-1]))

    def take(self, rows: Tensor) -> MaskBatch:
        return self._each(lambda mask: mask[rows])

    def block(self, start: int, stop: int, size: int) -> MaskBatch:
        """Masks `start` to `stop`, the last one repeated up to `size`."""

        def padded(mask: Tensor) -> Tensor:
            last = mask[stop - 1 : stop].expand(size - (stop - start), *mask.shape[1:])
            return torch.cat([mask[start:stop], last])

        return self._each(padded)

    def to(self, device: torch.device) -> MaskBatch:
        text, image = (
            mask if mask is None else mask.to(device) for mask in (self.text, self.image)
        )
        return replace(self, heads=self.heads.to(device), text=text, image=image)

    def _each(self, do: Callable[[Tensor], Tensor]) -> MaskBatch:
        """The same to every mask that does not serve all."""
        heads, text, image = (
            mask if mask is None or len(mask) == 1 else do(mask)
            for mask in (self.heads, self.text, self.image)
        )
        assert heads is not None
        return replace(self, heads=heads, text=text, image=image)

    def shared_layers(self) -> int:
        """How many of the first blocks give every mask the same states: the heads agree, and no row
        or token mask matters yet."""
        same = (self.heads == self.heads[:1]).flatten(2).all(dim=2).all(dim=0)  # [L]
        if any(mask is not None and len(mask) > 1 for mask in (self.text, self.image)):
            same &= ~self.heads.flatten(2).any(dim=2).any(dim=0)
        return int(same.int().cumprod(dim=0).sum())

    def sees_picture(self) -> list[bool]:
        """Whether any head of a block sees the picture in any mask, [L]."""
        return self.heads.any(dim=2).any(dim=0).tolist()

    def sees_average(self) -> list[bool]:
        """Whether any head of a block sees the average in any mask and row, [L]."""
        if self.text is not None and not bool(self.text.all()):
            return [True] * self.heads.shape[1]
        return (~self.heads).any(dim=2).any(dim=0).tolist()


@dataclass(frozen=True, eq=False)
class SoftMasks(MaskBatch):
    """The same with entries in [0, 1]. A derivative asks for both sides of every gate, and for
    every mask apart, so nothing is left out and no block is shared."""

    def order(self) -> Tensor:
        return torch.arange(len(self))

    def shared_layers(self) -> int:
        return 0

    def sees_picture(self) -> list[bool]:
        return [True] * self.heads.shape[1]

    def sees_average(self) -> list[bool]:
        return [True] * self.heads.shape[1]


def check_masks(
    heads: Tensor | None,
    text: Tensor | None,
    image: Tensor | None,
    grid: tuple[int, int],
    n_text: int,
    n_image: int,
) -> MaskBatch:
    """Masks of a user, or what is wrong with them."""
    heads, text, image = _shaped(heads, text, image, grid, n_text, n_image)
    for name, mask in (("heads", heads), ("text", text), ("image", image)):
        if (
            mask is not None
            and mask.is_floating_point()
            and bool(((mask != 0) & (mask != 1)).any())
        ):
            raise BadOption(name, "values between 0 and 1", "0 or 1; for others, engine.slopes")
    text, image = (None if mask is None else mask.bool() for mask in (text, image))
    return MaskBatch(heads.bool().unflatten(1, grid), text, image)


def check_soft_masks(
    heads: Tensor | None,
    text: Tensor | None,
    image: Tensor | None,
    grid: tuple[int, int],
    n_text: int,
    n_image: int,
    dtype: torch.dtype,
) -> SoftMasks:
    """Soft masks of a user, or what is wrong with them."""
    heads, text, image = _shaped(heads, text, image, grid, n_text, n_image)
    for name, mask in (("heads", heads), ("text", text), ("image", image)):
        if mask is not None and not bool(((mask >= 0) & (mask <= 1)).all()):
            raise BadOption(name, "other values", "masks with values from 0 to 1")
    text, image = (None if mask is None else mask.to(dtype) for mask in (text, image))
    return SoftMasks(heads.to(dtype).unflatten(1, grid), text, image)


def _shaped(
    heads: Tensor | None,
    text: Tensor | None,
    image: Tensor | None,
    grid: tuple[int, int],
    n_text: int,
    n_image: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Masks [M, L*H], [M, T] and [M, N] on the CPU, all heads where none are given."""
    if heads is not None and heads.ndim == 3 and tuple(heads.shape[1:]) == grid:
        heads = heads.flatten(1)
    for name, mask, width in (
        ("heads", heads, grid[0] * grid[1]),
        ("text", text, n_text),
        ("image", image, n_image),
    ):
        if mask is not None and (mask.ndim != 2 or mask.shape[1] != width or len(mask) == 0):
            raise BadOption(name, list(mask.shape), f"masks of shape [M, {width}]")
    counts = {len(mask) for mask in (heads, text, image) if mask is not None} - {1}
    if len(counts) > 1:
        raise BadOption(
            "masks", sorted(counts), "as many heads, text and image masks, or one that serves all"
        )
    if heads is None:
        heads = torch.ones(1, grid[0] * grid[1], dtype=torch.bool)
    text, image = (None if mask is None else mask.detach().cpu() for mask in (text, image))
    return heads.detach().cpu(), text, image
