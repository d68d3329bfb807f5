"""`folder:PATH`: your own pictures, in one sub-folder for each class or all together without
labels. Where they have masks and groups, these lie with them:

    PATH/dog/1.jpg, PATH/cat/2.jpg      pictures; or all in PATH, without labels
    PATH/masks/dog/1.png                masks of the same stems (also PATH/masks/1.png, or a folder
                                        `masks` beside PATH)
    PATH/groups.csv                     file,background: what a shortcut goes by, such as grass
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from seecause.data.dataset import evenly
from seecause.data.images import MASKS, SUFFIXES, read_grey, read_ids
from seecause.data.photos import Photo, Photos, class_folders, pictures, read_csv
from seecause.errors import BadImage, DataMissing

GROUPS = "groups.csv"
GROUPS_LAYOUT = (
    "a CSV with the columns file (such as dog/1.jpg) and background (such as grass), a line for"
    " each picture"
)
LOSSY = (".jpg", ".jpeg")
FEW = 16  # different numbers of a mask that numbers objects; one with more has soft edges


def open_folder(rest: str, *, limit: int | None = None) -> Photos:
    """Labels number the sub-folders in sorted order; their names are the classes."""
    root = Path(rest)
    if not root.is_dir():
        raise DataMissing(
            str(root),
            "no such folder",
            "give a folder of pictures, or of one sub-folder for each class",
        )
    masks = _mask_folder(root)
    folders = [folder for folder in class_folders(root) if folder != masks]
    loose = sorted(
        path for path in root.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file()
    )
    if folders and loose:
        raise DataMissing(
            str(loose[0]), "a picture beside the class folders", "put it into one of them"
        )
    photos = [] if folders else [Photo(path, path.name) for path in pictures(root)]
    for label, folder in enumerate(folders):
        for path in pictures(folder):
            photos.append(Photo(path, f"{folder.name}/{path.name}", label))
    photos = photos if masks is None else _with_masks(photos, masks)
    photos, places = _with_groups(photos, root / GROUPS)
    return Photos(
        f"folder:{rest}",
        tuple(folder.name for folder in folders),
        evenly(photos, limit),
        read_mask=None if masks is None else read_mask,
        places=places,
    )


def read_mask(path: Path) -> Tensor:
    """[H, W] bool, True on the object: where a file of few numbers is not 0, where one with soft
    edges is brighter than half. JPEG puts small numbers around edges, so there it is half too."""
    try:
        values = read_ids(path)
    except BadImage:  # saved in colour
        values = read_grey(path)
    few = path.suffix.lower() not in LOSSY and len(np.unique(values)) <= FEW
    return torch.from_numpy(values > 0 if few else values * 2 > values.max())


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
    for where, fields in read_csv(file, ("file", "background"), GROUPS_LAYOUT):
        if not fields["background"]:
            raise DataMissing(where, "it names no background", GROUPS_LAYOUT)
        rows[fields["file"]] = fields["background"]
    places = tuple(sorted(set(rows.values())))
    missing = [photo.id for photo in photos if photo.id not in rows]
    unknown = sorted(rows.keys() - {photo.id for photo in photos})
    if missing or unknown:
        words = f"{missing[0]} is not listed" if missing else f"{unknown[0]} is no picture here"
        raise DataMissing(str(file), words, GROUPS_LAYOUT)
    grouped = [
        replace(photo, group=(photo.label or 0, places.index(rows[photo.id]))) for photo in photos
    ]
    return grouped, places
