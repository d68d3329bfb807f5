"""How labels, creatures and backgrounds go together, and what an accuracy then proves.

    y uniform;  f = y with probability r_f, else another class;  b = s(y) with probability r_s, else
    another background
f and b are independent given y, and everything else is independent of all three. A predictor that
ignores the background cannot be right more often than the best guess from f, nor one that ignores
the creature more often than the best guess from b. Accuracy above such a bound by more than
sampling error is therefore a proof that the other cue is used, whatever the model is.

`critters:REGIME[:SPLIT]`: the generated world as a dataset. It has no end, so `limit` is its
length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from seecause import _random
from seecause.critters.latents import CLASSES, Latents, from_codes
from seecause.critters.rendering import BACKGROUNDS, Do, Style, intervene, render
from seecause.data.dataset import Sample
from seecause.errors import BadOption, UnknownName
from seecause.files import digest

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Regime:
    """A joint law of (label, creature, background)."""

    name: str
    creature_reliability: float = 1.0  # r_f
    background_reliability: float = 1 / len(BACKGROUNDS)  # r_s; 1/B is independence
    train_pool: int | None = None  # training images in all, where the set is finite
    balanced: bool = False  # every (creature, background) equally often, in turn
    mat: bool = False  # no patch shows both creature and background


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("clean"),
        Regime("certified", creature_reliability=0.7, background_reliability=0.95),
        Regime("simplicity", background_reliability=0.95, train_pool=4096),
        Regime("balanced", balanced=True),
        Regime("matted", creature_reliability=0.7, background_reliability=0.95, mat=True),
    )
}


def find_regime(regime: str | Regime) -> Regime:
    if isinstance(regime, Regime):
        return regime
    if regime not in REGIMES:
        raise UnknownName("regime", regime, REGIMES)
    return REGIMES[regime]


def usual_background(label: Tensor) -> Tensor:
    """s(y): the background a class is usually met on. Two classes share each, so the background
    alone leaves a choice."""
    return label % len(BACKGROUNDS)


def joint(regime: str | Regime) -> Tensor:
    """P(y, f, b) as a float64 table [C, C, B]."""
    law, classes, textures = find_regime(regime), len(CLASSES), len(BACKGROUNDS)
    label = torch.arange(classes)
    creature = _reliable(label, classes, law.creature_reliability)  # [C, C]
    background = _reliable(usual_background(label), textures, law.background_reliability)  # [C, B]
    return creature[:, :, None] * background[:, None, :] / classes


@dataclass(frozen=True)
class Certificate:
    """The best possible accuracies under a regime, and what a measured one proves at the given
    confidence."""

    accuracy: float
    samples: int
    margin: float  # sqrt(ln(1 / (1 - confidence)) / (2 n)), Hoeffding
    bayes: float
    creature_only: float
    background_only: float
    uses_background: bool
    uses_creature: bool

    def __str__(self) -> str:
        cues = {"background": self.uses_background, "creature": self.uses_creature}
        proven = [cue for cue, used in cues.items() if used]
        return (
            f"accuracy {self.accuracy:.3f} on {self.samples} images (margin {self.margin:.3f});"
            f" at most {self.creature_only:.3f} without the background, {self.background_only:.3f}"
            f" without the creature, {self.bayes:.3f} with both. Proven in use:"
            f" {' and '.join(proven) or 'neither cue'}."
        )


def certificate(
    regime: str | Regime, *, accuracy: float, samples: int, confidence: float = 0.95
) -> Certificate:
    """Tell what an accuracy proves about the cues that a model uses.

    The bounds are exact, by enumeration of P(y, f, b).

    Args:
        regime: The regime that the model was tested on.
        accuracy: Its accuracy on held-out images.
        samples: The number of held-out images.
        confidence: Of the proof.

    Returns:
        A `Certificate`: the best possible accuracies, and which cues are proven to be used.

    Example:
        >>> from seecause import critters
        >>> proof = critters.certificate("certified", accuracy=0.78, samples=8192)
        >>> proof.uses_background, proof.uses_creature
        (True, True)
    """
    if samples < 1:
        raise BadOption("samples", samples, "a positive number of images")
    table = joint(regime)
    margin = math.sqrt(math.log(1 / (1 - confidence)) / (2 * samples))
    creature_only = table.sum(dim=2).amax(dim=0).sum().item()
    background_only = table.sum(dim=1).amax(dim=0).sum().item()
    return Certificate(
        accuracy=accuracy,
        samples=samples,
        margin=margin,
        bayes=table.amax(dim=0).sum().item(),
        creature_only=creature_only,
        background_only=background_only,
        uses_background=accuracy > creature_only + margin,
        uses_creature=accuracy > background_only + margin,
    )


def draw(
    regime: str | Regime,
    split: str,
    n: int,
    *,
    seed: int = 0,
    start: int = 0,
    device: torch.device | str = "cpu",
) -> Latents:
    """Draw the latents of samples `start` to `start + n`.

    A sample is the same however it is reached; splits and seeds never share one.

    Args:
        regime: The name of a regime, such as "certified".
        split: "train", "val" or "test".
        n: The number of samples.
        seed: Another seed is another world.
        start: The first sample.
        device: Where the latents lie, and images are rendered.

    Returns:
        `Latents`, which `render` draws.

    Example:
        >>> from seecause import critters
        >>> len(critters.draw("clean", "test", 4))
        4
    """
    law = find_regime(regime)
    index = torch.arange(start, start + n, device=device)
    if split == "train" and law.train_pool is not None:
        index = index % law.train_pool
    sample_seed = _sample_seeds(split, index, seed)
    if law.balanced:
        label = creature = index % len(CLASSES)
        background = index // len(CLASSES) % len(BACKGROUNDS)
    else:
        label = _random.bits(sample_seed, 1) % len(CLASSES)
        creature = _mostly(label, len(CLASSES), law.creature_reliability, sample_seed, 2)
        background = _mostly(
            usual_background(label), len(BACKGROUNDS), law.background_reliability, sample_seed, 4
        )
    return from_codes(label, creature, background, sample_seed).on_mat(law.mat)


def _reliable(usual: Tensor, codes: int, reliability: float) -> Tensor:
    """[C, codes]: probability `reliability` on the usual code of each class, the rest spread
    evenly."""
    table = torch.full((len(usual), codes), (1 - reliability) / (codes - 1), dtype=torch.float64)
    table[torch.arange(len(usual)), usual] = reliability
    return table


def _sample_seeds(split: str, index: Tensor, seed: int) -> Tensor:
    """One number for each sample; split and world seed sit in their own bits, so no two can
    meet."""
    if split not in SPLITS:
        raise UnknownName("split", split, SPLITS)
    if not 0 <= seed < 2**24:
        raise BadOption("seed", seed, "a number from 0 to 16777215")
    return (seed << 34) + (index << 2) + SPLITS.index(split)


def _mostly(usual: Tensor, codes: int, reliability: float, seed: Tensor, purpose: int) -> Tensor:
    """The usual code with probability `reliability`, else one of the others, evenly."""
    other = (usual + 1 + _random.bits(seed, purpose) % (codes - 1)) % codes
    return torch.where(_random.uniform(seed, purpose + 1) < reliability, usual, other)


DEFAULT_LENGTH = 512
_RENDER_ROWS = 64


@dataclass(frozen=True, eq=False)
class CrittersData:
    """Samples 0 .. length of a regime's split, drawn when they are asked for."""

    regime: str
    split: str
    length: int
    capabilities: ClassVar = frozenset({"masks", "counterfactuals"})

    @property
    def name(self) -> str:
        return f"critters:{self.regime}:{self.split}"

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(CLASSES)

    @cached_property
    def fingerprint(self) -> str:
        """Of the name, the length and the first image's pixels, so that a change of the renderer
        shows."""
        return digest(f"{self.name} {self.length}", self[0].image.numpy().tobytes())

    def digests(self, start: int, stop: int) -> list[str]:
        """A sample is told by its generator: name, place, and the first image's pixels."""
        first = self[0].image.numpy().tobytes()
        return [digest(f"{self.name} {index}", first) for index in range(start, stop)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> Sample:
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
    """Draw images one by one, in small batches on the CPU.

    Args:
        regime: The name of a regime, such as "certified".
        split: "train", "val" or "test".
        n: The number of samples.
        seed: Another seed is another world.
        start: The first sample.
        size: Pixels of a side.
        style: "plain", "flat" or "sketch".
        do: An intervention on each scene.

    Returns:
        Samples with label, group (creature, background) as they are shown, mask and part map.

    Example:
        >>> from seecause import critters
        >>> next(critters.samples("clean", "test", 1)).image.shape
        torch.Size([3, 96, 96])
    """
    name = find_regime(regime).name
    for first in range(start, start + n, _RENDER_ROWS):
        rows = min(_RENDER_ROWS, start + n - first)
        latents = draw(regime, split, rows, seed=seed, start=first)
        drawn = render(latents, size=size, style=style, do=do)
        latents = latents if do is None else intervene(latents, do, size=size)
        for row in range(rows):
            yield Sample(
                image=drawn.image[row],
                label=int(latents.label[row]),
                group=(int(latents.creature[row]), int(latents.background[row])),
                mask=drawn.mask[row],
                parts=drawn.parts[row],
                id=f"{name}-{split}-{seed}-{first + row}",
            )


def open_critters(rest: str, *, limit: int | None = None) -> CrittersData:
    """The test split unless another is named."""
    regime, _, split = rest.partition(":")
    if split and split not in SPLITS:
        raise UnknownName("split", split, SPLITS)
    return CrittersData(find_regime(regime).name, split or "test", limit or DEFAULT_LENGTH)
