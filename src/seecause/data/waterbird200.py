"""`waterbird200:PATH`: CUB's 5,794 test photos with the backgrounds of Waterbirds and CUB's own 200
classes (Aniraj et al. 2025, iFAM).

It has no files of its own: lists, boxes, key points and masks are those of CUB in PATH
(`CUB_200_2011`), photos those of the Waterbirds folder in PATH or beside it. A test set only:
nothing is trained on it.
"""

from __future__ import annotations

from pathlib import Path

from seecause.data.cub import bird_classes, bird_photos, find_segmentations, read_birds, read_votes
from seecause.data.dataset import evenly, path_and_split
from seecause.data.photos import Photos
from seecause.data.waterbirds import FOLDER
from seecause.errors import DataMissing


def open_waterbird200(rest: str, *, limit: int | None = None) -> Photos:
    """CUB's test birds, elsewhere."""
    root, _ = path_and_split(rest, ("test",))
    birds = [bird for bird in read_birds(root) if not bird.train]
    found = bird_photos(birds, _photos(root), find_segmentations(root))
    return Photos(f"waterbird200:{root}", bird_classes(root), evenly(found, limit), read_votes)


def _photos(root: Path) -> Path:
    for place in (root / FOLDER, root.parent / FOLDER):
        if place.is_dir():
            return place
    raise DataMissing(
        str(root / FOLDER),
        "no such folder",
        "put the Waterbirds release into the CUB folder, or beside it",
    )
