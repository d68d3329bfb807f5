"""ImageNet and what is made of its photos.

`imagenet:PATH[:val|train]`: ImageNet-1k photos, `PATH/val/<wnid>/*.JPEG` and
`PATH/train/<wnid>/*.JPEG`, all of them or a part.

`imagenet-s:PATH`: ImageNet-S (Gao et al. 2022), ImageNet validation photos with class masks, in
the layout of its release.

    validation/<wnid>/*.JPEG   validation-segmentation/<wnid>/*.png
A mask is an RGB picture with id = R + 256 G: 0 is anything else, 1000 is ignored, k is the k-th
WordNet id of the sorted list of 919, 300 or 50 categories. Five classes that cannot be told apart
are merged into another. The object of a photo is the class of its folder; other classes are
background. Labels are ImageNet-1k classes, those of merged classes the class kept.

The list is that of the folders if all are there. Of a part of the dataset it must be given:
`ImageNetS_categories_im919.txt` in PATH, as the release's repository has it.

`imagenet-hard:PATH`: ImageNet-Hard (Taesiri et al. 2023) as it is released,
`PATH/data/validation-*.parquet`. It has no masks.

Columns used: `image` (the bytes of a picture file) and `label` (a list of ImageNet-1k classes). A
picture may have several right answers; `Sample.label` is the first, `answers(index)` gives all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from seecause.data.dataset import IGNORE, Sample, Sliceable, evenly, path_and_split
from seecause.data.images import BROKEN, decode_image, first_line, read_image
from seecause.data.photos import Layout, Photo, Photos, class_photos
from seecause.errors import BadImage, DataMissing
from seecause.files import digest

SPLITS = ("train", "val")
_IMAGENET_LAYOUT = Layout(
    "expected PATH/val/<wnid>/*.JPEG (or PATH/train/...), one folder for each WordNet id"
)


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """The 1,000 WordNet ids in the order of the labels."""
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


@cache
def imagenet_classes() -> tuple[str, ...]:
    """The names of the 1,000 classes in the order of the labels."""
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_descriptions())


def open_imagenet(rest: str, *, limit: int | None = None) -> Photos:
    """A label is the place of its WordNet id among the sorted 1,000, as every ImageNet-1k model has
    it."""
    path, split = path_and_split(rest, SPLITS, "val")
    root = path / split
    label = {wnid: place for place, wnid in enumerate(imagenet_wnids())}
    folders = _IMAGENET_LAYOUT.class_folders(root)
    if not folders:
        raise _IMAGENET_LAYOUT.refusal(root, "no class folders in it")
    for folder in folders:
        if folder.name not in label:
            odd = "not the WordNet id of an ImageNet-1k class"
            raise _IMAGENET_LAYOUT.refusal(folder, odd)
    photos: list[Photo] = []
    for folder in folders:
        photos += class_photos(folder, label[folder.name])
    return Photos(f"imagenet:{rest}", imagenet_classes(), evenly(photos, limit))


IGNORED_ID = 1000
S_SIZES = (50, 300, 919)
MERGED = {  # class -> the class it counts as
    "n04356056": "n04355933",
    "n04493381": "n02808440",
    "n03642806": "n03832673",
    "n04008634": "n03773504",
    "n03887697": "n15075141",
}
_S_LAYOUT = Layout(
    "expected PATH/validation/<wnid>/*.JPEG and PATH/validation-segmentation/<wnid>/*.png"
)


def open_imagenet_s(rest: str, *, limit: int | None = None) -> Photos:
    """The validation photos with masks of their own class."""
    root = Path(rest)
    folders = _S_LAYOUT.class_folders(root / "validation")
    masks = _S_LAYOUT.folder(root / "validation-segmentation")
    number = {wnid: place for place, wnid in enumerate(_categories(root, folders), start=1)}
    label = {wnid: place for place, wnid in enumerate(imagenet_wnids())}
    for folder in folders:
        if kept_class(folder.name) not in number or folder.name not in label:
            raise _S_LAYOUT.refusal(folder, "not the WordNet id of an ImageNet-S category")
    photos = []
    for folder in folders:
        for photo in class_photos(folder, label[kept_class(folder.name)]):
            mask = masks / folder.name / f"{photo.path.stem}.png"
            photos.append(replace(photo, mask=mask))
    return Photos(
        f"imagenet-s:{rest}",
        imagenet_classes(),
        evenly(photos, limit),
        lambda path: object_mask(path, number[kept_class(path.parent.name)]),
    )


def read_class_ids(path: Path) -> Tensor:
    """[H, W] int32: 0 other, 1.. categories, 1000 ignored."""
    pixels = np.asarray(read_image(path)).astype(np.int32)  # in 8 bits, 256 G would overflow
    return torch.from_numpy(pixels[..., 0] + 256 * pixels[..., 1])


def object_mask(path: Path, number: int) -> Tensor:
    """[H, W] uint8: 1 on the category, 0 on anything else, IGNORE on ignored pixels."""
    ids = read_class_ids(path)
    if ids.max() > IGNORED_ID:
        raise BadImage(
            str(path),
            f"a mask with id {int(ids.max())}",
            f"expected R + 256 G from 0 to {S_SIZES[-1]}, or {IGNORED_ID} for ignored pixels",
        )
    return (ids == number).to(torch.uint8).masked_fill(ids == IGNORED_ID, IGNORE)


def kept_class(wnid: str) -> str:
    """The category a WordNet id counts as."""
    return MERGED.get(wnid, wnid)


def _categories(root: Path, folders: list[Path]) -> tuple[str, ...]:
    """Sorted WordNet ids; the k-th has id k. Of several lists, that of just these folders."""
    own = {kept_class(folder.name) for folder in folders}
    lists = {
        file: set(_S_LAYOUT.fields(file, lambda fields: fields[0]))
        for file in sorted(root.glob("ImageNetS_categories_im*.txt"))
    }
    fitting = [file for file, listed in lists.items() if listed == own] or list(lists)
    if len(fitting) > 1:
        names = ", ".join(file.name for file in fitting)
        raise DataMissing(str(root), f"has {names}, of which none fits", "leave the one it is of")
    categories = tuple(sorted(lists[fitting[0]] if fitting else own))
    if len(categories) not in S_SIZES:
        raise DataMissing(
            str(fitting[0] if fitting else root / "validation"),
            f"{len(categories)} categories; the ids of masks count through all"
            f" {', '.join(map(str, S_SIZES[:-1]))} or {S_SIZES[-1]}",
            "put ImageNetS_categories_im919.txt (one WordNet id a line) into PATH",
        )
    return categories


_HARD_LAYOUT = Layout("expected PATH/data/validation-*.parquet with the columns image and label")


@dataclass(frozen=True)
class _ParquetRow:
    """Where a picture lies; its bytes are not read yet."""

    path: Path
    group: int
    row: int
    answers: tuple[int, ...]

    @property
    def id(self) -> str:
        return f"{self.path.name}:{self.group}:{self.row}"


@dataclass(frozen=True, eq=False)
class ImageNetHard(Sliceable):
    """Pictures inside Parquet files, read one row group at a time."""

    name: str
    rows: tuple[_ParquetRow, ...]
    capabilities: ClassVar = frozenset({"labels"})

    @property
    def classes(self) -> tuple[str, ...]:
        return imagenet_classes()

    @cached_property
    def fingerprint(self) -> str:
        """Of files, their sizes, rows and answers."""
        sizes = {row.path: row.path.stat().st_size for row in self.rows}
        return digest(*(f"{row.id} {row.answers} {sizes[row.path]}" for row in self.rows))

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(row.id for row in self.rows)

    @property
    def labels(self) -> tuple[int, ...]:
        return tuple(row.answers[0] for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, /) -> Sample:
        row = self.rows[index]
        entry = _row_group(row.path, row.group)[row.row].as_py()
        content = entry.get("bytes") if isinstance(entry, dict) else None
        if not isinstance(content, bytes):
            raise BadImage(row.id, "no bytes of a picture", _HARD_LAYOUT)
        pixels = torch.from_numpy(np.array(decode_image(content, row.id)))  # [H, W, 3] uint8
        return Sample(pixels.permute(2, 0, 1).float() / 255, row.answers[0], id=row.id)

    def answers(self, index: int) -> tuple[int, ...]:
        """All classes that count as right."""
        return self.rows[index].answers


def open_imagenet_hard(rest: str, *, limit: int | None = None) -> ImageNetHard:
    """All validation pictures, in the order of the files."""
    folder = Path(rest) / "data"
    files = sorted(folder.glob("validation-*.parquet"))
    if not files:
        raise _HARD_LAYOUT.refusal(folder, "no validation-*.parquet in it")
    rows: list[_ParquetRow] = []
    for path in files:
        rows += _parquet_rows(path)
    return ImageNetHard(f"imagenet-hard:{rest}", evenly(rows, limit))


@contextmanager
def _parquet(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, *BROKEN) as broken:
        raise _HARD_LAYOUT.refusal(path, f"cannot be read ({first_line(broken)})") from broken


def _parquet_rows(path: Path) -> list[_ParquetRow]:
    with _parquet(path) as file:
        names = file.schema_arrow.names
        missing = {"image", "label"} - set(names)
        groups = [] if missing else range(file.num_row_groups)
        labels = [file.read_row_group(group, columns=["label"])["label"] for group in groups]
        listed = [column.to_pylist() for column in labels]
    if missing:
        raise _HARD_LAYOUT.refusal(path, f"has the columns {', '.join(names)[:120]}")
    rows = []
    for group, column in enumerate(listed):
        for place, label in enumerate(column):
            answers = _checked_answers(label, f"{path}:{group}:{place}")
            rows.append(_ParquetRow(path, group, place, answers))
    return rows


def _checked_answers(label: object, where: str) -> tuple[int, ...]:
    answers = tuple(label) if isinstance(label, list) else ()
    if not answers or not all(type(answer) is int and 0 <= answer < 1000 for answer in answers):
        raise DataMissing(
            where,
            f"its labels are {str(answers)[:60]}",
            "expected ImageNet-1k classes, at least one",
        )
    return answers


@lru_cache(maxsize=1)
def _row_group(path: Path, group: int) -> pa.ChunkedArray:
    """The pictures of one row group; kept, because the next one asked for is most likely its
    neighbour."""
    with _parquet(path) as file:
        return file.read_row_group(group, columns=["image"])["image"]
