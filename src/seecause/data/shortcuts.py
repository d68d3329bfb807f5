"""Photos in groups: an object, and what goes with it in training. And CUB, of which some are made.

`cub:PATH[:train|val|trainval|test]`: CUB-200-2011 (Wah et al. 2011), PATH being the release's
folder `CUB_200_2011`.

    images.txt  image_class_labels.txt  train_test_split.txt  bounding_boxes.txt  classes.txt
    parts/part_locs.txt  images/<class>/<file>.jpg

All lists are joined on the id in their first field. The release has no validation split: `val` is
every tenth training photo of a class, `train` the others, `trainval` the release's 5,994. Masks are
read if the segmentations (an archive of their own, `segmentations/<class>/<file>.png`) lie in PATH
or beside it. Their grey is the share of annotators who marked a pixel; the object is where anyone
did.

`waterbirds:PATH[:train|val|test]`: Waterbirds (Sagawa et al. 2020), birds of CUB pasted on places.
PATH is `waterbird_complete95_forest2water2`, or the CUB folder that holds it:

    metadata.csv   <class>/<file>.jpg          columns img_id, img_filename, y, split, place, ...

y is 1 for a water bird, place 1 for water, split 0, 1, 2 for train, val, test. A group is (y,
place); in train 95 % of y equal place. The place was scaled to the bird's photo, so CUB's
segmentations fit pixel by pixel. Three species of land birds count as water birds in the release.

`waterbird200:PATH`: CUB's 5,794 test photos with the backgrounds of Waterbirds and CUB's own 200
classes (Aniraj et al. 2025, iFAM). Lists, boxes, key points and masks are those of CUB in PATH
(`CUB_200_2011`), photos those of the Waterbirds folder in PATH or beside it. A test set only.

`metashift:PATH[:train|val|test|test-all]`: cats and dogs of MetaShift (Liang & Zou 2022), in either
public layout. No masks.

    folders   train/cat/cat(sofa)/*.jpg  train/dog/dog(bench)/*.jpg ... test/cat/cat(shelf)/*.jpg
              (`MetaDatasetCatDog` of Wu et al. 2023, DISC)
    list      train/cat/*.jpg ... val_out_of_domain/dog/*.jpg  imageID_to_group.pkl
              (as MetaShift's own script writes it: photo -> ["cat(indoor)"])

A group is (class, place), the place being the word in brackets. Neither has a validation split: as
in DISC, `val` is 15 % of the test folder (81 of 541 photos, drawn with seed 0; photos are sorted by
name first, which DISC leaves to the disk) and `test` the rest; `test-all` is the whole folder, on
which iFAM is evaluated.

`celeba:PATH[:train|val|test]`: CelebA (Liu et al. 2015) with the question of Sagawa et al. 2020:
blond hair, which most men here do not have.

    img_align_celeba/<number>.jpg   list_attr_celeba.{csv,txt}   list_eval_partition.{csv,txt}

CSV as Kaggle has it, text as the authors do (two header lines in the first list, none in the
second). A label is Blond_Hair, a group (Blond_Hair, Male). The shortcut is not a background, so a
method that removes backgrounds cannot help here. No masks.

`domainnet:PATH[:DOMAIN][:test|train]`: DomainNet (Peng et al. 2019), one class in six styles. No
masks.

    real/<class>/<photo>.jpg   sketch/...   clipart/... ...   real_test.txt   real_train.txt ...

Lines of the lists are `real/<class>/<photo>.jpg <label>`. Without a DOMAIN, all whose list is
there. A group is (class, domain).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from seecause.data._pickles import read_pickle
from seecause.data.dataset import evenly, part_of_train, path_and_split
from seecause.data.images import read_grey
from seecause.data.photos import BIT, THREE, Layout, Photo, Photos, finite, pictures, whole

CUB_SPLITS = ("train", "val", "trainval", "test")
POINTS = 15
MOST_CLASSES = 10_000  # of any list; a larger number is a mistake
_CUB_LAYOUT = Layout("give the folder CUB_200_2011 of the release")
_CUB_LISTS = {  # what each list says about the id in its first field
    "image_class_labels": {"class": whole(MOST_CLASSES)},
    "train_test_split": {"is-train": BIT},
    "bounding_boxes": dict.fromkeys(("x", "y", "width", "height"), finite),
}
_PART = {"part": whole(POINTS + 1), "x": finite, "y": finite, "visible": BIT}


def open_cub(rest: str, *, limit: int | None = None) -> Photos:
    """Photos with box and key points, and masks where there are segmentations."""
    root, split = path_and_split(rest, CUB_SPLITS)
    photos = _birds(root, root / "images", train=split != "test")
    if split != "test":
        photos = part_of_train(photos, [photo.label for photo in photos], split)
    return Photos(f"cub:{root}:{split}", _bird_classes(root), evenly(photos, limit), read_votes)


def open_waterbird200(rest: str, *, limit: int | None = None) -> Photos:
    """CUB's test birds on the backgrounds of Waterbirds."""
    root, _ = path_and_split(rest, ("test",))
    places = [place for place in (root / WATERBIRDS, root.parent / WATERBIRDS) if place.is_dir()]
    if not places:
        layout = Layout("put the Waterbirds release into the CUB folder, or beside it")
        raise layout.refusal(root / WATERBIRDS, "no such folder")
    photos = _birds(root, places[0], train=False)
    return Photos(f"waterbird200:{root}", _bird_classes(root), evenly(photos, limit), read_votes)


def _birds(root: Path, images: Path, *, train: bool) -> list[Photo]:
    """The training or the test photos of CUB, in the order of images.txt; all lists are joined."""
    known = {}
    for name, columns in _CUB_LISTS.items():
        rows = _CUB_LAYOUT.table(root / f"{name}.txt", {"id": str, **columns})
        known[name] = {id: fields for id, *fields in rows}
    points: dict[str, dict[int, tuple[float, float, float]]] = {}
    listing = root / "parts" / "part_locs.txt"
    for id, part, x, y, visible in _CUB_LAYOUT.table(listing, {"id": str, **_PART}):
        points.setdefault(id, {})[part] = (x, y, float(visible))
    masks, photos = _segmentations(root), []
    for id, file in _CUB_LAYOUT.table(root / "images.txt", {"id": str, "class/file.jpg": str}):
        for name, listed in (*known.items(), ("parts/part_locs", points)):
            if id not in listed:
                raise _CUB_LAYOUT.refusal(root / f"{name}.txt", f"no line for photo {id}")
        if known["train_test_split"][id] != [int(train)]:
            continue
        own = points[id]
        photos.append(
            Photo(
                _CUB_LAYOUT.inside(images, file, "images.txt"),
                file,
                known["image_class_labels"][id][0] - 1,
                masks / Path(file).with_suffix(".png") if masks else None,
                box=tuple(known["bounding_boxes"][id]),
                points=tuple(own.get(part, (0.0, 0.0, 0.0)) for part in range(1, POINTS + 1)),
            )
        )
    if not photos:
        raise _CUB_LAYOUT.refusal(root, "no photo in this split")
    return photos


def _bird_classes(root: Path) -> tuple[str, ...]:
    """Names such as `001.Black_footed_Albatross`, in the order of the labels."""
    columns = {"id": whole(MOST_CLASSES), "name": str}
    names = dict(_CUB_LAYOUT.table(root / "classes.txt", columns))
    return tuple(names.get(number, f"class {number}") for number in range(1, max(names) + 1))


def _segmentations(root: Path) -> Path | None:
    """The folder of masks in a release's folder, beside it, or in a CUB folder beside it."""
    places = (root, root.parent, root.parent / "CUB_200_2011")
    return next((p / "segmentations" for p in places if (p / "segmentations").is_dir()), None)


def read_votes(path: Path) -> Tensor:
    """[H, W] bool: where at least one annotator saw the bird."""
    return torch.from_numpy(read_grey(path) > 0)


WATERBIRDS = "waterbird_complete95_forest2water2"
SPLITS = ("train", "val", "test")
WATERBIRDS_CLASSES, WATERBIRDS_PLACES = ("land bird", "water bird"), ("land", "water")
MINORITY = ((0, 1), (1, 0))  # groups whose bird and place disagree
_WATERBIRDS_COLUMNS = {"img_filename": str, "y": BIT, "split": THREE, "place": BIT}
_WATERBIRDS_LAYOUT = Layout(f"give the folder {WATERBIRDS} with metadata.csv")


def open_waterbirds(rest: str, *, limit: int | None = None) -> Photos:
    """The photos of one split with group and, where there are segmentations, mask."""
    path, split = path_and_split(rest, SPLITS)
    root = path / WATERBIRDS if (path / WATERBIRDS).is_dir() else path
    masks, listing, photos = _segmentations(root), root / "metadata.csv", []
    for file, label, part, place in _WATERBIRDS_LAYOUT.table(
        listing, _WATERBIRDS_COLUMNS, separator=",", header=True
    ):
        if SPLITS[part] == split:
            photo = _WATERBIRDS_LAYOUT.inside(root, file, listing)
            mask = masks / Path(file).with_suffix(".png") if masks else None
            photos.append(Photo(photo, file, label, mask, (label, place)))
    if not photos:
        raise _WATERBIRDS_LAYOUT.refusal(listing, f"no photo of the split {split}")
    return Photos(
        f"waterbirds:{path}:{split}",
        WATERBIRDS_CLASSES,
        evenly(photos, limit),
        read_votes,
        WATERBIRDS_PLACES,
    )


METASHIFT_SPLITS = ("train", "val", "test", "test-all")
METASHIFT_CLASSES = ("cat", "dog")
TEST_SHARE = 0.85
FEWEST = 7  # photos of which 15 % is one
GROUP_FILE = "imageID_to_group.pkl"
_METASHIFT_LAYOUT = Layout(
    "expected PATH/train/cat/cat(place)/*.jpg and PATH/test/..., or PATH/train/cat/*.jpg,"
    f" PATH/val_out_of_domain/... and PATH/{GROUP_FILE} with one group for each photo"
)
_GROUP = re.compile(r"(?P<animal>[^()]+)\((?P<place>[^()]+)\)")


def open_metashift(rest: str, *, limit: int | None = None) -> Photos:
    """The photos of one split with their group. Places are numbered alphabetically over both
    folders."""
    root, split = path_and_split(rest, METASHIFT_SPLITS)
    groups = None
    if (root / GROUP_FILE).is_file():
        groups = read_pickle(root / GROUP_FILE, _METASHIFT_LAYOUT)
    test = root / "test" if groups is None else root / "val_out_of_domain"
    in_train, in_test = (list(_animals(folder, groups)) for folder in (root / "train", test))
    places = sorted({place for _, place in in_train + in_test})
    chosen = in_train if split == "train" else part_of_test(in_test, split)
    photos = [replace(p, group=(p.label or 0, places.index(place))) for p, place in chosen]
    name = f"metashift:{root}:{split}"
    return Photos(name, METASHIFT_CLASSES, evenly(photos, limit), places=tuple(places))


def part_of_test(items: list[tuple[Photo, str]], split: str) -> list[tuple[Photo, str]]:
    """DISC's validation photos, the other ones, or all."""
    from sklearn.model_selection import train_test_split

    if split == "test-all":
        return items
    if len(items) < FEWEST:
        odd = f"{len(items)} photos, too few to keep 15 % for validation"
        raise Layout("use the split test-all").refusal(items[0][0].path.parents[1], odd)
    val, _ = train_test_split(np.arange(len(items)), test_size=TEST_SHARE, random_state=0)
    held = set(val.tolist())
    return [item for place, item in enumerate(items) if (place in held) == (split == "val")]


def _animals(folder: Path, groups: dict[str, list[str]] | None) -> Iterator[tuple[Photo, str]]:
    """Photos of one folder with their place, from the names of sub-folders or from a list."""
    for label, animal in enumerate(METASHIFT_CLASSES):
        inside = folder / animal
        parts = [inside] if groups is not None else _METASHIFT_LAYOUT.class_folders(inside)
        if not parts:
            odd = f"no folders like {animal}(place) in it, and no {GROUP_FILE} in PATH"
            raise _METASHIFT_LAYOUT.refusal(inside, odd)
        for part in parts:
            for path in pictures(_METASHIFT_LAYOUT.folder(part)):
                with _METASHIFT_LAYOUT.reading(path):
                    (group,) = [part.name] if groups is None else groups[path.stem]
                    match = _GROUP.fullmatch(group)
                if not match or match["animal"] != animal:
                    raise _METASHIFT_LAYOUT.refusal(path, f"its group {group!r} is not of {animal}")
                yield Photo(path, f"{part.name}/{path.name}", label), match["place"]


CELEBA_CLASSES, CELEBA_PLACES = ("not blond", "blond"), ("not male", "male")
_CELEBA_LAYOUT = Layout(
    "give the folder with img_align_celeba/, list_attr_celeba and list_eval_partition (csv or txt)"
)
_SIGN = ("-1", "1").index


def open_celeba(rest: str, *, limit: int | None = None) -> Photos:
    """The faces of one split with their group."""
    root, split = path_and_split(rest, SPLITS)
    attributes, partition = (
        root / (f"{name}.csv" if (root / f"{name}.csv").is_file() else f"{name}.txt")
        for name in ("list_attr_celeba", "list_eval_partition")
    )
    groups = dict(_attributes(attributes))
    columns = {"image_id": str, "partition": THREE}
    csv = partition.suffix == ".csv"
    separator = "," if csv else None
    images = root / "img_align_celeba"
    if (images / images.name).is_dir():  # Kaggle's archive has the folder twice
        images = images / images.name
    photos = []
    for name, part in _CELEBA_LAYOUT.table(partition, columns, separator=separator, header=csv):
        if SPLITS[part] == split:
            if name not in groups:
                raise _CELEBA_LAYOUT.refusal(attributes, f"no line for {name}")
            path = _CELEBA_LAYOUT.inside(images, name, partition)
            photos.append(Photo(path, name, groups[name][0], group=groups[name]))
    if not photos:
        raise _CELEBA_LAYOUT.refusal(partition, f"no photo of the split {split}")
    name = f"celeba:{root}:{split}"
    return Photos(name, CELEBA_CLASSES, evenly(photos, limit), places=CELEBA_PLACES)


def _attributes(path: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """(blond, male) of each photo."""
    columns = {"image_id": str, "Blond_Hair": _SIGN, "Male": _SIGN}
    if path.suffix == ".csv":
        for name, *group in _CELEBA_LAYOUT.table(path, columns, separator=",", header=True):
            yield name, tuple(group)
        return
    _, header, *lines = _CELEBA_LAYOUT.text(path).splitlines()  # a count, the names, the signs
    with _CELEBA_LAYOUT.reading(path):
        blond, male = (header.split().index(name) + 1 for name in ("Blond_Hair", "Male"))
        for fields in map(str.split, lines):
            yield fields[0], (_SIGN(fields[blond]), _SIGN(fields[male]))


DOMAINNET_SPLITS = ("test", "train")
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
DOMAINNET_CLASSES = 345
_DOMAINNET_LAYOUT = Layout(
    "expected PATH/real/<class>/*.jpg and PATH/real_test.txt; domains are " + ", ".join(DOMAINS)
)


def open_domainnet(rest: str, *, limit: int | None = None) -> Photos:
    """The listed photos of one split, of one domain or all."""
    folder, last = path_and_split(rest, (*DOMAINNET_SPLITS, *DOMAINS))
    split = last if last in DOMAINNET_SPLITS else "test"
    root, wanted = folder, last
    if last in DOMAINNET_SPLITS:
        root, wanted = path_and_split(str(folder), (*DOMAINS, "all"), default="all")
    chosen = [name for name in DOMAINS if (root / f"{name}_{split}.txt").is_file()]
    chosen = chosen if wanted == "all" else [wanted]
    if not chosen:
        raise _DOMAINNET_LAYOUT.refusal(root, f"no list of a domain's {split} photos")
    names, photos = dict[int, str](), []
    columns = {"DOMAIN/<class>/<photo>.jpg": str, "label": whole(DOMAINNET_CLASSES)}
    for domain in chosen:
        listing = root / f"{domain}_{split}.txt"
        for name, label in _DOMAINNET_LAYOUT.table(listing, columns):
            path = _DOMAINNET_LAYOUT.inside(root, name, listing)
            called = path.parent.name.replace("_", " ")
            if path.parents[1].name != domain or names.setdefault(label, called) != called:
                raise _DOMAINNET_LAYOUT.refusal(listing, f"{name[:80]!r} with the label {label}")
            photos.append(Photo(path, name, label, group=(label, DOMAINS.index(domain))))
    classes = tuple(names.get(label, f"class {label}") for label in range(max(names) + 1))
    spec = f"domainnet:{root}{'' if wanted == 'all' else f':{wanted}'}:{split}"
    return Photos(spec, classes, evenly(photos, limit), places=DOMAINS)
