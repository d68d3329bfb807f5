"""The dataset: latents and pictures of any regime, any split, in any amount."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from seecause import _random
from seecause.critters.anatomy import CLASSES
from seecause.critters.backgrounds import BACKGROUNDS
from seecause.critters.latents import Latents, from_codes
from seecause.critters.picture import Do, Style, render
from seecause.critters.regimes import Regime, find_regime, usual_background
from seecause.data.dataset import Sample
from seecause.errors import BadOption, UnknownName

SPLITS = ("train", "val", "test")
_RENDER_ROWS = 64


def draw(
    regime: str | Regime,
    split: str,
    n: int,
    *,
    seed: int = 0,
    start: int = 0,
    device: torch.device | str = "cpu",
) -> Latents:
    """Latents of samples start .. start + n. A sample is the same however it is reached; splits and
    seeds never share one."""
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
