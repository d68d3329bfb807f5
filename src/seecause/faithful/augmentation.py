"""Pictures as training sees them.

What is drawn depends on (seed, epoch, sample) alone: not on the reading process, the batch or what
came before.

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

from seecause.data.batch import raw_in_frame
from seecause.data.images import to_pil
from seecause.faithful.config import Augment
from seecause.models.preprocess import Preprocess

_JITTER = 0.8  # share of pictures in another light
Transform = Callable[[Tensor], Tensor]  # raw [3, H, W] in [0, 1] -> raw [3, S, S]


class PlanckianJitter(nn.Module):
    """The same scene under another black body, with probability `share` (Zini et al. 2023): red and
    blue are scaled against green, and clipped."""

    def __init__(self, share: float = _JITTER):
        super().__init__()
        self.share = share

    def forward(self, image: Tensor) -> Tensor:
        if torch.rand(()) >= self.share:
            return image
        table = illuminants()
        red, green, blue = table[int(torch.randint(len(table), ()))].tolist()
        light = image.new_tensor([red / green, 1.0, blue / green])
        return (image * light[:, None, None]).clamp(max=1)


@cache
def illuminants() -> Tensor:
    """[25, 3] red, green, blue of a black body at 3,000 to 15,000 kelvin."""
    text = resources.files("seecause.faithful").joinpath("planckian.csv").read_text("utf-8")
    rows = csv.DictReader(text.splitlines())
    return torch.tensor([[float(row[name]) for name in ("red", "green", "blue")] for row in rows])


def augmentation(kind: Augment, frame: Preprocess) -> Transform:
    """From raw pixels of any size to raw pixels of the frame's."""
    side = min(frame.size)
    bilinear, bicubic = v2.InterpolationMode.BILINEAR, v2.InterpolationMode.BICUBIC
    mirror = v2.RandomHorizontalFlip()
    if kind in ("birds", "birds_no_jitter"):
        resize = v2.Resize(side, bilinear, antialias=True)
        light = [PlanckianJitter()] if kind == "birds" else []
        turn = v2.RandomAffine((-90, 90), translate=(0.2, 0.2), scale=(0.8, 1.2))
        cut = v2.RandomCrop(frame.size, pad_if_needed=True)  # of a frame that is no square
        return v2.Compose([resize, mirror, *light, turn, cut])
    if kind == "plain":
        return v2.Compose([v2.Resize(frame.size, bilinear, antialias=True), mirror])
    if kind == "imagenet":
        cut = v2.RandomResizedCrop(frame.size, interpolation=bicubic, antialias=True)
        return v2.Compose([cut, _in_range, mirror, _rand_augment(side)])
    return partial(raw_in_frame, frame)


@contextmanager
def seeded(seed: int, epoch: int, sample: int) -> Iterator[None]:
    """Every generator that transforms draw from, seeded by these three inside the block and as it
    was after it."""
    name = f"{seed} {epoch} {sample}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
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


def _rand_augment(side: int) -> Transform:
    from timm.data.auto_augment import rand_augment_transform

    settings = {"translate_const": int(side * 0.45), "img_mean": (124, 116, 104)}
    change = rand_augment_transform("rand-m6-mstd0.5", settings)
    return lambda image: pil_to_tensor(change(to_pil(image))).float() / 255


def _in_range(image: Tensor) -> Tensor:
    return image.clamp(0, 1)  # bicubic overshoots
