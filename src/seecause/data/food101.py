"""`food101:PATH[:test|train]`: Food-101 (Bossard et al. 2014) in the layout of its release. It has
no masks.

    images/<class>/<number>.jpg   meta/classes.txt   meta/test.txt   meta/train.txt
Lines of the lists are `<class>/<number>`; a label is the place of its class in `classes.txt`.
"""

from __future__ import annotations

from pathlib import Path

from seecause.data.dataset import evenly, path_and_split
from seecause.data.photos import Photo, Photos
from seecause.errors import DataMissing

SPLITS = ("test", "train")


def open_food101(rest: str, *, limit: int | None = None) -> Photos:
    """The listed photos of one split."""
    root, split = path_and_split(rest, SPLITS)
    classes = _lines(root / "meta" / "classes.txt")
    label = {name: place for place, name in enumerate(classes)}
    listing = root / "meta" / f"{split}.txt"
    found = []
    for number, line in enumerate(_lines(listing), start=1):
        name, _, photo = line.partition("/")
        if name not in label or not photo:
            raise DataMissing(
                f"{listing}, line {number}",
                f"{line!r} cannot be read",
                "expected <class>/<number> with a class of meta/classes.txt",
            )
        found.append(Photo(root / "images" / f"{line}.jpg", line, label[name]))
    return Photos(f"food101:{root}:{split}", tuple(classes), evenly(found, limit))


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise DataMissing(
            str(path),
            "no such file",
            "give the folder that holds images/ and meta/, and one of the splits"
            f" {', '.join(SPLITS)}",
        )
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise DataMissing(str(path), "it lists nothing", "give the file of the release")
    return lines
