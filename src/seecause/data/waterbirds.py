"""`waterbirds:PATH[:train|val|test]`: Waterbirds (Sagawa et al. 2020), birds of CUB pasted on
places, in the layout of its release.

PATH is `waterbird_complete95_forest2water2`, or the CUB folder that holds it:
    metadata.csv   <class>/<file>.jpg          columns img_id, img_filename, y, split, place,
    place_filename
y is 1 for a water bird, place 1 for water, split 0, 1, 2 for train, val, test. A group is (y,
place); in train 95 % of y equal place. The place was scaled to the bird's photo, so CUB's
segmentations fit pixel by pixel: they are the masks, where they lie as `seecause.data.cub` says.
Three species of land birds count as water birds in the release; they are left so.

`waterbird200:PATH`: CUB's 5,794 test photos with the backgrounds of Waterbirds and CUB's own 200
classes (Aniraj et al. 2025, iFAM). It has no files of its own: lists, boxes, key points and masks
are those of CUB in PATH (`CUB_200_2011`), photos those of the Waterbirds folder in PATH or beside
it. A test set only: nothing is trained on it.
"""

from __future__ import annotations

from pathlib import Path

from seecause.data.cub import (
    bird_classes,
    bird_photos,
    find_segmentations,
    read_birds,
    read_votes,
    segmentation,
)
from seecause.data.dataset import evenly, path_and_split
from seecause.data.photos import BITS, THREE, Photo, Photos, code, inside, read_csv
from seecause.errors import DataMissing

FOLDER = "waterbird_complete95_forest2water2"
SPLITS = ("train", "val", "test")
CLASSES, PLACES = ("land bird", "water bird"), ("land", "water")
MINORITY = ((0, 1), (1, 0))  # groups whose bird and place disagree
_COLUMNS = ("img_filename", "y", "split", "place")
_LAYOUT = f"give the folder {FOLDER} with metadata.csv (columns {', '.join(_COLUMNS)})"


def open_waterbirds(rest: str, *, limit: int | None = None) -> Photos:
    """The photos of one split with group and, where there are segmentations, mask."""
    path, split = path_and_split(rest, SPLITS)
    root = waterbirds_folder(path)
    masks = find_segmentations(root)
    photos = []
    for where, row in read_csv(root / "metadata.csv", _COLUMNS, _LAYOUT):
        label, place, part = (
            code(row["y"], BITS, where, _LAYOUT),
            code(row["place"], BITS, where, _LAYOUT),
            code(row["split"], THREE, where, _LAYOUT),
        )
        if SPLITS[part] == split:
            file = row["img_filename"]
            photo = inside(root, file, where, _LAYOUT)
            group = (label, place)
            photos.append(Photo(photo, file, label, segmentation(masks, file), group))
    if not photos:
        raise DataMissing(
            str(root / "metadata.csv"), f"no photo with split {SPLITS.index(split)}", _LAYOUT
        )
    return Photos(f"waterbirds:{path}:{split}", CLASSES, evenly(photos, limit), read_votes, PLACES)


def waterbirds_folder(path: Path) -> Path:
    """PATH itself, or the Waterbirds folder in it."""
    return path / FOLDER if (path / FOLDER).is_dir() else path


def open_waterbird200(rest: str, *, limit: int | None = None) -> Photos:
    """CUB's test birds, elsewhere."""
    root, _ = path_and_split(rest, ("test",))
    birds = [bird for bird in read_birds(root) if not bird.train]
    photos = bird_photos(birds, _photos(root), find_segmentations(root))
    return Photos(f"waterbird200:{root}", bird_classes(root), evenly(photos, limit), read_votes)


def _photos(root: Path) -> Path:
    for place in (root / FOLDER, root.parent / FOLDER):
        if place.is_dir():
            return place
    raise DataMissing(
        str(root / FOLDER),
        "no such folder",
        "put the Waterbirds release into the CUB folder, or beside it",
    )
