"""Birds: CUB and what is made of it.

`cub:PATH[:train|val|trainval|test]`: CUB-200-2011 (Wah et al. 2011), PATH being the release's
folder `CUB_200_2011`.

    images.txt  image_class_labels.txt  train_test_split.txt  bounding_boxes.txt  classes.txt
    parts/part_locs.txt  images/<class>/<file>.jpg
All lists are joined on the id in their first field. The release has no validation split: `val` is
every tenth training photo of a class, `train` the others, `trainval` the release's 5,994. Masks are
there if the segmentations (an archive of their own) lie in PATH or beside it:
    segmentations/<class>/<file>.png
Their grey is the share of annotators who marked a pixel; the object is where anyone did.

`waterbirds:PATH[:train|val|test]`: Waterbirds (Sagawa et al. 2020), birds of CUB pasted on
places, in the layout of its release.

PATH is `waterbird_complete95_forest2water2`, or the CUB folder that holds it:
    metadata.csv   <class>/<file>.jpg          columns img_id, img_filename, y, split, place,
    place_filename
y is 1 for a water bird, place 1 for water, split 0, 1, 2 for train, val, test. A group is (y,
place); in train 95 % of y equal place. The place was scaled to the bird's photo, so CUB's
segmentations fit pixel by pixel: they are the masks, where they lie as said above.
Three species of land birds count as water birds in the release; they are left so.

`waterbird200:PATH`: CUB's 5,794 test photos with the backgrounds of Waterbirds and CUB's own 200
classes (Aniraj et al. 2025, iFAM). It has no files of its own: lists, boxes, key points and masks
are those of CUB in PATH (`CUB_200_2011`), photos those of the Waterbirds folder in PATH or beside
it. A test set only: nothing is trained on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from seecause.data.dataset import evenly, part_of_train, path_and_split
from seecause.data.images import read_grey
from seecause.data.photos import BITS, THREE, Layout, Photo, Photos, whole_number
from seecause.errors import DataMissing

CUB_SPLITS = ("train", "val", "trainval", "test")
POINTS = 15
MOST_CLASSES = 10_000  # of any list; a larger number is a mistake
_CUB_LAYOUT = Layout("give the folder CUB_200_2011 of the release")

K = TypeVar("K")
T = TypeVar("T")
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
    root, split = path_and_split(rest, CUB_SPLITS)
    birds = [bird for bird in read_birds(root) if bird.train == (split != "test")]
    if split != "test":
        birds = part_of_train(birds, [bird.label for bird in birds], split)
    photos = bird_photos(birds, root / "images", find_segmentations(root))
    return Photos(f"cub:{root}:{split}", bird_classes(root), evenly(photos, limit), read_votes)


def bird_photos(birds: list[Bird], images: Path, segmentations: Path | None) -> list[Photo]:
    """Where the photo and mask of each bird lie; Waterbirds has the same names in a folder of its
    own."""
    if not birds:
        raise _CUB_LAYOUT.refusal(images.parent, "no photo in this split")
    return [
        Photo(
            _CUB_LAYOUT.inside(images, bird.file, "images.txt"),
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

    def take(fields: list[str]) -> tuple[int, str]:
        name = fields[1] if len(fields) > 1 else fields[0]
        return whole_number(fields[0], MOST_CLASSES), name

    listed = _read_list(root / "classes.txt", take, "id name")
    return tuple(listed.get(number, f"class {number}") for number in range(1, max(listed) + 1))


def read_birds(root: Path) -> list[Bird]:
    """All lists, joined on the photo's id, in the order of images.txt."""
    files = _read_list(root / "images.txt", _pair, "id class/file.jpg")
    labels = _read_list(root / "image_class_labels.txt", _class_label, "id class")
    train = _read_list(root / "train_test_split.txt", _is_train, "id is-train")
    boxes = _read_list(root / "bounding_boxes.txt", _box, "id x y width height")
    parts = root / "parts" / "part_locs.txt"
    points: dict[str, dict[int, tuple[float, float, float]]] = {}
    for number, part, point in _CUB_LAYOUT.with_lines("id part x y visible").fields(parts, _point):
        points.setdefault(number, {})[part] = point
    for name, listed in (
        ("image_class_labels", labels),
        ("train_test_split", train),
        ("bounding_boxes", boxes),
        ("parts/part_locs", points),
    ):
        lost = [number for number in files if number not in listed]
        if lost:
            odd = f"no line for photo {lost[0]} of images.txt ({len(lost)} in all)"
            raise _CUB_LAYOUT.refusal(root / f"{name}.txt", odd)
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


def _read_list(path: Path, take: Callable[[list[str]], tuple[K, T]], form: str) -> dict[K, T]:
    """One value for each id."""
    return dict(_CUB_LAYOUT.with_lines(form).fields(path, take))


def _pair(fields: list[str]) -> tuple[str, str]:
    number, value = fields
    return number, value


def _class_label(fields: list[str]) -> tuple[str, int]:
    number, label = _pair(fields)
    return number, whole_number(label, MOST_CLASSES + 1) - 1


def _is_train(fields: list[str]) -> tuple[str, bool]:
    number, train = _pair(fields)
    return number, bool(int(train))


def _finite(field: str) -> float:
    number = float(field)
    if not math.isfinite(number):
        raise ValueError(field)
    return number


def _box(fields: list[str]) -> tuple[str, Box]:
    number, x, y, width, height = fields
    return number, (_finite(x), _finite(y), _finite(width), _finite(height))


def _point(fields: list[str]) -> tuple[str, int, tuple[float, float, float]]:
    number, part, x, y, visible = fields
    if not 1 <= int(part) <= POINTS:
        raise ValueError(part)
    return number, int(part), (_finite(x), _finite(y), float(int(visible)))


FOLDER = "waterbird_complete95_forest2water2"
SPLITS = ("train", "val", "test")
CLASSES, PLACES = ("land bird", "water bird"), ("land", "water")
MINORITY = ((0, 1), (1, 0))  # groups whose bird and place disagree
_COLUMNS = ("img_filename", "y", "split", "place")
_LAYOUT = Layout(f"give the folder {FOLDER} with metadata.csv (columns {', '.join(_COLUMNS)})")


def open_waterbirds(rest: str, *, limit: int | None = None) -> Photos:
    """The photos of one split with group and, where there are segmentations, mask."""
    path, split = path_and_split(rest, SPLITS)
    root = path / FOLDER if (path / FOLDER).is_dir() else path
    masks = find_segmentations(root)
    photos = []
    for where, row in _LAYOUT.csv(root / "metadata.csv", _COLUMNS):
        label, place = (_LAYOUT.code(row[name], BITS, where) for name in ("y", "place"))
        if SPLITS[_LAYOUT.code(row["split"], THREE, where)] == split:
            file = row["img_filename"]
            photo = _LAYOUT.inside(root, file, where)
            photos.append(Photo(photo, file, label, segmentation(masks, file), (label, place)))
    if not photos:
        odd = f"no photo with split {SPLITS.index(split)}"
        raise _LAYOUT.refusal(root / "metadata.csv", odd)
    return Photos(f"waterbirds:{path}:{split}", CLASSES, evenly(photos, limit), read_votes, PLACES)


def open_waterbird200(rest: str, *, limit: int | None = None) -> Photos:
    """CUB's test birds, elsewhere."""
    root, _ = path_and_split(rest, ("test",))
    birds = [bird for bird in read_birds(root) if not bird.train]
    places = [place for place in (root / FOLDER, root.parent / FOLDER) if place.is_dir()]
    if not places:
        remedy = "put the Waterbirds release into the CUB folder, or beside it"
        raise DataMissing(str(root / FOLDER), "no such folder", remedy)
    photos = bird_photos(birds, places[0], find_segmentations(root))
    return Photos(f"waterbird200:{root}", bird_classes(root), evenly(photos, limit), read_votes)
