"""`metashift:PATH[:train|val|test|test-all]`: cats and dogs of MetaShift (Liang & Zou 2022), in
either of its public layouts. It has no masks.

folders   train/cat/cat(sofa)/*.jpg  train/dog/dog(bench)/*.jpg ... test/cat/cat(shelf)/*.jpg
`MetaDatasetCatDog` of Wu et al. 2023 (DISC)
list      train/cat/*.jpg ... val_out_of_domain/dog/*.jpg  imageID_to_group.pkl
as MetaShift's own script writes it
The list is a pickled dictionary, photo -> ["cat(indoor)"], read without running it. A group is
(class, place), the place being the word in brackets. Neither has a validation split: as in DISC,
`val` is 15 % of the test folder (81 of 541 photos, drawn with seed 0; photos are sorted by name
first, which DISC leaves to the disk) and `test` the rest; `test-all` is the whole folder, on which
iFAM is evaluated.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.model_selection import train_test_split

from seecause.data._pickles import read_pickle
from seecause.data.dataset import evenly, path_and_split
from seecause.data.photos import Photo, Photos, class_folders, pictures
from seecause.errors import DataMissing

SPLITS = ("train", "val", "test", "test-all")
CLASSES = ("cat", "dog")
TEST_SHARE = 0.85
FEWEST = 7  # photos of which 15 % is one
GROUP_FILE = "imageID_to_group.pkl"
_SETS: dict[tuple[str, str], Any] = {  # older lists hold sets in a defaultdict
    ("collections", "defaultdict"): defaultdict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
}
_LAYOUT = (
    "expected PATH/train/cat/cat(place)/*.jpg and PATH/test/..., or PATH/train/cat/*.jpg,"
    f" PATH/val_out_of_domain/... and PATH/{GROUP_FILE}"
)
_GROUP = re.compile(r"(?P<animal>[^()]+)\((?P<place>[^()]+)\)")

Found = tuple[Path, str, str]  # photo, class, place


def open_metashift(rest: str, *, limit: int | None = None) -> Photos:
    """The photos of one split with their group. Places are numbered alphabetically over both
    folders."""
    root, split = path_and_split(rest, SPLITS)
    listed = _read_groups(root / GROUP_FILE) if (root / GROUP_FILE).is_file() else None
    train = root / "train"
    test = root / "test" if listed is None else root / "val_out_of_domain"
    found = {
        folder: list(_in_folders(folder) if listed is None else _in_list(folder, listed))
        for folder in (train, test)
    }
    places = sorted({place for some in found.values() for _, _, place in some})
    chosen = found[train] if split == "train" else part_of_test(found[test], split)
    photos = [
        Photo(
            path,
            f"{path.parent.name}/{path.name}",
            CLASSES.index(animal),
            group=(CLASSES.index(animal), places.index(place)),
        )
        for path, animal, place in chosen
    ]
    return Photos(f"metashift:{root}:{split}", CLASSES, evenly(photos, limit), places=tuple(places))


def part_of_test(found: list[Found], split: str) -> list[Found]:
    """DISC's validation photos, the other ones, or all."""
    if split == "test-all":
        return found
    if len(found) < FEWEST:
        raise DataMissing(
            str(found[0][0].parents[1]),
            f"{len(found)} photos, too few to keep 15 % for validation",
            "use the split test-all",
        )
    val, _ = train_test_split(np.arange(len(found)), test_size=TEST_SHARE, random_state=0)
    held = set(val.tolist())
    return [item for place, item in enumerate(found) if (place in held) == (split == "val")]


def _in_folders(folder: Path) -> Iterator[Found]:
    for animal in CLASSES:
        parts = class_folders(_must_be(folder / animal))
        if not parts:
            raise DataMissing(
                str(folder / animal),
                f"no folders like {animal}(place) in it, and no {GROUP_FILE} in PATH",
                _LAYOUT,
            )
        for part in parts:
            place = _place(part.name, animal, str(part))
            yield from ((path, animal, place) for path in pictures(part))


def _in_list(folder: Path, listed: dict[str, list[str]]) -> Iterator[Found]:
    for animal in CLASSES:
        for path in pictures(_must_be(folder / animal)):
            if path.stem not in listed:
                raise DataMissing(str(path), f"{GROUP_FILE} has no group for it", _LAYOUT)
            yield path, animal, _place(listed[path.stem][0], animal, str(path))


def _place(group: str, animal: str, where: str) -> str:
    """`sofa` of `cat(sofa)`."""
    named = _GROUP.fullmatch(group)
    if not named or named["animal"] != animal:
        raise DataMissing(
            where, f"its group {group!r} does not match its class folder {animal}", _LAYOUT
        )
    return named["place"]


def _read_groups(path: Path) -> dict[str, list[str]]:
    listed = read_pickle(path, _LAYOUT, allowed=_SETS)
    if not isinstance(listed, dict):
        raise DataMissing(str(path), "not a dictionary", _LAYOUT)
    groups = {}
    for photo, some in listed.items():
        if (
            not isinstance(some, (list, tuple, set))
            or len(some) != 1
            or not all(isinstance(group, str) for group in some)
        ):
            raise DataMissing(
                str(path),
                f"the groups of {photo!r} are {some!r}",
                "expected one for each photo, like ['cat(indoor)']",
            )
        groups[str(photo)] = list(some)
    return groups


def _must_be(folder: Path) -> Path:
    if not folder.is_dir():
        raise DataMissing(str(folder), "no such folder", _LAYOUT)
    return folder
