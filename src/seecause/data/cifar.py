"""`cifar10:PATH[:train|val|trainval|test]` and `cifar100:...`: CIFAR (Krizhevsky 2009), the "python
version" of its release. It has no masks.

    cifar-10-batches-py/  data_batch_1 .. 5, test_batch, batches.meta        cifar-100-python/
    train, test, meta
PATH is that folder or the one that holds it. The files are pickles; they are read without running
them. The release has no validation split: `val` is every tenth training photo of a class (5,000 in
all), `train` the others, `trainval` all 50,000. Labels of CIFAR-100 are the fine ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seecause.data._pickles import ARRAYS, read_pickle
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

    @cached_property
    def fingerprint(self) -> str:
        """Of every pixel and label."""
        return hashlib.sha256(
            self.pixels.numpy().tobytes() + repr((self.labels, self.ids)).encode()
        ).hexdigest()[:16]

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
    meta = _pickle(root / release.meta, release, release.names)
    classes = tuple(name.decode() for name in meta[release.names])
    files = release.test if split == "test" else release.train
    batches = [_batch(root / file, release, len(classes)) for file in files]
    pixels = np.concatenate([pixels for pixels, _ in batches])
    labels = [label for _, some in batches for label in some]
    kept: Sequence[int] = range(len(labels))
    if split != "test":
        kept = part_of_train(kept, labels, split)
    ids = [
        f"{file}/{place}"
        for file, (_, some) in zip(files, batches, strict=True)
        for place in range(len(some))
    ]
    chosen = evenly(kept, limit)
    return Cifar(
        f"{release.name}:{path}:{split}",
        classes,
        torch.from_numpy(pixels)[torch.tensor(chosen)],
        tuple(labels[place] for place in chosen),
        tuple(ids[place] for place in chosen),
    )


def _batch(path: Path, release: _Release, classes: int) -> tuple[np.ndarray, list[int]]:
    """Pixels [n, 3, 32, 32] uint8 and labels of one file."""
    found = _pickle(path, release, b"data", release.labels)
    pixels, labels = found[b"data"], found[release.labels]
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.shape != (len(labels), 3 * SIDE * SIDE)
    ):
        raise DataMissing(
            str(path),
            f"pixels that are no [{len(labels)}, {3 * SIDE * SIDE}] array of bytes",
            release.layout,
        )
    if not all(isinstance(label, int) and 0 <= label < classes for label in labels):
        raise DataMissing(str(path), f"a label that is none of 0 to {classes - 1}", release.layout)
    return pixels.reshape(-1, 3, SIDE, SIDE), labels


def _pickle(path: Path, release: _Release, *keys: bytes) -> dict[bytes, Any]:
    """A dictionary with lists or arrays under `keys`."""
    found = read_pickle(path, release.layout, allowed=ARRAYS, encoding="bytes")
    lost = [
        key.decode()
        for key in keys
        if not isinstance(found, dict) or not isinstance(found.get(key), (list, np.ndarray))
    ]
    if lost:
        raise DataMissing(str(path), f"no entry {', '.join(lost)}", release.layout)
    return found
