"""Datasets of files: photos and masks, read one at a time, and the lists that name them."""

from __future__ import annotations

import csv
import json
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause.data.dataset import Sample, Sliceable
from seecause.data.images import find_images, read_image
from seecause.errors import BadImage, DataMissing
from seecause.files import digest, digest_file

T = TypeVar("T")
LONGEST_NAME = 240  # bytes, with a suffix that is added; file systems allow 255
BITS, THREE = ("0", "1"), ("0", "1", "2")  # what fields of classes, places and splits hold


@dataclass(frozen=True)
class Photo:
    """Where a sample lies; nothing is read yet."""

    path: Path
    id: str
    label: int | None = None
    mask: Path | None = None
    group: tuple[int, int] | None = None
    box: tuple[float, float, float, float] | None = None
    points: tuple[tuple[float, float, float], ...] | None = None


@dataclass(frozen=True, eq=False)
class Photos(Sliceable):
    """A dataset of photos. A file that is missing or broken raises when it is asked for, with its
    name, so that one hole stays one hole."""

    name: str
    classes: tuple[str, ...]
    photos: tuple[Photo, ...]
    read_mask: Callable[[Path], Tensor] | None = None  # file -> [H, W] as in `Sample`
    places: tuple[str, ...] = ()  # the names of the second code of groups
    read_picture: Callable[[Path], Image.Image] = read_image
    lists: tuple[Path, ...] = ()  # files that `read_mask` has read already

    @property
    def capabilities(self) -> frozenset[str]:
        """What some photo has; no file is read to tell."""
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
        """Of all photos, without reading them."""
        return tuple(photo.label for photo in self.photos)

    @property
    def groups(self) -> tuple[tuple[int, int] | None, ...]:
        """Of all photos, without reading them."""
        return tuple(photo.group for photo in self.photos)

    def __len__(self) -> int:
        return len(self.photos)

    def sample(self, index: int, /) -> Sample:
        photo = self.photos[index]
        pixels = np.asarray(self.read_picture(photo.path)).copy()  # [H, W, 3] uint8
        image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
        mask = None if self.read_mask is None or photo.mask is None else self.read_mask(photo.mask)
        if mask is not None and mask.shape != image.shape[1:]:
            raise BadImage(
                str(photo.mask),
                f"{list(mask.shape)} pixels for a photo of {list(image.shape[1:])}",
                "give masks of the photos' own size",
            )
        points = None if photo.points is None else torch.tensor(photo.points)
        return Sample(
            image=image,
            label=photo.label,
            group=photo.group,
            mask=mask,
            box=photo.box,
            points=points,
            id=photo.id,
        )

    @cached_property
    def fingerprint(self) -> str:
        """Of names, labels and file sizes: reading every byte of a large dataset would take longer
        than most runs."""
        lists = [f"{path.name} {_bytes(path)}" for path in self.lists]
        photos = [
            f"{_facts(photo)} {_bytes(photo.path)} {_bytes(photo.mask)}" for photo in self.photos
        ]
        return digest(*lists, *photos)

    def digests(self, start: int, stop: int) -> list[str]:
        """Of some photos, their masks and what is known about them; files are read to their end."""
        lists = repr([_list_digest(path, path.stat().st_mtime_ns) for path in self.lists])
        return [
            digest(_facts(photo), _file_digest(photo.path), _file_digest(photo.mask), lists)
            for photo in self.photos[start:stop]
        ]


def pictures(folder: Path) -> list[Path]:
    """The pictures of one folder, sorted, without hidden files; an empty folder names itself."""
    return [path for path in find_images([folder]) if not path.name.startswith(".")]


def class_photos(folder: Path, label: int) -> list[Photo]:
    """The pictures of one class, called as their folder and file are."""
    return [Photo(path, f"{folder.name}/{path.name}", label) for path in pictures(folder)]


def _facts(photo: Photo) -> str:
    return repr((photo.id, photo.label, photo.group, photo.box, photo.points))


def _file_digest(path: Path | None) -> str:
    return "no file" if path is None or _bytes(path) is None else digest_file(path)


@lru_cache(maxsize=8)
def _list_digest(path: Path, _: int) -> str:
    """Every photo asks for it; read again when the file has changed."""
    return _file_digest(path)


def _bytes(path: Path | None) -> int | None:
    """Of a file; None where there is none. One question to the system: there are many files."""
    try:
        facts = None if path is None else path.stat()
    except (OSError, ValueError):
        return None
    return facts.st_size if facts is not None and stat.S_ISREG(facts.st_mode) else None


def whole_number(field: str, below: int) -> int:
    """A field that numbers things, from 0 to less than `below`; ValueError for anything else."""
    number = int(field)
    if not 0 <= number < below:
        raise ValueError(field)
    return number


class Layout(str):
    """What the files of a release look like, in words. They are read through it, so that every
    error ends with what was expected."""

    __slots__ = ()

    def refusal(self, where: str | Path, what: str) -> DataMissing:
        """The error for a file, or a line of one, that is not so."""
        return DataMissing(str(where), what, self)

    def with_lines(self, form: str) -> Layout:
        """The same, and how the lines of a list are written."""
        return Layout(f"{self}; lines are `{form}`")

    def folder(self, path: Path) -> Path:
        """A folder that must be there."""
        if not path.is_dir():
            raise self.refusal(path, "no such folder")
        return path

    def file(self, path: Path) -> Path:
        """A file that must be there."""
        if not path.is_file():
            raise self.refusal(path, "no such file")
        return path

    def class_folders(self, root: Path) -> list[Path]:
        """Sub-folders of `root`, sorted, without hidden ones."""
        inside = self.folder(root).iterdir()
        return sorted(path for path in inside if path.is_dir() and not path.name.startswith("."))

    def json(self, path: Path) -> Any:
        try:
            return json.loads(self.file(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as broken:
            raise self.refusal(path, f"not JSON ({broken})") from broken

    def lines(self, path: Path) -> list[str]:
        """All lines of a text file; a file that is missing, empty or no text says so."""
        try:
            lines = self.file(path).read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise self.refusal(path, "not a text file") from None
        if not any(line.strip() for line in lines):
            raise self.refusal(path, "it lists nothing")
        return lines

    def fields(
        self,
        path: Path,
        take: Callable[[list[str]], T],
        *,
        separator: str | None = None,
        skip: int = 0,
    ) -> list[T]:
        """What `take` makes of the fields of each line; it raises ValueError for a line it cannot
        use."""
        rows = []
        for number, line in enumerate(self.lines(path)[skip:], start=skip + 1):
            if line.strip():
                try:
                    rows.append(take(line.split(separator)))
                except (ValueError, IndexError, OverflowError):
                    where = f"{path}, line {number}"
                    raise self.refusal(where, f"{line[:80]!r} cannot be read") from None
        if not rows:
            raise self.refusal(path, "it lists nothing")
        return rows

    def csv(self, path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
        """Where each row stands and its fields of `columns`, which must be there; spaces around
        names and fields are cut."""
        rows = csv.reader(self.lines(path), skipinitialspace=True)
        try:
            header = [name.strip() for name in next(rows)]
            missing = [name for name in columns if name not in header]
            if missing:
                listed = f"no column {', '.join(missing)} among {', '.join(header)[:120]}"
                raise self.refusal(path, listed)
            places = {name: header.index(name) for name in columns}
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                if row and len(row) <= max(places.values()):
                    raise self.refusal(where, "fewer fields than the header has")
                if row:
                    yield where, {name: row[place].strip() for name, place in places.items()}
        except csv.Error as broken:
            where = f"{path}, line {rows.line_num}"
            raise self.refusal(where, f"cannot be read ({broken})") from broken

    def code(self, field: str, values: Sequence[str], where: str) -> int:
        """The place of a field among the values it may have."""
        if field not in values:
            expected = ", ".join(values)
            raise self.refusal(where, f"{field[:40]!r} where one of {expected} was expected")
        return values.index(field)

    def inside(self, folder: Path, name: str, where: str | Path) -> Path:
        """The file that a list calls `name` in `folder`. A name that leads out of it is refused:
        lists come from elsewhere, and would show any picture of this disk."""
        parts = name.split("/")
        odd = any(part in ("", ".", "..") or len(part.encode()) > LONGEST_NAME for part in parts)
        if odd or not name.isprintable() or "\\" in name or Path(name).drive:
            raise self.refusal(where, f"{name[:80]!r} is no name of a file inside {folder}")
        return folder / name
