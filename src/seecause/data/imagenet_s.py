"""`imagenet-s:PATH`: ImageNet-S (Gao et al. 2022), ImageNet validation photos with class masks, in
the layout of its release.

    validation/<wnid>/*.JPEG   validation-segmentation/<wnid>/*.png
A mask is an RGB picture with id = R + 256 G: 0 is anything else, 1000 is ignored, k is the k-th
WordNet id of the sorted list of 919, 300 or 50 categories. Five classes that cannot be told apart
are merged into another. The object of a photo is the class of its folder; other classes are
background. Labels are ImageNet-1k classes, those of merged classes the class kept.

The list is that of the folders if all are there. Of a part of the dataset it must be given:
`ImageNetS_categories_im919.txt` in PATH, as the release's repository has it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from seecause.data.dataset import IGNORE, evenly
from seecause.data.imagenet import imagenet_classes, imagenet_wnids
from seecause.data.images import read_image
from seecause.data.photos import Photo, Photos, class_folders, pictures, read_fields
from seecause.errors import BadImage, DataMissing

IGNORED_ID = 1000
SIZES = (50, 300, 919)
MERGED = {  # class -> the class it counts as
    "n04356056": "n04355933",
    "n04493381": "n02808440",
    "n03642806": "n03832673",
    "n04008634": "n03773504",
    "n03887697": "n15075141",
}
_LAYOUT = "expected PATH/validation/<wnid>/*.JPEG and PATH/validation-segmentation/<wnid>/*.png"


def open_imagenet_s(rest: str, *, limit: int | None = None) -> Photos:
    """The validation photos with masks of their own class."""
    root = Path(rest)
    photos, masks = root / "validation", root / "validation-segmentation"
    for folder in (photos, masks):
        if not folder.is_dir():
            raise DataMissing(str(folder), "no such folder", _LAYOUT)
    folders = class_folders(photos)
    number = {wnid: place for place, wnid in enumerate(_categories(root, folders), start=1)}
    label = {wnid: place for place, wnid in enumerate(imagenet_wnids())}
    for folder in folders:
        if kept_class(folder.name) not in number or folder.name not in label:
            raise DataMissing(str(folder), "not the WordNet id of an ImageNet-S category", _LAYOUT)
    listed = []
    for folder in folders:
        of_class = label[kept_class(folder.name)]
        for path in pictures(folder):
            mask = masks / folder.name / f"{path.stem}.png"
            listed.append(Photo(path, f"{folder.name}/{path.name}", of_class, mask))
    return Photos(
        f"imagenet-s:{rest}",
        imagenet_classes(),
        evenly(listed, limit),
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
            f"expected R + 256 G from 0 to {SIZES[-1]}, or {IGNORED_ID} for ignored pixels",
        )
    return (ids == number).to(torch.uint8).masked_fill(ids == IGNORED_ID, IGNORE)


def kept_class(wnid: str) -> str:
    """The category a WordNet id counts as."""
    return MERGED.get(wnid, wnid)


def _categories(root: Path, folders: list[Path]) -> tuple[str, ...]:
    """Sorted WordNet ids; the k-th has id k."""
    lists = sorted(root.glob("ImageNetS_categories_im*.txt"))
    if lists:
        listed = read_fields(lists[-1], lambda fields: fields[0], _LAYOUT)
    else:
        listed = [kept_class(folder.name) for folder in folders]
    categories = tuple(sorted(set(listed)))
    if len(categories) not in SIZES:
        raise DataMissing(
            str(lists[-1] if lists else root / "validation"),
            f"{len(categories)} categories; the ids of masks count through all"
            f" {', '.join(map(str, SIZES[:-1]))} or {SIZES[-1]}",
            "put ImageNetS_categories_im919.txt (one WordNet id a line) into PATH",
        )
    return categories
