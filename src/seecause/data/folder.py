"""`folder:PATH`: your own pictures, in one sub-folder for each class or all together without
labels."""

from __future__ import annotations

from pathlib import Path

from seecause.data.dataset import evenly
from seecause.data.images import SUFFIXES
from seecause.data.photos import Photo, Photos, class_folders, pictures
from seecause.errors import DataMissing


def open_folder(rest: str, *, limit: int | None = None) -> Photos:
    """Labels number the sub-folders in sorted order; their names are the classes."""
    root = Path(rest)
    if not root.is_dir():
        raise DataMissing(
            str(root),
            "no such folder",
            "give a folder of pictures, or of one sub-folder for each class",
        )
    folders = class_folders(root)
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
    return Photos(f"folder:{rest}", tuple(folder.name for folder in folders), evenly(photos, limit))
