"""`celeba:PATH[:train|val|test]`: CelebA (Liu et al. 2015) with the question of Sagawa et al. 2020:
blond hair, which most men here have not.

    img_align_celeba/<number>.jpg   list_attr_celeba.{csv,txt}   list_eval_partition.{csv,txt}
CSV as Kaggle has it, text as the authors do (two header lines in the first list, none in the
second). A label is Blond_Hair, a group (Blond_Hair, Male). The shortcut is no background, so a
method that removes backgrounds has no way to help here. There are no masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from seecause.data.dataset import evenly, path_and_split
from seecause.data.photos import (
    THREE,
    Photo,
    Photos,
    code,
    inside,
    read_csv,
    read_fields,
    read_lines,
)
from seecause.errors import DataMissing

SPLITS = ("train", "val", "test")
CLASSES, PLACES = ("not blond", "blond"), ("not male", "male")
ATTRIBUTES = ("Blond_Hair", "Male")
_LAYOUT = (
    "give the folder with img_align_celeba/, list_attr_celeba and list_eval_partition (csv or txt)"
)
_SIGNS = ("-1", "1")


def open_celeba(rest: str, *, limit: int | None = None) -> Photos:
    """The faces of one split with their group."""
    root, split = path_and_split(rest, SPLITS)
    attributes = dict(_attributes(root))
    images = root / "img_align_celeba"
    if (images / images.name).is_dir():  # Kaggle's archive has the folder twice
        images = images / images.name
    photos = []
    for name, part in _partition(root):
        if SPLITS[part] == split:
            if name not in attributes:
                raise DataMissing(
                    str(root / "list_attr_celeba"),
                    f"no line for {name} of list_eval_partition",
                    _LAYOUT,
                )
            group = attributes[name]
            path = inside(images, name, str(root / "list_eval_partition"), _LAYOUT)
            photos.append(Photo(path, name, group[0], group=group))
    if not photos:
        raise DataMissing(
            str(root / "list_eval_partition"), f"no photo of the split {split}", _LAYOUT
        )
    return Photos(f"celeba:{root}:{split}", CLASSES, evenly(photos, limit), places=PLACES)


def _attributes(root: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """(blond, male) of each photo."""
    path = root / "list_attr_celeba.csv"
    if path.is_file():
        for where, row in read_csv(path, ("image_id", *ATTRIBUTES), _LAYOUT):
            yield row["image_id"], _pair(row[ATTRIBUTES[0]], row[ATTRIBUTES[1]], where)
        return
    path = root / "list_attr_celeba.txt"
    header = [*read_lines(path, _LAYOUT), ""][1].split()
    for name in ATTRIBUTES:
        if name not in header:
            raise DataMissing(
                f"{path}, line 2", f"{name} is not among its {len(header)} attributes", _LAYOUT
            )
    blond, male = (header.index(name) + 1 for name in ATTRIBUTES)
    lines = read_fields(
        path,
        lambda f: _wide(f, len(header) + 1),
        f"{_LAYOUT}; lines are `file` and {len(header)} signs",
        skip=2,
    )
    for fields in lines:
        yield fields[0], _pair(fields[blond], fields[male], f"{path}, {fields[0]}")


def _partition(root: Path) -> Iterator[tuple[str, int]]:
    """0, 1 or 2 for each photo."""
    path = root / "list_eval_partition.csv"
    if path.is_file():
        for where, row in read_csv(path, ("image_id", "partition"), _LAYOUT):
            yield row["image_id"], code(row["partition"], THREE, where, _LAYOUT)
        return
    path = root / "list_eval_partition.txt"
    for name, part in read_fields(
        path, lambda f: _wide(f, 2), f"{_LAYOUT}; lines are `file split`"
    ):
        yield name, code(part, THREE, f"{path}, {name}", _LAYOUT)


def _pair(blond: str, male: str, where: str) -> tuple[int, int]:
    return code(blond, _SIGNS, where, _LAYOUT), code(male, _SIGNS, where, _LAYOUT)


def _wide(fields: list[str], count: int) -> list[str]:
    if len(fields) != count:
        raise ValueError(fields)
    return fields
