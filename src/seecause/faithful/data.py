"""What a run reads: its train and validation splits, the order of every epoch, and batches of it
for each process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from seecause.data.dataset import Dataset, Subset, evenly, part_of_train, sample_labels
from seecause.data.registry import open_data
from seecause.errors import BadOption, DataMissing
from seecause.faithful.augment import augmentation, keyed
from seecause.faithful.config import Augment
from seecause.faithful.reading import read
from seecause.models.preprocess import Preprocess

_HELD_OUT = {
    "imagenet": "train",
    "pets": "trainval",
    "food101": "train",
}  # releases whose other split is their test: validation is cut from this one
_POOL = 4096  # training pictures of a Critters regime that has no end
_NO_TRAINING = {"imagenet-hard", "imagenet-s", "imagenet9", "waterbird200"}


def open_train(data: str, *, limit: int | None = None) -> Dataset:
    """The train split of a dataset that is named without its split."""
    return _open(data, "train", limit)


def open_val(data: str, *, limit: int | None = None) -> Dataset:
    """The validation split; where a release has none, every tenth training photo of a class."""
    return _open(data, "val", limit)


def open_validation(data: str, val: str | None, *, limit: int | None = None) -> Dataset:
    """What is chosen by: the validation split of `data`, or the dataset `val` that is named for
    that."""
    return open_val(data, limit=limit) if val is None else _labelled(open_data(val, limit=limit))


def open_test(data: str, *, limit: int | None = None) -> Dataset:
    """The test split, which training never opens."""
    kind, _, path = data.partition(":")
    if kind == "folder":
        return open_data(f"folder:{_sub_folder(Path(path), 'test')}", limit=limit)
    return open_data(
        data if kind in _NO_TRAINING or kind == "imagenet" else f"{data}:test", limit=limit
    )


def _open(data: str, split: str, limit: int | None) -> Dataset:
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
            raise DataMissing(
                whole.name,
                f"too few photos of any class to keep one in ten for {split}",
                "add photos, or name a validation set with val=",
            )
        return _labelled(Subset(f"{whole.name} ({split})", whole, evenly(rows, limit)))
    return _labelled(open_data(f"{data}:{split}", limit=limit))


def _sub_folder(path: Path, split: str) -> Path:
    if not (path / split).is_dir():
        raise DataMissing(
            str(path / split),
            "no such folder",
            "give a folder with train, val and test in it, each with one folder for each class",
        )
    return path / split


def _labelled(data: Dataset) -> Dataset:
    if not data.classes:
        raise BadOption(
            "data", data.name, "a dataset with labels, such as a folder of class folders"
        )
    return data


class Training:
    """Augmented, normalised pictures by (epoch, index), for torch's DataLoader."""

    def __init__(self, data: Dataset, kind: Augment, frame: Preprocess, seed: int):
        self.data, self.frame, self.seed = data, frame, seed
        self.change = augmentation(kind, frame)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int, int]:
        epoch, index = key
        sample = self.data[index]
        if sample.label is None:
            raise BadOption("data", f"{sample.id} without a label", "a label for every picture")
        with keyed(self.seed, epoch, index):
            return self.frame.normalise(self.change(sample.image)[None])[0], sample.label, index


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """A permutation that is known in advance, so that a run can be continued anywhere."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def passes(
    count: int,
    *,
    batch: int,
    accumulate: int,
    rank: int,
    world: int,
    seed: int,
    epoch: int,
    first: int = 0,
) -> list[list[tuple[int, int]]]:
    """Keys of every forward pass of one process from step `first` on: `accumulate` of them make a
    step. The last, incomplete batch is left out."""
    if batch % (accumulate * world):
        raise BadOption(
            "batch",
            batch,
            f"a multiple of {accumulate * world}: {world} processes with {accumulate} passes each"
            " share it",
        )
    if count < batch:
        raise BadOption("batch", batch, f"at most {count}: there are no more training pictures")
    order, share = epoch_order(count, seed, epoch).tolist(), batch // (accumulate * world)
    found = []
    for step in range(first, count // batch):
        for turn in range(accumulate):
            start = step * batch + (turn * world + rank) * share
            found.append([(epoch, index) for index in order[start : start + share]])
    return found


def feed(
    data: Training, keys: Sequence[list[Any]], *, workers: int, pin: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(images, labels, ids) for each list of keys, in this order whatever the number of reading
    processes."""
    yield from read(data, keys, default_collate, workers=workers, pin=pin)
