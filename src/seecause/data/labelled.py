"""Photos with one class each; some with a mask of their object.

`pets:PATH[:test|trainval]`: Oxford-IIIT Pet (Parkhi et al. 2012).

    images/NAME.jpg   annotations/trimaps/NAME.png   annotations/test.txt   annotations/trainval.txt

Lines of the lists are `NAME breed-id species breed-id-in-species`. A trimap has 1 on the animal, 2
on the background and 3 on the border, which is ignored. Labels are breeds. With a file
`imagenet_labels.csv` (columns breed, imagenet_index) in PATH, labels are ImageNet classes instead,
and breeds that it does not list are skipped.

`coco:PATH[:val|train]`: COCO 2017 (Lin et al. 2014), every photo with its main object.

    val2017/<number>.jpg   train2017/<number>.jpg   annotations/instances_{val,train}2017.json

The label is the category that covers most pixels (crowds do not count), the mask has all objects of
it. Crowd regions, in which no single object can be told, are neither object nor background. Photos
without an object are skipped. Outlines are filled by Pillow: a mask may differ from that of
pycocotools at its edge.

`coco-main:PATH[:val|train]`: those of these photos that show one object and nothing else, on at
least 5 % of the photo. A group of both is (category, super-category).

`food101:PATH[:test|train]`: Food-101 (Bossard et al. 2014).

    images/<class>/<number>.jpg   meta/classes.txt   meta/test.txt   meta/train.txt

`cifar10:PATH[:train|val|trainval|test]`, `cifar100:...`: CIFAR (Krizhevsky 2009), the "python
version" of its release, where PATH is its folder or the one that contains it.

    cifar-10-batches-py/  data_batch_1 .. 5, test_batch, batches.meta
    cifar-100-python/     train, test, meta

Labels of CIFAR-100 are the fine ones.

`tiny-imagenet:PATH[:train|val|trainval|test]`: Tiny ImageNet (200 classes, 64 pixels), where PATH
is the release's folder `tiny-imagenet-200`.

    wnids.txt  words.txt  train/<wnid>/images/*.JPEG  val/images/*.JPEG  val/val_annotations.txt

The release's test photos have no labels, so its `val` folder is `test` here. A label is the index
of its WordNet id among the sorted 200.

CIFAR and Tiny ImageNet have no validation split: `val` is every tenth training photo of each class,
`train` the others, `trainval` all of them.

torchvision's classes for these datasets check digests of whole archives, which a part of a dataset
does not have, and do not tell the paths of masks.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from seecause.data.dataset import IGNORE, Size, path_and_split
from seecause.data.photos import Layout, Photo, Photos, class_photos, split_of
from seecause.errors import BadImage
from seecause.loading import imagenet_names
from seecause.models.preprocess import read_ids

log = logging.getLogger(__name__)
TRAIN_SPLITS = ("train", "val", "trainval", "test")
_TRIMAP = torch.tensor([IGNORE, 1, 0, IGNORE], dtype=torch.uint8)  # 1 animal, 2 background, 3 edge
_PETS = Layout(
    "give the folder that holds images/ and annotations/, and one of the splits test, trainval"
)


def open_pets(rest: str) -> Photos:
    """The listed photos of one split with their trimaps."""
    root, split = path_and_split(rest, ("test", "trainval"))
    columns = {"NAME": str, "breed-id": int}
    listed = _PETS.table(root / "annotations" / f"{split}.txt", columns)
    breeds = {id - 1: name.rpartition("_")[0] for name, id in listed}
    classes = tuple(breeds.get(place, f"breed {place + 1}") for place in range(max(breeds) + 1))
    labelled = [(name, id - 1) for name, id in listed]
    if (translation := root / "imagenet_labels.csv").is_file():
        names = {"breed": str, "imagenet_index": int}
        index = dict(Layout("").table(translation, names, separator=",", header=True))
        known = [(name, index[breeds[label]]) for name, label in labelled if breeds[label] in index]
        if len(known) < len(labelled):
            words = "%s names no ImageNet class for the breeds of %d photos, which are skipped"
            log.warning(words, translation, len(labelled) - len(known))
        labelled, classes = known, imagenet_names()
    images, trimaps = root / "images", root / "annotations" / "trimaps"
    photos = [
        Photo(images / f"{name}.jpg", name, label, trimaps / f"{name}.png")
        for name, label in labelled
    ]
    return Photos(f"pets:{root}:{split}", classes, photos, read_trimap)


def read_trimap(photo: Photo) -> Tensor:
    """[H, W] uint8: 1 animal, 0 background, IGNORE border."""
    assert photo.mask is not None
    ids = torch.from_numpy(read_ids(photo.mask))
    if (values := {*ids.unique().tolist()}) - {1, 2, 3}:
        odd = f"a trimap with values {values}"
        raise BadImage(str(photo.mask), odd, "expected 1 animal, 2 background, 3 border")
    return _TRIMAP[ids]


_COCO = Layout(
    "expected PATH/val2017/*.jpg and PATH/annotations/instances_val2017.json (or train), with"
    " polygons [x, y, x, y, ...] or uncompressed run lengths"
)
Record = Mapping[str, Any]
MAIN = 0.05  # the least share of a photo that its one object covers


def open_coco(rest: str, *, alone: bool = False) -> Photos:
    """The photos of one split that show an object of a known category; or one `alone`."""
    root, split = path_and_split(rest, ("val", "train"), default="val")
    source = root / "annotations" / f"instances_{split}2017.json"
    content = _COCO.json(source)
    photos, outlines = [], {}
    with _COCO.reading(source):
        categories = sorted(content["categories"], key=lambda row: row["id"])
        labels = {row["id"]: place for place, row in enumerate(categories)}
        above = {row["id"]: row.get("supercategory", "") for row in categories}
        kinds = sorted(set(above.values()))
        objects, crowds = defaultdict[int, list[Record]](list), defaultdict[int, list[Any]](list)
        for row in content["annotations"]:
            if row["iscrowd"]:
                crowds[row["image_id"]].append(row["segmentation"])
            else:
                objects[row["image_id"]].append(row)
        for image in content["images"]:
            main = main_category(objects[image["id"]])
            known = objects[image["id"]]
            if main is None:
                continue
            few = len(known) + len(crowds[image["id"]]) == 1
            if alone and not (few and known[0]["area"] >= MAIN * image["height"] * image["width"]):
                continue
            path = root / f"{split}2017" / image["file_name"]
            id = str(Path(image["file_name"]).with_suffix(""))
            own = [o["segmentation"] for o in known if o["category_id"] == main]
            outlines[id] = ((image["height"], image["width"]), own, crowds[image["id"]])
            group = (labels[main], kinds.index(above[main]))
            photos.append(Photo(path, id, labels[main], source, group))
    classes, name = tuple(str(row["name"]) for row in categories), f"coco{'-main' * alone}"
    draw = partial(_draw_objects, outlines)
    return Photos(f"{name}:{root}:{split}", classes, photos, draw, tuple(kinds))


def open_coco_main(rest: str) -> Photos:
    """The photos of one split that show one object alone."""
    return open_coco(rest, alone=True)


def main_category(objects: Iterable[Record]) -> int | None:
    """The category whose objects cover most pixels together; the smaller number if two are equal,
    None without objects."""
    areas: Counter[int] = Counter()
    for row in objects:
        areas[row["category_id"]] += row["area"]
    return min(areas, key=lambda category: (-areas[category], category), default=None)


def _draw_objects(
    outlines: Mapping[str, tuple[Size, list[Any], list[Any]]], photo: Photo
) -> Tensor:
    """[H, W] uint8: 1 on the objects of the main category, IGNORE on crowds. `outlines` has size,
    objects and crowds by photo."""
    size, own, crowds = outlines[photo.id]
    with _COCO.reading(f"{photo.mask}, {photo.id}"):
        objects, crowd = filled(own, size), filled(crowds, size)
    return objects.to(torch.uint8).masked_fill(crowd & ~objects, IGNORE)


def filled(outlines: Iterable[Any], size: Size) -> Tensor:
    """[H, W] bool: the pixels inside outlines: lists of polygons, or run lengths."""
    canvas = Image.new("1", (size[1], size[0]))
    draw, mask = ImageDraw.Draw(canvas), torch.zeros(size, dtype=torch.bool)
    for outline in outlines:
        if isinstance(outline, dict):
            mask |= run_lengths(outline["counts"], size)
            continue
        for polygon in outline:
            if len(polygon) < 6:
                raise ValueError("a polygon without three corners")
            draw.polygon([float(value) for value in polygon], fill=1)
    return mask | torch.from_numpy(np.array(canvas))


def run_lengths(counts: Iterable[int], size: Size) -> Tensor:
    """[H, W] bool of lengths of runs down the columns: off, on, off ...; ValueError if they do not
    fill the image."""
    counts = [int(count) for count in counts]
    if any(count < 0 for count in counts) or sum(counts) != size[0] * size[1]:
        raise ValueError(f"runs that do not fill {size[0]} x {size[1]} pixels")
    on = torch.arange(len(counts)) % 2 == 1
    return on.repeat_interleave(torch.tensor(counts)).view(size[1], size[0]).T.contiguous()


_FOOD = Layout(
    "give the folder that holds images/ and meta/, and one of the splits test, train; lines are"
    " <class>/<number> with a class of meta/classes.txt"
)


def open_food101(rest: str) -> Photos:
    """The listed photos of one split."""
    root, split = path_and_split(rest, ("test", "train"))
    classes = _FOOD.text(root / "meta" / "classes.txt").split()
    columns = {"class": classes.index, "number": str}
    rows = _FOOD.table(root / "meta" / f"{split}.txt", columns, separator="/")
    photos = []
    for label, number in rows:
        id = f"{classes[label]}/{number}"
        photos.append(Photo(root / "images" / f"{id}.jpg", id, label))
    return Photos(f"food101:{root}:{split}", tuple(classes), photos)


_CIFAR = Layout("give the folder of the release's python version, or the one that contains it")


def open_cifar10(rest: str) -> Photos:
    """CIFAR-10."""
    train = [f"data_batch_{number}" for number in range(1, 6)]
    keys = ("batches.meta", b"labels", b"label_names")
    return _open_cifar("cifar10", "cifar-10-batches-py", ["test_batch"], train, keys, rest)


def open_cifar100(rest: str) -> Photos:
    """CIFAR-100 with fine labels."""
    keys = ("meta", b"fine_labels", b"fine_label_names")
    return _open_cifar("cifar100", "cifar-100-python", ["test"], ["train"], keys, rest)


def _open_cifar(
    release: str,
    folder: str,
    test: list[str],
    train: list[str],
    keys: tuple[str, bytes, bytes],
    rest: str,
) -> Photos:
    path, split = path_and_split(rest, TRAIN_SPLITS)
    root = path / folder if (path / folder).is_dir() else path
    meta, labels, names = keys
    photos, pixels = list[Photo](), {}
    with _CIFAR.reading(root):
        classes = tuple(name.decode() for name in _CIFAR.pickle(root / meta)[names])
        for file in test if split == "test" else train:
            content = _CIFAR.pickle(root / file)
            for row, (image, label) in enumerate(
                zip(content[b"data"], content[labels], strict=True)
            ):
                id = f"{file}/{row}"
                pixels[id] = image.reshape(3, 32, 32)
                photos.append(Photo(root / file, id, range(len(classes))[label]))
    photos = split_of(photos, split)
    reader = partial(_read_cifar, pixels)
    return Photos(f"{release}:{path}:{split}", classes, photos, read_image=reader)


def _read_cifar(pixels: Mapping[str, np.ndarray], photo: Photo) -> Image.Image:
    return Image.fromarray(pixels[photo.id].transpose(1, 2, 0))


_TINY = Layout("give the folder tiny-imagenet-200 with wnids.txt, words.txt, train/ and val/")


def open_tiny_imagenet(rest: str) -> Photos:
    """The photos of one split."""
    root, split = path_and_split(rest, TRAIN_SPLITS)
    wnids = sorted(set(_TINY.text(root / "wnids.txt").split()))
    photos: list[Photo] = []
    if split == "test":
        columns = {"file": str, "wnid": wnids.index}
        for name, label in _TINY.table(root / "val" / "val_annotations.txt", columns):
            photos.append(Photo(root / "val" / "images" / name, name, label))
    else:
        for label, wnid in enumerate(wnids):
            for photo in class_photos(root / "train" / wnid / "images", label):
                photos.append(replace(photo, id=f"{wnid}/{photo.path.name}"))
        photos = split_of(photos, split)
    columns = {"wnid": str, "names": str}
    words = dict(_TINY.table(root / "words.txt", columns, separator="\t"))
    classes = tuple(words.get(wnid, wnid).split(",")[0] for wnid in wnids)
    return Photos(f"tiny-imagenet:{root}:{split}", classes, photos)
