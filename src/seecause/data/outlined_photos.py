"""Photos with a class each, and the outline of their object.

`pets:PATH[:test|trainval]`: Oxford-IIIT Pet (Parkhi et al. 2012) in the layout of its release.

    images/NAME.jpg   annotations/trimaps/NAME.png   annotations/test.txt   annotations/trainval.txt
Lines of the lists are `NAME breed-id species breed-id-in-species`. A trimap has 1 on the animal, 2
on the background and 3 on the border, which is ignored. Labels are breeds. With a file
`imagenet_labels.csv` (columns breed, imagenet_index) beside them, labels are ImageNet classes
instead, and breeds it does not list are left out.

`coco:PATH[:val|train]`: COCO 2017 (Lin et al. 2014), every photo with its main object.

    val2017/<number>.jpg   train2017/<number>.jpg   annotations/instances_{val,train}2017.json
The label is the category that covers most pixels (crowds do not count), the mask all objects of it,
the box that of the largest. Crowd regions, of which no object is told apart, are neither object nor
background. Photos without an object are left out. Outlines are filled by Pillow: a mask may differ
from pycocotools' by its edge.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from seecause.data.dataset import IGNORE, evenly, path_and_split
from seecause.data.imagenet import imagenet_classes
from seecause.data.images import MAX_PIXELS, read_ids
from seecause.data.photos import Layout, Photo, Photos, whole_number
from seecause.errors import BadImage, DataMissing

log = logging.getLogger(__name__)

PET_SPLITS = ("test", "trainval")
MOST_BREEDS = 1000  # a larger number is a mistake
_MEANING = torch.tensor([IGNORE, 1, 0, IGNORE], dtype=torch.uint8)  # 1 animal, 2 background, 3 edge
_PETS_LAYOUT = Layout(
    "give the folder that holds images/ and annotations/, and one of the splits"
    f" {', '.join(PET_SPLITS)}; lines are `NAME breed-id species breed-id-in-species`"
)
_TRANSLATION = Layout(
    "expected columns breed and imagenet_index, with a number from 0 to 999 in each row"
)


class _Pet(NamedTuple):
    name: str
    breed: str
    label: int


def open_pets(rest: str, *, limit: int | None = None) -> Photos:
    """The listed photos of one split with their trimaps."""
    root, split = path_and_split(rest, PET_SPLITS)
    listed = _read_pets(root / "annotations" / f"{split}.txt")
    translation = root / "imagenet_labels.csv"
    if translation.is_file():
        listed, classes = _translate(listed, translation), imagenet_classes()
    else:
        breeds = {pet.label: pet.breed for pet in listed}
        classes = tuple(breeds.get(label, f"breed {label + 1}") for label in range(max(breeds) + 1))
    trimaps = root / "annotations" / "trimaps"
    photos = []
    for pet in listed:
        path = _PETS_LAYOUT.inside(root / "images", f"{pet.name}.jpg", f"{split}.txt")
        photos.append(Photo(path, pet.name, pet.label, trimaps / f"{pet.name}.png"))
    return Photos(f"pets:{root}:{split}", classes, evenly(photos, limit), read_trimap)


def read_trimap(path: Path) -> Tensor:
    """[H, W] uint8: 1 animal, 0 background, IGNORE border."""
    ids = torch.from_numpy(read_ids(path))
    if ids.min() < 1 or ids.max() > 3:
        odd = f"a trimap with values {int(ids.min())} to {int(ids.max())}"
        raise BadImage(str(path), odd, "expected 1 animal, 2 background, 3 border")
    return _MEANING[ids]


def _read_pets(path: Path) -> list[_Pet]:
    pets = [pet for pet in _PETS_LAYOUT.fields(path, _pet) if pet is not None]
    if not pets:
        raise _PETS_LAYOUT.refusal(path, "it lists no photos")
    return pets


def _pet(fields: list[str]) -> _Pet | None:
    """One line; None for a comment."""
    if fields[0].startswith("#"):
        return None
    name, breed, _, _ = fields
    numbers = [whole_number(field, MOST_BREEDS + 1) for field in fields[1:]]
    if numbers[0] < 1:
        raise ValueError(breed)
    return _Pet(name, name.rpartition("_")[0], numbers[0] - 1)


def _translate(listed: list[_Pet], path: Path) -> list[_Pet]:
    """ImageNet labels for the breeds that have one."""
    label = {}
    for where, row in _TRANSLATION.csv(path, ("breed", "imagenet_index")):
        try:
            label[row["breed"]] = whole_number(row["imagenet_index"], len(imagenet_classes()))
        except ValueError:
            raise _TRANSLATION.refusal(where, "cannot be read") from None
    pets = [pet._replace(label=label[pet.breed]) for pet in listed if pet.breed in label]
    if not pets:
        odd = "none of its breeds is in the list of photos"
        raise DataMissing(str(path), odd, "expected names like Egyptian_Mau")
    if len(pets) < len(listed):
        words = "%s names no ImageNet class for the breeds of %d photos; they are left out"
        log.warning(words, path, len(listed) - len(pets))
    return pets


COCO_SPLITS = ("val", "train")
_COCO_LAYOUT = Layout(
    "expected PATH/val2017/*.jpg and PATH/annotations/instances_val2017.json (or train)"
)
_FIELDS = {
    "images": ("id", "file_name", "height", "width"),
    "annotations": ("image_id", "category_id", "segmentation", "area", "bbox", "iscrowd"),
    "categories": ("id", "name"),
}
Record = Mapping[str, Any]


@dataclass(frozen=True)
class ObjectMasks:
    """The outlines of each photo's main object and of crowds, drawn when they are asked for."""

    source: Path
    sizes: Mapping[Path, tuple[int, int]]  # photo -> height, width
    outlines: Mapping[Path, tuple[list[Any], list[Any]]]  # photo -> object's, crowds'

    def __call__(self, path: Path) -> Tensor:
        size = self.sizes[path]
        try:
            own, crowd = (_filled(parts, size) for parts in self.outlines[path])
        except (TypeError, ValueError, KeyError, OverflowError) as odd:
            raise DataMissing(
                f"{self.source}, {path.name}", f"an outline that cannot be read ({odd})",
                "expected polygons [x, y, x, y, ...] or uncompressed run lengths",
            ) from None  # fmt: skip
        mask = own.to(torch.uint8)
        mask[crowd & ~own] = IGNORE
        return mask


def open_coco(rest: str, *, limit: int | None = None) -> Photos:
    """The photos of one split that show an object of a known category."""
    root, split = path_and_split(rest, COCO_SPLITS, default="val")
    source = root / "annotations" / f"instances_{split}2017.json"
    images, annotations, categories = _read_coco(source)
    places = {row["id"]: place for place, row in enumerate(categories)}
    by_photo: dict[Any, list[Record]] = {}
    for row in annotations:
        if row["category_id"] not in places:
            raise _COCO_LAYOUT.refusal(
                source, f"an object of the category {row['category_id']!r}, which is none"
            )
        by_photo.setdefault(row["image_id"], []).append(row)
    photos, sizes, outlines = [], {}, {}
    for image in images:
        objects = by_photo.get(image["id"], [])
        main = main_category(objects)
        if main is None:
            continue
        name = str(image["file_name"])
        path = _COCO_LAYOUT.inside(root / f"{split}2017", name, source)
        own = [row for row in objects if row["category_id"] == main and not row["iscrowd"]]
        crowds = [row["segmentation"] for row in objects if row["iscrowd"]]
        sizes[path] = _size(image, source)
        outlines[path] = ([row["segmentation"] for row in own], crowds)
        id = Path(name).with_suffix("").as_posix()  # folders tell photos of one name apart
        photos.append(Photo(path, id, places[main], path, box=_largest_box(own, source)))
    if not photos:
        raise _COCO_LAYOUT.refusal(source, "no photo with an object")
    chosen = evenly(photos, limit)
    needed = [photo.path for photo in chosen]
    read_mask = ObjectMasks(
        source, {path: sizes[path] for path in needed}, {path: outlines[path] for path in needed}
    )
    classes = tuple(str(row["name"]) for row in categories)
    return Photos(f"coco:{root}:{split}", classes, chosen, read_mask, lists=(source,))


def main_category(objects: Iterable[Record]) -> Any:
    """The category whose objects cover most pixels together; None where there is no object. Of
    equal ones the smaller number."""
    areas: Counter[Any] = Counter()
    for row in objects:
        if not row["iscrowd"]:
            areas[row["category_id"]] += row["area"]
    return min(areas, key=lambda category: (-areas[category], category), default=None)


def run_lengths(counts: Iterable[int], size: tuple[int, int]) -> Tensor:
    """[H, W] bool of lengths of runs down the columns: off, on, off ...; ValueError if they do not
    fill the picture."""
    counts = [int(count) for count in counts]
    if any(count < 0 for count in counts) or sum(counts) != size[0] * size[1]:
        raise ValueError(f"runs that do not fill {size[0]} x {size[1]} pixels")
    on = torch.arange(len(counts)) % 2 == 1
    flat = on.repeat_interleave(torch.tensor(counts))
    return flat.view(size[1], size[0]).T.contiguous()


def _filled(parts: Iterable[Any], size: tuple[int, int]) -> Tensor:
    """[H, W] bool: the pixels of any outline."""
    canvas = Image.new("1", (size[1], size[0]))
    draw, mask = ImageDraw.Draw(canvas), torch.zeros(size, dtype=torch.bool)
    for part in parts:
        if isinstance(part, dict):
            if isinstance(part["counts"], str) or tuple(part["size"]) != size:
                raise ValueError("compressed run lengths, or those of another size")
            mask |= run_lengths(part["counts"], size)
            continue
        for polygon in part:
            corners = [float(value) for value in polygon]
            if len(corners) < 6 or len(corners) % 2 or not np.isfinite(corners).all():
                raise ValueError("a polygon without three corners")
            draw.polygon(corners, fill=1)
    return mask | torch.from_numpy(np.asarray(canvas).copy())


def _largest_box(objects: Iterable[Record], source: Path) -> tuple[float, float, float, float]:
    box = max(objects, key=lambda row: row["area"])["bbox"]
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        raise _COCO_LAYOUT.refusal(source, f"the box {str(box)[:60]}, not x, y, width and height")
    x, y, width, height = map(float, box)
    return x, y, width, height


def _size(image: Record, source: Path) -> tuple[int, int]:
    size = (image["height"], image["width"])
    whole = all(type(side) is int and side > 0 for side in size)
    if not whole or size[0] * size[1] > MAX_PIXELS:
        raise _COCO_LAYOUT.refusal(source, f"the size {size} of {str(image['file_name'])[:60]!r}")
    return size


def _read_coco(source: Path) -> tuple[list[Record], list[Record], list[Record]]:
    """Images, annotations and categories, those sorted by their number, with all their fields."""
    content, tables = _COCO_LAYOUT.json(source), []
    for name, fields in _FIELDS.items():
        rows = content.get(name) if isinstance(content, dict) else None
        if not isinstance(rows, list) or not rows:
            raise _COCO_LAYOUT.refusal(source, f"no list of {name}")
        for row in rows:
            if not isinstance(row, dict) or not row.keys() >= set(fields):
                raise _COCO_LAYOUT.refusal(source, f"one of its {name} lacks {', '.join(fields)}")
        tables.append(rows)
    images, annotations, categories = tables
    numbered = [(row, "id") for row in (*images, *categories)]
    numbered += [(row, name) for row in annotations for name in ("image_id", "category_id")]
    if any(type(row[name]) is not int for row, name in numbered):
        raise _COCO_LAYOUT.refusal(source, "numbers of photos or categories that are not whole")
    if not all(_is_number(row["area"]) for row in annotations):
        raise _COCO_LAYOUT.refusal(source, "areas that are no numbers")
    return images, annotations, sorted(categories, key=lambda row: row["id"])


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value - value == 0
