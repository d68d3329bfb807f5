"""Pictures as training sees them. What is drawn depends on (seed, epoch, sample) alone: not on the
reading process, the batch or what came before.

birds            CUB, Waterbirds, MetaShift: short side to S, mirror, Planckian jitter, turn by +-90
degrees, shift by 20 %, scale 0.8-1.2, random cut
birds_no_jitter  the same without Planckian jitter, as PDiscoFormer was trained
plain            SIIM: both sides to S, mirror
imagenet         random cut of 8-100 % of the picture, mirror, RandAugment (m = 6, mstd = 0.5)
none             what a test picture gets
"""

from __future__ import annotations

import csv
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import resources

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.functional import pil_to_tensor

from seecause.data.batch import seen
from seecause.data.images import to_pil
from seecause.faithful.config import Augment
from seecause.models.preprocess import Preprocess

JITTER = 0.8  # share of pictures in another light
Change = Callable[[Tensor], Tensor]  # raw [3, H, W] in [0, 1] -> raw [3, S, S]


class PlanckianJitter(nn.Module):
    """The same scene under another black body, with probability `share` (Zini et al. 2023): red and
    blue are scaled against green, and clipped."""

    def __init__(self, share: float = JITTER):
        super().__init__()
        self.share = share

    def forward(self, image: Tensor) -> Tensor:
        if torch.rand(()) >= self.share:
            return image
        table = illuminants()
        red, green, blue = table[int(torch.randint(len(table), ()))].tolist()
        return (image * image.new_tensor([red / green, 1.0, blue / green])[:, None, None]).clamp(
            max=1
        )


@cache
def illuminants() -> Tensor:
    """[25, 3] red, green, blue of a black body at 3,000 to 15,000 kelvin."""
    with resources.files(__package__).joinpath("planckian.csv").open(encoding="utf-8") as file:
        return torch.tensor(
            [
                [float(row[name]) for name in ("red", "green", "blue")]
                for row in csv.DictReader(file)
            ]
        )


def augmentation(kind: Augment, frame: Preprocess) -> Change:
    """From raw pixels of any size to raw pixels of the frame's."""
    side = min(frame.size)
    bilinear, bicubic = v2.InterpolationMode.BILINEAR, v2.InterpolationMode.BICUBIC
    if kind in ("birds", "birds_no_jitter"):
        light = [PlanckianJitter()] if kind == "birds" else []
        turn = v2.RandomAffine(90, translate=(0.2, 0.2), scale=(0.8, 1.2))
        return v2.Compose(
            [
                v2.Resize(side, bilinear, antialias=True),
                v2.RandomHorizontalFlip(),
                *light,
                turn,
                v2.RandomCrop(frame.size),
            ]
        )
    if kind == "plain":
        return v2.Compose(
            [v2.Resize(frame.size, bilinear, antialias=True), v2.RandomHorizontalFlip()]
        )
    if kind == "imagenet":
        return v2.Compose(
            [
                v2.RandomResizedCrop(frame.size, interpolation=bicubic, antialias=True),
                _in_range,
                v2.RandomHorizontalFlip(),
                _rand_augment(side),
            ]
        )
    return partial(seen, frame)


@contextmanager
def keyed(seed: int, epoch: int, sample: int) -> Iterator[None]:
    """Every generator that transforms draw from, seeded by these three inside the block and as it
    was after it."""
    key = int.from_bytes(
        hashlib.blake2b(f"{seed} {epoch} {sample}".encode(), digest_size=8).digest()
    )
    plain, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)


def _rand_augment(side: int) -> Change:
    from timm.data.auto_augment import rand_augment_transform

    grey = (124, 116, 104)
    change = rand_augment_transform(
        "rand-m6-mstd0.5", {"translate_const": int(side * 0.45), "img_mean": grey}
    )
    return lambda image: pil_to_tensor(change(to_pil(image))).float() / 255


def _in_range(image: Tensor) -> Tensor:
    return image.clamp(0, 1)  # bicubic overshoots
