"""The generated world: the latents of a Critters image, and the joint distribution of labels,
creatures and backgrounds.

A class is a codeword over part variants (`anatomy.toml`). Two classes differ in at least two parts,
so one part can be removed without losing the class, and every variant belongs to two classes, so no
part alone gives it away. An intervention changes a field of the latents and renders the image
again.

A regime is a law of label y, creature f and background b:

    y uniform;  f = y with probability r_f, else another class;  b = s(y) with probability r_s, else
    another background
f and b are independent given y, and everything else is independent of all three. A predictor that
ignores the background cannot be right more often than the best guess from f, nor one that ignores
the creature more often than the best guess from b. Accuracy above such a bound by more than
sampling error is therefore a proof that the other cue is used, whatever the model is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch
from torch import Tensor

from seecause._random import bits, uniform
from seecause.errors import BadOption, UnknownName

TABLE = tomllib.loads(resources.files("seecause.critters").joinpath("anatomy.toml").read_text())

# the part map holds 1 + the index here; 0 is background
PARTS = ("body", "crest", "wings", "tail", "feet")
VARIANTS = {part: tuple(TABLE[part]) for part in PARTS[1:]}
VARIANT_COLOURS = {
    part: tuple(TABLE[part][name]["colour"] for name in VARIANTS[part]) for part in PARTS[1:]
}
CLASSES = tuple(TABLE["classes"])  # names of the creatures, in the order of labels
BACKGROUNDS = tuple(TABLE["backgrounds"])
QUESTION = "What is the name of this creature?"  # about its class
COLOURS = tuple(TABLE["colours"])
CODEWORDS = tuple(
    tuple(VARIANTS[part].index(name) for part, name in zip(PARTS[1:], word, strict=True))
    for word in TABLE["classes"].values()
)


def minimal_sufficient_sets(creature: int) -> tuple[tuple[str, ...], ...]:
    """The smallest sets of parts that distinguish `creature` from every other class."""
    word = CODEWORDS[creature]
    differing = [  # of each other class: the parts in which it differs
        {part for part, one, two in zip(PARTS[1:], word, other, strict=True) if one != two}
        for other in CODEWORDS
        if other != word
    ]
    found: list[tuple[str, ...]] = []
    for count in range(1, len(PARTS)):
        for chosen in itertools.combinations(PARTS[1:], count):
            smallest = not any(set(smaller) <= set(chosen) for smaller in found)
            if smallest and all(parts & set(chosen) for parts in differing):
                found.append(chosen)
    return tuple(found)


@cache
def codewords(device: torch.device) -> Tensor:
    """[C, P] variant of each part in each class."""
    return torch.tensor(CODEWORDS, device=device)


# how far from the middle of the image a creature may stand and still be whole, as a share of the
# side
REACH = 0.19


@dataclass(frozen=True)
class Latents:
    """A batch of images before they are drawn. All fields are tensors whose first dimension is the
    batch.

    `creature` and `background` are the two cues a model can predict from; `label` is what it is
    trained to predict. They differ only in regimes with unreliable creatures.
    """

    label: Tensor  # [B] int64
    creature: Tensor  # [B] int64, the class whose parts are shown
    background: Tensor  # [B] int64
    variants: Tensor  # [B, P] int64, the codeword of `creature` unless a part was swapped
    present: Tensor  # [B, 1 + P] bool, body first
    centre: Tensor  # [B, 2] float32, (row, column) as a share of the side
    extent: Tensor  # [B] float32, creature size as a share of the side
    flip: Tensor  # [B] bool, facing left
    tilt: Tensor  # [B] float32, turns
    coat: Tensor  # [B] int64, body colour; independent of the class
    tone: Tensor  # [B, 1 + P] float32, brightness of each part
    gain: Tensor  # [B] float32, brightness of the whole image
    seed: Tensor  # [B] int64, feeds the background texture
    mat: Tensor  # [B] bool, whether patches that the creature touches are cut out on a neutral mat

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: slice | Tensor | list[int] | int) -> Latents:
        """Rows of the batch; an integer keeps the batch dimension."""
        if isinstance(index, int):
            place = range(len(self))[index]
            index = slice(place, place + 1)
        return self._each(lambda field: field[index])

    def to(self, device: torch.device | str) -> Latents:
        return self._each(lambda field: field.to(device))

    def replace(self, **changes: Tensor) -> Latents:
        return dataclasses.replace(self, **changes)

    def split(self, rows: int) -> Iterator[Latents]:
        for start in range(0, len(self), rows):
            yield self[start : start + rows]

    def show(self, creature: Tensor) -> Latents:
        """The same scene with another creature in it: codes [B] and their parts, all else kept."""
        return self.replace(creature=creature, variants=codewords(creature.device)[creature])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Latents:
        return Latents(*(change(field) for field in vars(self).values()))


def _off_middle(seed: Tensor, purpose: int) -> Tensor:
    """A position on one axis [B], more likely far from the middle, so that centre maps score
    low."""
    spot = uniform(seed, purpose, -1.0, 1.0)
    return 0.5 + REACH * spot.sign() * spot.abs().sqrt()


SPLITS = ("train", "val", "test")
CONFIDENCE = 0.95  # of what an accuracy proves


@dataclass(frozen=True)
class Regime:
    """A joint law of (label, creature, background)."""

    name: str
    creature_reliability: float = 1.0  # r_f
    background_reliability: float = 1 / len(BACKGROUNDS)  # r_s; 1/B is independence
    train_pool: int | None = None  # training images in all, where the set is finite
    balanced: bool = False  # every (creature, background) equally often, in turn
    mat: bool = False  # no patch shows both creature and background


REGIMES = {name: Regime(name, **law) for name, law in TABLE["regimes"].items()}


def find_regime(regime: str | Regime) -> Regime:
    if isinstance(regime, Regime):
        return regime
    if regime not in REGIMES:
        raise UnknownName("regime", regime, REGIMES)
    return REGIMES[regime]


def usual_background(label: Tensor) -> Tensor:
    """s(y): the usual background of a class. Two classes share each background, so that it does not
    determine the class."""
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
    """The best possible accuracies under a regime, and what a measured one proves with a confidence
    of 95 %."""

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


def certificate(regime: str | Regime, *, accuracy: float, samples: int) -> Certificate:
    """Compute what an accuracy proves about the cues that a model uses.

    The bounds are exact, by enumeration of P(y, f, b).

    Args:
        regime: The regime that the model was tested on.
        accuracy: Its accuracy on held-out images.
        samples: The number of held-out images.

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
    margin = math.sqrt(math.log(1 / (1 - CONFIDENCE)) / (2 * samples))
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

    A sample does not depend on the call that draws it; splits and seeds share no samples.

    Args:
        regime: The name of a regime, such as "certified".
        split: "train", "val" or "test".
        n: The number of samples.
        seed: Another seed is another world.
        start: The first sample.
        device: The device of the latents, on which images are rendered.

    Returns:
        `Latents`, which `render` draws.

    Example:
        >>> from seecause import critters
        >>> len(critters.draw("clean", "test", 4))
        4
    """
    law, parts = find_regime(regime), torch.arange(len(PARTS), device=device)
    if split not in SPLITS:
        raise UnknownName("split", split, SPLITS)
    if not 0 <= seed < 2**24:
        raise BadOption("seed", seed, "a number from 0 to 16777215")
    index = torch.arange(start, start + n, device=device)
    if split == "train" and law.train_pool is not None:
        index = index % law.train_pool
    # one number for each sample: split and world seed have their own bits, so it is unique
    own = (seed << 34) + (index << 2) + SPLITS.index(split)
    if law.balanced:
        label = creature = index % len(CLASSES)
        background = index // len(CLASSES) % len(BACKGROUNDS)
    else:
        label = bits(own, 1) % len(CLASSES)
        creature = _mostly(label, len(CLASSES), law.creature_reliability, own, 2)
        usual = usual_background(label)
        background = _mostly(usual, len(BACKGROUNDS), law.background_reliability, own, 4)
    return Latents(
        label=label,
        creature=creature,
        background=background,
        variants=codewords(creature.device)[creature],
        present=torch.ones(n, len(PARTS), dtype=torch.bool, device=device),
        centre=torch.stack([_off_middle(own, 11), _off_middle(own, 12)], dim=1),
        extent=uniform(own, 13, 0.50, 0.55),
        flip=bits(own, 14) % 2 == 1,
        tilt=uniform(own, 15, -0.025, 0.025),
        coat=bits(own, 16) % len(TABLE["coats"]),
        tone=uniform(own[:, None] * len(PARTS) + parts, 17, 0.9, 1.0),
        gain=uniform(own, 18, 0.85, 1.0),
        seed=own,
        mat=torch.full_like(own, law.mat, dtype=torch.bool),
    )


def _reliable(usual: Tensor, codes: int, reliability: float) -> Tensor:
    """[C, codes]: probability `reliability` on the usual code of each class, the rest spread
    evenly."""
    table = torch.full((len(usual), codes), (1 - reliability) / (codes - 1), dtype=torch.float64)
    table[torch.arange(len(usual)), usual] = reliability
    return table


def _mostly(usual: Tensor, codes: int, reliability: float, seed: Tensor, purpose: int) -> Tensor:
    """The usual code with probability `reliability`, else one of the others, evenly."""
    other = (usual + 1 + bits(seed, purpose) % (codes - 1)) % codes
    return torch.where(uniform(seed, purpose + 1) < reliability, usual, other)
