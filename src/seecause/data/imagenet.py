"""ImageNet and the datasets made of its photos.

`imagenet:PATH[:val|train]`: ImageNet-1k, `PATH/val/<wnid>/*.JPEG` and `PATH/train/<wnid>/*.JPEG`,
all classes or some of them.

`imagenet-s:PATH`: ImageNet-S (Gao et al. 2022), ImageNet validation photos with class masks:

    validation/<wnid>/*.JPEG   validation-segmentation/<wnid>/*.png

A mask is an RGB image with id = R + 256 G: 0 is anything else, 1000 is ignored, k is the k-th
WordNet id of the sorted list of 919, 300 or 50 categories. Five classes that cannot be told apart
are merged into another one. The object of a photo is the class of its folder; other classes are
background. Labels are ImageNet-1k classes, those of merged classes the class that was kept. The
list is that of the folders if all are there; of a part of the dataset it must be given:
`ImageNetS_categories_im919.txt` in PATH, as the release's repository has it.

`imagenet-hard:PATH`: ImageNet-Hard (Taesiri et al. 2023), `PATH/data/validation-*.parquet` with
the columns `image` (bytes of an image file) and `label` (a list of ImageNet-1k classes). Several
classes may be right: `Sample.label` is the first, `answers(index)` returns all. No masks.

`imagenet9:PATH[:VARIANT]`: ImageNet-9, the Backgrounds Challenge (Xiao et al. 2020), PATH being the
folder `bg_challenge` of its release:

    <variant>/val/<NN_class>/*.JPEG         fg_mask/val/<NN_class>/*.npy

Variants: original, mixed_same, mixed_rand, mixed_next (the object on a background of the same, a
random or the next class), only_fg, no_fg, only_bg_b, only_bg_t. Labels are the nine classes, NN =
00 to 08. Variants that show the object have masks; the name of a mixed photo
(`fg_<photo>_bg_<photo>`) says whose object it has. No file tells the class of a random background,
so there are no groups. `read_in9_map` reads `in_to_in9.json`, which maps the predictions of an
ImageNet-1k model to the nine classes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from seecause.data.dataset import IGNORE, Sample, Sliceable, evenly, path_and_split
from seecause.data.images import BROKEN, decode_image, first_line, read_image
from seecause.data.photos import Layout, Photo, Photos, class_photos
from seecause.errors import BadImage

SPLITS = ("train", "val")
_LAYOUT = Layout(
    "expected PATH/val/<wnid>/*.JPEG (or PATH/train/...), one folder for each WordNet id"
)


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """The 1,000 WordNet ids in the order of the labels."""
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


@cache
def imagenet_classes() -> tuple[str, ...]:
    """The names of the 1,000 classes in the order of the labels."""
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_descriptions())


def open_imagenet(rest: str, *, limit: int | None = None) -> Photos:
    """A label is the index of its WordNet id among the sorted 1,000."""
    path, split = path_and_split(rest, SPLITS, "val")
    photos: list[Photo] = []
    for folder in _LAYOUT.class_folders(path / split):
        photos += class_photos(folder, _imagenet_label(folder, _LAYOUT))
    if not photos:
        raise _LAYOUT.refusal(path / split, "no class folders in it")
    return Photos(f"imagenet:{rest}", imagenet_classes(), evenly(photos, limit))


def _imagenet_label(folder: Path, layout: Layout) -> int:
    wnid = kept_class(folder.name) if layout is _S_LAYOUT else folder.name
    if wnid not in imagenet_wnids():
        raise layout.refusal(folder, "not the WordNet id of an ImageNet-1k class")
    return imagenet_wnids().index(wnid)


IGNORED_ID = 1000
S_SIZES = (50, 300, 919)
MERGED = {  # class -> the class it counts as
    "n04356056": "n04355933",
    "n04493381": "n02808440",
    "n03642806": "n03832673",
    "n04008634": "n03773504",
    "n03887697": "n15075141",
}
_S_LAYOUT = Layout(
    "expected PATH/validation/<wnid>/*.JPEG and PATH/validation-segmentation/<wnid>/*.png"
)


def open_imagenet_s(rest: str, *, limit: int | None = None) -> Photos:
    """The validation photos with masks of their own class."""
    root = Path(rest)
    folders = _S_LAYOUT.class_folders(root / "validation")
    masks = _S_LAYOUT.folder(root / "validation-segmentation")
    number = {wnid: place for place, wnid in enumerate(_categories(root, folders), start=1)}
    photos = []
    for folder in folders:
        label = _imagenet_label(folder, _S_LAYOUT)
        if kept_class(folder.name) not in number:
            raise _S_LAYOUT.refusal(folder, "not the WordNet id of an ImageNet-S category")
        for photo in class_photos(folder, label):
            mask = masks / folder.name / f"{photo.path.stem}.png"
            photos.append(replace(photo, mask=mask))

    def read_mask(path: Path) -> Tensor:
        return object_mask(path, number[kept_class(path.parent.name)])

    return Photos(f"imagenet-s:{rest}", imagenet_classes(), evenly(photos, limit), read_mask)


def read_class_ids(path: Path) -> Tensor:
    """[H, W] int64: R + 256 G."""
    colours = torch.from_numpy(np.array(read_image(path))).long()
    return colours[..., 0] + 256 * colours[..., 1]


def object_mask(path: Path, number: int) -> Tensor:
    """[H, W] uint8: 1 on the category, 0 on anything else, IGNORE on ignored pixels."""
    ids = read_class_ids(path)
    if ids.max() > IGNORED_ID:
        raise BadImage(
            str(path),
            f"a mask with id {int(ids.max())}",
            f"expected R + 256 G from 0 to {S_SIZES[-1]}, or {IGNORED_ID} for ignored pixels",
        )
    return (ids == number).to(torch.uint8).masked_fill(ids == IGNORED_ID, IGNORE)


def kept_class(wnid: str) -> str:
    """The category a WordNet id counts as."""
    return MERGED.get(wnid, wnid)


def _categories(root: Path, folders: list[Path]) -> tuple[str, ...]:
    """Sorted WordNet ids; the k-th has id k. Of several lists, the one of just these folders."""
    own = {kept_class(folder.name) for folder in folders}
    lists = {
        file: {wnid for (wnid,) in _S_LAYOUT.table(file, {"WordNet id": str})}
        for file in sorted(root.glob("ImageNetS_categories_im*.txt"))
    }
    fitting = (
        [listed for listed in lists.values() if listed == own] or list(lists.values()) or [own]
    )
    if len(fitting) > 1 or len(fitting[0]) not in S_SIZES:
        found = f"{len(lists)} lists" if len(fitting) > 1 else f"{len(fitting[0])} categories"
        sizes = " or ".join(map(str, S_SIZES))
        expected = f"the ids of masks count through all {sizes}: put ImageNetS_categories_im919.txt"
        raise Layout(f"{expected} (one WordNet id a line) into PATH").refusal(root, found)
    return tuple(sorted(fitting[0]))


_HARD_LAYOUT = Layout("expected PATH/data/validation-*.parquet with the columns image and label")


@dataclass(frozen=True, eq=False)
class ImageNetHard(Sliceable):
    """Images inside Parquet files, read one row group at a time."""

    name: str
    rows: tuple[tuple[Path, int, int, tuple[int, ...]], ...]  # file, row group, row, classes
    capabilities: ClassVar = frozenset({"labels"})

    @property
    def classes(self) -> tuple[str, ...]:
        return imagenet_classes()

    @cached_property
    def fingerprint(self) -> str:
        from seecause.files import digest

        sizes = {path.name: path.stat().st_size for path, *_ in self.rows}
        return digest(*self.ids, repr(sizes), repr([row[3] for row in self.rows]))

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(f"{path.name}:{group}:{row}" for path, group, row, _ in self.rows)

    @property
    def labels(self) -> tuple[int, ...]:
        return tuple(classes[0] for *_, classes in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, /) -> Sample:
        path, group, row, classes = self.rows[index]
        entry, id = _row_group(path, group)[row].as_py(), self.ids[index]
        content = entry.get("bytes") if isinstance(entry, dict) else None
        if not isinstance(content, bytes):
            raise BadImage(id, "no bytes of an image", _HARD_LAYOUT)
        pixels = torch.from_numpy(np.array(decode_image(content, id)))  # [H, W, 3] uint8
        return Sample(pixels.permute(2, 0, 1).float() / 255, classes[0], id=id)

    def answers(self, index: int) -> tuple[int, ...]:
        """All classes that count as right."""
        return self.rows[index][3]


def open_imagenet_hard(rest: str, *, limit: int | None = None) -> ImageNetHard:
    """All validation images, in the order of the files."""
    folder = Path(rest) / "data"
    rows, known = [], set(range(IMAGENET_CLASSES))
    for path in sorted(folder.glob("validation-*.parquet")):
        with _HARD_LAYOUT.reading(path), pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                listed = file.read_row_group(group, columns=["image", "label"])["label"].to_pylist()
                for row, classes in enumerate(listed):
                    if not classes or not set(classes) <= known:
                        raise ValueError(f"row {row}: label {str(classes)[:60]}")
                    rows.append((path, group, row, tuple(classes)))
    if not rows:
        raise _HARD_LAYOUT.refusal(folder, "no validation-*.parquet in it")
    return ImageNetHard(f"imagenet-hard:{rest}", evenly(rows, limit))


@lru_cache(maxsize=1)
def _row_group(path: Path, group: int) -> pa.ChunkedArray:
    """The images of one row group, kept because the next one asked for is often its neighbour."""
    with _HARD_LAYOUT.reading(path), pq.ParquetFile(path) as file:
        return file.read_row_group(group, columns=["image"])["image"]


IN9_CLASSES = (
    *("dog", "bird", "wheeled vehicle", "reptile", "carnivore", "insect"),
    *("musical instrument", "primate", "fish"),
)
SHOWING_OBJECT = ("original", "mixed_same", "mixed_rand", "mixed_next", "only_fg")
VARIANTS = (*SHOWING_OBJECT, "no_fg", "only_bg_b", "only_bg_t")
IMAGENET_CLASSES = 1000
MAP = "in_to_in9.json"  # of the release
_IN9_LAYOUT = Layout(
    "expected PATH/<variant>/val/<NN_class>/*.JPEG with NN = 00 to 08, and"
    " PATH/fg_mask/val/<NN_class>/*.npy"
)
_MAP_LAYOUT = Layout(
    f'expected the in_to_in9.json of the release: {{"0": class, ...}} with {IMAGENET_CLASSES}'
    " entries, classes 0 to 8 or -1"
)
_OBJECT = re.compile(r"fg_(?P<photo>.+)_bg_.+")


def open_imagenet9(rest: str, *, limit: int | None = None) -> Photos:
    """The photos of one variant."""
    root, variant = path_and_split(rest, VARIANTS, "original")
    folder, masks = root / variant / "val", root / "fg_mask" / "val"
    masked = variant in SHOWING_OBJECT and masks.is_dir()
    photos = []
    for part in _IN9_LAYOUT.class_folders(folder):
        if part.name.partition("_")[0] not in {f"0{label}" for label in range(len(IN9_CLASSES))}:
            raise _IN9_LAYOUT.refusal(part, "not the folder of an ImageNet-9 class")
        for photo in class_photos(part, int(part.name[:2])):
            mask = masks / part.name / f"{object_of(photo.path.stem)}.npy" if masked else None
            photos.append(replace(photo, mask=mask))
    if not photos:
        raise _IN9_LAYOUT.refusal(folder, "no class folders in it")
    name = f"imagenet9:{root}:{variant}"
    return Photos(name, IN9_CLASSES, evenly(photos, limit), _read_object)


def object_of(stem: str) -> str:
    """The photo that an object was cut from."""
    named = _OBJECT.fullmatch(stem)
    return named["photo"] if named else stem


def _read_object(path: Path) -> Tensor:
    """[H, W] bool."""
    try:
        values = np.load(path, allow_pickle=False)
        if values.ndim != 2 or values.dtype.kind not in "biuf":
            raise ValueError(f"{values.dtype} {list(values.shape)}, not numbers [H, W]")
    except BROKEN as broken:
        reason = f"not a mask that can be read ({first_line(broken)})"
        raise BadImage(str(path), reason, _IN9_LAYOUT) from broken
    return torch.from_numpy(values > 0)


def read_in9_map(path: str | Path) -> Tensor:
    """[1000] int64: the class of ImageNet-9 that each class of ImageNet-1k belongs to, or -1."""
    path = Path(path)
    listed = _MAP_LAYOUT.json(path)
    with _MAP_LAYOUT.reading(path):
        values = [listed[str(place)] for place in range(IMAGENET_CLASSES)]
        if len(listed) != IMAGENET_CLASSES or not set(values) <= {*range(-1, len(IN9_CLASSES))}:
            raise ValueError("other classes")
        return torch.tensor(values, dtype=torch.int64)


def find_in9_map(name: str) -> Path:
    """The map of a dataset `imagenet9:PATH:VARIANT`: a file in PATH or beside it."""
    root, _ = path_and_split(name.partition(":")[2], VARIANTS, "original")
    beside = root.parent / MAP
    return beside if beside.is_file() and not (root / MAP).is_file() else root / MAP
