"""What every recipe derives from its fields."""

from __future__ import annotations

from seecause.models.preprocess import Preprocess

_HALF = (0.5, 0.5, 0.5)  # as mean and deviation: pixels in [0, 1] become [-1, 1]


class Drawn:
    """A recipe that trains on Critters pictures, drawn as it goes."""

    name: str
    samples: int
    batch: int
    seed: int

    @property
    def size(self) -> int:
        """Pixels of a side."""
        raise NotImplementedError

    @property
    def stem(self) -> str:
        """What its files are called: seeds other than 0 are part of the name, so that they can
        share a folder."""
        return self.name if self.seed == 0 else f"{self.name}-{self.seed}"

    @property
    def preprocess(self) -> Preprocess:
        return Preprocess((self.size, self.size), mean=_HALF, std=_HALF)

    @property
    def steps(self) -> int:
        return max(1, self.samples // self.batch)
