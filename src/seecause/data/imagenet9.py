"""`imagenet9:PATH[:VARIANT]`: ImageNet-9, the Backgrounds Challenge (Xiao et al. 2020), PATH being
the folder `bg_challenge` of its release.

    <variant>/val/<NN_class>/*.JPEG         fg_mask/val/<NN_class>/*.npy
Variants: original, mixed_same, mixed_rand, mixed_next (the object on a background of the same, a
random or the next class), only_fg, no_fg, only_bg_b, only_bg_t. Labels are the nine classes, NN =
00 to 08. Masks are there for variants that show the object; a mixed photo says in its name
(`fg_<photo>_bg_<photo>`) whose object it has. The class of a random background is not told by any
file, so there are no groups.

`read_in9_map` reads the release's `in_to_in9.json`, which turns the answers of an ImageNet-1k model
into the nine.
"""

from __future__ import annotations

import json
import re
import warnings
from io import BytesIO
from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from seecause.data.dataset import evenly, path_and_split
from seecause.data.images import BROKEN, first_line
from seecause.data.photos import Photo, Photos, class_folders, pictures
from seecause.errors import BadImage, DataMissing

CLASSES = (
    "dog",
    "bird",
    "wheeled vehicle",
    "reptile",
    "carnivore",
    "insect",
    "musical instrument",
    "primate",
    "fish",
)
SHOWING_OBJECT = ("original", "mixed_same", "mixed_rand", "mixed_next", "only_fg")
VARIANTS = (*SHOWING_OBJECT, "no_fg", "only_bg_b", "only_bg_t")
IMAGENET_CLASSES = 1000
MAP = "in_to_in9.json"  # of the release
_LAYOUT = (
    "expected PATH/<variant>/val/<NN_class>/*.JPEG with NN = 00 to 08, and"
    " PATH/fg_mask/val/<NN_class>/*.npy"
)
_MAP_LAYOUT = (
    f'expected the in_to_in9.json of the release: {{"0": class, ...}} with {IMAGENET_CLASSES}'
    " entries, classes 0 to 8 or -1"
)
_OBJECT = re.compile(r"fg_(?P<photo>.+)_bg_.+")


def open_imagenet9(rest: str, *, limit: int | None = None) -> Photos:
    """The photos of one variant."""
    root, variant = path_and_split(rest, VARIANTS, "original")
    folder = root / variant / "val"
    if not folder.is_dir():
        raise DataMissing(str(folder), "no such folder", _LAYOUT)
    masks = root / "fg_mask" / "val"
    masked = variant in SHOWING_OBJECT and masks.is_dir()
    photos = []
    for part in class_folders(folder):
        for path in pictures(part):
            mask = masks / part.name / f"{object_of(path.stem)}.npy" if masked else None
            photos.append(Photo(path, f"{part.name}/{path.name}", _label(part), mask))
    if not photos:
        raise DataMissing(str(folder), "no class folders in it", _LAYOUT)
    return Photos(f"imagenet9:{root}:{variant}", CLASSES, evenly(photos, limit), read_object)


def object_of(stem: str) -> str:
    """The photo that an object was cut from."""
    named = _OBJECT.fullmatch(stem)
    return named["photo"] if named else stem


def read_object(path: Path) -> Tensor:
    """[H, W] bool."""
    return torch.from_numpy(_read_npy(path) > 0)


def _read_npy(path: Path) -> np.ndarray:
    """A numpy array [H, W] of real numbers. The header is checked against the file's length before
    anything is made of it."""
    if not path.is_file():
        raise BadImage(str(path), "no such file", _LAYOUT)
    file = BytesIO(path.read_bytes())
    try:
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about headers of Python 2
            shape, fortran, dtype = read_header(file)
    except (*BROKEN, TokenError) as broken:
        raise BadImage(
            str(path), f"not a numpy array that can be read ({first_line(broken)})", _LAYOUT
        ) from broken
    content = file.read()
    if len(shape) != 2 or dtype.kind not in "biuf" or min(shape) < 1:
        raise BadImage(str(path), "not an array [H, W] of numbers", _LAYOUT)
    if shape[0] * shape[1] * dtype.itemsize != len(content):
        raise BadImage(str(path), f"not the bytes of {list(shape)} numbers", _LAYOUT)
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def read_in9_map(path: str | Path) -> Tensor:
    """[1000] int64: the class of ImageNet-9 that each class of ImageNet-1k belongs to, or -1."""
    path = Path(path)
    if not path.is_file():
        raise DataMissing(str(path), "no such file", _MAP_LAYOUT)
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as broken:
        raise DataMissing(str(path), f"not JSON ({broken})", _MAP_LAYOUT) from broken
    expected = {str(place) for place in range(IMAGENET_CLASSES)}
    if not isinstance(listed, dict) or set(listed) != expected:
        raise DataMissing(str(path), "not one entry for each class of ImageNet-1k", _MAP_LAYOUT)
    for place, value in listed.items():
        if type(value) is not int or not -1 <= value < len(CLASSES):
            got = repr(value)[:40] if isinstance(value, int | float | str) else "no number"
            raise DataMissing(str(path), f"class {place} belongs to {got}", _MAP_LAYOUT)
    return torch.tensor([listed[str(place)] for place in range(IMAGENET_CLASSES)])


def find_in9_map(name: str) -> Path:
    """`imagenet9:PATH:VARIANT` -> the map, which lies in PATH or beside it."""
    path, _, last = name.partition(":")[2].rpartition(":")
    root = Path(path if last in VARIANTS else name.partition(":")[2])
    beside = root.parent / MAP
    return beside if beside.is_file() and not (root / MAP).is_file() else root / MAP


def _label(folder: Path) -> int:
    number = folder.name.partition("_")[0]
    if number not in {f"{place:02}" for place in range(len(CLASSES))}:
        raise DataMissing(str(folder), "not the folder of an ImageNet-9 class", _LAYOUT)
    return int(number)
