"""Photos with a class each, and no masks.

`cifar10:PATH[:train|val|trainval|test]` and `cifar100:...`: CIFAR (Krizhevsky 2009), the "python
version" of its release. It has no masks.

    cifar-10-batches-py/  data_batch_1 .. 5, test_batch, batches.meta
    cifar-100-python/     train, test, meta
PATH is that folder or the one that holds it. The files are pickles; they are read without running
them. The release has no validation split: `val` is every tenth training photo of a class (5,000 in
all), `train` the others, `trainval` all 50,000. Labels of CIFAR-100 are the fine ones.

`food101:PATH[:test|train]`: Food-101 (Bossard et al. 2014) in the layout of its release. It has
no masks.

    images/<class>/<number>.jpg   meta/classes.txt   meta/test.txt   meta/train.txt
Lines of the lists are `<class>/<number>`; a label is the place of its class in `classes.txt`.

`tiny-imagenet:PATH[:train|val|trainval|test]`: Tiny ImageNet (200 classes, 64 px), PATH being
the release's folder `tiny-imagenet-200`.

    wnids.txt  words.txt  train/<wnid>/images/*.JPEG  train/<wnid>/<wnid>_boxes.txt
    val/images/*.JPEG  val/val_annotations.txt
The release's test photos have no labels, so its `val` folder is `test` here; `val` is every tenth
training photo of a class, `train` the others, `trainval` all of them. A label is the place of its
WordNet id among the sorted 200. Boxes are given; there are no masks.
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

from seecause.data._pickles import read_pickle
from seecause.data.dataset import Sample, Sliceable, evenly, part_of_train, path_and_split
from seecause.data.photos import Layout, Photo, Photos, pictures
from seecause.files import digest

CIFAR_SPLITS = ("train", "val", "trainval", "test")
CIFAR_SIDE = 32


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
    def layout(self) -> Layout:
        return Layout(f"give the folder {self.folder} of the release's python version")


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
class Cifar(Sliceable):
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

    def sample(self, index: int, /) -> Sample:
        return Sample(
            image=self.pixels[index].float() / 255, label=self.labels[index], id=self.ids[index]
        )


def open_cifar10(rest: str, *, limit: int | None = None) -> Cifar:
    return _open_cifar(_TEN, rest, limit)


def open_cifar100(rest: str, *, limit: int | None = None) -> Cifar:
    return _open_cifar(_HUNDRED, rest, limit)


def _open_cifar(release: _Release, rest: str, limit: int | None) -> Cifar:
    path, split = path_and_split(rest, CIFAR_SPLITS)
    root = path / release.folder if (path / release.folder).is_dir() else path
    classes = _class_names(root / release.meta, release)
    files = release.test if split == "test" else release.train
    batches = [_cifar_batch(root / file, release, len(classes)) for file in files]
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
    names = _read_cifar(path, release, release.names)[release.names]
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise release.layout.refusal(path, "class names that are no text")
    return tuple(name.decode(errors="replace") for name in names)


def _cifar_batch(path: Path, release: _Release, classes: int) -> tuple[np.ndarray, list[int]]:
    """Pixels [n, 3, 32, 32] uint8 and labels of one file."""
    content = _read_cifar(path, release, b"data", release.labels)
    pixels, labels = content[b"data"], content[release.labels]
    if not isinstance(labels, list) or not all(
        type(label) is int and 0 <= label < classes for label in labels
    ):
        raise release.layout.refusal(path, f"a label that is none of 0 to {classes - 1}")
    shape = (len(labels), 3 * CIFAR_SIDE * CIFAR_SIDE)
    if not isinstance(pixels, np.ndarray) or pixels.shape != shape:
        odd = f"pixels that are no {list(shape)} array of bytes"
        raise release.layout.refusal(path, odd)
    return pixels.reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE), labels


def _read_cifar(path: Path, release: _Release, *keys: bytes) -> dict[bytes, Any]:
    """A dictionary with lists or arrays under `keys`."""
    content = read_pickle(path, release.layout, arrays=True)
    if not isinstance(content, dict):
        raise release.layout.refusal(path, "not a dictionary")
    for key in keys:
        if not isinstance(content.get(key), (list, np.ndarray)):
            raise release.layout.refusal(path, f"no entry {key.decode()}")
    return content


FOOD_SPLITS = ("test", "train")
_FOOD_LAYOUT = Layout(
    f"give the folder that holds images/ and meta/, and one of the splits {', '.join(FOOD_SPLITS)}"
)


def open_food101(rest: str, *, limit: int | None = None) -> Photos:
    """The listed photos of one split."""
    root, split = path_and_split(rest, FOOD_SPLITS)
    classes = _food_lines(root / "meta" / "classes.txt")
    label = {name: place for place, name in enumerate(classes)}
    listing = root / "meta" / f"{split}.txt"
    photos = []
    for number, line in enumerate(_food_lines(listing), start=1):
        where, (name, _, photo) = f"{listing}, line {number}", line.partition("/")
        if name not in label or not photo:
            expected = Layout("expected <class>/<number> with a class of meta/classes.txt")
            raise expected.refusal(where, f"{line[:80]!r} cannot be read")
        path = _FOOD_LAYOUT.inside(root / "images", f"{line}.jpg", where)
        photos.append(Photo(path, line, label[name]))
    return Photos(f"food101:{root}:{split}", tuple(classes), evenly(photos, limit))


def _food_lines(path: Path) -> list[str]:
    return [line.strip() for line in _FOOD_LAYOUT.lines(path) if line.strip()]


TINY_SPLITS = ("train", "val", "trainval", "test")
_TINY_LAYOUT = Layout(
    "give the folder tiny-imagenet-200 with wnids.txt, words.txt, train/ and val/"
)
_WORDS_LAYOUT = Layout(f"{_TINY_LAYOUT}; lines are a WordNet id, a tab and its names")


def open_tiny_imagenet(rest: str, *, limit: int | None = None) -> Photos:
    """Photos with the box of their object."""
    root, split = path_and_split(rest, TINY_SPLITS)
    listed = root / "wnids.txt"
    wnids = sorted({line.strip() for line in _TINY_LAYOUT.lines(listed) if line.strip()})
    label = {wnid: place for place, wnid in enumerate(wnids)}
    if split == "test":
        photos = _tiny_listed(root / "val", label)
    else:
        photos = []
        for wnid in wnids:
            photos += _tiny_class(_TINY_LAYOUT.inside(root / "train", wnid, listed), label[wnid])
        photos = part_of_train(photos, [photo.label for photo in photos], split)
    words = dict(_WORDS_LAYOUT.fields(root / "words.txt", _word, separator="\t"))
    classes = tuple(words.get(wnid, wnid) for wnid in wnids)
    return Photos(f"tiny-imagenet:{root}:{split}", classes, evenly(photos, limit))


def _tiny_class(folder: Path, label: int) -> list[Photo]:
    listing = folder / f"{folder.name}_boxes.txt"
    layout = _TINY_LAYOUT.with_lines("file x0 y0 x1 y1")
    boxes = dict(layout.fields(listing, lambda f: (f[0], _tiny_box(f[1:])), separator="\t"))
    return [
        Photo(path, f"{folder.name}/{path.name}", label, box=boxes.get(path.name))
        for path in pictures(_TINY_LAYOUT.folder(folder / "images"))
    ]


def _tiny_listed(folder: Path, label: dict[str, int]) -> list[Photo]:
    listing = folder / "val_annotations.txt"
    layout = _TINY_LAYOUT.with_lines("file wnid x0 y0 x1 y1")
    lines = layout.fields(listing, lambda f: (f[0], f[1], _tiny_box(f[2:])), separator="\t")
    photos = []
    for name, wnid, box in lines:
        if wnid not in label:
            odd = f"{name[:80]!r} is {wnid[:80]!r}, which wnids.txt does not list"
            raise _TINY_LAYOUT.refusal(listing, odd)
        path = _TINY_LAYOUT.inside(folder / "images", name, listing)
        photos.append(Photo(path, name, label[wnid], box=box))
    return photos


def _tiny_box(corners: list[str]) -> tuple[float, float, float, float]:
    """x, y, width, height of a box whose two corners both belong to it."""
    left, top, right, bottom = (int(corner) for corner in corners)
    return float(left), float(top), float(right - left + 1), float(bottom - top + 1)


def _word(fields: list[str]) -> tuple[str, str]:
    wnid, names = fields
    return wnid, names.split(",")[0]
