"""`waterbirds:PATH[:train|val|test]`: Waterbirds (Sagawa et al. 2020), birds of CUB pasted on
places, in the layout of its release.

PATH is `waterbird_complete95_forest2water2`, or the CUB folder that holds it:
    metadata.csv   <class>/<file>.jpg          columns img_id, img_filename, y, split, place,
    place_filename
y is 1 for a water bird, place 1 for water, split 0, 1, 2 for train, val, test. A group is (y,
place); in train 95 % of y equal place. The place was scaled to the bird's photo, so CUB's
segmentations fit pixel by pixel: they are the masks, where they lie as `seecause.data.cub` says.
Three species of land birds count as water birds in the release; they are left so.
"""

from __future__ import annotations

from pathlib import Path

from seecause.data.cub import find_segmentations, read_votes, segmentation
from seecause.data.dataset import evenly, path_and_split
from seecause.data.photos import Photo, Photos
from seecause.data.tables import BITS, THREE, code, read_csv
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
    found = []
    for where, row in read_csv(root / "metadata.csv", _COLUMNS, _LAYOUT):
        label, place, part = (
            code(row["y"], BITS, where, _LAYOUT),
            code(row["place"], BITS, where, _LAYOUT),
            code(row["split"], THREE, where, _LAYOUT),
        )
        if SPLITS[part] == split:
            file = row["img_filename"]
            found.append(
                Photo(root / file, file, label, segmentation(masks, file), group=(label, place))
            )
    if not found:
        raise DataMissing(
            str(root / "metadata.csv"), f"no photo with split {SPLITS.index(split)}", _LAYOUT
        )
    return Photos(f"waterbirds:{path}:{split}", CLASSES, evenly(found, limit), read_votes, PLACES)


def waterbirds_folder(path: Path) -> Path:
    """PATH itself, or the Waterbirds folder in it."""
    return path / FOLDER if (path / FOLDER).is_dir() else path
