"""Training noise as a function: every draw is a hash of (seed, step, sample id, purpose), never the
state of a generator.

A sample's noise is then the same in whatever batch, place or process it is trained, so one process
and many with the same global batch take the same steps, and a resumed run goes on as if it had
never stopped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

from seecause._random import bits, lattice
from seecause.errors import BadOption
from seecause.types import wide_dtype


class Purpose(IntEnum):
    """What a draw is for: draws of different purposes are independent."""

    MAPS = 1  # Gumbel noise of the part maps
    MASK = 2  # Gumbel noise of the stage-2 mask
    WARPED = 3  # Gumbel noise of the warped image's maps
    DROP_EMBEDDINGS = 4  # parts left out of the stage-1 classifier
    DROP_MASK = 5  # parts left out of the stage-2 mask


@dataclass(frozen=True, eq=False)
class Noise:
    """The noise of one step: `ids` [B] (int64) say which samples of the dataset the batch holds."""

    seed: int
    step: int
    ids: Tensor

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32 or not 0 <= self.step < 2**30:
            raise BadOption(
                "noise", (self.seed, self.step), "a seed in [0, 2**32) and a step in [0, 2**30)"
            )
        if self.ids.ndim != 1 or self.ids.is_floating_point():
            raise BadOption(
                "ids",
                f"{self.ids.dtype} {list(self.ids.shape)}",
                "one whole number for each image, [B]",
            )

    @classmethod
    def fresh(cls, batch: int, device: torch.device) -> Noise:
        """Noise that nobody keyed: from torch's global generator."""
        seed, step = torch.randint(2**30, (2,)).tolist()
        return cls(seed, step, torch.arange(batch, device=device))

    @classmethod
    def of(cls, images: Tensor) -> Noise:
        """A draw of its own for every image, by its pixels: the same wherever and whenever it is
        tested, whatever else is in the batch."""
        rows = images.detach().flatten(1).float().cpu().numpy()
        digests = [
            int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=7).digest()) for row in rows
        ]
        return cls(0, 0, torch.tensor(digests, device=images.device))

    @cached_property
    def _sample(self) -> Tensor:
        """[B] what the draws of a sample in this step hash; made once for all purposes."""
        return bits(self.ids, self.seed) | (self.step << 32)

    def uniform(self, purpose: Purpose, rows: int, columns: int, like: Tensor) -> Tensor:
        """[B, rows, columns] in (0, 1), without its ends."""
        return (
            lattice(self._sample.to(like.device), purpose, rows, columns)
            .to(wide_dtype(like.dtype))
            .add(2.0**-25)
            .clamp(max=1 - 2.0**-24)
        )

    def gumbel(self, purpose: Purpose, like: Tensor) -> Tensor:
        """Gumbel(0, 1) noise for logits [B, K + 1, N]."""
        return -(-self.uniform(purpose, like.shape[1], like.shape[2], like).log()).log()

    def kept(self, purpose: Purpose, parts: int, drop: float, like: Tensor) -> Tensor:
        """Which parts stay when each is dropped with probability `drop`: [B, K] bool."""
        return self.uniform(purpose, 1, parts, like)[:, 0] >= drop
