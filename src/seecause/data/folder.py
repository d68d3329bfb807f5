"""`folder:PATH`: your own pictures, in one sub-folder for each class or all together without
labels. Where they have masks and groups, these lie with them:

    PATH/dog/1.jpg, PATH/cat/2.jpg      pictures; or all in PATH, without labels
    PATH/masks/dog/1.png                masks of the same stems (also PATH/masks/1.png, or a folder
                                        `masks` beside PATH)
    PATH/groups.csv                     file,background: what a shortcut goes by, such as grass

`pairs:WITH:WITHOUT`: two versions of each picture that should be answered alike: with and
without a mark, from two devices, before two backgrounds.

Two folders of the same pictures under the same names, each like `folder:PATH`: one sub-folder for
each class, or all together without labels. `paired(data, change)` makes the second version by a
function instead.

Samples are the first version; `other(index)` is the second. What explains, audits, scores heads or
repairs takes the second version as what the first would be without the cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

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
from seecause.errors import BadImage, BadOption, DataMissing
from seecause.files import digest

_FOLDER_FORM = Layout("give a folder of pictures, or of one sub-folder for each class")
GROUPS = "groups.csv"
_GROUPS_LAYOUT = Layout(
    "a CSV with the columns file (such as dog/1.jpg) and background (such as grass), a line for"
    " each picture"
)


def open_folder(rest: str, *, limit: int | None = None) -> Photos:
    """Labels number the sub-folders in sorted order; their names are the classes."""
    root = Path(rest)
    inside = _FOLDER_FORM.class_folders(root)
    masks = _mask_folder(root)
    folders = [folder for folder in inside if folder != masks]
    loose = sorted(
        path for path in root.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file()
    )
    if folders and loose:
        raise DataMissing(
            str(loose[0]), "a picture beside the class folders", "put it into one of them"
        )
    photos = [] if folders else [Photo(path, path.name) for path in pictures(root)]
    for label, folder in enumerate(folders):
        photos += class_photos(folder, label)
    photos = photos if masks is None else _with_masks(photos, masks)
    photos, places = _with_groups(photos, root / GROUPS)
    return Photos(
        f"folder:{rest}",
        tuple(folder.name for folder in folders),
        evenly(photos, limit),
        read_mask=None if masks is None else read_mask,
        places=places,
    )


def _mask_folder(root: Path) -> Path | None:
    """The folder of masks in `root`, or beside it: called so, and with stems of the pictures. Else
    it is a class like others."""
    for folder in (root / MASKS, root.absolute().parent / MASKS):
        if folder.is_dir() and folder.absolute() != root.absolute():
            pictures = [path for path in _files(root) if folder not in path.parents]
            stems = {path.stem for path in pictures}
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


def _with_groups(photos: Sequence[Photo], file: Path) -> tuple[list[Photo], tuple[str, ...]]:
    """Photos with their groups (class, background) and the names of the backgrounds; none without
    the file."""
    if not file.is_file():
        return list(photos), ()
    rows = {}
    for where, fields in _GROUPS_LAYOUT.csv(file, ("file", "background")):
        if not fields["background"]:
            raise _GROUPS_LAYOUT.refusal(where, "it names no background")
        rows[fields["file"]] = fields["background"]
    places = tuple(sorted(set(rows.values())))
    missing = [photo.id for photo in photos if photo.id not in rows]
    unknown = sorted(rows.keys() - {photo.id for photo in photos})
    if missing or unknown:
        words = f"{missing[0]} is not listed" if missing else f"{unknown[0]} is no picture here"
        raise _GROUPS_LAYOUT.refusal(file, words)
    grouped = [
        replace(photo, group=(photo.label or 0, places.index(rows[photo.id]))) for photo in photos
    ]
    return grouped, places


Change = Callable[[Tensor], Tensor]  # raw pixels [3, H, W] in [0, 1] -> the same picture, changed

_PAIRS_FORM = Layout("give two folders with pictures of the same names, pairs:WITH:WITHOUT")
_NAMED = 3  # names in a message


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
        """Of both versions; a function is told by what it makes of the first picture."""
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
            raise BadImage(f"the changed version of {sample.id}", "pixels that are no numbers")
        return replace(sample, image=image)


def paired(data: Dataset, change: Change | Dataset, *, name: str | None = None) -> PairedData:
    """A dataset beside its changed version: `change` makes one raw picture [3, H, W] of another, or
    is a dataset of the same pictures in the same order.

    >>> import seecause as sc
    >>> data = sc.data.open_data("critters:clean:test", limit=2)
    >>> pairs = sc.data.paired(data, lambda image: image.flip(0))
    >>> pairs.other(0).image.equal(pairs[0].image.flip(0))
    True
    """
    if not callable(change) and len(change) != len(data):
        raise BadOption(
            "change", f"{len(change)} pictures", f"as many as {data.name} has: {len(data)}"
        )
    return PairedData(name or f"{data.name} and its other version", data, change)


def open_pairs(rest: str, *, limit: int | None = None) -> PairedData:
    """Two folders; a path may hold colons, so the one is meant that leaves two folders."""
    pieces = rest.split(":")
    ways = [(":".join(pieces[:at]), ":".join(pieces[at:])) for at in range(1, len(pieces))]
    if not ways:
        raise _PAIRS_FORM.refusal(f"pairs:{rest}", "one folder only")
    both = [way for way in ways if all(Path(part).is_dir() for part in way)]
    if not both:
        missing = [part for part in ways[0] if not Path(part).is_dir()]
        raise _PAIRS_FORM.refusal(missing[0], "no such folder")
    first, second = (open_folder(part) for part in both[0])
    places = {identity: place for place, identity in enumerate(second.ids)}
    _check_names(first.ids, second.ids, both[0])
    rows = evenly(range(len(first)), limit)
    matching = tuple(places[first.ids[row]] for row in rows)
    name, (left, right) = f"pairs:{rest}", cast(tuple[Dataset, Dataset], (first, second))
    return PairedData(name, Subset(name, left, rows), Subset(name, right, matching))


def _check_names(first: tuple[str, ...], second: tuple[str, ...], paths: tuple[str, str]) -> None:
    for path, missing in (
        (paths[1], sorted(set(first) - set(second))),
        (paths[0], sorted(set(second) - set(first))),
    ):
        if missing:
            listed = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
            lost = f"{len(missing)} pictures have no second version here: {listed}"
            raise _PAIRS_FORM.refusal(path, lost)
