"""Datasets of image files, read one at a time, and the lists that name the files of a release."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause.data.dataset import Sample, Sliceable
from seecause.data.images import BROKEN, find_images, first_line, read_image
from seecause.errors import BadImage, DataMissing, SeecauseError
from seecause.files import digest, digest_file

Box = tuple[float, float, float, float]
Point = tuple[float, float, float]
BIT, THREE = ("0", "1").index, ("0", "1", "2").index  # converters of `Layout.table`


@dataclass(frozen=True)
class Photo:
    """Where a sample is stored, and what lists say about it. Nothing is read yet."""

    path: Path
    id: str
    label: int | None = None
    mask: Path | None = None
    group: tuple[int, int] | None = None
    box: Box | None = None
    points: tuple[Point, ...] | None = None


@dataclass(frozen=True, eq=False)
class Photos(Sliceable):
    """A dataset of image files. A file that is missing or damaged raises when it is read."""

    name: str
    classes: tuple[str, ...]
    photos: tuple[Photo, ...]
    read_mask: Callable[[Path], Tensor] | None = None  # file -> [H, W] as in `Sample`
    places: tuple[str, ...] = ()  # names of the second code of groups
    read_picture: Callable[[Path], Image.Image] = read_image
    lists: tuple[Path, ...] = ()  # files that hold the masks

    @property
    def capabilities(self) -> frozenset[str]:
        masked = self.read_mask is not None
        present = {
            "labels": any(photo.label is not None for photo in self.photos),
            "groups": any(photo.group for photo in self.photos),
            "masks": masked and any(photo.mask for photo in self.photos),
            "boxes": any(photo.box for photo in self.photos),
            "points": any(photo.points for photo in self.photos),
        }
        return frozenset(word for word, there in present.items() if there)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(photo.id for photo in self.photos)

    @property
    def labels(self) -> tuple[int | None, ...]:
        return tuple(photo.label for photo in self.photos)

    @property
    def groups(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(photo.group for photo in self.photos)

    def __len__(self) -> int:
        return len(self.photos)

    def sample(self, index: int, /) -> Sample:
        photo = self.photos[index]
        pixels = np.array(self.read_picture(photo.path))  # [H, W, 3] uint8
        image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
        mask = None if self.read_mask is None or photo.mask is None else self.read_mask(photo.mask)
        if mask is not None and mask.shape != image.shape[1:]:
            raise BadImage(
                str(photo.mask),
                f"a mask {list(mask.shape)} for an image {list(image.shape[1:])}",
                "give masks of the images' own size",
            )
        points = None if photo.points is None else torch.tensor(photo.points)
        return Sample(
            image, photo.label, photo.group, mask, box=photo.box, points=points, id=photo.id
        )

    @cached_property
    def fingerprint(self) -> str:
        """Of names, labels and file sizes: reading all bytes of a large dataset takes too long."""
        lists = [f"{path.name} {_bytes(path)}" for path in self.lists]
        photos = [f"{_facts(p)} {_bytes(p.path)} {_bytes(p.mask)}" for p in self.photos]
        return digest(*lists, *photos)

    def digests(self, start: int, stop: int) -> list[str]:
        """Of the contents of images and masks, and of what lists say about them."""
        lists = repr([(path.name, _bytes(path)) for path in self.lists])
        return [
            digest(_facts(photo), _content(photo.path), _content(photo.mask), lists)
            for photo in self.photos[start:stop]
        ]


def pictures(folder: Path) -> list[Path]:
    """The images of one folder, sorted, without hidden files; raises if there are none."""
    return [path for path in find_images([folder]) if not path.name.startswith(".")]


def class_photos(folder: Path, label: int) -> list[Photo]:
    """The images of one class folder."""
    return [Photo(path, f"{folder.name}/{path.name}", label) for path in pictures(folder)]


def _facts(photo: Photo) -> str:
    return repr((photo.id, photo.label, photo.group, photo.box, photo.points))


def _content(path: Path | None) -> str:
    return digest_file(path) if path is not None and path.is_file() else "no file"


def _bytes(path: Path | None) -> int | None:
    return path.stat().st_size if path is not None and path.is_file() else None


def whole(below: int) -> Callable[[str], int]:
    """A converter of `Layout.table`: whole numbers from 0 to less than `below`."""

    def convert(field: str) -> int:
        number = int(field)
        if not 0 <= number < below:
            raise ValueError(field)
        return number

    return convert


def finite(field: str) -> float:
    """A converter of `Layout.table`: numbers that are not infinite or NaN."""
    number = float(field)
    if number - number != 0:
        raise ValueError(field)
    return number


class Layout(str):
    """What the files of a release look like, in words. Files are read through it, so that every
    error ends with what was expected."""

    __slots__ = ()

    def refusal(self, where: str | Path, what: str) -> DataMissing:
        """The error for a file, or a line of one, that has another layout."""
        return DataMissing(str(where), what, self)

    @contextmanager
    def reading(self, where: str | Path) -> Iterator[None]:
        """Whatever a parser raises in this block becomes a refusal of `where`."""
        try:
            yield
        except SeecauseError:
            raise
        except (*BROKEN, csv.Error) as broken:
            raise self.refusal(where, f"cannot be read ({first_line(broken)})") from broken

    def folder(self, path: Path) -> Path:
        """A folder that must exist."""
        if not path.is_dir():
            raise self.refusal(path, "no such folder")
        return path

    def class_folders(self, root: Path) -> list[Path]:
        """Sub-folders of `root`, sorted, without hidden ones."""
        inside = self.folder(root).iterdir()
        return sorted(path for path in inside if path.is_dir() and not path.name.startswith("."))

    def text(self, path: Path) -> str:
        """The content of a text file that must exist and hold something."""
        if not path.is_file():
            raise self.refusal(path, "no such file")
        with self.reading(path):
            text = path.read_text(encoding="utf-8-sig")
        if not text.strip():
            raise self.refusal(path, "it lists nothing")
        return text

    def json(self, path: Path) -> Any:
        with self.reading(path):
            return json.loads(self.text(path))

    def table(
        self,
        path: Path,
        columns: Mapping[str, Callable[[str], Any]],
        *,
        separator: str | None = None,
        header: bool = False,
        comment: str = "",
    ) -> list[tuple[Any, ...]]:
        """The rows of a list of files.

        Args:
            path: The file.
            columns: A converter for each column; it raises ValueError for a field it cannot use.
            separator: Between fields: "," (with quotes, as in CSV), another one, or white space.
            header: Whether the first row names the columns; others than `columns` are ignored.
            comment: Rows that begin with it are skipped.

        Raises:
            DataMissing: If the file is missing or empty, a column is missing, or a row cannot be
                converted; the message has the number of the line.
        """
        rows, places = [], None if header else range(len(columns))
        expected = Layout(f"{self}; the fields of a line are {', '.join(columns)}")
        for number, line in enumerate(self.text(path).splitlines(), start=1):
            try:
                comma = separator == "," and line
                fields = next(csv.reader([line])) if comma else line.split(separator)
                fields = [field.strip() for field in fields]
                if not any(fields) or (comment and line.startswith(comment)):
                    continue
                if places is None:
                    missing = [name for name in columns if name not in fields]
                    if missing:
                        raise expected.refusal(path, f"no column {', '.join(missing)}")
                    places = [fields.index(name) for name in columns]
                    continue
                if not header and len(fields) != len(columns):
                    raise ValueError(line)
                taken = zip(places, columns.values(), strict=True)
                rows.append(tuple(take(fields[place]) for place, take in taken))
            except (ValueError, LookupError, OverflowError, csv.Error):
                where = f"{path}, line {number}"
                raise expected.refusal(where, f"{line[:80]!r} cannot be read") from None
        if not rows:
            raise self.refusal(path, "it lists nothing")
        return rows

    def inside(self, folder: Path, name: str, where: str | Path) -> Path:
        """The file that a list calls `name` in `folder`. A name that leads out of the folder is
        refused: lists come from elsewhere, and could show any image of this disk."""
        path = Path(name)
        odd = not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name
        if odd or not name.isprintable():
            raise self.refusal(where, f"{name[:80]!r} is not the name of a file inside {folder}")
        return folder / path
