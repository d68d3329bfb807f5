"""Masks: which heads, text rows and image tokens may see, how they are drawn, and how many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from seecause.errors import BadOption
from seecause.options import accepts

Law = Literal["bernoulli", "fixed"]
How = Literal["derivative", "corrected", "fit"]
MASKS: dict[How, int] = {"derivative": 64, "corrected": 1000, "fit": 10_000}
MOST_MASKS = 10_000_000
FEWEST = 4  # masks of a derivative: two halves, with a spread each
SLOPES = 64  # masks that a corrected derivative is differentiated at
_BLOCK = 1000  # masks that share a generator
_SEEDS = 1 << 43  # with twenty bits for the block, a generator's seed


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
        lots = torch.rand(_BLOCK, size, generator=generator, dtype=torch.float32)
        on = lots >= p if law == "bernoulli" else _largest(lots, round((1 - p) * size))
        rows.append(on[max(0, start - block * _BLOCK) : stop - block * _BLOCK])
    return torch.cat(rows) if rows else torch.zeros(0, size, dtype=torch.bool)


def check_seed(seed: int) -> None:
    if not 0 <= seed < _SEEDS:
        raise BadOption("seed", seed, f"0 to {_SEEDS - 1}")


def _largest(lots: Tensor, count: int) -> Tensor:
    largest = lots.argsort(dim=1, descending=True)[:, :count]
    return torch.zeros_like(lots, dtype=torch.bool).scatter_(1, largest, True)


@dataclass(frozen=True)
class MaskSampling:
    """How masks are drawn and what is made of them: a fit, the mean derivative, or that corrected
    by a fit. Of a fit, `adaptive` stops as soon as the halves' coefficients correlate by
    `agreement`, asking `step` masks at a time."""

    masks: int = 10_000
    p: float = 0.75
    law: Law = "bernoulli"
    split: float = 0.8
    alpha: float = 5e-4
    l1_ratio: float = 0.5
    seed: int = 0
    adaptive: bool = False
    agreement: float = 0.9
    step: int = 1000
    how: How = "fit"
    soften: float = 0.0  # of the masks that are differentiated at
    slopes: int | None = None  # how many are, the first ones; None: as `how` has it

    @property
    def differentiated(self) -> int:
        """How many masks a derivative is taken at."""
        usual = {"derivative": self.masks, "corrected": min(SLOPES, self.masks), "fit": 0}
        return self.slopes or usual[self.how]

    @property
    def runs(self) -> int:
        """Masked runs in all, at most."""
        return self.masks + self.differentiated


def mask_count(how: How, masks: int | None) -> int:
    """The usual number where none is asked for."""
    if how not in get_args(How):
        raise BadOption("how", how, "derivative, corrected or fit")
    return MASKS[how] if masks is None else masks


def check_sampling(sampling: MaskSampling, size: int) -> None:
    """Refuse what cannot be fitted for `size` coefficients, before any mask is asked."""
    mask_count(sampling.how, sampling.masks)
    for name, hint in get_type_hints(MaskSampling).items():
        if not accepts(hint, getattr(sampling, name)):
            raise BadOption(name, getattr(sampling, name), f"of type {hint}")
    check_seed(sampling.seed)
    masks, fits = sampling.masks, sampling.how == "fit"
    if not (sampling.step >= 10 and 0 < sampling.agreement < 1):
        expected = "at least 10 masks a step, and a correlation between 0 and 1"
        raise BadOption("step, agreement", (sampling.step, sampling.agreement), expected)
    enough_slopes = sampling.slopes is None or FEWEST <= sampling.slopes <= masks
    rules = (
        ("masks", masks <= MOST_MASKS, f"at most {MOST_MASKS:,}"),
        ("alpha", 0 <= sampling.alpha < float("inf"), "a penalty from 0 on"),
        ("l1_ratio", 0 <= sampling.l1_ratio <= 1, "a share from 0 to 1"),
        ("slopes", enough_slopes, f"{FEWEST} to {masks}, the masks"),
        ("adaptive", fits or not sampling.adaptive, "how='fit': only a fit stops by itself"),
        ("masks", fits or masks >= FEWEST, f"at least {FEWEST}"),
        ("split", not fits or 0 < sampling.split < 1, "the share of masks to fit, between 0 and 1"),
    )
    for name, holds, expected in rules:
        if not holds:
            raise BadOption(name, getattr(sampling, name), expected)
    if not fits:
        return
    split = sampling.split
    least = max(2, int(size / split), int(1 / (1 - split)))
    while round(split * least) <= size or least - round(split * least) < 2:
        least += 1
    if sampling.masks < least:
        share = f"{split:.0%} of them must outnumber the {size} coefficients"
        remedy = f"at least {least}: {share}; how='derivative' needs fewer"
        raise BadOption("masks", sampling.masks, remedy)


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
        return self._changed(lambda mask: mask.to(device))

    def _each(self, do: Callable[[Tensor], Tensor]) -> MaskBatch:
        """The same to every mask that does not serve all."""
        return self._changed(lambda mask: mask if len(mask) == 1 else do(mask))

    def _changed(self, do: Callable[[Tensor], Tensor]) -> MaskBatch:
        return replace(self, **{n: do(mask) for n, mask in vars(self).items() if mask is not None})

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
    *,
    soft: torch.dtype | None = None,
) -> MaskBatch:
    """Masks [M, L*H] (or [M, L, H]), [M, T] and [M, N] of a user on the CPU, all heads where none
    are given; with `soft`, entries from 0 to 1 in that dtype. Or what is wrong with them."""
    if heads is None:
        heads = torch.ones(1, grid[0] * grid[1], dtype=torch.bool)
    elif heads.ndim == 3 and tuple(heads.shape[1:]) == grid:
        heads = heads.flatten(1)
    heads = _checked("heads", heads, grid[0] * grid[1], soft)
    text = None if text is None else _checked("text", text, n_text, soft)
    image = None if image is None else _checked("image", image, n_image, soft)
    counts = {len(mask) for mask in (heads, text, image) if mask is not None} - {1}
    if len(counts) > 1:
        raise BadOption(
            "masks", sorted(counts), "as many heads, text and image masks, or one that serves all"
        )
    kind = MaskBatch if soft is None else SoftMasks
    return kind(heads.unflatten(1, grid), text, image)


def _checked(name: str, mask: Tensor, width: int, soft: torch.dtype | None) -> Tensor:
    if mask.ndim != 2 or mask.shape[1] != width or len(mask) == 0:
        raise BadOption(name, list(mask.shape), f"masks of shape [M, {width}]")
    if soft is None and not bool(((mask == 0) | (mask == 1)).all()):
        raise BadOption(name, "other values", "0 or 1; for those between, engine.slopes")
    if not bool(((mask >= 0) & (mask <= 1)).all()):
        raise BadOption(name, "other values", "masks with values from 0 to 1")
    return mask.detach().cpu().to(soft or torch.bool)
