"""Datasets by name.

A new one is an `open_...` function and a line in `_OURS`. Other packages call `register`, or name
their function as an entry point of the group `seecause.datasets`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from seecause.data.dataset import Dataset, Subset, check_limit, evenly
from seecause.errors import BadOption, UnknownName, nearest
from seecause.options import keyword_options
from seecause.registry import Registry

T = TypeVar("T")
Opener = Callable[..., Dataset]  # (what follows `name:`, *, limit=None)

_OURS = {  # how a name is written, and the function that opens it
    "celeba:PATH[:SPLIT]": "shortcuts:open_celeba",
    "cifar10:PATH[:SPLIT]": "labelled:open_cifar10",
    "cifar100:PATH[:SPLIT]": "labelled:open_cifar100",
    "coco:PATH[:SPLIT]": "labelled:open_coco",
    "cub:PATH[:SPLIT]": "shortcuts:open_cub",
    "domainnet:PATH[:DOMAIN][:SPLIT]": "shortcuts:open_domainnet",
    "folder:PATH": "folder:open_folder",
    "food101:PATH[:SPLIT]": "labelled:open_food101",
    "imagenet:PATH[:SPLIT]": "imagenet:open_imagenet",
    "imagenet-hard:PATH": "imagenet:open_imagenet_hard",
    "imagenet-s:PATH": "imagenet:open_imagenet_s",
    "imagenet9:PATH[:VARIANT]": "imagenet:open_imagenet9",
    "metashift:PATH[:SPLIT]": "shortcuts:open_metashift",
    "painted-pets:PATH[:SPLIT]": "painted:open_painted",
    "pairs:WITH:WITHOUT": "folder:open_pairs",
    "pets:PATH[:SPLIT]": "labelled:open_pets",
    "siim:PATH[:SPLIT]": "siim:open_siim",
    "tiny-imagenet:PATH[:SPLIT]": "labelled:open_tiny_imagenet",
    "waterbird200:PATH": "shortcuts:open_waterbird200",
    "waterbirds:PATH[:SPLIT]": "shortcuts:open_waterbirds",
}
_HOMES = {form.partition(":")[0]: f"seecause.data.{home}" for form, home in _OURS.items()}
_HOMES["critters"] = "seecause.critters.regimes:open_critters"


@dataclass(frozen=True)
class _Plugin:
    """An opener of another package: what it returns is checked, and limited where it takes no
    `limit`."""

    name: str
    run: Opener
    form: str = "PATH"

    def __call__(self, rest: str, *, limit: int | None = None) -> Dataset:
        options = {"limit": limit} if "limit" in keyword_options(self.run) else {}
        data = self.run(rest, **options)
        for attribute in ("name", "classes", "fingerprint", "__len__", "__getitem__"):
            if not hasattr(data, attribute):
                expected = f"a dataset with `{attribute}`, as `seecause.data.Dataset` has it"
                raise BadOption("data", f"{self.name}:{rest}", expected)
        if limit is None or len(data) <= limit:
            return data
        return Subset(data.name, data, evenly(range(len(data)), limit))


_REGISTRY: Registry[Opener] = Registry(
    "dataset", group="seecause.datasets", homes=_HOMES, adopt=_Plugin
)


def register(name: str, opener: Opener, *, form: str = "PATH") -> None:
    """Let `open` and the command line open `name:...`.

    Args:
        name: A new word, without ":" and "#".
        opener: Called with what follows the colon, and with `limit=` if it takes that. Returns a
            `Dataset`.
        form: How the rest is written, for messages.
    """
    if not name or ":" in name or "#" in name or name in _HOMES:
        raise BadOption("name", name, "a new word without : and #")
    _REGISTRY.add(name, _Plugin(name, opener, form))


def datasets() -> tuple[str, ...]:
    """How every dataset is written, such as `pets:PATH[:SPLIT]`, with those of plug-ins."""
    others = [name for name in _REGISTRY.names() if name not in _HOMES]
    added = (f"{name}:{getattr(_REGISTRY.get(name), 'form', 'PATH')}" for name in others)
    return tuple(sorted((*_OURS, "critters:REGIME[:SPLIT]", *added)))


def is_data(text: str) -> bool:
    """Whether a text begins like a dataset's name."""
    name, colon, _ = text.partition(":")
    return bool(colon) and name in _REGISTRY


def open_data(spec: str | Path, *, limit: int | None = None) -> Dataset:
    """Open a dataset by its name; also called `sc.data.open`.

    Args:
        spec: NAME:PATH, often with a split behind it: `folder:PATH` (your own images, a sub-folder
            for each class), `pets:PATH:test`, `imagenet-s:PATH`. `sc.data.datasets()` lists all.
        limit: At most so many samples, spread evenly over the whole.

    Returns:
        A sequence of samples, which are read when they are asked for, as raw pixels of their own
        size; `sc.data.to_batch` brings them into a model's frame.

    Raises:
        UnknownName: If there is no such dataset or split.
        DataMissing: If a file is missing or has another layout.

    Example:
        >>> import seecause as sc
        >>> data = sc.data.open("critters:clean:test", limit=4)
        >>> len(data), data.classes[data[0].label], data[0].image.shape
        (4, 'quillow', torch.Size([3, 96, 96]))
    """
    check_limit(limit)
    spec = str(spec)
    name, _, rest = spec.partition(":")
    if name not in _REGISTRY and Path(spec).is_dir():
        raise BadOption("data", spec, f"a dataset; for a folder of images give folder:{spec}")
    if not rest or name not in _REGISTRY:
        forms = {form.partition(":")[0]: form for form in datasets()}
        near = [forms[kind] for kind in nearest(name, forms)] or forms.values()
        hint = f"Write {', '.join(near)}, or folder:PATH for a folder of images."
        raise UnknownName("dataset", spec if rest else name, forms, hint)
    return _REGISTRY.get(name)(rest, limit=limit)


def as_data(data: T | str | Path) -> T | Dataset:
    """A dataset as it is, or the one of that name."""
    return open_data(data) if isinstance(data, str | Path) else data


open = open_data  # sc.data.open(...)
