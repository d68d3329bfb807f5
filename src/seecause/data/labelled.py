"""Photos with one class each; some with the outline of their object.

`pets:PATH[:test|trainval]`: Oxford-IIIT Pet (Parkhi et al. 2012).

    images/NAME.jpg   annotations/trimaps/NAME.png   annotations/test.txt   annotations/trainval.txt

Lines of the lists are `NAME breed-id species breed-id-in-species`. A trimap has 1 on the animal, 2
on the background and 3 on the border, which is ignored. Labels are breeds. With a file
`imagenet_labels.csv` (columns breed, imagenet_index) in PATH, labels are ImageNet classes instead,
and breeds that it does not list are skipped.

`coco:PATH[:val|train]`: COCO 2017 (Lin et al. 2014), every photo with its main object.

    val2017/<number>.jpg   train2017/<number>.jpg   annotations/instances_{val,train}2017.json

The label is the category that covers most pixels (crowds do not count), the mask all objects of it,
the box that of the largest one. Crowd regions, in which no single object can be told, are neither
object nor background. Photos without an object are skipped. Outlines are filled by Pillow: a mask
may differ from that of pycocotools at its edge.

`food101:PATH[:test|train]`: Food-101 (Bossard et al. 2014).

    images/<class>/<number>.jpg   meta/classes.txt   meta/test.txt   meta/train.txt

`cifar10:PATH[:train|val|trainval|test]`, `cifar100:...`: CIFAR (Krizhevsky 2009), the "python
version" of its release; PATH is its folder or the one that holds it.

    cifar-10-batches-py/  data_batch_1 .. 5, test_batch, batches.meta
    cifar-100-python/     train, test, meta

The pickles are read without running them. Labels of CIFAR-100 are the fine ones.

`tiny-imagenet:PATH[:train|val|trainval|test]`: Tiny ImageNet (200 classes, 64 pixels), PATH being
the release's folder `tiny-imagenet-200`.

    wnids.txt  words.txt  train/<wnid>/images/*.JPEG  train/<wnid>/<wnid>_boxes.txt
    val/images/*.JPEG  val/val_annotations.txt

The release's test photos have no labels, so its `val` folder is `test` here. A label is the index
of its WordNet id among the sorted 200.

CIFAR and Tiny ImageNet have no validation split: `val` is every tenth training photo of each class,
`train` the others, `trainval` all of them.

torchvision's classes for these datasets are not used: they check digests of whole archives, keep
the paths that masks and digests need private, and unpickle whatever a file says.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from seecause.data._pickles import read_pickle
from seecause.data.dataset import IGNORE, Sample, Sliceable, evenly, part_of_train, path_and_split
from seecause.data.imagenet import imagenet_classes
from seecause.data.images import read_ids
from seecause.data.photos import Box, Layout, Photo, Photos, pictures, whole
from seecause.errors import BadImage
from seecause.files import digest

log = logging.getLogger(__name__)
TRAIN_SPLITS = ("train", "val", "trainval", "test")
PET_SPLITS = ("test", "trainval")
MOST_BREEDS = 1000  # a larger number is a mistake
_MEANING = torch.tensor([IGNORE, 1, 0, IGNORE], dtype=torch.uint8)  # 1 animal, 2 background, 3 edge
_PETS_LAYOUT = Layout(
    "give the folder that holds images/ and annotations/, and one of the splits"
    f" {', '.join(PET_SPLITS)}"
)
_PET_FIELDS = {
    "NAME": str,
    "breed-id": whole(MOST_BREEDS),
    "species": whole(3),
    "breed-id-in-species": str,
}


def read_pets(root: Path, split: str) -> list[tuple[str, str, int, int]]:
    """Name, breed, label and species (1 cat, 2 dog) of the listed photos."""
    listing = root / "annotations" / f"{split}.txt"
    rows = _PETS_LAYOUT.table(listing, _PET_FIELDS, comment="#")
    for name, *_ in rows:
        _PETS_LAYOUT.inside(root / "images", name, listing)
    return [(name, name.rpartition("_")[0], id - 1, kind) for name, id, kind, _ in rows]


def open_pets(rest: str, *, limit: int | None = None) -> Photos:
    """The listed photos of one split with their trimaps."""
    root, split = path_and_split(rest, PET_SPLITS)
    listed = read_pets(root, split)
    translation = root / "imagenet_labels.csv"
    if translation.is_file():
        classes = imagenet_classes()
        columns = {"breed": str, "imagenet_index": whole(len(classes))}
        index = dict(Layout("").table(translation, columns, separator=",", header=True))
        labelled = [(name, index[breed]) for name, breed, *_ in listed if breed in index]
        if not labelled:
            raise Layout("expected names like Egyptian_Mau").refusal(
                translation, "none of its breeds is in the list of photos"
            )
        if len(labelled) < len(listed):
            words = "%s names no ImageNet class for the breeds of %d photos, which are skipped"
            log.warning(words, translation, len(listed) - len(labelled))
    else:
        labelled = [(name, label) for name, _, label, _ in listed]
        breeds = {label: breed for _, breed, label, _ in listed}
        classes = tuple(breeds.get(label, f"breed {label + 1}") for label in range(max(breeds) + 1))
    images, trimaps = root / "images", root / "annotations" / "trimaps"
    photos = [
        Photo(images / f"{name}.jpg", name, label, trimaps / f"{name}.png")
        for name, label in labelled
    ]
    return Photos(f"pets:{root}:{split}", classes, evenly(photos, limit), read_trimap)


def read_trimap(path: Path) -> Tensor:
    """[H, W] uint8: 1 animal, 0 background, IGNORE border."""
    ids = torch.from_numpy(read_ids(path))
    if ids.min() < 1 or ids.max() > 3:
        odd = f"a trimap with values {int(ids.min())} to {int(ids.max())}"
        raise BadImage(str(path), odd, "expected 1 animal, 2 background, 3 border")
    return _MEANING[ids]


COCO_SPLITS = ("val", "train")
_COCO_LAYOUT = Layout(
    "expected PATH/val2017/*.jpg and PATH/annotations/instances_val2017.json (or train), with"
    " polygons [x, y, x, y, ...] or uncompressed run lengths"
)
Record = Mapping[str, Any]


@dataclass(frozen=True)
class ObjectMasks:
    """Draws the outlines of each photo's main object and of crowds when they are asked for."""

    source: Path
    outlines: Mapping[Path, tuple[tuple[int, int], list[Any], list[Any]]]  # size, object's, crowds'

    def __call__(self, path: Path) -> Tensor:
        size, *outlines = self.outlines[path]
        with _COCO_LAYOUT.reading(f"{self.source}, {path.name}"):
            own, crowd = (_filled(parts, size) for parts in outlines)
        mask = own.to(torch.uint8)
        mask[crowd & ~own] = IGNORE
        return mask


def open_coco(rest: str, *, limit: int | None = None) -> Photos:
    """The photos of one split that show an object of a known category."""
    root, split = path_and_split(rest, COCO_SPLITS, default="val")
    source = root / "annotations" / f"instances_{split}2017.json"
    content = _COCO_LAYOUT.json(source)
    photos, outlines = [], {}
    with _COCO_LAYOUT.reading(source):
        categories = sorted(content["categories"], key=lambda row: row["id"])
        places = {row["id"]: place for place, row in enumerate(categories)}
        by_photo: dict[int, list[Record]] = {}
        for row in content["annotations"]:
            by_photo.setdefault(row["image_id"], []).append(row)
        for image in content["images"]:
            objects = by_photo.get(image["id"], [])
            main = main_category(objects)
            if main is None:
                continue
            name = image["file_name"]
            path = _COCO_LAYOUT.inside(root / f"{split}2017", name, source)
            own = [row for row in objects if row["category_id"] == main and not row["iscrowd"]]
            crowds = [row["segmentation"] for row in objects if row["iscrowd"]]
            size = (int(image["height"]), int(image["width"]))
            outlines[path] = (size, [row["segmentation"] for row in own], crowds)
            x, y, width, height = map(float, max(own, key=lambda row: row["area"])["bbox"])
            id = Path(name).with_suffix("").as_posix()  # folders tell photos of one name apart
            photos.append(Photo(path, id, places[main], path, box=(x, y, width, height)))
    if not photos:
        raise _COCO_LAYOUT.refusal(source, "no photo with an object")
    chosen = evenly(photos, limit)
    masks = ObjectMasks(source, {photo.path: outlines[photo.path] for photo in chosen})
    classes = tuple(str(row["name"]) for row in categories)
    return Photos(f"coco:{root}:{split}", classes, chosen, masks, lists=(source,))


def main_category(objects: Iterable[Record]) -> int | None:
    """The category whose objects cover most pixels together; None where there is no object. Of
    equal ones the smaller number."""
    areas: Counter[int] = Counter()
    for row in objects:
        if not row["iscrowd"]:
            areas[row["category_id"]] += row["area"]
    return min(areas, key=lambda category: (-areas[category], category), default=None)


def run_lengths(counts: Iterable[int], size: tuple[int, int]) -> Tensor:
    """[H, W] bool of lengths of runs down the columns: off, on, off ...; ValueError if they do not
    fill the image."""
    counts = [int(count) for count in counts]
    if any(count < 0 for count in counts) or sum(counts) != size[0] * size[1]:
        raise ValueError(f"runs that do not fill {size[0]} x {size[1]} pixels")
    on = torch.arange(len(counts)) % 2 == 1
    flat = on.repeat_interleave(torch.tensor(counts))
    return flat.view(size[1], size[0]).T.contiguous()


def _filled(parts: Iterable[Any], size: tuple[int, int]) -> Tensor:
    """[H, W] bool: the pixels inside outlines: lists of polygons, or run lengths."""
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
    return mask | torch.from_numpy(np.array(canvas))


FOOD_SPLITS = ("test", "train")
_FOOD_LAYOUT = Layout(
    f"give the folder that holds images/ and meta/, and one of the splits {', '.join(FOOD_SPLITS)};"
    " lines are <class>/<number> with a class of meta/classes.txt"
)


def open_food101(rest: str, *, limit: int | None = None) -> Photos:
    """The listed photos of one split."""
    root, split = path_and_split(rest, FOOD_SPLITS)
    classes = [name for (name,) in _FOOD_LAYOUT.table(root / "meta" / "classes.txt", {"name": str})]
    listing = root / "meta" / f"{split}.txt"
    photos = []
    for label, line in _FOOD_LAYOUT.table(
        listing, {"class": classes.index, "number": str}, separator="/"
    ):
        id = f"{classes[label]}/{line}"
        path = _FOOD_LAYOUT.inside(root / "images", f"{id}.jpg", listing)
        photos.append(Photo(path, id, label))
    return Photos(f"food101:{root}:{split}", tuple(classes), evenly(photos, limit))


CIFAR_SIDE = 32
_CIFAR = {  # folder, training files, test file, names of classes, keys of labels and names
    "cifar10": (
        "cifar-10-batches-py",
        [f"data_batch_{number}" for number in range(1, 6)],
        *("test_batch", "batches.meta", b"labels", b"label_names"),
    ),
    "cifar100": (
        *("cifar-100-python", ["train"], "test", "meta"),
        *(b"fine_labels", b"fine_label_names"),
    ),
}


@dataclass(frozen=True, eq=False)
class Cifar(Sliceable):
    """All photos of a split, in memory."""

    name: str
    classes: tuple[str, ...]
    pixels: Tensor  # [N, 3, 32, 32] uint8
    labels: tuple[int, ...]
    ids: tuple[str, ...]
    capabilities: ClassVar = frozenset({"labels"})

    @cached_property
    def fingerprint(self) -> str:
        return digest(self.pixels.numpy().tobytes(), repr((self.labels, self.ids)))

    def __len__(self) -> int:
        return len(self.labels)

    def sample(self, index: int, /) -> Sample:
        return Sample(self.pixels[index].float() / 255, self.labels[index], id=self.ids[index])


def open_cifar10(rest: str, *, limit: int | None = None) -> Cifar:
    return _open_cifar("cifar10", rest, limit)


def open_cifar100(rest: str, *, limit: int | None = None) -> Cifar:
    return _open_cifar("cifar100", rest, limit)


def _open_cifar(release: str, rest: str, limit: int | None) -> Cifar:
    folder, train, test, meta, labels_key, names_key = _CIFAR[release]
    layout = Layout(f"give the folder {folder} of the release's python version")
    path, split = path_and_split(rest, TRAIN_SPLITS)
    root = path / folder if (path / folder).is_dir() else path
    names = read_pickle(root / meta, layout, encoding="bytes")
    pixels, labels, ids = [], list[int](), list[str]()
    with layout.reading(root):
        classes = tuple(name.decode() for name in names[names_key])
        for file in [test] if split == "test" else train:
            content = read_pickle(root / file, layout, encoding="bytes")
            batch = [range(len(classes))[label] for label in content[labels_key]]
            pixels.append(content[b"data"].reshape(len(batch), 3, CIFAR_SIDE, CIFAR_SIDE))
            labels += batch
            ids += [f"{file}/{row}" for row in range(len(batch))]
    rows = list(range(len(labels)))
    if split != "test":
        rows = part_of_train(rows, labels, split)
    chosen = list(evenly(rows, limit))
    return Cifar(
        f"{release}:{path}:{split}",
        classes,
        torch.from_numpy(np.concatenate(pixels)[chosen]),
        tuple(labels[row] for row in chosen),
        tuple(ids[row] for row in chosen),
    )


_TINY_LAYOUT = Layout(
    "give the folder tiny-imagenet-200 with wnids.txt, words.txt, train/ and val/"
)
_CORNERS = dict.fromkeys(("x0", "y0", "x1", "y1"), int)


def open_tiny_imagenet(rest: str, *, limit: int | None = None) -> Photos:
    """Photos with the box of their object."""
    root, split = path_and_split(rest, TRAIN_SPLITS)
    wnids = sorted({wnid for (wnid,) in _TINY_LAYOUT.table(root / "wnids.txt", {"wnid": str})})
    photos = []
    if split == "test":
        listing = root / "val" / "val_annotations.txt"
        columns = {"file": str, "wnid": wnids.index, **_CORNERS}
        for name, label, *corners in _TINY_LAYOUT.table(listing, columns, separator="\t"):
            path = _TINY_LAYOUT.inside(root / "val" / "images", name, listing)
            photos.append(Photo(path, name, label, box=_box(*corners)))
    else:
        for label, wnid in enumerate(wnids):
            folder = _TINY_LAYOUT.inside(root / "train", wnid, root / "wnids.txt")
            listing = folder / f"{wnid}_boxes.txt"
            rows = _TINY_LAYOUT.table(listing, {"file": str, **_CORNERS}, separator="\t")
            boxes = {name: _box(*corners) for name, *corners in rows}
            for path in pictures(_TINY_LAYOUT.folder(folder / "images")):
                photos.append(Photo(path, f"{wnid}/{path.name}", label, box=boxes.get(path.name)))
        photos = part_of_train(photos, [photo.label for photo in photos], split)
    columns = {"wnid": str, "names": str}
    words = dict(_TINY_LAYOUT.table(root / "words.txt", columns, separator="\t"))
    classes = tuple(words.get(wnid, wnid).split(",")[0] for wnid in wnids)
    return Photos(f"tiny-imagenet:{root}:{split}", classes, evenly(photos, limit))


def _box(left: int, top: int, right: int, bottom: int) -> Box:
    """x, y, width, height of a box whose two corners both belong to it."""
    return float(left), float(top), float(right - left + 1), float(bottom - top + 1)
