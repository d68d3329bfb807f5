"""`pets:PATH[:test|trainval]`: Oxford-IIIT Pet (Parkhi et al. 2012) in the layout of its release.

    images/NAME.jpg   annotations/trimaps/NAME.png   annotations/test.txt   annotations/trainval.txt
Lines of the lists are `NAME breed-id species breed-id-in-species`. A trimap has 1 on the animal, 2
on the background and 3 on the border, which is ignored. Labels are breeds. With a file
`imagenet_labels.csv` (columns breed, imagenet_index) beside them, labels are ImageNet classes
instead, and breeds it does not list are left out.
"""

from __future__ import annotations

import csv
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from seecause.data.dataset import IGNORE, evenly, path_and_split
from seecause.data.imagenet import imagenet_classes
from seecause.data.images import read_ids
from seecause.data.photos import Photo, Photos
from seecause.errors import BadImage, DataMissing

log = logging.getLogger(__name__)

SPLITS = ("test", "trainval")
_MEANING = torch.tensor(
    [IGNORE, 1, 0, IGNORE], dtype=torch.uint8
)  # of 1 animal, 2 background, 3 border


@dataclass(frozen=True)
class _Listed:
    name: str
    breed: str
    label: int


def open_pets(rest: str, *, limit: int | None = None) -> Photos:
    """The listed photos of one split with their trimaps."""
    root, split = path_and_split(rest, SPLITS)
    listed = _read_list(root / "annotations" / f"{split}.txt")
    translation = root / "imagenet_labels.csv"
    if translation.is_file():
        listed, classes = _translate(listed, translation), imagenet_classes()
    else:
        breeds = {pet.label: pet.breed for pet in listed}
        classes = tuple(breeds.get(label, f"breed {label + 1}") for label in range(max(breeds) + 1))
    found = [
        Photo(
            root / "images" / f"{pet.name}.jpg",
            pet.name,
            pet.label,
            root / "annotations" / "trimaps" / f"{pet.name}.png",
        )
        for pet in listed
    ]
    return Photos(f"pets:{root}:{split}", classes, evenly(found, limit), read_trimap)


def read_trimap(path: Path) -> Tensor:
    """[H, W] uint8: 1 animal, 0 background, IGNORE border."""
    ids = torch.from_numpy(read_ids(path))
    if ids.min() < 1 or ids.max() > 3:
        raise BadImage(
            str(path),
            f"a trimap with values {int(ids.min())} to {int(ids.max())}",
            "expected 1 animal, 2 background, 3 border",
        )
    return _MEANING[ids]


def _read_list(path: Path) -> list[_Listed]:
    if not path.is_file():
        raise DataMissing(
            str(path),
            "no such file",
            "give the folder that holds images/ and annotations/, and one of the splits"
            f" {', '.join(SPLITS)}",
        )
    listed = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split()
        if not fields or line.startswith("#"):
            continue
        if (
            len(fields) != 4
            or not all(field.isdigit() for field in fields[1:])
            or int(fields[1]) < 1
        ):
            raise DataMissing(
                f"{path}, line {number}",
                f"{line!r} cannot be read",
                "expected `NAME breed-id species breed-id-in-species`",
            )
        listed.append(_Listed(fields[0], fields[0].rpartition("_")[0], int(fields[1]) - 1))
    if not listed:
        raise DataMissing(str(path), "it lists no photos", "give the file of the release")
    return listed


def _translate(listed: list[_Listed], path: Path) -> list[_Listed]:
    """ImageNet labels for the breeds that have one."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if (
        not rows
        or not {"breed", "imagenet_index"} <= set(rows[0])
        or not all((row["imagenet_index"] or "").isdigit() for row in rows)
    ):
        raise DataMissing(
            str(path),
            "cannot be read",
            "expected columns breed and imagenet_index, with a number in each row",
        )
    label = {row["breed"]: int(row["imagenet_index"]) for row in rows}
    kept = [_Listed(pet.name, pet.breed, label[pet.breed]) for pet in listed if pet.breed in label]
    if not kept:
        raise DataMissing(
            str(path),
            "none of its breeds is in the list of photos",
            "expected names like Egyptian_Mau",
        )
    if len(kept) < len(listed):
        log.warning(
            "%s names no ImageNet class for the breeds of %d photos; they are left out",
            path,
            len(listed) - len(kept),
        )
    return kept
