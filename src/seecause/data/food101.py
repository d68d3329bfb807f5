"""`food101:PATH[:test|train]`: Food-101 (Bossard et al. 2014) in the layout of its release. It has
no masks.

    images/<class>/<number>.jpg   meta/classes.txt   meta/test.txt   meta/train.txt
Lines of the lists are `<class>/<number>`; a label is the place of its class in `classes.txt`.
"""

from __future__ import annotations

from pathlib import Path

from seecause.data.dataset import evenly, path_and_split
from seecause.data.photos import Photo, Photos, inside, read_lines
from seecause.errors import DataMissing

SPLITS = ("test", "train")
_LAYOUT = f"give the folder that holds images/ and meta/, and one of the splits {', '.join(SPLITS)}"


def open_food101(rest: str, *, limit: int | None = None) -> Photos:
    """The listed photos of one split."""
    root, split = path_and_split(rest, SPLITS)
    classes = _lines(root / "meta" / "classes.txt")
    label = {name: place for place, name in enumerate(classes)}
    listing = root / "meta" / f"{split}.txt"
    photos = []
    for number, line in enumerate(_lines(listing), start=1):
        name, _, photo = line.partition("/")
        if name not in label or not photo:
            raise DataMissing(
                f"{listing}, line {number}",
                f"{line[:80]!r} cannot be read",
                "expected <class>/<number> with a class of meta/classes.txt",
            )
        path = inside(root / "images", f"{line}.jpg", f"{listing}, line {number}", _LAYOUT)
        photos.append(Photo(path, line, label[name]))
    return Photos(f"food101:{root}:{split}", tuple(classes), evenly(photos, limit))


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in read_lines(path, _LAYOUT) if line.strip()]
