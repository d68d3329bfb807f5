"""Your own images.

`folder:PATH`: one sub-folder for each class, or all images together without labels. Masks and
groups, where there are some, lie with them:

    PATH/dog/1.jpg, PATH/cat/2.jpg      images; or all in PATH, without labels
    PATH/masks/dog/1.png                masks of the same stems (also PATH/masks/1.png, or a folder
                                        `masks` beside PATH)
    PATH/groups.csv                     file,background: what a shortcut goes by, such as grass

`pairs:WITH:WITHOUT`: two versions of each image that should get the same prediction: with and
without a mark, from two devices, before two backgrounds. Two folders of the same images under the
same names, each like `folder:PATH`. Samples are the first version; `other(index)` is the second.
`paired(data, change)` makes the second version by a function instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from seecause.data.dataset import (
    Dataset,
    Sample,
    Sliceable,
    Subset,
    capabilities,
    evenly,
    sample_digests,
    sample_ids,
    sample_labels,
)
from seecause.data.images import MASKS, SUFFIXES, read_mask
from seecause.data.photos import Layout, Photo, Photos, class_photos, pictures
from seecause.errors import BadImage, BadOption
from seecause.files import digest

GROUPS = "groups.csv"
_FOLDER_LAYOUT = Layout(
    "give a folder of images, or of one sub-folder for each class and nothing beside them"
)
_GROUPS_LAYOUT = Layout(
    "a CSV with the columns file (such as dog/1.jpg) and background (such as grass), a line for"
    " each image"
)
_PAIRS_LAYOUT = Layout("give two folders with images of the same names, pairs:WITH:WITHOUT")
Change = Callable[[Tensor], Tensor]  # raw pixels [3, H, W] in [0, 1] -> the same image, changed


def open_folder(rest: str, *, limit: int | None = None) -> Photos:
    """Labels number the sub-folders in sorted order; their names are the classes."""
    root = Path(rest)
    inside, masks = _FOLDER_LAYOUT.class_folders(root), _mask_folder(root)
    folders = [folder for folder in inside if folder != masks]
    loose = sorted(
        path for path in root.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file()
    )
    if folders and loose:
        raise _FOLDER_LAYOUT.refusal(loose[0], "an image beside the class folders")
    photos = [] if folders else [Photo(path, path.name) for path in pictures(root)]
    for label, folder in enumerate(folders):
        photos += class_photos(folder, label)
    photos = photos if masks is None else _with_masks(photos, masks)
    photos, places = _with_groups(photos, root / GROUPS)
    classes = tuple(folder.name for folder in folders)
    reader = None if masks is None else read_mask
    return Photos(f"folder:{rest}", classes, evenly(photos, limit), reader, places)


def _mask_folder(root: Path) -> Path | None:
    """The folder `masks` in `root` or beside it that holds stems of the images. Without such stems
    it is a class like others."""
    for folder in (root / MASKS, root.absolute().parent / MASKS):
        if folder.is_dir() and folder.absolute() != root.absolute():
            stems = {path.stem for path in _files(root) if folder not in path.parents}
            if any(path.stem in stems for path in _files(folder)):
                return folder
    return None


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES]


def _with_masks(photos: Sequence[Photo], folder: Path) -> list[Photo]:
    """Photos with the mask of the same class and stem, or of the same stem where no other photo has
    it."""
    by_name = {path.relative_to(folder).with_suffix("").as_posix(): path for path in _files(folder)}
    times = Counter(photo.path.stem for photo in photos)
    masked = []
    for photo in photos:
        stem = photo.path.stem
        mask = by_name.get(Path(photo.id).with_suffix("").as_posix())
        if mask is None and times[stem] == 1:
            mask = by_name.get(stem)
        masked.append(replace(photo, mask=mask))
    return masked


def _with_groups(photos: list[Photo], file: Path) -> tuple[list[Photo], tuple[str, ...]]:
    """Photos with their groups (class, background) and the names of the backgrounds; none without
    the file."""
    if not file.is_file():
        return photos, ()
    columns = {"file": str, "background": str}
    rows = dict(_GROUPS_LAYOUT.table(file, columns, separator=",", header=True))
    for name in sorted({photo.id for photo in photos} ^ rows.keys()):
        odd = "is no image here" if name in rows else "is not listed"
        raise _GROUPS_LAYOUT.refusal(file, f"{name} {odd}")
    places = tuple(sorted(set(rows.values())))
    if not all(places):
        raise _GROUPS_LAYOUT.refusal(file, "a line names no background")
    grouped = [replace(p, group=(p.label or 0, places.index(rows[p.id]))) for p in photos]
    return grouped, places


@dataclass(frozen=True, eq=False)
class PairedData(Sliceable):
    """A dataset whose samples have a second version."""

    name: str
    data: Dataset
    others: Dataset | Change

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.classes

    @cached_property
    def fingerprint(self) -> str:
        """Of both versions; a function is identified by what it makes of the first image."""
        if not callable(self.others):
            return digest(self.data.fingerprint, self.others.fingerprint)
        first = self.other(0).image.numpy().tobytes() if len(self) else b""
        return digest(self.data.fingerprint, first)

    @property
    def capabilities(self) -> frozenset[str]:
        return (capabilities(self.data) - {"counterfactuals"}) | {"pairs"}

    @property
    def ids(self) -> tuple[str, ...]:
        return sample_ids(self.data)

    @property
    def labels(self) -> tuple[int | None, ...]:
        return sample_labels(self.data)

    def digests(self, start: int, stop: int) -> list[str]:
        own = sample_digests(self.data, start, stop)
        if callable(self.others):
            return [digest(part, self.fingerprint) for part in own]
        others = sample_digests(self.others, start, stop)
        return [digest(*parts) for parts in zip(own, others, strict=True)]

    def __len__(self) -> int:
        return len(self.data)

    def sample(self, index: int, /) -> Sample:
        return self.data[index]

    def other(self, index: int) -> Sample:
        """The second version of sample `index`."""
        if not callable(self.others):
            return self.others[index]
        sample = self.data[index]
        image = self.others(sample.image)
        if not isinstance(image, Tensor) or image.shape != sample.image.shape:
            shape = list(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise BadImage(
                f"the changed version of {sample.id}",
                f"got {shape}",
                f"return raw pixels {list(sample.image.shape)} in [0, 1]",
            )
        if not bool(torch.isfinite(image).all()):
            raise BadImage(f"the changed version of {sample.id}", "pixels that are not finite")
        return replace(sample, image=image)


def paired(data: Dataset, change: Change | Dataset, *, name: str | None = None) -> PairedData:
    """A dataset beside a changed version of it.

    Args:
        data: The first versions.
        change: A function that makes one raw image [3, H, W] of another, or a dataset of the same
            images in the same order.
        name: Of the result.

    Example:
        >>> import seecause as sc
        >>> data = sc.data.open_data("critters:clean:test", limit=2)
        >>> pairs = sc.data.paired(data, lambda image: image.flip(0))
        >>> pairs.other(0).image.equal(pairs[0].image.flip(0))
        True
    """
    if not callable(change) and len(change) != len(data):
        raise BadOption(
            "change", f"{len(change)} images", f"as many as {data.name} has: {len(data)}"
        )
    return PairedData(name or f"{data.name} and its other version", data, change)


def open_pairs(rest: str, *, limit: int | None = None) -> PairedData:
    """Two folders; a path may hold colons, so the split is meant that leaves two folders."""
    pieces = rest.split(":")
    ways = [(":".join(pieces[:at]), ":".join(pieces[at:])) for at in range(1, len(pieces))]
    folders = [way for way in ways if all(Path(part).is_dir() for part in way)]
    if not folders:
        missing = [part for part in pieces if not Path(part).is_dir()]
        raise _PAIRS_LAYOUT.refusal((missing or pieces)[0], "no such folder, or one folder only")
    first, second = (open_folder(part) for part in folders[0])
    for path, missing in (
        (folders[0][1], sorted(set(first.ids) - set(second.ids))),
        (folders[0][0], sorted(set(second.ids) - set(first.ids))),
    ):
        if missing:
            odd = f"{len(missing)} images have no second version here: {', '.join(missing[:3])}"
            raise _PAIRS_LAYOUT.refusal(path, odd)
    places = {id: place for place, id in enumerate(second.ids)}
    rows, name = evenly(range(len(first)), limit), f"pairs:{rest}"
    matching = tuple(places[first.ids[row]] for row in rows)
    return PairedData(name, Subset(name, first, rows), Subset(name, second, matching))
