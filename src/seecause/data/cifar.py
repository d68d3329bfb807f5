"""`cifar10:PATH[:train|val|trainval|test]` and `cifar100:...`: CIFAR (Krizhevsky 2009), the "python
version" of its release. It has no masks.

    cifar-10-batches-py/  data_batch_1 .. 5, test_batch, batches.meta
    cifar-100-python/     train, test, meta
PATH is that folder or the one that holds it. The files are pickles; they are read without running
them. The release has no validation split: `val` is every tenth training photo of a class (5,000 in
all), `train` the others, `trainval` all 50,000. Labels of CIFAR-100 are the fine ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from seecause._files import digest
from seecause.data._pickles import read_pickle
from seecause.data.dataset import Sample, evenly, part_of_train, path_and_split
from seecause.errors import DataMissing

SPLITS = ("train", "val", "trainval", "test")
SIDE = 32


@dataclass(frozen=True)
class _Release:
    name: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: bytes
    names: bytes

    @property
    def layout(self) -> str:
        return f"give the folder {self.folder} of the release's python version"


_TEN = _Release(
    "cifar10",
    "cifar-10-batches-py",
    tuple(f"data_batch_{n}" for n in range(1, 6)),
    ("test_batch",),
    "batches.meta",
    b"labels",
    b"label_names",
)
_HUNDRED = _Release(
    "cifar100",
    "cifar-100-python",
    ("train",),
    ("test",),
    "meta",
    b"fine_labels",
    b"fine_label_names",
)


@dataclass(frozen=True, eq=False)
class Cifar:
    """All photos of a split, in memory."""

    name: str
    classes: tuple[str, ...]
    pixels: Tensor  # [N, 3, 32, 32] uint8
    labels: tuple[int, ...]
    ids: tuple[str, ...]
    capabilities: ClassVar = frozenset({"labels"})

    @cached_property
    def fingerprint(self) -> str:
        """Of every pixel and label."""
        return digest(self.pixels.numpy().tobytes(), repr((self.labels, self.ids)))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return Sample(
            image=self.pixels[index].float() / 255, label=self.labels[index], id=self.ids[index]
        )


def open_cifar10(rest: str, *, limit: int | None = None) -> Cifar:
    return _open(_TEN, rest, limit)


def open_cifar100(rest: str, *, limit: int | None = None) -> Cifar:
    return _open(_HUNDRED, rest, limit)


def _open(release: _Release, rest: str, limit: int | None) -> Cifar:
    path, split = path_and_split(rest, SPLITS)
    root = path / release.folder if (path / release.folder).is_dir() else path
    classes = _class_names(root / release.meta, release)
    files = release.test if split == "test" else release.train
    batches = [_batch(root / file, release, len(classes)) for file in files]
    pixels = np.concatenate([pixels for pixels, _ in batches])
    labels: list[int] = []
    ids: list[str] = []
    for file, (_, batch_labels) in zip(files, batches, strict=True):
        labels += batch_labels
        ids += [f"{file}/{place}" for place in range(len(batch_labels))]
    places: Sequence[int] = range(len(labels))
    if split != "test":
        places = part_of_train(places, labels, split)
    chosen = evenly(places, limit)
    return Cifar(
        f"{release.name}:{path}:{split}",
        classes,
        torch.from_numpy(pixels)[torch.tensor(chosen, dtype=torch.int64)],
        tuple(labels[place] for place in chosen),
        tuple(ids[place] for place in chosen),
    )


def _class_names(path: Path, release: _Release) -> tuple[str, ...]:
    names = _read(path, release, release.names)[release.names]
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise DataMissing(str(path), "class names that are no text", release.layout)
    return tuple(name.decode(errors="replace") for name in names)


def _batch(path: Path, release: _Release, classes: int) -> tuple[np.ndarray, list[int]]:
    """Pixels [n, 3, 32, 32] uint8 and labels of one file."""
    content = _read(path, release, b"data", release.labels)
    pixels, labels = content[b"data"], content[release.labels]
    if not isinstance(labels, list) or not all(
        type(label) is int and 0 <= label < classes for label in labels
    ):
        raise DataMissing(str(path), f"a label that is none of 0 to {classes - 1}", release.layout)
    shape = (len(labels), 3 * SIDE * SIDE)
    if not isinstance(pixels, np.ndarray) or pixels.shape != shape:
        raise DataMissing(
            str(path), f"pixels that are no {list(shape)} array of bytes", release.layout
        )
    return pixels.reshape(-1, 3, SIDE, SIDE), labels


def _read(path: Path, release: _Release, *keys: bytes) -> dict[bytes, Any]:
    """A dictionary with lists or arrays under `keys`."""
    content = read_pickle(path, release.layout, arrays=True)
    if not isinstance(content, dict):
        raise DataMissing(str(path), "not a dictionary", release.layout)
    for key in keys:
        if not isinstance(content.get(key), (list, np.ndarray)):
            raise DataMissing(str(path), f"no entry {key.decode()}", release.layout)
    return content
