"""Photos in groups: what is asked, and what goes with it in training.

`metashift:PATH[:train|val|test|test-all]`: cats and dogs of MetaShift (Liang & Zou 2022), in
either of its public layouts. It has no masks.

folders   train/cat/cat(sofa)/*.jpg  train/dog/dog(bench)/*.jpg ... test/cat/cat(shelf)/*.jpg
          `MetaDatasetCatDog` of Wu et al. 2023 (DISC)
list      train/cat/*.jpg ... val_out_of_domain/dog/*.jpg  imageID_to_group.pkl
          as MetaShift's own script writes it
The list is a pickled dictionary, photo -> ["cat(indoor)"], read without running it. A group is
(class, place), the place being the word in brackets. Neither has a validation split: as in DISC,
`val` is 15 % of the test folder (81 of 541 photos, drawn with seed 0; photos are sorted by name
first, which DISC leaves to the disk) and `test` the rest; `test-all` is the whole folder, on which
iFAM is evaluated.

`celeba:PATH[:train|val|test]`: CelebA (Liu et al. 2015) with the question of Sagawa et al. 2020:
blond hair, which most men here have not.

    img_align_celeba/<number>.jpg   list_attr_celeba.{csv,txt}   list_eval_partition.{csv,txt}
CSV as Kaggle has it, text as the authors do (two header lines in the first list, none in the
second). A label is Blond_Hair, a group (Blond_Hair, Male). The shortcut is no background, so a
method that removes backgrounds has no way to help here. There are no masks.

`domainnet:PATH[:DOMAIN][:test|train]`: DomainNet (Peng et al. 2019), one class in six styles. It
has no masks.

    real/<class>/<photo>.jpg   sketch/...   clipart/... ...   real_test.txt   real_train.txt ...
Lines of the lists are `real/<class>/<photo>.jpg <label>`. Without a DOMAIN, all whose list is
there. A group is (class, domain).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from seecause.data._pickles import read_pickle
from seecause.data.dataset import evenly, path_and_split
from seecause.data.photos import THREE, Layout, Photo, Photos, pictures, whole_number
from seecause.errors import DataMissing

METASHIFT_SPLITS = ("train", "val", "test", "test-all")
METASHIFT_CLASSES = ("cat", "dog")
TEST_SHARE = 0.85
FEWEST = 7  # photos of which 15 % is one
GROUP_FILE = "imageID_to_group.pkl"
_METASHIFT_LAYOUT = Layout(
    "expected PATH/train/cat/cat(place)/*.jpg and PATH/test/..., or PATH/train/cat/*.jpg,"
    f" PATH/val_out_of_domain/... and PATH/{GROUP_FILE}"
)
_GROUP = re.compile(r"(?P<animal>[^()]+)\((?P<place>[^()]+)\)")

Animal = tuple[Path, str, str]  # photo, class, place


def open_metashift(rest: str, *, limit: int | None = None) -> Photos:
    """The photos of one split with their group. Places are numbered alphabetically over both
    folders."""
    root, split = path_and_split(rest, METASHIFT_SPLITS)
    listed = _read_groups(root / GROUP_FILE) if (root / GROUP_FILE).is_file() else None
    train = root / "train"
    test = root / "test" if listed is None else root / "val_out_of_domain"
    in_train, in_test = (
        list(_in_folders(folder) if listed is None else _in_list(folder, listed))
        for folder in (train, test)
    )
    places = sorted({place for _, _, place in in_train + in_test})
    chosen = in_train if split == "train" else part_of_test(in_test, split)
    photos = []
    for path, animal, place in chosen:
        label = METASHIFT_CLASSES.index(animal)
        group = (label, places.index(place))
        photos.append(Photo(path, f"{path.parent.name}/{path.name}", label, group=group))
    return Photos(
        f"metashift:{root}:{split}", METASHIFT_CLASSES, evenly(photos, limit), places=tuple(places)
    )


def part_of_test(photos: list[Animal], split: str) -> list[Animal]:
    """DISC's validation photos, the other ones, or all."""
    from sklearn.model_selection import train_test_split

    if split == "test-all":
        return photos
    if len(photos) < FEWEST:
        raise DataMissing(
            str(photos[0][0].parents[1]),
            f"{len(photos)} photos, too few to keep 15 % for validation",
            "use the split test-all",
        )
    val, _ = train_test_split(np.arange(len(photos)), test_size=TEST_SHARE, random_state=0)
    held = {int(place) for place in val}
    return [item for place, item in enumerate(photos) if (place in held) == (split == "val")]


def _in_folders(folder: Path) -> Iterator[Animal]:
    for animal in METASHIFT_CLASSES:
        parts = _METASHIFT_LAYOUT.class_folders(folder / animal)
        if not parts:
            odd = f"no folders like {animal}(place) in it, and no {GROUP_FILE} in PATH"
            raise _METASHIFT_LAYOUT.refusal(folder / animal, odd)
        for part in parts:
            place = _place(part.name, animal, str(part))
            yield from ((path, animal, place) for path in pictures(part))


def _in_list(folder: Path, listed: dict[str, list[str]]) -> Iterator[Animal]:
    for animal in METASHIFT_CLASSES:
        for path in pictures(_METASHIFT_LAYOUT.folder(folder / animal)):
            if path.stem not in listed:
                raise _METASHIFT_LAYOUT.refusal(path, f"{GROUP_FILE} has no group for it")
            yield path, animal, _place(listed[path.stem][0], animal, str(path))


def _place(group: str, animal: str, where: str) -> str:
    """`sofa` of `cat(sofa)`."""
    match = _GROUP.fullmatch(group)
    if not match or match["animal"] != animal:
        odd = f"its group {group[:60]!r} does not match its class folder {animal}"
        raise _METASHIFT_LAYOUT.refusal(where, odd)
    return match["place"]


def _read_groups(path: Path) -> dict[str, list[str]]:
    listed = read_pickle(path, _METASHIFT_LAYOUT, sets=True)  # older lists hold sets
    if not isinstance(listed, dict):
        raise _METASHIFT_LAYOUT.refusal(path, "not a dictionary")
    groups = {}
    for photo, names in listed.items():
        several = isinstance(names, (list, tuple))
        if not several or [type(name) for name in names] != [str]:
            count = f"{len(names)} groups" if several else "no list of groups"
            raise DataMissing(
                str(path),
                f"{str(photo)[:60]!r} has {count}",
                "expected one for each photo, like ['cat(indoor)']",
            )
        groups[str(photo)] = list(names)
    return groups


CELEBA_SPLITS = ("train", "val", "test")
CELEBA_CLASSES, CELEBA_PLACES = ("not blond", "blond"), ("not male", "male")
ATTRIBUTES = ("Blond_Hair", "Male")
_CELEBA_LAYOUT = Layout(
    "give the folder with img_align_celeba/, list_attr_celeba and list_eval_partition (csv or txt)"
)
_SIGNS = ("-1", "1")


def open_celeba(rest: str, *, limit: int | None = None) -> Photos:
    """The faces of one split with their group."""
    root, split = path_and_split(rest, CELEBA_SPLITS)
    attributes, listing = dict(_attributes(root)), root / "list_eval_partition"
    images = root / "img_align_celeba"
    if (images / images.name).is_dir():  # Kaggle's archive has the folder twice
        images = images / images.name
    photos = []
    for name, part in _partition(root):
        if CELEBA_SPLITS[part] == split:
            if name not in attributes:
                odd = f"no line for {name} of list_eval_partition"
                raise _CELEBA_LAYOUT.refusal(root / "list_attr_celeba", odd)
            group = attributes[name]
            path = _CELEBA_LAYOUT.inside(images, name, listing)
            photos.append(Photo(path, name, group[0], group=group))
    if not photos:
        raise _CELEBA_LAYOUT.refusal(listing, f"no photo of the split {split}")
    return Photos(
        f"celeba:{root}:{split}", CELEBA_CLASSES, evenly(photos, limit), places=CELEBA_PLACES
    )


def _attributes(root: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """(blond, male) of each photo."""
    path = root / "list_attr_celeba.csv"
    if path.is_file():
        for where, row in _CELEBA_LAYOUT.csv(path, ("image_id", *ATTRIBUTES)):
            yield row["image_id"], _pair(row[ATTRIBUTES[0]], row[ATTRIBUTES[1]], where)
        return
    path = root / "list_attr_celeba.txt"
    header = [*_CELEBA_LAYOUT.lines(path), ""][1].split()
    for name in ATTRIBUTES:
        if name not in header:
            odd = f"{name} is not among its {len(header)} attributes"
            raise _CELEBA_LAYOUT.refusal(f"{path}, line 2", odd)
    blond, male = (header.index(name) + 1 for name in ATTRIBUTES)
    layout = Layout(f"{_CELEBA_LAYOUT}; lines are `file` and {len(header)} signs")
    for fields in layout.fields(path, lambda f: _wide(f, len(header) + 1), skip=2):
        yield fields[0], _pair(fields[blond], fields[male], f"{path}, {fields[0]}")


def _partition(root: Path) -> Iterator[tuple[str, int]]:
    """0, 1 or 2 for each photo."""
    path = root / "list_eval_partition.csv"
    if path.is_file():
        for where, row in _CELEBA_LAYOUT.csv(path, ("image_id", "partition")):
            yield row["image_id"], _CELEBA_LAYOUT.code(row["partition"], THREE, where)
        return
    path, layout = root / "list_eval_partition.txt", _CELEBA_LAYOUT.with_lines("file split")
    for name, part in layout.fields(path, lambda f: _wide(f, 2)):
        yield name, _CELEBA_LAYOUT.code(part, THREE, f"{path}, {name}")


def _pair(blond: str, male: str, where: str) -> tuple[int, int]:
    return _CELEBA_LAYOUT.code(blond, _SIGNS, where), _CELEBA_LAYOUT.code(male, _SIGNS, where)


def _wide(fields: list[str], count: int) -> list[str]:
    if len(fields) != count:
        raise ValueError(fields)
    return fields


DOMAINNET_SPLITS = ("test", "train")
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
DOMAINNET_CLASSES = 345
_DOMAINNET_LAYOUT = Layout(
    "expected PATH/real/<class>/*.jpg and PATH/real_test.txt with lines"
    " `real/<class>/<photo>.jpg <label>`; domains are " + ", ".join(DOMAINS)
)


def open_domainnet(rest: str, *, limit: int | None = None) -> Photos:
    """The listed photos of one split, of one domain or all."""
    folder, last = path_and_split(rest, (*DOMAINNET_SPLITS, *DOMAINS))
    split = last if last in DOMAINNET_SPLITS else "test"
    root, wanted = folder, last
    if last in DOMAINNET_SPLITS:
        root, wanted = path_and_split(str(folder), (*DOMAINS, "all"), default="all")
    chosen = [name for name in DOMAINS if (root / f"{name}_{split}.txt").is_file()]
    if wanted != "all":
        chosen = [wanted]
    if not chosen:
        raise _DOMAINNET_LAYOUT.refusal(root, f"no list of a domain's {split} photos")
    names: dict[int, str] = {}
    photos = [photo for domain in chosen for photo in _domain_photos(root, domain, split, names)]
    classes = tuple(names.get(label, f"class {label}") for label in range(max(names) + 1))
    spec = f"domainnet:{root}{'' if wanted == 'all' else f':{wanted}'}:{split}"
    return Photos(spec, classes, evenly(photos, limit), places=DOMAINS)


def _domain_photos(root: Path, domain: str, split: str, names: dict[int, str]) -> list[Photo]:
    """The photos of one list; `names` learns how its labels are called."""
    source = root / f"{domain}_{split}.txt"

    def take(fields: list[str]) -> tuple[str, int]:
        name, label = fields
        if name.split("/")[0] != domain or name.count("/") != 2:
            raise ValueError(name)
        return name, whole_number(label, DOMAINNET_CLASSES)

    photos = []
    for name, label in _DOMAINNET_LAYOUT.fields(source, take):
        called = name.split("/")[1].replace("_", " ")
        if names.setdefault(label, called) != called:
            odd = f"label {label} is called {names[label]!r} and {called[:60]!r}"
            raise _DOMAINNET_LAYOUT.refusal(source, odd)
        path = _DOMAINNET_LAYOUT.inside(root, name, source)
        photos.append(Photo(path, name, label, group=(label, DOMAINS.index(domain))))
    return photos
