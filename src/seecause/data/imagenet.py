"""`imagenet:PATH[:val|train]`: ImageNet-1k photos, `PATH/val/<wnid>/*.JPEG` and
`PATH/train/<wnid>/*.JPEG`, all of them or a part."""

from __future__ import annotations

from functools import cache

from seecause.data.dataset import evenly, path_and_split
from seecause.data.photos import Photo, Photos, class_folders, pictures
from seecause.errors import DataMissing

SPLITS = ("train", "val")
_LAYOUT = "expected PATH/val/<wnid>/*.JPEG (or PATH/train/...), one folder for each WordNet id"


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
    """A label is the place of its WordNet id among the sorted 1,000, as every ImageNet-1k model has
    it."""
    path, split = path_and_split(rest, SPLITS, "val")
    root = path / split
    if not root.is_dir():
        raise DataMissing(str(root), "no such folder", _LAYOUT)
    label = {wnid: place for place, wnid in enumerate(imagenet_wnids())}
    folders = class_folders(root)
    if not folders:
        raise DataMissing(str(root), "no class folders in it", _LAYOUT)
    for folder in folders:
        if folder.name not in label:
            raise DataMissing(str(folder), "not the WordNet id of an ImageNet-1k class", _LAYOUT)
    photos = []
    for folder in folders:
        for path in pictures(folder):
            photos.append(Photo(path, f"{folder.name}/{path.name}", label[folder.name]))
    return Photos(f"imagenet:{rest}", imagenet_classes(), evenly(photos, limit))
