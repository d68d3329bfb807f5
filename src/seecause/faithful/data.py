"""The data of an iFAM network: splits of a dataset, batches in the network's frame, and augmented
training images in a deterministic order.

Augmentation depends on (seed, epoch, sample) alone, not on the reading process or the batch.

birds            CUB, Waterbirds, MetaShift: resize the short side to S, horizontal flip, Planckian
                 jitter, rotation by +-90 degrees, shift by 20 %, scale 0.8-1.2, random crop
birds_no_jitter  the same without Planckian jitter, as PDiscoFormer was trained
plain            SIIM: resize both sides to S, horizontal flip
imagenet         random crop of 8-100 % of the image, horizontal flip, RandAugment (m = 6,
                 mstd = 0.5)
none             the preprocessing of test images
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from seecause.data.batch import in_order, raw_in_frame, to_batch
from seecause.data.dataset import (
    Dataset,
    Subset,
    evenly,
    open_data,
    part_of_train,
    sample_labels,
    to_pil,
)
from seecause.data.imagenet import IMAGENET_CLASSES, find_in9_map, read_in9_map
from seecause.errors import BadOption, DataMissing, SeecauseError
from seecause.faithful.net import IFAM
from seecause.models.preprocess import Preprocess

Augment = Literal["birds", "birds_no_jitter", "plain", "imagenet", "none"]
Split = Literal["train", "val", "test"]
Transform = Callable[[Tensor], Tensor]  # raw [3, H, W] in [0, 1] -> raw [3, S, S]
JITTER = 0.8  # probability of Planckian jitter


class PlanckianJitter(nn.Module):
    """Change the illuminant to that of a random black body (Zini et al. 2023): red and blue are
    scaled relative to green, and clipped at 1."""

    def forward(self, image: Tensor) -> Tensor:
        table = illuminants()
        red, green, blue = table[int(torch.randint(len(table), ()))].tolist()
        light = image.new_ones(len(image))  # a fourth channel is a mask
        light[0], light[2] = red / green, blue / green
        return (image * light[:, None, None]).clamp(max=1)


@cache
def illuminants() -> Tensor:
    """Red, green and blue [25, 3] of a black body at 3,000 to 15,000 kelvin."""
    text = resources.files("seecause.faithful").joinpath("planckian.csv").read_text("utf-8")
    rows = np.loadtxt(text.splitlines(), delimiter=",", skiprows=1, usecols=(1, 2, 3))
    return torch.tensor(rows, dtype=torch.float32)


def augmentation(kind: Augment, frame: Preprocess) -> Transform:
    """The transform from raw pixels of any size to raw pixels of the frame's size."""
    side = min(frame.size)
    bilinear, bicubic = v2.InterpolationMode.BILINEAR, v2.InterpolationMode.BICUBIC
    flip = v2.RandomHorizontalFlip()
    if kind in ("birds", "birds_no_jitter"):
        resize = v2.Resize(side, bilinear, antialias=True)
        light = [v2.RandomApply([PlanckianJitter()], JITTER)] if kind == "birds" else []
        affine = v2.RandomAffine((-90, 90), translate=(0.2, 0.2), scale=(0.8, 1.2))
        crop = v2.RandomCrop(frame.size, pad_if_needed=True)  # the frame may not be square
        return v2.Compose([resize, flip, *light, affine, crop])
    if kind == "plain":
        return v2.Compose([v2.Resize(frame.size, bilinear, antialias=True), flip])
    if kind == "imagenet":
        from timm.data.auto_augment import rand_augment_transform

        crop = v2.RandomResizedCrop(frame.size, interpolation=bicubic, antialias=True)
        in_range = partial(torch.clamp, min=0, max=1)  # bicubic interpolation overshoots
        settings = {"translate_const": int(side * 0.45), "img_mean": (124, 116, 104)}
        change = rand_augment_transform("rand-m6-mstd0.5", settings)
        back = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
        return v2.Compose([crop, in_range, flip, to_pil, change, *back])
    return partial(raw_in_frame, frame)


@contextmanager
def seeded(seed: int, epoch: int, sample: int) -> Iterator[None]:
    """Seed every generator that transforms draw from inside the block, and restore its state
    afterwards."""
    name = f"{seed} {epoch} {sample}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


# releases whose other split is their test split: validation is cut from this one
_HELD_OUT = {"imagenet": "train", "pets": "trainval", "food101": "train"}
_TEST_ONLY = {"imagenet-hard", "imagenet-s", "imagenet9", "waterbird200"}
_POOL = 4096  # number of training images of an infinite Critters regime


def open_split(data: str, split: Split, *, limit: int | None = None) -> Dataset:
    """A split of a dataset that is named without one, such as `waterbirds:PATH`.

    A folder of images has the sub-folders train, val and test, or class folders only. Where a
    release has no validation split, every tenth training image of each class validates; a name that
    ends in `:trainval` (ImageNet: `:train`) trains on these, too.
    """
    kind, _, path = data.partition(":")
    if split == "train" and path.endswith((":trainval", ":train")):
        opened = open_data(data, limit=limit)
    elif kind == "folder" and (split == "test" or (Path(path) / "train").is_dir()):
        opened = open_data(f"folder:{Path(path) / split}", limit=limit)
    elif split == "test":
        whole = kind in {*_TEST_ONLY, "imagenet"}
        opened = open_data(data if whole else f"{data}:test", limit=limit)
    elif kind in _TEST_ONLY:
        raise BadOption("data", data, "a dataset with a train split; this one is for testing")
    elif kind in _HELD_OUT or kind == "folder":
        release = open_data(data if kind == "folder" else f"{data}:{_HELD_OUT[kind]}")
        rows = part_of_train(range(len(release)), sample_labels(release), split)
        if not rows:
            reason = f"too few images of any class to keep one in ten for {split}"
            raise DataMissing(release.name, reason, "add images, or name a dataset with val=")
        opened = Subset(f"{release.name} ({split})", release, evenly(rows, limit))
    else:
        if kind == "critters" and split == "train" and limit is None:
            from seecause.critters.world import find_regime

            limit = find_regime(path).train_pool or _POOL
        opened = open_data(f"{data}:{split}", limit=limit)
    if not opened.classes:
        raise BadOption("data", opened.name, "a dataset with labels, such as class folders")
    return opened


def match_classes(net: IFAM, data: Dataset) -> tuple[Tensor, Tensor | None]:
    """The network's class for each label of a dataset, and the map of ImageNet-9.

    Labels are matched by name, never by order alone; a dataset with other classes is refused,
    because its accuracy would mean nothing. For ImageNet-9 and a network of ImageNet's classes the
    second value maps each prediction to one of the nine classes; otherwise it is None.
    """
    kind, names = data.name.partition(":")[0], net.class_names
    own = torch.arange(len(data.classes))
    if kind == "imagenet9" and net.classes == IMAGENET_CLASSES:
        return own, read_in9_map(find_in9_map(data.name))
    if len(data.classes) == net.classes and in_order(data, names, net.classes):
        return own, None
    unknown = [name for name in data.classes if name not in names]
    if unknown or not data.classes or len(set(names)) < len(names):
        listed = ", ".join(names[:6]) or f"{net.classes}, without names"
        expected = f"a dataset with the network's classes ({listed}); not among them: {unknown[:3]}"
        raise BadOption("data", data.name, expected)
    return torch.tensor([names.index(name) for name in data.classes]), None


def batches_of(
    net: IFAM,
    data: Dataset,
    *,
    batch: int = 32,
    rows: Sequence[int] | None = None,
    workers: int = 0,
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    """Normalised images, labels, groups [B, 2] and masks of these rows of a dataset, or of all.

    Groups are None where a sample of the batch has none, masks where no sample has one; `workers`
    processes read ahead.
    """
    every = range(len(data)) if rows is None else rows
    keys = [list(every[start : start + batch]) for start in range(0, len(every), batch)]
    frame = SimpleNamespace(preprocess=net.preprocess, device="cpu", dtype=torch.float32)
    collate = partial(_labelled_batch, frame)
    batches = read_batches(data, keys, collate, workers=workers, device=net.device)
    for images, labels, groups, masks in batches:
        images = images.to(net.device, net.dtype)
        masks = None if masks is None else masks.to(net.device)
        yield images, labels.to(net.device), groups, masks


def _labelled_batch(frame: Any, samples: list[Any]) -> tuple[Tensor | None, ...]:
    images, labels, masks = to_batch(frame, samples)
    if labels is None:
        raise BadOption("data", f"{samples[0].id} without a label", "a label for every image")
    groups = [sample.group for sample in samples]
    return images, labels, None if None in groups else torch.tensor(groups), masks


@dataclass
class TrainingImages:
    """Augmented, normalised images of an epoch, with label and index, for torch's DataLoader. With
    `masks`, a fourth channel is the object mask after the same augmentation."""

    data: Dataset
    kind: Augment
    frame: Preprocess
    seed: int
    epoch: int = 0
    masks: bool = False

    def __post_init__(self) -> None:
        self.augment = augmentation(self.kind, self.frame)

    def __getitem__(self, index: int) -> tuple[Tensor, int | None, int]:
        sample = self.data[index]
        image = sample.image
        if self.masks:
            if sample.mask is None or self.kind == "imagenet":
                raise BadOption("data", sample.id, "images with masks, and augment=birds or plain")
            image = torch.cat([image, (sample.mask == 1).to(image)[None]])
        with seeded(self.seed, self.epoch, index):
            image = self.augment(image)
        pixels = self.frame.normalise(image[None, :3])[0]
        return torch.cat([pixels, image[3:]]), sample.label, index


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """A permutation that depends on seed and epoch alone, so that a run can be continued
    anywhere."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def pass_rows(
    order: Tensor, batch: int, *, accumulate: int = 1, rank: int = 0, world: int = 1, first: int = 0
) -> list[list[int]]:
    """Rows of every forward pass of process `rank` of `world`, from step `first` on.

    `accumulate` passes make a step. The last, incomplete batch is dropped.
    """
    steps = len(order) // batch
    shares = order[: steps * batch].view(steps, accumulate, world, -1)
    return shares[first:, :, rank].flatten(0, 1).tolist()


def read_batches(
    data: Any,
    rows: Sequence[list[int]],
    collate: Callable[[list[Any]], Any],
    *,
    workers: int,
    device: torch.device,
) -> Iterator[Any]:
    """`collate` of the samples of each list of rows, in this order whatever the number of reading
    processes (0: none but this one)."""
    loader: DataLoader[Any] = DataLoader(
        _Batches(data, collate),  # type: ignore[arg-type]
        batch_size=None,
        sampler=rows,
        num_workers=min(workers, len(rows), os.cpu_count() or 1),
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),
    )
    for batch in loader:
        if isinstance(batch, SeecauseError):
            raise batch
        yield batch


@dataclass(frozen=True)
class _Batches:
    """Batches by their rows, or the error that reading one raised: torch would turn an error
    with several arguments into a RuntimeError with a traceback in it."""

    data: Any
    collate: Callable[[list[Any]], Any]

    def __getitem__(self, rows: list[int]) -> Any:
        try:
            return self.collate([self.data[row] for row in rows])
        except SeecauseError as error:
            return error
