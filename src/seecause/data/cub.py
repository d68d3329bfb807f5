"""`cub:PATH[:train|val|trainval|test]`: CUB-200-2011 (Wah et al. 2011), PATH being the release's
folder `CUB_200_2011`.

    images.txt  image_class_labels.txt  train_test_split.txt  bounding_boxes.txt  classes.txt
    parts/part_locs.txt  images/<class>/<file>.jpg
All lists are joined on the id in their first field. The release has no validation split: `val` is
every tenth training photo of a class, `train` the others, `trainval` the release's 5,994. Masks are
there if the segmentations (an archive of their own) lie in PATH or beside it:
    segmentations/<class>/<file>.png
Their grey is the share of annotators who marked a pixel; the object is where anyone did.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from seecause.data.dataset import evenly, part_of_train, path_and_split
from seecause.data.images import read_grey
from seecause.data.photos import Photo, Photos, read_fields
from seecause.errors import DataMissing

SPLITS = ("train", "val", "trainval", "test")
POINTS = 15
_LAYOUT = "give the folder CUB_200_2011 of the release"

Box = tuple[float, float, float, float]
Points = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class Bird:
    """One line of every list."""

    file: str  # <class>/<name>.jpg
    label: int
    train: bool
    box: Box
    points: Points


def open_cub(rest: str, *, limit: int | None = None) -> Photos:
    """Photos with box and key points, and masks where there are segmentations."""
    root, split = path_and_split(rest, SPLITS)
    birds = [bird for bird in read_birds(root) if bird.train == (split != "test")]
    if split != "test":
        birds = part_of_train(birds, [bird.label for bird in birds], split)
    found = bird_photos(birds, root / "images", find_segmentations(root))
    return Photos(f"cub:{root}:{split}", bird_classes(root), evenly(found, limit), read_votes)


def bird_photos(birds: list[Bird], images: Path, segmentations: Path | None) -> list[Photo]:
    """Where the photo and mask of each bird lie; Waterbirds has the same names in a folder of its
    own."""
    if not birds:
        raise DataMissing(str(images.parent), "no photo in this split", _LAYOUT)
    return [
        Photo(
            images / bird.file,
            bird.file,
            bird.label,
            segmentation(segmentations, bird.file),
            box=bird.box,
            points=bird.points,
        )
        for bird in birds
    ]


def find_segmentations(root: Path) -> Path | None:
    """The folder of masks in a release's folder, beside it, or in a CUB folder beside it."""
    places = [
        root / "segmentations",
        root.parent / "segmentations",
        root.parent / "CUB_200_2011" / "segmentations",
    ]
    return next((place for place in places if place.is_dir()), None)


def segmentation(folder: Path | None, file: str) -> Path | None:
    return None if folder is None else (folder / file).with_suffix(".png")


def read_votes(path: Path) -> Tensor:
    """[H, W] bool: where at least one annotator saw the bird."""
    return torch.from_numpy(read_grey(path) > 0)


def bird_classes(root: Path) -> tuple[str, ...]:
    """Names such as `001.Black_footed_Albatross`, in the order of the labels."""
    listed = dict(
        read_fields(
            root / "classes.txt",
            lambda f: (int(f[0]), f[1] if len(f) > 1 else f[0]),
            f"{_LAYOUT}; lines are `id name`",
        )
    )
    return tuple(listed.get(number, f"class {number}") for number in range(1, max(listed) + 1))


def read_birds(root: Path) -> list[Bird]:
    """All lists, joined on the photo's id, in the order of images.txt."""
    files = dict(
        read_fields(
            root / "images.txt",
            lambda f: (_two(f)[0], f[1]),
            f"{_LAYOUT}; lines are `id class/file.jpg`",
        )
    )
    labels = dict(
        read_fields(
            root / "image_class_labels.txt",
            lambda f: (_two(f)[0], int(f[1]) - 1),
            f"{_LAYOUT}; lines are `id class`",
        )
    )
    train = dict(
        read_fields(
            root / "train_test_split.txt",
            lambda f: (_two(f)[0], bool(int(f[1]))),
            f"{_LAYOUT}; lines are `id is-train`",
        )
    )
    boxes = dict(
        read_fields(
            root / "bounding_boxes.txt", _box, f"{_LAYOUT}; lines are `id x y width height`"
        )
    )
    points: dict[str, dict[int, tuple[float, float, float]]] = {}
    for number, part, point in read_fields(
        root / "parts" / "part_locs.txt", _point, f"{_LAYOUT}; lines are `id part x y visible`"
    ):
        points.setdefault(number, {})[part] = point
    for name, listed in (
        ("image_class_labels", labels),
        ("train_test_split", train),
        ("bounding_boxes", boxes),
        ("parts/part_locs", points),
    ):
        lost = [number for number in files if number not in listed]
        if lost:
            raise DataMissing(
                str(root / f"{name}.txt"),
                f"no line for photo {lost[0]} of images.txt ({len(lost)} in all)",
                _LAYOUT,
            )
    hidden = (0.0, 0.0, 0.0)
    return [
        Bird(
            file,
            labels[number],
            train[number],
            boxes[number],
            tuple(points[number].get(part, hidden) for part in range(1, POINTS + 1)),
        )
        for number, file in files.items()
    ]


def _two(fields: list[str]) -> list[str]:
    if len(fields) != 2:
        raise ValueError(fields)
    return fields


def _box(fields: list[str]) -> tuple[str, Box]:
    number, x, y, width, height = fields
    return number, (float(x), float(y), float(width), float(height))


def _point(fields: list[str]) -> tuple[str, int, tuple[float, float, float]]:
    number, part, x, y, visible = fields
    if not 1 <= int(part) <= POINTS:
        raise ValueError(part)
    return number, int(part), (float(x), float(y), float(int(visible)))
