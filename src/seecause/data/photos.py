"""Datasets of image files: your own folders and pairs of them, and common functions of the readers
of published datasets.

`folder:PATH`: one sub-folder for each class, or all images together without labels. Masks and
groups are read if they are there:

    PATH/dog/1.jpg, PATH/cat/2.jpg      images; or all in PATH, without labels
    PATH/masks/dog/1.png                masks with the same stems; PATH/masks/1.png without labels
    PATH/groups.csv                     file,background: an attribute correlated with the class

`pairs:WITH:WITHOUT`: two versions of each image that should get the same prediction: with and
without a mark, from two devices, on two backgrounds. Both are folders like `folder:PATH`, with the
same file names. Samples are the first version; `other(index)` is the second. `paired(data, change)`
makes the second version by a function instead.
"""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause.data.dataset import (
    MASKS,
    Box,
    Dataset,
    Group,
    Labels,
    Names,
    Sample,
    Subset,
    capabilities,
    images_in,
    mask_of,
    part_of_train,
    read_mask,
    sample_digests,
)
from seecause.errors import BadImage, BadOption, DataMissing, SeecauseError
from seecause.files import digest, digest_file
from seecause.models.preprocess import first_line, kinds, read_image

Change = Callable[[Tensor], Tensor]  # raw pixels [3, H, W] in [0, 1] -> the same image, changed


@dataclass(frozen=True)
class Photo:
    """The location of a sample, and the entries of lists about it. `mask` is the file with its
    mask, which may contain other masks, too."""

    path: Path
    id: str
    label: int | None = None
    mask: Path | None = None
    group: Group | None = None
    box: Box | None = None
    points: tuple[tuple[float, float, float], ...] | None = None


def read_photo(photo: Photo) -> Image.Image:
    """The image in a file of one image."""
    return read_image(photo.path)


def read_photo_mask(photo: Photo) -> Tensor:
    """The mask in a file of one mask."""
    assert photo.mask is not None
    return read_mask(photo.mask)


@dataclass(frozen=True, eq=False)
class Photos:
    """A dataset of image files. A file that is missing or damaged raises when it is read."""

    name: str
    classes: Names
    photos: Sequence[Photo]
    read_mask: Callable[[Photo], Tensor] = read_photo_mask  # [H, W] as in `Sample`
    places: Names = ()  # names of the second code of groups
    read_image: Callable[[Photo], Image.Image] = read_photo

    def __post_init__(self) -> None:
        if not self.photos:
            expected = "an image; check the folder, its lists and the split (docs/data.md)"
            raise DataMissing(self.name, "no image is listed", expected)

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"masks"} if any(photo.mask for photo in self.photos) else ())

    @property
    def ids(self) -> Names:
        return tuple(photo.id for photo in self.photos)

    @property
    def labels(self) -> Labels:
        return tuple(photo.label for photo in self.photos)

    @property
    def groups(self) -> tuple[Group | None, ...]:
        return tuple(photo.group for photo in self.photos)

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int, /) -> Sample:
        photo = self.photos[index]
        pixels = np.array(self.read_image(photo))  # [H, W, 3] uint8
        image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
        mask = None if photo.mask is None else self.read_mask(photo)
        if mask is not None and mask.shape != image.shape[1:]:
            odd = f"a mask {list(mask.shape)} for an image {list(image.shape[1:])}"
            raise BadImage(f"{photo.mask}, {photo.id}", odd, "give masks of the images' own size")
        points = None if photo.points is None else torch.tensor(photo.points)
        more: dict[str, Any] = {"box": photo.box, "points": points, "id": photo.id}
        return Sample(image, photo.label, photo.group, mask, **more)

    def take(self, rows: Sequence[int]) -> Photos:
        """Some of the photos."""
        return replace(self, photos=tuple(self.photos[row] for row in rows))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of names, labels and file sizes: reading all bytes of a large dataset is
        slow."""
        files = [path for photo in self.photos for path in (photo.path, photo.mask) if path]
        sizes: dict[Path | None, int] = {
            path: path.stat().st_size for path in dict.fromkeys(files) if path.is_file()
        }
        return digest(*(_facts(p, sizes.get(p.path), sizes.get(p.mask)) for p in self.photos))

    def digests(self, start: int, stop: int) -> list[str]:
        """Digests of the contents of images and masks, and of the entries of lists about them."""
        chosen = self.photos[start:stop]
        return [
            digest(_facts(photo, _content(photo.path), _content(photo.mask))) for photo in chosen
        ]


def _facts(photo: Photo, *contents: Any) -> str:
    return repr((photo.id, photo.label, photo.group, photo.box, photo.points, *contents))


def _content(path: Path | None) -> str:
    if path is None or not path.is_file():
        return "no file"
    facts = path.stat()
    return _digest(path, facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=16)  # a file may hold many images or masks
def _digest(path: Path, size: int, changed: int) -> str:
    return digest_file(path)


class Layout(str):
    """The expected files of a release, in words. Files are read through it, so that every error
    ends with what was expected."""

    __slots__ = ()

    def refusal(self, where: str | Path, what: str) -> DataMissing:
        """The error for a file that is missing or has another layout."""
        return DataMissing(str(where), what, self)

    @contextmanager
    def reading(self, where: str | Path) -> Iterator[None]:
        """Turn whatever a parser raises in this block into a refusal of `where`."""
        try:
            yield
        except SeecauseError:
            raise
        except Exception as broken:  # decoders raise anything on a damaged file
            raise self.refusal(where, f"cannot be read ({first_line(broken)})") from broken

    def folders(self, root: Path) -> list[Path]:
        """The sub-folders of a folder that must exist, sorted, without hidden ones."""
        if not root.is_dir():
            raise self.refusal(root, "no such folder")
        return sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")

    def text(self, path: Path) -> str:
        """The content of a text file that must exist and not be empty."""
        if not path.is_file():
            raise self.refusal(path, "no such file")
        with self.reading(path):
            text = path.read_text(encoding="utf-8-sig")
        if not text.strip():
            raise self.refusal(path, "it lists nothing")
        return text

    def json(self, path: Path) -> Any:
        """The value in a JSON file."""
        with self.reading(path):
            return json.loads(self.text(path))

    def table(
        self,
        path: Path,
        columns: Mapping[str, Callable[[str], Any]],
        *,
        separator: str | None = None,
        header: bool = False,
    ) -> list[tuple[Any, ...]]:
        """The rows of a list of files. Lines that begin with # are comments.

        Args:
            path: The file.
            columns: A converter for each column; it raises ValueError for a field it cannot use.
            separator: Between fields: "," (with quotes, as in CSV), another one, or white space.
            header: Whether the first line names the columns, of which those of `columns` are read.

        Raises:
            DataMissing: If the file is missing or lists nothing, a column is missing, or a line
                cannot be converted; the message has the line.
        """
        lines = [line for line in self.text(path).splitlines() if line.strip() and line[0] != "#"]
        fields = (line.split(separator) for line in lines)
        rows = csv.reader(lines) if separator == "," else fields
        found = []
        with self.reading(path):
            names = [name.strip() for name in next(rows, [])] if header else list(columns)
            if missing := columns.keys() - set(names):
                raise self.refusal(path, f"no column {min(missing)}")
            for row in rows:
                try:
                    fields = dict(zip(names, row, strict=False))
                    found.append(
                        tuple(take(fields[name].strip()) for name, take in columns.items())
                    )
                except (ValueError, KeyError):
                    line = " ".join(row)[:80]
                    raise self.refusal(path, f"the line {line!r} cannot be read") from None
        if not found:
            raise self.refusal(path, "it lists nothing")
        return found

    def pickle(self, path: Path) -> dict[Any, Any]:
        """The dictionary in a pickle of plain values and numpy arrays; no other code runs. Text of
        Python 2 is returned as bytes."""
        with self.reading(path):
            return _Unpickler(BytesIO(path.read_bytes()), encoding="bytes").load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if module.endswith("core.multiarray") and name == "_reconstruct":
            return cast(Any, np)._core.multiarray._reconstruct
        raise pickle.UnpicklingError(f"it would load {module}.{name}")


def split_of(photos: list[Photo], split: str) -> list[Photo]:
    """The photos of a split of the training data; all of any other split."""
    return part_of_train(photos, [photo.label for photo in photos], split)


def class_photos(folder: Path, label: int | None) -> list[Photo]:
    """The images of one class folder."""
    images = images_in(folder) if folder.is_dir() else []
    if not images:
        raise BadImage(str(folder), "a folder without images", f"give a folder with {kinds()}")
    prefix = "" if label is None else f"{folder.name}/"
    return [Photo(path, f"{prefix}{path.name}", label) for path in images]


_FOLDER = Layout(
    "give a folder of images, or of one sub-folder for each class and nothing beside them"
)
_GROUPS = Layout(
    "a CSV with the columns file (such as dog/1.jpg) and background (such as grass), a line for"
    " each image"
)
_PAIRS = Layout("give two folders with images of the same names, pairs:WITH:WITHOUT")


def open_folder(rest: str) -> Photos:
    """A folder of your own. Labels number the sub-folders in sorted order; their names are the
    classes."""
    root = Path(rest)
    folders = _FOLDER.folders(root)
    classes = [folder for folder in folders if folder.name != MASKS]
    photos = _photos_of(root, classes)
    if len(classes) < len(folders) and not any(photo.mask for photo in photos):
        classes, photos = folders, _photos_of(root, folders)  # a class with the name "masks"
    places: Names = ()
    if (file := root / "groups.csv").is_file():
        columns = {"file": str, "background": str}
        listed = dict(_GROUPS.table(file, columns, separator=",", header=True))
        for name in sorted({photo.id for photo in photos} ^ listed.keys()):
            odd = "is no image here" if name in listed else "is not listed"
            raise _GROUPS.refusal(file, f"{name} {odd}")
        places = tuple(sorted(set(listed.values())))
        photos = [replace(p, group=(p.label or 0, places.index(listed[p.id]))) for p in photos]
    names = tuple(folder.name for folder in classes)
    return Photos(f"folder:{rest}", names, photos, places=places)


def _photos_of(root: Path, classes: Sequence[Path]) -> list[Photo]:
    loose = images_in(root)
    if classes and loose:
        raise _FOLDER.refusal(loose[0], "an image beside the class folders")
    parts = [class_photos(folder, label) for label, folder in enumerate(classes)]
    parts = parts or [class_photos(root, None)]
    return [replace(photo, mask=mask_of(photo.path)) for part in parts for photo in part]


@dataclass(frozen=True, eq=False)
class PairedData(Subset):
    """A dataset whose samples have a second version, in another dataset or made by a function."""

    others: Dataset | Change

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """A digest of both versions; a function is identified by its result for the first image."""
        if not callable(self.others):
            return digest(self.data.fingerprint, self.others.fingerprint)
        first = self.other(0).image.numpy().tobytes() if len(self) else b""
        return digest(self.data.fingerprint, first)

    @property
    def capabilities(self) -> frozenset[str]:
        return (capabilities(self.data) - {"counterfactuals"}) | {"pairs"}

    def digests(self, start: int, stop: int) -> list[str]:
        own = super().digests(start, stop)
        if callable(self.others):
            return [digest(part, self.fingerprint) for part in own]
        others = sample_digests(self.others, start, stop)
        return [digest(*parts) for parts in zip(own, others, strict=True)]

    def other(self, index: int) -> Sample:
        """The second version of sample `index`."""
        if not callable(self.others):
            return self.others[index]
        sample = self.data[index]
        image = self.others(sample.image)
        shape = getattr(image, "shape", type(image).__name__)
        if shape != sample.image.shape or not bool(torch.isfinite(image).all()):
            expected = f"return finite raw pixels {list(sample.image.shape)} in [0, 1]"
            raise BadImage(f"the changed version of {sample.id}", f"got {shape}", expected)
        return replace(sample, image=image)


def paired(data: Dataset, change: Change | Dataset, *, name: str | None = None) -> PairedData:
    """Pair a dataset with a changed version of it.

    Args:
        data: The first versions.
        change: A function that makes one raw image [3, H, W] of another, or a dataset of the same
            images in the same order.
        name: The name of the result.

    Returns:
        A dataset whose `other(index)` is the second version of a sample.

    Example:
        >>> import seecause as sc
        >>> data = sc.data.open_data("critters:clean:test", limit=2)
        >>> pairs = sc.data.paired(data, lambda image: image.flip(0))
        >>> pairs.other(0).image.equal(pairs[0].image.flip(0))
        True
    """
    if not callable(change) and len(change) != len(data):
        expected = f"{len(data)} images, as many as {data.name} has"
        raise BadOption("change", f"{len(change)} images", expected)
    name = name or f"{data.name} and its other version"
    return PairedData(name, data, tuple(range(len(data))), change)


def open_pairs(rest: str) -> PairedData:
    """Two folders with images of the same names."""
    first, _, second = rest.partition(":")
    if not second:
        raise _PAIRS.refusal(first, "one folder only")
    data, others = cast(Any, open_folder(first)), cast(Any, open_folder(second))
    for name in sorted(set(data.ids) ^ set(others.ids)):
        where = second if name in data.ids else first
        raise _PAIRS.refusal(where, f"{name} has no second version here")
    return paired(data, others, name=f"pairs:{rest}")  # folders are sorted alike
