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
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from seecause.data._pickles import read_pickle
from seecause.data.dataset import evenly, path_and_split
from seecause.data.photos import Photo, Photos, class_folders, pictures
from seecause.errors import DataMissing

SPLITS = ("train", "val", "test", "test-all")
CLASSES = ("cat", "dog")
TEST_SHARE = 0.85
FEWEST = 7  # photos of which 15 % is one
GROUP_FILE = "imageID_to_group.pkl"
_LAYOUT = (
    "expected PATH/train/cat/cat(place)/*.jpg and PATH/test/..., or PATH/train/cat/*.jpg,"
    f" PATH/val_out_of_domain/... and PATH/{GROUP_FILE}"
)
_GROUP = re.compile(r"(?P<animal>[^()]+)\((?P<place>[^()]+)\)")

Animal = tuple[Path, str, str]  # photo, class, place


def open_metashift(rest: str, *, limit: int | None = None) -> Photos:
    """The photos of one split with their group. Places are numbered alphabetically over both
    folders."""
    root, split = path_and_split(rest, SPLITS)
    listed = _read_groups(root / GROUP_FILE) if (root / GROUP_FILE).is_file() else None
    train = root / "train"
    test = root / "test" if listed is None else root / "val_out_of_domain"
    in_train, in_test = (
        list(_in_folders(folder) if listed is None else _in_list(folder, listed))
        for folder in (train, test)
    )
    places = sorted({place for _, _, place in in_train + in_test})
    chosen = in_train if split == "train" else part_of_test(in_test, split)
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


def part_of_test(photos: list[Animal], split: str) -> list[Animal]:
    """DISC's validation photos, the other ones, or all."""
    from sklearn.model_selection import train_test_split

    if split == "test-all":
        return photos
    if len(photos) < FEWEST:
        raise DataMissing(
            str(photos[0][0].parents[1]),
            f"{len(photos)} photos, too few to keep 15 % for validation",
            "use the split test-all",
        )
    val, _ = train_test_split(np.arange(len(photos)), test_size=TEST_SHARE, random_state=0)
    held = {int(place) for place in val}
    return [item for place, item in enumerate(photos) if (place in held) == (split == "val")]


def _in_folders(folder: Path) -> Iterator[Animal]:
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


def _in_list(folder: Path, listed: dict[str, list[str]]) -> Iterator[Animal]:
    for animal in CLASSES:
        for path in pictures(_must_be(folder / animal)):
            if path.stem not in listed:
                raise DataMissing(str(path), f"{GROUP_FILE} has no group for it", _LAYOUT)
            yield path, animal, _place(listed[path.stem][0], animal, str(path))


def _place(group: str, animal: str, where: str) -> str:
    """`sofa` of `cat(sofa)`."""
    match = _GROUP.fullmatch(group)
    if not match or match["animal"] != animal:
        raise DataMissing(
            where, f"its group {group[:60]!r} does not match its class folder {animal}", _LAYOUT
        )
    return match["place"]


def _read_groups(path: Path) -> dict[str, list[str]]:
    listed = read_pickle(path, _LAYOUT, sets=True)  # older lists hold sets
    if not isinstance(listed, dict):
        raise DataMissing(str(path), "not a dictionary", _LAYOUT)
    groups = {}
    for photo, names in listed.items():
        several = isinstance(names, (list, tuple))
        if not several or [type(name) for name in names] != [str]:
            count = f"{len(names)} groups" if several else "no list of groups"
            raise DataMissing(
                str(path),
                f"{str(photo)[:60]!r} has {count}",
                "expected one for each photo, like ['cat(indoor)']",
            )
        groups[str(photo)] = list(names)
    return groups


def _must_be(folder: Path) -> Path:
    if not folder.is_dir():
        raise DataMissing(str(folder), "no such folder", _LAYOUT)
    return folder
