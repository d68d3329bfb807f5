"""ImageNet and the datasets made of its photos.

`imagenet:PATH[:val|train]`: ImageNet-1k, `PATH/val/<wnid>/*.JPEG` and `PATH/train/<wnid>/*.JPEG`,
all classes or some of them.

`imagenet-s:PATH`: ImageNet-S (Gao et al. 2022), ImageNet validation photos with class masks:

    validation/<wnid>/*.JPEG   validation-segmentation/<wnid>/*.png

A mask is an RGB image with id = R + 256 G: 0 is anything else, 1000 is ignored, k is the k-th
WordNet id of the sorted list of 919, 300 or 50 categories. Five classes that cannot be told apart
are merged into another one. The object of a photo is the class of its folder; other classes are
background. Labels are ImageNet-1k classes, those of merged classes the class that was kept. The
categories are the folders; for a part of the dataset, put their list into PATH
(`ImageNetS_categories_im919.txt`, im300 or im50, as the release's repository has it).

`imagenet-hard:PATH`: ImageNet-Hard (Taesiri et al. 2023), `PATH/data/validation-*.parquet` with
the columns `image` (bytes of an image file) and `label` (a list of ImageNet-1k classes, of which
`Sample.label` is the first). No masks.

`imagenet9:PATH[:VARIANT]`: ImageNet-9, the Backgrounds Challenge (Xiao et al. 2020), where PATH is
the folder `bg_challenge` of its release:

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
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

from seecause.data.dataset import IGNORE, Names, path_and_split
from seecause.data.photos import Layout, Photo, Photos, class_photos
from seecause.errors import BadImage
from seecause.loading import imagenet_names
from seecause.models.preprocess import decode_image, first_line, read_image

IMAGENET_CLASSES = 1000
_IMAGENET = Layout(
    "expected PATH/val/<wnid>/*.JPEG (or PATH/train/...), one folder for each WordNet id"
)


@cache
def imagenet_wnids() -> Names:
    """The 1,000 WordNet ids in the order of the labels."""
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


def open_imagenet(rest: str) -> Photos:
    """A label is the index of its WordNet id among the sorted 1,000."""
    path, split = path_and_split(rest, ("train", "val"), "val")
    photos: list[Photo] = []
    for folder in _IMAGENET.folders(path / split):
        photos += class_photos(folder, _label(folder, folder.name))
    return Photos(f"imagenet:{rest}", imagenet_names(), photos)


def _label(folder: Path, wnid: str) -> int:
    if wnid not in imagenet_wnids():
        raise _IMAGENET.refusal(folder, "not the WordNet id of an ImageNet-1k class")
    return imagenet_wnids().index(wnid)


IGNORED_ID = 1000
S_SIZES = (50, 300, 919)
MERGED = {  # class -> the class that it is merged into
    "n04356056": "n04355933",
    "n04493381": "n02808440",
    "n03642806": "n03832673",
    "n04008634": "n03773504",
    "n03887697": "n15075141",
}
_IMAGENET_S = Layout(
    "expected PATH/validation/<wnid>/*.JPEG and PATH/validation-segmentation/<wnid>/*.png, for all"
    " 50, 300 or 919 categories; for some of them, put the one list of the release that the ids of"
    " its masks count through (ImageNetS_categories_im50.txt, im300 or im919) into PATH"
)


def open_imagenet_s(rest: str) -> Photos:
    """The validation photos with masks of their own class."""
    root = Path(rest)
    folders = _IMAGENET_S.folders(root / "validation")
    categories = {kept_class(folder.name) for folder in folders}
    lists = list(root.glob("ImageNetS_categories_im*.txt"))
    if len(lists) == 1:
        categories = {wnid for (wnid,) in _IMAGENET_S.table(lists[0], {"WordNet id": str})}
    if len(categories) not in S_SIZES or len(lists) > 1:
        found = f"{len(categories)} categories and {len(lists)} lists of them"
        raise _IMAGENET_S.refusal(root, found)
    number = {wnid: place for place, wnid in enumerate(sorted(categories), start=1)}
    photos = []
    for folder in folders:
        for photo in class_photos(folder, _label(folder, kept_class(folder.name))):
            mask = root / "validation-segmentation" / folder.name / f"{photo.path.stem}.png"
            photos.append(replace(photo, mask=mask))
    reader = partial(_read_category, number)
    return Photos(f"imagenet-s:{rest}", imagenet_names(), photos, reader)


def _read_category(number: dict[str, int], photo: Photo) -> Tensor:
    """[H, W] uint8: 1 on the category of the photo's folder, 0 on anything else, IGNORE on ignored
    pixels."""
    assert photo.mask is not None
    ids = read_class_ids(photo.mask)
    if ids.max() > IGNORED_ID:
        expected = f"expected R + 256 G from 0 to {S_SIZES[-1]}, or {IGNORED_ID} for ignored pixels"
        raise BadImage(str(photo.mask), f"a mask with id {int(ids.max())}", expected)
    own = number[kept_class(photo.path.parent.name)]
    return (ids == own).to(torch.uint8).masked_fill(ids == IGNORED_ID, IGNORE)


def read_class_ids(path: Path) -> Tensor:
    """[H, W] int64: R + 256 G."""
    colours = torch.from_numpy(np.array(read_image(path))).long()
    return colours[..., 0] + 256 * colours[..., 1]


def kept_class(wnid: str) -> str:
    """The category that a WordNet id is merged into."""
    return MERGED.get(wnid, wnid)


_HARD = Layout("expected PATH/data/validation-*.parquet with the columns image and label")


def open_imagenet_hard(rest: str) -> Photos:
    """All validation images, in the order of the files."""
    photos = []
    for path in sorted(Path(rest).glob("data/validation-*.parquet")):
        with _HARD.reading(path), pq.ParquetFile(path) as file:
            file.schema_arrow.field("image")
            for group in range(file.num_row_groups):
                listed = file.read_row_group(group, columns=["label"])["label"].to_pylist()
                for row, classes in enumerate(listed):
                    label = range(IMAGENET_CLASSES)[classes[0]]
                    photos.append(Photo(path, f"{path.name}:{group}:{row}", label))
    return Photos(f"imagenet-hard:{rest}", imagenet_names(), photos, read_image=_read_row)


def _read_row(photo: Photo) -> Image.Image:
    _, group, row = photo.id.split(":")
    entry = _row_group(photo.path, int(group))[int(row)].as_py()
    content = entry.get("bytes") if isinstance(entry, dict) else None
    return decode_image(content or b"", photo.id)


@lru_cache(maxsize=1)
def _row_group(path: Path, group: int) -> pa.ChunkedArray:
    """The images of one row group, cached because the next image is often in it."""
    with _HARD.reading(path), pq.ParquetFile(path) as file:
        return file.read_row_group(group, columns=["image"])["image"]


IN9_CLASSES = (
    *("dog", "bird", "wheeled vehicle", "reptile", "carnivore", "insect"),
    *("musical instrument", "primate", "fish"),
)
SHOWING_OBJECT = ("original", "mixed_same", "mixed_rand", "mixed_next", "only_fg")
VARIANTS = (*SHOWING_OBJECT, "no_fg", "only_bg_b", "only_bg_t")
MAP = "in_to_in9.json"  # of the release
_IN9 = Layout(
    "expected PATH/<variant>/val/<NN_class>/*.JPEG with NN = 00 to 08, and"
    " PATH/fg_mask/val/<NN_class>/*.npy"
)
_IN9_MAP = Layout(
    f'expected the in_to_in9.json of the release: {{"0": class, ...}} with {IMAGENET_CLASSES}'
    " entries, classes 0 to 8 or -1"
)
_MIXED = re.compile(r"fg_(?P<photo>.+)_bg_.+")


def open_imagenet9(rest: str) -> Photos:
    """The photos of one variant."""
    root, variant = path_and_split(rest, VARIANTS, "original")
    folder, masks = root / variant / "val", root / "fg_mask" / "val"
    masked = variant in SHOWING_OBJECT and masks.is_dir()
    photos = []
    for part in _IN9.folders(folder):
        with _IN9.reading(part):
            label = range(len(IN9_CLASSES))[int(part.name.partition("_")[0])]
        for photo in class_photos(part, label):
            mask = masks / part.name / f"{object_of(photo.path.stem)}.npy" if masked else None
            photos.append(replace(photo, mask=mask))
    return Photos(f"imagenet9:{root}:{variant}", IN9_CLASSES, photos, _read_object)


def object_of(stem: str) -> str:
    """The photo that the object of a photo was cut from."""
    named = _MIXED.fullmatch(stem)
    return named["photo"] if named else stem


def _read_object(photo: Photo) -> Tensor:
    """[H, W] bool."""
    assert photo.mask is not None
    try:
        return torch.from_numpy(np.load(photo.mask, allow_pickle=False) > 0)
    except Exception as broken:  # decoders raise anything on a damaged file
        reason = f"not a mask that can be read ({first_line(broken)})"
        raise BadImage(str(photo.mask), reason, _IN9) from broken


def read_in9_map(path: str | Path) -> Tensor:
    """[1000] int64: the class of ImageNet-9 that each class of ImageNet-1k belongs to, or -1."""
    path = Path(path)
    listed, known = _IN9_MAP.json(path), range(-1, len(IN9_CLASSES))
    with _IN9_MAP.reading(path):
        values = [known.index(listed[str(place)]) - 1 for place in range(IMAGENET_CLASSES)]
    return torch.tensor(values)


def find_in9_map(name: str) -> Path:
    """The map of a dataset `imagenet9:PATH:VARIANT`: a file in PATH or beside it."""
    root, _ = path_and_split(name.partition(":")[2], VARIANTS, "original")
    beside = root.parent / MAP
    return beside if beside.is_file() and not (root / MAP).is_file() else root / MAP
