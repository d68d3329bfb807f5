"""What a Critters image is made from: the creatures as data, and the latents of an image.

A class is a codeword over part variants (`anatomy.toml`). Two classes differ in at least two parts,
so one part can be removed without losing the class, and every variant belongs to two classes, so no
part alone gives it away. Change a field of the latents and render again: that is an intervention.
"""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch
from torch import Tensor

from seecause import _random

TABLE = tomllib.loads(resources.files("seecause.critters").joinpath("anatomy.toml").read_text())

# the part map holds 1 + the index here; 0 is background
PARTS = ("body", "crest", "wings", "tail", "feet")
VARIANTS = {part: tuple(TABLE[part]) for part in PARTS[1:]}
VARIANT_COLOURS = {
    part: tuple(TABLE[part][name]["colour"] for name in VARIANTS[part]) for part in PARTS[1:]
}
CLASSES = tuple(TABLE["classes"])
COLOURS = tuple(TABLE["colours"])
CODEWORDS = tuple(
    tuple(VARIANTS[part].index(name) for part, name in zip(PARTS[1:], word, strict=True))
    for word in TABLE["classes"].values()
)


def minimal_sufficient_sets(creature: int) -> tuple[tuple[str, ...], ...]:
    """The smallest sets of parts that tell `creature` from every other class."""
    word = CODEWORDS[creature]
    rivals = [other for index, other in enumerate(CODEWORDS) if index != creature]
    sets: list[tuple[int, ...]] = []
    for count in range(1, len(word) + 1):
        for chosen in itertools.combinations(range(len(word)), count):
            if any(set(smaller) <= set(chosen) for smaller in sets):
                continue
            if all(any(rival[part] != word[part] for part in chosen) for rival in rivals):
                sets.append(chosen)
    return tuple(tuple(PARTS[1 + part] for part in chosen) for chosen in sets)


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
    trained to predict. They differ only where a regime says so.
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
    coat: Tensor  # [B] int64, body colour; says nothing about the class
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

    def on_mat(self, mat: bool = True) -> Latents:
        """The same scenes with or without a mat: with one, no patch shows both creature and
        background."""
        return self.replace(mat=torch.full_like(self.mat, mat))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Latents:
        return Latents(*(change(field) for field in vars(self).values()))


def from_codes(label: Tensor, creature: Tensor, background: Tensor, seed: Tensor) -> Latents:
    """Latents with these codes [B] and nuisances (place, size, pose, colours, light) hashed from
    the seeds [B] alone."""
    batch, parts = len(seed), len(PARTS)
    # [B, 1 + P] distinct seeds
    each_part = seed[:, None] * parts + torch.arange(parts, device=seed.device)
    return Latents(
        label=label,
        creature=creature,
        background=background,
        variants=codewords(creature.device)[creature],
        present=torch.ones(batch, parts, dtype=torch.bool, device=seed.device),
        centre=torch.stack([_off_middle(seed, 11), _off_middle(seed, 12)], dim=1),
        extent=_random.uniform(seed, 13, 0.50, 0.55),
        flip=_random.bits(seed, 14) % 2 == 1,
        tilt=_random.uniform(seed, 15, -0.025, 0.025),
        coat=_random.bits(seed, 16) % len(TABLE["coats"]),
        tone=_random.uniform(each_part, 17, 0.9, 1.0),
        gain=_random.uniform(seed, 18, 0.85, 1.0),
        seed=seed,
        mat=torch.zeros_like(seed, dtype=torch.bool),
    )


def _off_middle(seed: Tensor, purpose: int) -> Tensor:
    """A place on one axis [B], the likelier the farther from the middle: a guess at the middle of
    the image should find little."""
    spot = _random.uniform(seed, purpose, -1.0, 1.0)
    return 0.5 + REACH * spot.sign() * spot.abs().sqrt()


def drop_parts(latents: Latents, *, share: float, each: float = 0.4) -> Latents:
    """Remove parts (never the body) from a `share` of the images, each part with probability
    `each`.

    Models trained on such images meet part-removal interventions in their own domain (FunnyBirds,
    Hesse et al. 2023).
    """
    parts = torch.arange(len(PARTS), device=latents.seed.device)
    dice = _random.uniform(latents.seed[:, None] * len(PARTS) + parts, 21)  # [B, 1 + P]
    chosen = _random.uniform(latents.seed, 22) < share
    gone = chosen[:, None] & (dice < each) & (parts > 0)
    return latents.replace(present=latents.present & ~gone)


def mix_parts(latents: Latents, *, share: float) -> Latents:
    """Give a `share` of the creatures parts drawn by lot, each on its own: what a part looks like
    then says nothing about the others.

    Such a creature has no name: `creature` is -1. Its label is left alone.
    """
    mixed = _random.uniform(latents.seed, 23) < share  # [B]
    parts = torch.arange(len(PARTS) - 1, device=latents.seed.device)
    choices = len(VARIANTS["tail"])  # as many as every part has
    drawn = _random.bits(latents.seed[:, None] * len(PARTS) + parts, 24) % choices  # [B, P]
    return latents.replace(
        variants=torch.where(mixed[:, None], drawn, latents.variants),
        creature=torch.where(mixed, -1, latents.creature),
    )


def compatible_classes(latents: Latents) -> Tensor:
    """[B, C] bool: the classes whose codeword agrees with every part still visible."""
    words = codewords(latents.label.device)  # [C, P]
    agrees = (latents.variants[:, None] == words) | ~latents.present[:, None, 1:]  # [B, C, P]
    return agrees.all(dim=-1)
