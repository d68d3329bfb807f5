"""The creatures as data: classes, part variants, colours and strokes, read from `anatomy.toml`.

A class is a codeword over part variants. Two classes differ in at least two parts, so one part can
be removed without losing the class, and every variant belongs to two classes, so no part alone
gives it away.
"""

from __future__ import annotations

import itertools
import tomllib
from functools import cache
from importlib import resources

import torch
from torch import Tensor

_TABLE = tomllib.loads(resources.files(__package__).joinpath("anatomy.toml").read_text())

PARTS = (
    "body",
    "crest",
    "wings",
    "tail",
    "feet",
)  # the part map holds 1 + the index here; 0 is background
VARIANTS = {part: tuple(_TABLE[part]) for part in PARTS[1:]}
VARIANT_COLOURS = {
    part: tuple(_TABLE[part][name]["colour"] for name in VARIANTS[part]) for part in PARTS[1:]
}
CLASSES = tuple(_TABLE["classes"])
COLOURS = tuple(_TABLE["colours"])
COATS = tuple(_TABLE["coats"])
CODEWORDS = tuple(
    tuple(VARIANTS[part].index(name) for part, name in zip(PARTS[1:], word, strict=True))
    for word in _TABLE["classes"].values()
)
PETALS = max(len(_TABLE[part][name]["petals"]) for part in PARTS[1:] for name in VARIANTS[part])
DECALS = tuple(
    feature["decal"] for feature in _TABLE["face"].values()
)  # face strokes without an outline of their own
_NEVER = [
    0.0,
    0.0,
    1.0,
    0.0,
    -9.0,
    -9.0,
    0.0,
    0.0,
    0.0,
]  # a petal that covers nothing, to fill up short lists


def minimal_sufficient_sets(creature: int) -> tuple[tuple[str, ...], ...]:
    """The smallest sets of parts that tell `creature` from every other class."""
    word = CODEWORDS[creature]
    rivals = [other for index, other in enumerate(CODEWORDS) if index != creature]
    found: list[tuple[int, ...]] = []
    for count in range(1, len(word) + 1):
        for chosen in itertools.combinations(range(len(word)), count):
            if any(set(smaller) <= set(chosen) for smaller in found):
                continue
            if all(any(rival[part] != word[part] for part in chosen) for rival in rivals):
                found.append(chosen)
    return tuple(tuple(PARTS[1 + part] for part in chosen) for chosen in found)


@cache
def codewords(device: torch.device) -> Tensor:
    """[C, P] variant of each part in each class."""
    return torch.tensor(CODEWORDS, device=device)


@cache
def part_petals(device: torch.device) -> Tensor:
    """[P, V, K, 9] strokes of every part variant."""
    rows = [
        [_filled(_TABLE[part][name]["petals"]) for name in VARIANTS[part]] for part in PARTS[1:]
    ]
    return torch.tensor(rows, device=device)


@cache
def part_colours(device: torch.device) -> Tensor:
    """[P, V, 3] colour of every part variant."""
    rows = [[_TABLE["colours"][colour] for colour in VARIANT_COLOURS[part]] for part in PARTS[1:]]
    return torch.tensor(rows, device=device)


@cache
def body_petals(device: torch.device) -> Tensor:
    """[2, 9] torso and head."""
    return torch.tensor(list(_TABLE["body"].values()), device=device)


@cache
def coat_colours(device: torch.device) -> Tensor:
    """[coats, 3] body colours."""
    return torch.tensor(list(_TABLE["coats"].values()), device=device)


@cache
def face_petals(device: torch.device) -> Tensor:
    """[F, 9] strokes painted on the body, first to last."""
    return torch.tensor([feature["petal"] for feature in _TABLE["face"].values()], device=device)


@cache
def face_colours(device: torch.device) -> Tensor:
    """[coats, F, 3] colour of each face stroke; some take the colour of the coat."""
    named = _TABLE["face_colours"]
    strokes = [feature["colour"] for feature in _TABLE["face"].values()]
    rows = [
        [coat if colour == "coat" else named[colour] for colour in strokes]
        for coat in _TABLE["coats"].values()
    ]
    return torch.tensor(rows, device=device)


def _filled(petals: list[list[float]]) -> list[list[float]]:
    return petals + [_NEVER] * (PETALS - len(petals))
