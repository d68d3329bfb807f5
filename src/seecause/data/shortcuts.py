"""Photos in groups of an object and an attribute that is correlated with it in training; and CUB,
from which some of these datasets are made.

`cub:PATH[:train|val|trainval|test]`: CUB-200-2011 (Wah et al. 2011), where PATH is the release's
folder `CUB_200_2011`.

    images.txt  image_class_labels.txt  train_test_split.txt  bounding_boxes.txt  classes.txt
    parts/part_locs.txt  images/<class>/<file>.jpg

All lists are joined on the id in their first field. The release has no validation split: `val` is
every tenth training photo of a class, `train` the others, `trainval` the release's 5,994. Masks are
read if the segmentations (an archive of their own, `segmentations/<class>/<file>.png`) are in PATH
or beside it. Their grey is the share of annotators who marked a pixel; the object is where anyone
did.

`waterbirds:PATH[:train|val|test]`: Waterbirds (Sagawa et al. 2020), birds of CUB pasted on places.
PATH is `waterbird_complete95_forest2water2`, or the CUB folder that contains it:

    metadata.csv   <class>/<file>.jpg          columns img_id, img_filename, y, split, place, ...

y is 1 for a water bird, place 1 for water, split 0, 1, 2 for train, val, test. A group is (y,
place); in train 95 % of y equal place. The place was scaled to the bird's photo, so CUB's
segmentations fit pixel by pixel. Three species of land birds count as water birds in the release.

`waterbird200:PATH`: CUB's 5,794 test photos with the backgrounds of Waterbirds and CUB's own 200
classes (Aniraj et al. 2025, iFAM). Lists, boxes, key points and masks are those of CUB in PATH
(`CUB_200_2011`), photos those of the Waterbirds folder in PATH or beside it. A test set only.

`metashift:PATH[:train|val|test|test-all]`: cats and dogs of MetaShift (Liang & Zou 2022), as Wu et
al. 2023 (DISC) published them (`MetaDatasetCatDog`). No masks.

    train/cat/cat(sofa)/*.jpg  train/dog/dog(bench)/*.jpg ... test/cat/cat(shelf)/*.jpg

A group is (class, place), where the place is the word in brackets. There is no validation split: as
in DISC, `val` is 15 % of the test folder (81 of 541 photos, drawn with seed 0; photos are sorted by
name first, which DISC leaves to the disk) and `test` the rest; `test-all` is the whole folder, on
which iFAM is evaluated.

`celeba:PATH[:train|val|test]`: CelebA (Liu et al. 2015) with the question of Sagawa et al. 2020:
blond hair, which most men here do not have.

    img_align_celeba/<number>.jpg   list_attr_celeba.{csv,txt}   list_eval_partition.{csv,txt}

CSV as Kaggle has it, text as the authors do. A label is Blond_Hair, a group (Blond_Hair, Male). The
attribute is not a background, so a method that removes backgrounds cannot help here. No masks.

`domainnet:PATH[:DOMAIN][:test|train]`: DomainNet (Peng et al. 2019), one class in six styles. No
masks.

    real/<class>/<photo>.jpg   sketch/...   clipart/... ...   real_test.txt   real_train.txt ...

Lines of the lists are `real/<class>/<photo>.jpg <label>`. Without a DOMAIN, all with a list are
read. A group is (class, domain).

`siim:PATH[:train|val|trainval|test|robust|non-robust]`: SIIM-ACR Pneumothorax (stage 1) with labels
of chest tubes (Saab et al. 2022). Needs the extra `medical`.

    dicom-images-train/*/*/<uid>.dcm   train-rle.csv (ImageId, EncodedPixels)
    cxr_tube_dict.pkl (uid -> bool)

A tube is the treatment: it indicates a pneumothorax without showing one. A group is (pneumothorax,
tube), where the tube is known. `test` has the images whose tubes are labelled, `robust` those where
tube and label disagree, `non-robust` those where they agree. The rest is `trainval`; `val` is every
tenth of a class, `train` the others. Masks are run lengths: pairs (gap since the last run, length),
down the columns; the mask of an image with several rows is their union.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seecause.data.dataset import Names, Size, path_and_split
from seecause.data.labelled import run_lengths
from seecause.data.photos import Layout, Photo, Photos, class_photos, split_of
from seecause.errors import BadImage, MissingExtra
from seecause.models.preprocess import first_line, read_grey

log = logging.getLogger(__name__)
POINTS = 15
_CUB = Layout("give the folder CUB_200_2011 of the release")


def open_cub(rest: str) -> Photos:
    """Photos with box and key points, and masks if there are segmentations."""
    root, split = path_and_split(rest, ("train", "val", "trainval", "test"))
    photos = _birds(root, root / "images", train=split != "test")
    photos = split_of(photos, split)
    return Photos(f"cub:{root}:{split}", _bird_classes(root), photos, read_votes)


def open_waterbird200(rest: str) -> Photos:
    """CUB's test birds on the backgrounds of Waterbirds."""
    root, _ = path_and_split(rest, ("test",))
    images = next((p / WATERBIRDS for p in (root, root.parent) if (p / WATERBIRDS).is_dir()), None)
    if images is None:
        layout = Layout("put the Waterbirds release into the CUB folder, or beside it")
        raise layout.refusal(root / WATERBIRDS, "no such folder")
    photos = _birds(root, images, train=False)
    return Photos(f"waterbird200:{root}", _bird_classes(root), photos, read_votes)


def _birds(root: Path, images: Path, *, train: bool) -> list[Photo]:
    """The training or the test photos of CUB, in the order of images.txt."""
    code = {"id": str, "code": int}
    labels = dict(_CUB.table(root / "image_class_labels.txt", code))
    sides = dict.fromkeys(("x", "y", "width", "height"), float)
    boxes = {id: box for id, *box in _CUB.table(root / "bounding_boxes.txt", {"id": str, **sides})}
    splits = dict(_CUB.table(root / "train_test_split.txt", code))
    points = defaultdict[str, dict[int, Any]](dict)
    columns = {"id": str, "part": int, **dict.fromkeys(("x", "y", "visible"), float)}
    for id, part, *place in _CUB.table(root / "parts" / "part_locs.txt", columns):
        points[id][part] = tuple(place)
    masks, photos = _segmentations(root), []
    for id, file in _CUB.table(root / "images.txt", {"id": str, "class/file.jpg": str}):
        mask = masks / Path(file).with_suffix(".png") if masks else None
        own = tuple(points[id].get(part, (0.0,) * 3) for part in range(1, POINTS + 1))
        with _CUB.reading(f"{root}, the lines of photo {id}"):
            box = tuple(boxes[id])
            photo = Photo(images / file, file, labels[id] - 1, mask, box=box, points=own)
            photos += [photo] if splits[id] == train else []
    return photos


def _bird_classes(root: Path) -> Names:
    """Names such as `001.Black_footed_Albatross`, in the order of the labels."""
    names = _CUB.table(root / "classes.txt", {"id": int, "name": str})
    return tuple(name for _, name in sorted(names))


def _segmentations(root: Path) -> Path | None:
    """The folder of masks in a release's folder, beside it, or in a CUB folder beside it."""
    places = (root, root.parent, root.parent / "CUB_200_2011")
    return next((p / "segmentations" for p in places if (p / "segmentations").is_dir()), None)


def read_votes(photo: Photo) -> Tensor:
    """[H, W] bool: where at least one annotator saw the bird."""
    assert photo.mask is not None
    return torch.from_numpy(read_grey(photo.mask) > 0)


WATERBIRDS = "waterbird_complete95_forest2water2"
SPLITS = ("train", "val", "test")
WATERBIRDS_CLASSES, WATERBIRDS_PLACES = ("land bird", "water bird"), ("land", "water")
MINORITY = ((0, 1), (1, 0))  # groups whose bird and place disagree
_WATERBIRDS = Layout(f"give the folder {WATERBIRDS} with metadata.csv")


def open_waterbirds(rest: str) -> Photos:
    """The photos of one split with group and, if there are segmentations, mask."""
    path, split = path_and_split(rest, SPLITS)
    root = path / WATERBIRDS if (path / WATERBIRDS).is_dir() else path
    columns = {"img_filename": str, "y": _bit, "split": int, "place": _bit}
    listed = _WATERBIRDS.table(root / "metadata.csv", columns, separator=",", header=True)
    masks = _segmentations(root)
    photos = []
    for file, label, part, place in listed:
        if part == SPLITS.index(split):
            mask = masks / Path(file).with_suffix(".png") if masks else None
            photos.append(Photo(root / file, file, label, mask, (label, place)))
    name = f"waterbirds:{path}:{split}"
    return Photos(name, WATERBIRDS_CLASSES, photos, read_votes, WATERBIRDS_PLACES)


def _bit(field: str) -> int:
    """0 for "0" and "-1", 1 for "1"; ValueError for others."""
    return ("0", "1", "-1").index(field) % 2


METASHIFT_CLASSES = ("cat", "dog")
TEST_SHARE = 0.85
_METASHIFT = Layout("expected PATH/train/cat/cat(place)/*.jpg and PATH/test/..., likewise for dog")
_GROUP = re.compile(r"(?P<animal>[^()]+)\((?P<place>[^()]+)\)")


Placed = list[tuple[Photo, str]]  # photos and the words for their places


def open_metashift(rest: str) -> Photos:
    """The photos of one split with their group. Places are numbered alphabetically over both
    folders."""
    root, split = path_and_split(rest, ("train", "val", "test", "test-all"))
    train, test = (_animals(root / folder) for folder in ("train", "test"))
    places = sorted({place for _, place in train + test})
    chosen = train if split == "train" else part_of_test(test, split)
    photos = [replace(p, group=(p.label or 0, places.index(place))) for p, place in chosen]
    return Photos(f"metashift:{root}:{split}", METASHIFT_CLASSES, photos, places=tuple(places))


def part_of_test(items: Placed, split: str) -> Placed:
    """DISC's validation photos, the other ones, or all."""
    from sklearn.model_selection import train_test_split

    if split == "test-all":
        return items
    val, _ = train_test_split(np.arange(len(items)), test_size=TEST_SHARE, random_state=0)
    held = set(np.asarray(val).tolist())
    return [item for place, item in enumerate(items) if (place in held) == (split == "val")]


def _animals(folder: Path) -> Placed:
    """The photos of one folder with their place, from the names of sub-folders."""
    found = []
    for label, animal in enumerate(METASHIFT_CLASSES):
        for part in _METASHIFT.folders(folder / animal):
            match = _GROUP.fullmatch(part.name)
            if not match or match["animal"] != animal:
                raise _METASHIFT.refusal(part, f"its name is not like {animal}(place)")
            found += [(photo, match["place"]) for photo in class_photos(part, label)]
    return found


CELEBA_CLASSES, CELEBA_PLACES = ("not blond", "blond"), ("not male", "male")
_CELEBA = Layout(
    "give the folder with img_align_celeba/, list_attr_celeba and list_eval_partition (csv or txt)"
)


def open_celeba(rest: str) -> Photos:
    """The faces of one split with their group."""
    root, split = path_and_split(rest, SPLITS)
    attributes, partition = (
        root / (f"{name}.csv" if (root / f"{name}.csv").is_file() else f"{name}.txt")
        for name in ("list_attr_celeba", "list_eval_partition")
    )
    images = root / "img_align_celeba"
    if (images / images.name).is_dir():  # Kaggle's archive has the folder twice
        images = images / images.name
    with _CELEBA.reading(attributes):  # text begins with a count, and its header lacks the image
        header, *faces = (fields for fields in _fields(attributes) if len(fields) > 1)
        blond, male = (header.index(name) - len(header) for name in ("Blond_Hair", "Male"))
        groups = {face[0]: (_bit(face[blond]), _bit(face[male])) for face in faces}
    photos = []
    with _CELEBA.reading(partition):
        for name, part in (fields for fields in _fields(partition) if fields[1] != "partition"):
            if int(part) == SPLITS.index(split):
                photos.append(Photo(images / name, name, groups[name][0], group=groups[name]))
    return Photos(f"celeba:{root}:{split}", CELEBA_CLASSES, photos, places=CELEBA_PLACES)


def _fields(path: Path) -> list[list[str]]:
    return [re.split(r"[,\s]+", line.strip()) for line in _CELEBA.text(path).splitlines()]


DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_DOMAINNET = Layout(
    "expected PATH/real/<class>/*.jpg and PATH/real_test.txt; domains are " + ", ".join(DOMAINS)
)


def open_domainnet(rest: str) -> Photos:
    """The listed photos of one split, of one domain or all."""
    path, split = rest, "test"
    if (last := rest.rpartition(":")[2]) in ("test", "train"):
        path, split = rest.rpartition(":")[0], last
    root, wanted = path_and_split(path, DOMAINS, default="")
    lists = {domain: root / f"{domain}_{split}.txt" for domain in DOMAINS}
    found = [domain for domain in DOMAINS if lists[domain].is_file()]
    chosen = [wanted] if wanted else found or ["real"]  # whose missing list is named
    names, photos = dict[int, str](), []
    for domain in chosen:
        for file, label in _DOMAINNET.table(lists[domain], {"photo": str, "label": int}):
            name = Path(file).parent.name.replace("_", " ")
            if names.setdefault(label, name) != name:
                raise _DOMAINNET.refusal(lists[domain], f"two names of class {label}")
            photos.append(Photo(root / file, file, label, group=(label, DOMAINS.index(domain))))
    most = max(names, default=-1)
    classes = tuple(names.get(label, f"class {label}") for label in range(most + 1))
    return Photos(f"domainnet:{path}:{split}", classes, photos, places=DOMAINS)


_SIIM_TESTS = ("test", "robust", "non-robust")
_SIIM = Layout(
    "expected PATH/dicom-images-train/*/*/<uid>.dcm, PATH/train-rle.csv and PATH/cxr_tube_dict.pkl"
    " (uid -> bool) of the stage-1 release; later ones have other ids"
)
_EXPECTED = "give a DICOM file of one 8-bit grey image"
_NEGATIVE = "-1"


def open_siim(rest: str) -> Photos:
    """X-rays as RGB with masks."""
    root, split = path_and_split(rest, ("train", "val", "trainval", *_SIIM_TESTS))
    table, runs = root / "train-rle.csv", defaultdict[str, list[str]](list)
    columns = {"ImageId": str, "EncodedPixels": str}
    for uid, row in _SIIM.table(table, columns, separator=",", header=True):
        runs[uid].append(row)
    with _SIIM.reading(root / "cxr_tube_dict.pkl"):
        listed = _SIIM.pickle(root / "cxr_tube_dict.pkl")
        tubes = {uid if isinstance(uid, str) else uid.decode(): t for uid, t in listed.items()}
    files = {path.stem: path for path in sorted((root / "dicom-images-train").glob("*/*/*.dcm"))}
    if lost := len(runs.keys() - files):
        log.warning("%s: %d labelled images have no DICOM file and are skipped", root, lost)
    photos = []
    for uid in (uid for uid in runs if uid in files):
        label = int(any(row != _NEGATIVE for row in runs[uid]))
        group = (label, int(tubes[uid])) if uid in tubes else None
        agree = group is not None and group[0] == group[1]
        parts = ["trainval"] if group is None else ["test", "non-robust" if agree else "robust"]
        if (split if split in _SIIM_TESTS else "trainval") in parts:
            photos.append(Photo(files[uid], uid, label, table, group))
    photos = split_of(photos, split)
    places, classes = ("no tube", "tube"), ("no pneumothorax", "pneumothorax")
    reader = partial(_read_runs, dict(runs))
    return Photos(f"siim:{root}:{split}", classes, photos, reader, places, read_xray)


def _read_runs(runs: dict[str, list[str]], photo: Photo) -> Tensor:
    """[H, W] bool: the union of all rows of an image; its header has the size."""
    header = _dicom(photo.path, stop_before_pixels=True)
    size = (int(header.Rows), int(header.Columns))
    with _SIIM.reading(f"{photo.mask}, {photo.id}"):
        return torch.stack([rle_mask(row, size) for row in runs[photo.id]]).any(dim=0)


def rle_mask(runs: str, size: Size) -> Tensor:
    """[H, W] bool from pairs (gap, length) that run down the columns; ValueError if they do not
    fit."""
    numbers = [] if runs.strip() == _NEGATIVE else [int(number) for number in runs.split()]
    if len(numbers) % 2:
        raise ValueError("not pairs of a gap and a length")
    return run_lengths([*numbers, size[0] * size[1] - sum(numbers)], size)


def read_xray(photo: Photo) -> Image.Image:
    """RGB with three equal channels; MONOCHROME1, where black is the largest number, is
    inverted."""
    file = _dicom(photo.path)
    pixels = file.pixel_array
    if pixels.ndim != 2 or pixels.dtype != np.uint8:
        odd = f"an array {list(pixels.shape)} of {pixels.dtype}"
        raise BadImage(str(photo.path), odd, _EXPECTED)
    inverted = file.get("PhotometricInterpretation") == "MONOCHROME1"
    return Image.fromarray(255 - pixels if inverted else pixels).convert("RGB")


def _dicom(path: Path, *, stop_before_pixels: bool = False) -> Any:
    """A DICOM file, with decoded pixels unless `stop_before_pixels`."""
    try:
        import pydicom
    except ImportError:
        raise MissingExtra("pydicom", "medical") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydicom warns about odd identifiers
        try:
            file = pydicom.dcmread(path, stop_before_pixels=stop_before_pixels)
            _ = file.Rows if stop_before_pixels else file.pixel_array
            return file
        except Exception as error:  # decoders raise anything on a damaged file
            reason = f"not a DICOM file that can be read ({first_line(error)})"
            raise BadImage(str(path), reason, _EXPECTED) from error
