"""Datasets by name.

A new dataset is an `open_...` function and a line in `_OURS`. Other packages call `register`, or
name their function as an entry point of the group `seecause.datasets`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from seecause.data.dataset import Dataset, Subset, evenly
from seecause.errors import BadOption, UnknownName, nearest
from seecause.options import Count, checked, keyword_options
from seecause.registry import Registry

T = TypeVar("T")
Opener = Callable[..., Dataset]  # called with what follows `name:`, and with `limit` if it has that

_OURS = {  # how a name is written, and the function that opens it
    "celeba:PATH[:SPLIT]": "shortcuts:open_celeba",
    "cifar10:PATH[:SPLIT]": "labelled:open_cifar10",
    "cifar100:PATH[:SPLIT]": "labelled:open_cifar100",
    "coco:PATH[:SPLIT]": "labelled:open_coco",
    "cub:PATH[:SPLIT]": "shortcuts:open_cub",
    "domainnet:PATH[:DOMAIN][:SPLIT]": "shortcuts:open_domainnet",
    "folder:PATH": "photos:open_folder",
    "food101:PATH[:SPLIT]": "labelled:open_food101",
    "imagenet:PATH[:SPLIT]": "imagenet:open_imagenet",
    "imagenet-hard:PATH": "imagenet:open_imagenet_hard",
    "imagenet-s:PATH": "imagenet:open_imagenet_s",
    "imagenet9:PATH[:VARIANT]": "imagenet:open_imagenet9",
    "metashift:PATH[:SPLIT]": "shortcuts:open_metashift",
    "pairs:WITH:WITHOUT": "photos:open_pairs",
    "pets:PATH[:SPLIT]": "labelled:open_pets",
    "siim:PATH[:SPLIT]": "shortcuts:open_siim",
    "tiny-imagenet:PATH[:SPLIT]": "labelled:open_tiny_imagenet",
    "waterbird200:PATH": "shortcuts:open_waterbird200",
    "waterbirds:PATH[:SPLIT]": "shortcuts:open_waterbirds",
}
_HOMES = {form.partition(":")[0]: f"seecause.data.{home}" for form, home in _OURS.items()}
_HOMES["critters"] = "seecause.critters.rendering:open_critters"
_FORMS = {form.partition(":")[0]: form for form in (*_OURS, "critters:REGIME[:SPLIT]")}
_REGISTRY: Registry[Opener] = Registry(
    "dataset", group="seecause.datasets", homes=_HOMES, adopt=lambda name, opener: opener
)


def register(name: str, opener: Opener, *, form: str = "PATH") -> None:
    """Add a dataset, so that `open_data` and the command line open `name:...`.

    Args:
        name: A new word, without ":" and "#".
        opener: Called with what follows the colon, and with `limit=` if it has that keyword.
            Returns a `Dataset`.
        form: How the rest of the name is written, for messages.

    Example:
        >>> import seecause as sc
        >>> sc.data.register("mine", lambda rest: sc.data.open_data(f"critters:{rest}"))
        >>> len(sc.data.open_data("mine:clean:test", limit=4))
        4
    """
    if not name or ":" in name or "#" in name or name in _HOMES:
        raise BadOption("name", name, "a new word without : and #")
    _REGISTRY.add(name, opener)
    _FORMS[name] = f"{name}:{form}"


def datasets() -> tuple[str, ...]:
    """How the name of each dataset is written, including those of plug-ins.

    Example:
        >>> import seecause as sc
        >>> "pets:PATH[:SPLIT]" in sc.data.datasets()
        True
    """
    return tuple(sorted(_FORMS.get(name, f"{name}:PATH") for name in _REGISTRY.names()))


def is_data(text: str) -> bool:
    """Whether a text begins like the name of a dataset."""
    name, colon, _ = text.partition(":")
    return bool(colon) and name in _REGISTRY


@checked
def open_data(spec: str | Path, *, limit: Count | None = None) -> Dataset:
    """Open a dataset by its name.

    Args:
        spec: NAME:PATH, often with a split behind it: `folder:PATH` (your own images, a sub-folder
            for each class), `pets:PATH:test`, `imagenet-s:PATH`. `sc.data.datasets()` lists all.
        limit: Use at most this many samples, spread evenly over the whole dataset.

    Returns:
        A sequence of samples, which are read when they are indexed, as raw pixels of their own
        size; `sc.data.to_batch` brings them into a model's frame.

    Raises:
        UnknownName: If there is no such dataset or split.
        DataMissing: If a file is missing or has another layout.

    Example:
        >>> import seecause as sc
        >>> data = sc.data.open_data("critters:clean:test", limit=4)
        >>> len(data), data.classes[data[0].label], data[0].image.shape
        (4, 'quillow', torch.Size([3, 96, 96]))
    """
    name, _, rest = str(spec).partition(":")
    if name not in _REGISTRY and Path(spec).is_dir():
        raise BadOption("data", str(spec), f"a dataset; for a folder of images give folder:{spec}")
    if not rest or name not in _REGISTRY:
        forms = {form.partition(":")[0]: form for form in datasets()}
        near = [forms[kind] for kind in nearest(name, forms)] or forms.values()
        hint = f"Write {', '.join(near)}, or folder:PATH for a folder of images."
        raise UnknownName("dataset", str(spec) if rest else name, forms, hint)
    opener = _REGISTRY.get(name)
    data = opener(rest, limit=limit) if "limit" in keyword_options(opener) else opener(rest)
    for attribute in ("name", "classes", "fingerprint", "__len__", "__getitem__"):
        if not hasattr(data, attribute):
            expected = f"a dataset with `{attribute}`, as `seecause.data.Dataset` has it"
            raise BadOption("data", str(spec), expected)
    if limit is None or len(data) <= limit:
        return data
    rows = evenly(range(len(data)), limit)
    return data.take(rows) if hasattr(data, "take") else Subset(data.name, data, rows)


def as_data(data: T | str | Path) -> T | Dataset:
    """A dataset as it is, or the one of that name."""
    return open_data(data) if isinstance(data, str | Path) else data
