"""`critters:REGIME[:SPLIT]`: the generated world as a dataset. It has no end, so `limit` is its
length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from seecause._files import digest
from seecause.critters.latents import CLASSES, Latents
from seecause.critters.picture import Do, Style, render
from seecause.critters.regimes import SPLITS, Regime, draw, find_regime
from seecause.data.dataset import Sample, check_limit
from seecause.errors import UnknownName

DEFAULT_LENGTH = 512
_RENDER_ROWS = 64


@dataclass(frozen=True, eq=False)
class CrittersData:
    """Samples 0 .. length of a regime's split, drawn when they are asked for."""

    regime: str
    split: str
    length: int
    capabilities: ClassVar = frozenset({"labels", "groups", "masks", "parts", "counterfactuals"})

    @property
    def name(self) -> str:
        return f"critters:{self.regime}:{self.split}"

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(CLASSES)

    @cached_property
    def fingerprint(self) -> str:
        """Of the name, the length and the first picture's pixels, so that a change of the renderer
        shows."""
        return digest(f"{self.name} {self.length}", self[0].image.numpy().tobytes())

    def digests(self, start: int, stop: int) -> list[str]:
        """A sample is told by its generator: name, place, and the first picture's pixels."""
        first = self[0].image.numpy().tobytes()
        return [digest(f"{self.name} {index}", first) for index in range(start, stop)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        place = range(self.length)[index]
        return next(samples(self.regime, self.split, 1, start=place))

    def latents(self, start: int, stop: int, *, device: torch.device | str = "cpu") -> Latents:
        """What samples `start` to `stop` are drawn from: their exact counterfactuals can be
        rendered."""
        return draw(self.regime, self.split, stop - start, start=start, device=device)


def samples(
    regime: str | Regime,
    split: str,
    n: int,
    *,
    seed: int = 0,
    start: int = 0,
    size: int = 96,
    style: Style = "plain",
    do: Do | None = None,
) -> Iterator[Sample]:
    """Pictures one by one, with label, group (creature, background), mask and part map; drawn in
    small batches on the CPU."""
    name = find_regime(regime).name
    for first in range(start, start + n, _RENDER_ROWS):
        rows = min(_RENDER_ROWS, start + n - first)
        latents = draw(regime, split, rows, seed=seed, start=first)
        picture = render(latents, size=size, style=style, do=do)
        for row in range(rows):
            yield Sample(
                image=picture.image[row],
                label=int(latents.label[row]),
                group=(int(latents.creature[row]), int(latents.background[row])),
                mask=picture.mask[row],
                parts=picture.parts[row],
                id=f"{name}-{split}-{seed}-{first + row}",
            )


def open_critters(rest: str, *, limit: int | None = None) -> CrittersData:
    """The test split unless another is named."""
    regime, _, split = rest.partition(":")
    check_limit(limit)
    if split and split not in SPLITS:
        raise UnknownName("split", split, SPLITS)
    return CrittersData(find_regime(regime).name, split or "test", limit or DEFAULT_LENGTH)
