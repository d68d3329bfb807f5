"""Endless batches of Critters on the training device. A GPU draws thousands at once hardly slower
than hundreds, so they are drawn ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from seecause import critters
from seecause.critters import Latents, Regime, find_regime

_AHEAD = 6144  # pictures drawn at once


@dataclass(frozen=True, eq=False)
class Scenes:
    """Pictures with everything that is known about them."""

    images: Tensor  # [B, 3, H, W] in [0, 1]
    masks: Tensor  # [B, H, W] bool, True on the creature
    latents: Latents
    ids: Tensor  # [B] int64, which sample of the regime each is

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Tensor | slice) -> Scenes:
        return Scenes(self.images[rows], self.masks[rows], self.latents[rows], self.ids[rows])

    def mirrored(self) -> Scenes:
        """Half of them, by lot, as in a mirror; a creature may face either way."""
        turned = torch.rand(len(self), device=self.ids.device) < 0.5
        images = torch.where(turned[:, None, None, None], self.images.flip(-1), self.images)
        return Scenes(
            images,
            torch.where(turned[:, None, None], self.masks.flip(-1), self.masks),
            self.latents,
            self.ids,
        )

    def patches(self, side: int, *, covered: float = 0.5) -> Tensor:
        """[B, side, side] bool: the patches of which the creature covers at least this share."""
        return (
            torch.nn.functional.adaptive_avg_pool2d(self.masks[:, None].float(), side)[:, 0]
            >= covered - 1e-6
        )


def drawn(latents: Latents, ids: Tensor, size: int) -> Scenes:
    """The pictures of these latents, which are samples `ids` of their regime."""
    pictures = [critters.render(part, size=size) for part in latents.split(_AHEAD)]
    return Scenes(
        torch.cat([p.image for p in pictures]), torch.cat([p.mask for p in pictures]), latents, ids
    )


def batches(
    regime: str | Regime,
    batch: int,
    steps: int,
    *,
    seed: int,
    size: int,
    device: torch.device,
    change: Callable[[Latents], Latents] = lambda latents: latents,
) -> Iterator[Scenes]:
    """Training batches: a finite regime's pictures in another order in every round, others fresh.
    `change` is done to latents before they are drawn."""
    pool = find_regime(regime).train_pool
    if pool is None:
        yield from _fresh(regime, batch, steps, seed, size, device, change)
        return
    whole = drawn(
        change(critters.draw(regime, "train", pool, seed=seed, device=device)),
        torch.arange(pool, device=device),
        size,
    )
    left = torch.empty(0, dtype=torch.int64, device=device)
    for _ in range(steps):
        while len(left) < batch:
            left = torch.cat([left, torch.randperm(pool, device=device)])
        rows, left = left[:batch], left[batch:]
        yield whole.take(rows)


def _fresh(
    regime: str | Regime,
    batch: int,
    steps: int,
    seed: int,
    size: int,
    device: torch.device,
    change: Callable[[Latents], Latents],
) -> Iterator[Scenes]:
    ahead = max(1, _AHEAD // batch) if device.type != "cpu" else 1
    for first in range(0, steps, ahead):
        count = min(ahead, steps - first) * batch
        latents = change(
            critters.draw(regime, "train", count, seed=seed, start=first * batch, device=device)
        )
        scenes = drawn(
            latents, torch.arange(first * batch, first * batch + count, device=device), size
        )
        for start in range(0, count, batch):
            yield scenes.take(slice(start, start + batch))
