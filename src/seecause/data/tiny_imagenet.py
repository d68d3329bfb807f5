"""`tiny-imagenet:PATH[:train|val|trainval|test]`: Tiny ImageNet (200 classes, 64 px), PATH being
the release's folder `tiny-imagenet-200`.

    wnids.txt  words.txt  train/<wnid>/images/*.JPEG  train/<wnid>/<wnid>_boxes.txt
    val/images/*.JPEG  val/val_annotations.txt
The release's test photos have no labels, so its `val` folder is `test` here; `val` is every tenth
training photo of a class, `train` the others, `trainval` all of them. A label is the place of its
WordNet id among the sorted 200. Boxes are given; there are no masks.
"""

from __future__ import annotations

from pathlib import Path

from seecause.data.dataset import evenly, part_of_train, path_and_split
from seecause.data.photos import Photo, Photos, inside, pictures, read_fields, read_lines
from seecause.errors import DataMissing

SPLITS = ("train", "val", "trainval", "test")
_LAYOUT = "give the folder tiny-imagenet-200 with wnids.txt, words.txt, train/ and val/"

Box = tuple[float, float, float, float]


def open_tiny_imagenet(rest: str, *, limit: int | None = None) -> Photos:
    """Photos with the box of their object."""
    root, split = path_and_split(rest, SPLITS)
    listed = read_lines(root / "wnids.txt", _LAYOUT)
    wnids = sorted({line.strip() for line in listed if line.strip()})
    label = {wnid: place for place, wnid in enumerate(wnids)}
    if split == "test":
        photos = _listed(root / "val", label)
    else:
        photos = []
        for wnid in wnids:
            folder = inside(root / "train", wnid, str(root / "wnids.txt"), _LAYOUT)
            photos += _of_class(folder, label[wnid])
        photos = part_of_train(photos, [photo.label for photo in photos], split)
    words = dict(
        read_fields(
            root / "words.txt",
            _word,
            f"{_LAYOUT}; lines are a WordNet id, a tab and its names",
            separator="\t",
        )
    )
    return Photos(
        f"tiny-imagenet:{root}:{split}",
        tuple(words.get(wnid, wnid) for wnid in wnids),
        evenly(photos, limit),
    )


def _of_class(folder: Path, label: int) -> list[Photo]:
    listing = folder / f"{folder.name}_boxes.txt"
    boxes = dict(
        read_fields(
            listing,
            lambda f: (f[0], _box(f[1:])),
            f"{_LAYOUT}; lines are `file x0 y0 x1 y1`",
            separator="\t",
        )
    )
    if not (folder / "images").is_dir():
        raise DataMissing(str(folder / "images"), "no such folder", _LAYOUT)
    return [
        Photo(path, f"{folder.name}/{path.name}", label, box=boxes.get(path.name))
        for path in pictures(folder / "images")
    ]


def _listed(folder: Path, label: dict[str, int]) -> list[Photo]:
    listing = folder / "val_annotations.txt"
    lines = read_fields(
        listing,
        lambda f: (f[0], f[1], _box(f[2:])),
        f"{_LAYOUT}; lines are `file wnid x0 y0 x1 y1`",
        separator="\t",
    )
    for name, wnid, _ in lines:
        if wnid not in label:
            raise DataMissing(
                str(listing),
                f"{name[:80]!r} is {wnid[:80]!r}, which wnids.txt does not list",
                _LAYOUT,
            )
    return [
        Photo(inside(folder / "images", name, str(listing), _LAYOUT), name, label[wnid], box=box)
        for name, wnid, box in lines
    ]


def _box(corners: list[str]) -> Box:
    """x, y, width, height of a box whose two corners both belong to it."""
    left, top, right, bottom = (int(corner) for corner in corners)
    return float(left), float(top), float(right - left + 1), float(bottom - top + 1)


def _word(fields: list[str]) -> tuple[str, str]:
    wnid, names = fields
    return wnid, names.split(",")[0]
