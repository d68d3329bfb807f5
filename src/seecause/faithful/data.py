"""The data of a network: splits of a dataset, labels in the order of its classes, batches in its
frame, and the augmented images of every epoch in an order that is known in advance.

Augmentation depends on (seed, epoch, sample) alone: not on the reading process or the batch.

birds            CUB, Waterbirds, MetaShift: short side to S, mirror, Planckian jitter, turn by +-90
                 degrees, shift by 20 %, scale 0.8-1.2, random crop
birds_no_jitter  the same without Planckian jitter, as PDiscoFormer was trained
plain            SIIM: both sides to S, mirror
imagenet         random crop of 8-100 % of the image, mirror, RandAugment (m = 6, mstd = 0.5)
none             the preprocessing of test images
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from torchvision.transforms.functional import pil_to_tensor

from seecause.data.batch import in_order, raw_in_frame, to_batch
from seecause.data.dataset import Dataset, Sample, Subset, evenly, part_of_train, sample_labels
from seecause.data.imagenet import IMAGENET_CLASSES, find_in9_map, read_in9_map
from seecause.data.images import to_pil
from seecause.data.registry import open_data
from seecause.errors import BadOption, DataMissing, SeecauseError
from seecause.faithful.config import Augment
from seecause.faithful.net import IFAM
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


# releases whose other split is their test: validation is cut from this one
_HELD_OUT = {"imagenet": "train", "pets": "trainval", "food101": "train"}
_POOL = 4096  # training pictures of a Critters regime that has no end
_NO_TRAINING = {"imagenet-hard", "imagenet-s", "imagenet9", "waterbird200"}


def open_train(data: str, *, limit: int | None = None) -> Dataset:
    """The train split of a dataset that is named without its split."""
    return _open("train", data, limit)


def open_val(data: str, *, limit: int | None = None) -> Dataset:
    """The validation split; where a release has none, every tenth training photo of a class."""
    return _open("val", data, limit)


def open_validation(data: str, val: str | None, *, limit: int | None = None) -> Dataset:
    """What is chosen by: the validation split of `data`, or the dataset `val` that is named for
    that."""
    return open_val(data, limit=limit) if val is None else _labelled(open_data(val, limit=limit))


def open_test(data: str, *, limit: int | None = None) -> Dataset:
    """The test split, which training never opens."""
    kind, _, path = data.partition(":")
    if kind == "folder" and not (Path(path) / "train").is_dir():
        reason = f"all pictures of {data} were for training and validation: there is no test split"
        raise DataMissing(str(Path(path) / "test"), reason, "name others: --data folder:OTHERS")
    if kind == "folder":
        return open_data(f"folder:{_sub_folder(Path(path), 'test')}", limit=limit)
    whole = kind in {*_NO_TRAINING, "imagenet"}
    return open_data(data if whole else f"{data}:test", limit=limit)


def _open(split: str, data: str, limit: int | None) -> Dataset:
    kind, _, path = data.partition(":")
    if kind in _NO_TRAINING:
        raise BadOption("data", data, "a dataset with a train split; this one is for testing")
    if kind == "critters" and limit is None:
        from seecause.critters import find_regime

        limit = find_regime(path).train_pool or _POOL if split == "train" else None
    if kind == "folder" and (Path(path) / "train").is_dir():
        return _labelled(open_data(f"folder:{_sub_folder(Path(path), split)}", limit=limit))
    if kind in _HELD_OUT or kind == "folder":
        whole = open_data(data if kind == "folder" else f"{data}:{_HELD_OUT[kind]}")
        rows = part_of_train(range(len(whole)), sample_labels(whole), split)
        if not rows:
            reason = f"too few photos of any class to keep one in ten for {split}"
            remedy = "add photos, or name a validation set with val="
            raise DataMissing(whole.name, reason, remedy)
        return _labelled(Subset(f"{whole.name} ({split})", whole, evenly(rows, limit)))
    return _labelled(open_data(f"{data}:{split}", limit=limit))


def _sub_folder(path: Path, split: str) -> Path:
    if not (path / split).is_dir():
        remedy = "give a folder with train, val and test in it, each with one folder for each class"
        raise DataMissing(str(path / split), "no such folder", remedy)
    return path / split


def _labelled(data: Dataset) -> Dataset:
    if not data.classes:
        expected = "a dataset with labels, such as a folder of class folders"
        raise BadOption("data", data.name, expected)
    return data


@dataclass(frozen=True)
class Relabelled:
    """A dataset whose label c is called places[c]."""

    data: Dataset
    classes: tuple[str, ...]
    places: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def fingerprint(self) -> str:
        return self.data.fingerprint

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        sample = self.data[index]
        if sample.label is None:
            return sample
        return dataclasses.replace(sample, label=self.places[sample.label])


def match_classes(net: IFAM, data: Dataset) -> tuple[Dataset, Tensor | None]:
    """The dataset with the network's labels, by name and never by place alone; and, for ImageNet-9
    and a network with ImageNet's classes, which of the nine each answer stands for.

    Names in another order, or some of them only, are mapped. Other classes are refused: accuracy
    would mean nothing.
    """
    kind, names = data.name.partition(":")[0], net.class_names
    if not data.classes:
        raise BadOption("data", data.name, "a dataset with labels")
    if kind == "imagenet9" and net.classes == IMAGENET_CLASSES:
        return data, read_in9_map(find_in9_map(data.name))
    if len(data.classes) == net.classes and in_order(data, names, net.classes):
        return data, None
    strange = next((name for name in data.classes if name not in names), None)
    if strange is not None or len(set(names)) < len(names):
        listed = ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")
        listed = listed or f"{net.classes}, without names"
        expected = f"a dataset with the network's classes ({listed}); {strange!r} is none of them"
        raise BadOption("data", data.name, expected)
    return Relabelled(data, names, tuple(names.index(name) for name in data.classes)), None


@dataclass(frozen=True)
class BatchFrame:
    """Into what pictures are brought: `to_batch` asks no more of a model."""

    preprocess: Preprocess
    device: torch.device
    dtype: torch.dtype


def frame_of(net: IFAM) -> BatchFrame:
    if net.preprocess is None:
        expected = "IFAM(..., preprocess=...): the backbone does not tell how pictures are prepared"
        raise BadOption("preprocess", None, expected)
    prototypes = net.stage1.prototypes
    return BatchFrame(net.preprocess, prototypes.device, prototypes.dtype)


def batches_of(
    net: IFAM,
    data: Dataset,
    *,
    batch: int = 32,
    places: Sequence[int] | None = None,
    workers: int = 0,
) -> Iterator[tuple[Tensor, Tensor, list[Any], Tensor | None]]:
    """Normalised images, labels, groups and masks (in the network's frame) of these places, or of
    all; `workers` processes read ahead."""
    frame = frame_of(net)
    on_cpu = BatchFrame(frame.preprocess, torch.device("cpu"), torch.float32)
    keys = chunked(range(len(data)) if places is None else places, batch)
    pin, collate = frame.device.type == "cuda", partial(_labelled_batch, on_cpu, data.name)
    batches = read_batches(data, keys, collate, workers=workers, pin=pin)
    for images, labels, groups, masks in batches:
        images = images.to(frame.device, frame.dtype)
        masks = None if masks is None else masks.to(frame.device)
        yield images, labels.to(frame.device), groups, masks


def labelled_batches(
    net: IFAM, data: Dataset, *, batch: int = 32, workers: int = 0
) -> Iterator[tuple[Tensor, ...]]:
    """(images, labels, groups) as `leave_one_out` takes them; without groups where the dataset has
    none."""
    for images, labels, groups, _ in batches_of(net, data, batch=batch, workers=workers):
        yield (images, labels) if None in groups else (images, labels, torch.tensor(groups))


def chunked(places: Sequence[int], batch: int) -> list[list[int]]:
    return [list(places[start : start + batch]) for start in range(0, len(places), batch)]


def _labelled_batch(
    frame: BatchFrame, name: str, samples: list[Any]
) -> tuple[Tensor, Tensor, list[Any], Tensor | None]:
    images, labels, masks = to_batch(frame, samples)
    if labels is None:
        raise BadOption("data", name, "a dataset with labels")
    return images, labels, [sample.group for sample in samples], masks


class TrainingPictures:
    """Augmented, normalised pictures by (epoch, index), for torch's DataLoader."""

    def __init__(self, data: Dataset, kind: Augment, frame: Preprocess, seed: int):
        self.data, self.frame, self.seed = data, frame, seed
        self.augment = augmentation(kind, frame)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int, int]:
        epoch, index = key
        sample = self.data[index]
        if sample.label is None:
            raise BadOption("data", f"{sample.id} without a label", "a label for every picture")
        with seeded(self.seed, epoch, index):
            image = self.augment(sample.image)
        return self.frame.normalise(image[None])[0], sample.label, index


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """A permutation that is known in advance, so that a run can be continued anywhere."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


@dataclass(frozen=True)
class StepShares:
    """How the pictures of a step are shared out: over `world` processes, of which this is `rank`,
    and `accumulate` passes of each."""

    batch: int
    accumulate: int = 1
    rank: int = 0
    world: int = 1

    def check(self, count: int) -> None:
        """Refuse a batch that cannot be shared out, or is larger than the dataset."""
        shares = self.accumulate * self.world
        if self.batch % shares:
            sharing = f"{self.world} processes with {self.accumulate} passes each share it"
            raise BadOption("batch", self.batch, f"a multiple of {shares}: {sharing}")
        if count < self.batch:
            expected = f"at most {count}: there are no more training pictures"
            raise BadOption("batch", self.batch, expected)

    def keys(
        self, count: int, *, seed: int, epoch: int, first: int = 0
    ) -> list[list[tuple[int, int]]]:
        """Keys of every forward pass of this process from step `first` on: `accumulate` of them
        make a step. The last, incomplete batch is left out."""
        self.check(count)
        order = epoch_order(count, seed, epoch).tolist()
        share, keys = self.batch // (self.accumulate * self.world), []
        for step in range(first, count // self.batch):
            for turn in range(self.accumulate):
                start = step * self.batch + (turn * self.world + self.rank) * share
                keys.append([(epoch, index) for index in order[start : start + share]])
        return keys


def read_batches(
    data: Any,
    keys: Sequence[list[Any]],
    collate: Callable[[list[Any]], Any],
    *,
    workers: int,
    pin: bool = False,
) -> Iterator[Any]:
    """`collate` of the samples of each list of keys, in this order whatever the number of reading
    processes (0: none but this one)."""
    loader: DataLoader[Any] = DataLoader(
        _Batches(data, collate),  # type: ignore[arg-type]
        batch_size=None,
        sampler=keys,
        collate_fn=_as_it_is,
        num_workers=min(workers, len(keys), os.cpu_count() or 1),
        pin_memory=pin,
        generator=torch.Generator(),
    )
    for batch in loader:
        if isinstance(batch, SeecauseError):
            raise batch
        yield batch


@dataclass(frozen=True)
class _Batches:
    """Batches by their keys, or the error of ours that reading one raised: torch would turn an
    error of several arguments into a RuntimeError with a traceback in it."""

    data: Any
    collate: Callable[[list[Any]], Any]

    def __getitem__(self, keys: list[Any]) -> Any:
        try:
            return self.collate([self.data[key] for key in keys])
        except SeecauseError as error:
            return error


def _as_it_is(batch: Any) -> Any:
    return batch
