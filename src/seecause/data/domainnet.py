"""`domainnet:PATH[:DOMAIN][:test|train]`: DomainNet (Peng et al. 2019), one class in six styles. It
has no masks.

    real/<class>/<photo>.jpg   sketch/...   clipart/... ...   real_test.txt   real_train.txt ...
Lines of the lists are `real/<class>/<photo>.jpg <label>`. Without a DOMAIN, all whose list is
there. A group is (class, domain).
"""

from __future__ import annotations

from pathlib import Path

from seecause.data.dataset import evenly, path_and_split
from seecause.data.photos import Photo, Photos, inside, read_fields, whole_number
from seecause.errors import DataMissing

SPLITS = ("test", "train")
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
CLASSES = 345
_LAYOUT = (
    "expected PATH/real/<class>/*.jpg and PATH/real_test.txt with lines"
    " `real/<class>/<photo>.jpg <label>`; domains are " + ", ".join(DOMAINS)
)


def open_domainnet(rest: str, *, limit: int | None = None) -> Photos:
    """The listed photos of one split, of one domain or all."""
    folder, last = path_and_split(rest, (*SPLITS, *DOMAINS))
    split = last if last in SPLITS else "test"
    root, wanted = folder, last
    if last in SPLITS:
        root, wanted = path_and_split(str(folder), (*DOMAINS, "all"), default="all")
    chosen = [name for name in DOMAINS if (root / f"{name}_{split}.txt").is_file()]
    if wanted != "all":
        chosen = [wanted]
    if not chosen:
        raise DataMissing(str(root), f"no list of a domain's {split} photos", _LAYOUT)
    names: dict[int, str] = {}
    photos = [photo for domain in chosen for photo in _listed(root, domain, split, names)]
    classes = tuple(names.get(label, f"class {label}") for label in range(max(names) + 1))
    spec = f"domainnet:{root}{'' if wanted == 'all' else f':{wanted}'}:{split}"
    return Photos(spec, classes, evenly(photos, limit), places=DOMAINS)


def _listed(root: Path, domain: str, split: str, names: dict[int, str]) -> list[Photo]:
    """The photos of one list; `names` learns how its labels are called."""
    source = root / f"{domain}_{split}.txt"

    def take(fields: list[str]) -> tuple[str, int]:
        name, label = fields
        if name.split("/")[0] != domain or name.count("/") != 2:
            raise ValueError(name)
        return name, whole_number(label, CLASSES)

    photos = []
    for name, label in read_fields(source, take, _LAYOUT):
        called = name.split("/")[1].replace("_", " ")
        if names.setdefault(label, called) != called:
            raise DataMissing(
                str(source), f"label {label} is called {names[label]!r} and {called[:60]!r}",
                _LAYOUT,
            )  # fmt: skip
        path = inside(root, name, str(source), _LAYOUT)
        photos.append(Photo(path, name, label, group=(label, DOMAINS.index(domain))))
    return photos
