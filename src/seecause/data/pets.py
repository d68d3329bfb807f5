"""`pets:PATH[:test|trainval]`: Oxford-IIIT Pet (Parkhi et al. 2012) in the layout of its release.

    images/NAME.jpg   annotations/trimaps/NAME.png   annotations/test.txt   annotations/trainval.txt
Lines of the lists are `NAME breed-id species breed-id-in-species`. A trimap has 1 on the animal, 2
on the background and 3 on the border, which is ignored. Labels are breeds. With a file
`imagenet_labels.csv` (columns breed, imagenet_index) beside them, labels are ImageNet classes
instead, and breeds it does not list are left out.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from seecause.data.dataset import IGNORE, evenly, path_and_split
from seecause.data.imagenet import imagenet_classes
from seecause.data.images import read_ids
from seecause.data.photos import Photo, Photos, inside, read_csv, read_fields, whole_number
from seecause.errors import BadImage, DataMissing

log = logging.getLogger(__name__)

SPLITS = ("test", "trainval")
MOST_BREEDS = 1000  # a larger number is a mistake
_MEANING = torch.tensor([IGNORE, 1, 0, IGNORE], dtype=torch.uint8)  # 1 animal, 2 background, 3 edge
_LAYOUT = (
    "give the folder that holds images/ and annotations/, and one of the splits"
    f" {', '.join(SPLITS)}; lines are `NAME breed-id species breed-id-in-species`"
)
_TRANSLATION = "expected columns breed and imagenet_index, with a number from 0 to 999 in each row"


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
    trimaps = root / "annotations" / "trimaps"
    photos = []
    for pet in listed:
        path = inside(root / "images", f"{pet.name}.jpg", f"{split}.txt", _LAYOUT)
        photos.append(Photo(path, pet.name, pet.label, trimaps / f"{pet.name}.png"))
    return Photos(f"pets:{root}:{split}", classes, evenly(photos, limit), read_trimap)


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
    lines = read_fields(path, _listed, _LAYOUT)
    listed = [pet for pet in lines if pet is not None]
    if not listed:
        raise DataMissing(str(path), "it lists no photos", _LAYOUT)
    return listed


def _listed(fields: list[str]) -> _Listed | None:
    """One line; None for a comment."""
    if fields[0].startswith("#"):
        return None
    name, breed, _, _ = fields
    numbers = [whole_number(field, MOST_BREEDS + 1) for field in fields[1:]]
    if numbers[0] < 1:
        raise ValueError(breed)
    return _Listed(name, name.rpartition("_")[0], numbers[0] - 1)


def _translate(listed: list[_Listed], path: Path) -> list[_Listed]:
    """ImageNet labels for the breeds that have one."""
    label = {}
    for where, row in read_csv(path, ("breed", "imagenet_index"), _TRANSLATION):
        try:
            label[row["breed"]] = whole_number(row["imagenet_index"], len(imagenet_classes()))
        except ValueError:
            raise DataMissing(where, "cannot be read", _TRANSLATION) from None
    pets = [_Listed(pet.name, pet.breed, label[pet.breed]) for pet in listed if pet.breed in label]
    if not pets:
        raise DataMissing(
            str(path),
            "none of its breeds is in the list of photos",
            "expected names like Egyptian_Mau",
        )
    if len(pets) < len(listed):
        log.warning(
            "%s names no ImageNet class for the breeds of %d photos; they are left out",
            path,
            len(listed) - len(pets),
        )
    return pets
