"""What a network reads: the splits of a dataset, labels as it counts its classes, batches in its
frame, and the augmented pictures of every epoch in an order that is known in advance.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from seecause.data.backgrounds import IMAGENET_CLASSES, find_in9_map, read_in9_map
from seecause.data.batch import in_order, to_batch
from seecause.data.dataset import Dataset, Sample, Subset, evenly, part_of_train, sample_labels
from seecause.data.registry import open_data
from seecause.errors import BadOption, DataMissing, SeecauseError
from seecause.faithful.augmentation import augmentation, seeded
from seecause.faithful.config import Augment
from seecause.faithful.net import IFAM
from seecause.models.preprocess import Preprocess

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
