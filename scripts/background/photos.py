"""The photos of `evidence_background.py`, in the model's frame: pets in two halves, their
composites, and ImageNet's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import seecause as sc
from scripts.background.composites import Composites, compose, halves
from seecause.data import open_data
from seecause.heads import Pictures, Swapped, read_pictures
from seecause.models.view import VisionModel

VERSION = 1  # of the protocol: another number makes every piece anew
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    ks: tuple[int, ...] = (1, 2, 4, 8)
    mask_steps: int = 250
    mixes: int = 3  # backgrounds for each animal, of either kind
    draws: int = 20  # random sets of heads of each size
    regression_draws: int = 32
    gating_masks: int = 5
    gating_steps: int = 100
    gating_batch: int = 32


SMALL = Sizes(mask_steps=60, mixes=1, draws=5, gating_masks=2, gating_steps=5, gating_batch=16)


@dataclass
class Study:
    """The model, the photos, and what is made of them without measuring anything."""

    model: VisionModel
    pets: Pictures  # labels are ImageNet's; truth: 1 animal, 0 background, IGNORE border
    imagenet: Pictures
    half: Tensor  # [N] 0: heads are chosen on it, 1: numbers are taken on it
    sizes: Sizes
    seed: int
    limit: int | None
    fast: bool  # TF32 where it is allowed
    device: str  # what the pieces are made on, "cuda" or "cpu": they round differently
    data: tuple[str, ...]  # fingerprints of the lists of photos

    @property
    def shapes(self) -> Tensor:
        """[N, H, W] bool: the animal with its border, which shows its fur and outline."""
        assert self.pets.truth is not None
        return self.pets.truth != 0

    @cached_property
    def composites(self) -> Composites:
        assert self.pets.labels is not None
        pixels = self.model.preprocess.raw(self.pets.images).clamp(0, 1)
        return compose(
            pixels,
            self.shapes,
            self.pets.labels.cpu(),
            self.half,
            draws=self.sizes.mixes,
            seed=self.seed,
        )

    def seen(self, pixels: Tensor) -> Tensor:
        return self.model.preprocess.normalise(pixels).to(self.model.dtype)

    @cached_property
    def swapped(self) -> Swapped:
        """The animal on another breed's photo, and another breed's animal on the photo: the same
        composites, since every background is used once."""
        mixed, turned = (
            self.seen(self.composites.mixed["mixed_rand"][0]),
            self.composites.donors["mixed_rand"][0].argsort(),
        )
        return Swapped(mixed, mixed[turned.to(mixed.device)])

    @property
    def state(self) -> str:
        """What decides the numbers, as a short name."""
        told = {
            "protocol": VERSION, "seecause": sc.__version__, "weights": self.model.fingerprint(),
            "photos": self.data, "sizes": asdict(self.sizes),
            "seed": self.seed, "limit": self.limit, "tf32": self.fast, "device": self.device,
        }  # fmt: skip
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def about(self) -> Row:
        assert self.pets.labels is not None
        return {
            **asdict(self.sizes), "model": self.model.name,
            "heads": self.model.n_layers * self.model.n_heads, "classes": self.model.n_classes,
            "pets": len(self.pets), "breeds": len(self.pets.labels.unique()),
            "chosen on": int((self.half == 0).sum()), "imagenet": len(self.imagenet),
            "half": self.half.tolist(), "labels": self.pets.labels.tolist(), "limit": self.limit,
            "seed": self.seed, "tf32": self.fast,
        }  # fmt: skip

    @contextmanager
    def fastly(self) -> Iterator[None]:
        """TF32 for the block, if it was asked for."""
        torch.set_float32_matmul_precision("high" if self.fast else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision("highest")


def opened(
    model: VisionModel,
    real: Path,
    *,
    sizes: Sizes,
    limit: int | None,
    seed: int,
    fast: bool,
    device: str,
) -> Study:
    """The study of a folder, of pieces that are made on `device`.

    A small one has four photos of each of some breeds, so that either half has two: one to paste
    and one to paste on.
    """
    pets, imagenet = (
        open_data(f"pets:{real / 'pets'}"),
        open_data(f"imagenet:{real / 'imagenet'}", limit=limit),
    )
    if limit is not None:
        labels = list(dict.fromkeys(pets.labels))
        count = min(len(labels), max(2, round(limit / 4)))
        kept = {labels[place * len(labels) // count] for place in range(count)}
        few = [
            photo
            for label in kept
            for photo in [one for one in pets.photos if one.label == label][:4]
        ]
        pets = replace(pets, photos=tuple(photo for photo in pets.photos if photo in few))
    cases = read_pictures(model, pets)
    assert cases.labels is not None
    half, told = halves(cases.labels.cpu(), seed=seed), (pets.fingerprint, imagenet.fingerprint)
    return Study(
        model,
        cases,
        read_pictures(model, imagenet),
        half,
        sizes,
        seed,
        limit,
        fast,
        device.split(":")[0],
        told,
    )
