"""Datasets by name. A new one is an `open_...` function in a file, and a line here; a package of
its own calls `register`, or names its opener as an entry point of the group `seecause.datasets`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from seecause.data.dataset import Dataset, Subset, check_limit, evenly
from seecause.errors import BadOption, UnknownName, nearest
from seecause.options import keyword_options
from seecause.registry import load_plugins, plugins

T = TypeVar("T")
Opener = Callable[..., Dataset]  # (what follows `name:`, *, limit=None)

_OURS = {  # spec -> where its opener is; imported on first use
    "celeba:PATH[:SPLIT]": "seecause.data.shifts:open_celeba",
    "cifar10:PATH[:SPLIT]": "seecause.data.labelled_photos:open_cifar10",
    "cifar100:PATH[:SPLIT]": "seecause.data.labelled_photos:open_cifar100",
    "coco:PATH[:SPLIT]": "seecause.data.outlined_photos:open_coco",
    "critters:REGIME[:SPLIT]": "seecause.critters.regimes:open_critters",
    "cub:PATH[:SPLIT]": "seecause.data.birds:open_cub",
    "domainnet:PATH[:DOMAIN][:SPLIT]": "seecause.data.shifts:open_domainnet",
    "folder:PATH": "seecause.data.folder:open_folder",
    "food101:PATH[:SPLIT]": "seecause.data.labelled_photos:open_food101",
    "imagenet:PATH[:SPLIT]": "seecause.data.imagenet:open_imagenet",
    "imagenet-hard:PATH": "seecause.data.imagenet:open_imagenet_hard",
    "imagenet-s:PATH": "seecause.data.imagenet:open_imagenet_s",
    "imagenet9:PATH[:VARIANT]": "seecause.data.backgrounds:open_imagenet9",
    "metashift:PATH[:SPLIT]": "seecause.data.shifts:open_metashift",
    "painted-pets:PATH[:SPLIT]": "seecause.data.painted:open_painted",
    "pairs:WITH:WITHOUT": "seecause.data.folder:open_pairs",
    "pets:PATH[:SPLIT]": "seecause.data.outlined_photos:open_pets",
    "siim:PATH[:SPLIT]": "seecause.data.siim:open_siim",
    "tiny-imagenet:PATH[:SPLIT]": "seecause.data.labelled_photos:open_tiny_imagenet",
    "waterbird200:PATH": "seecause.data.birds:open_waterbird200",
    "waterbirds:PATH[:SPLIT]": "seecause.data.birds:open_waterbirds",
}
_REGISTERED: dict[str, tuple[str, Opener]] = {}  # name -> spec, opener


def register(name: str, opener: Opener, *, form: str = "PATH") -> None:
    """Let `open_data` and the command line open `name:...`: `opener` gets what follows the colon,
    and `limit=` if it takes that. `form` is how the rest is written, for messages."""
    if not name or ":" in name or "#" in name or name in _our_openers():
        raise BadOption("name", name, "a new word without : and #")
    _REGISTERED[name] = (f"{name}:{form}", opener)


def datasets() -> tuple[str, ...]:
    """How every dataset is written, such as `pets:PATH[:SPLIT]`; plug-ins with the rest."""
    _load()
    return tuple(sorted((*_OURS, *(spec for spec, _ in _REGISTERED.values()))))


def is_data(text: str) -> bool:
    """Whether a text begins like a dataset's name."""
    name, colon, _ = text.partition(":")
    return bool(colon) and any(spec.partition(":")[0] == name for spec in datasets())


def open_data(spec: str | Path, *, limit: int | None = None) -> Dataset:
    """A dataset by its name: `sc.data.open("critters:clean:test")`, also called `open_data`.

    `spec` is written NAME:PATH, often with a split behind it: `folder:PATH` (your own pictures, a
    sub-folder for each class), `pets:PATH:test`, `imagenet-s:PATH`; `sc.data.datasets()` lists all.
    At most `limit` samples, spread evenly over the whole. Samples are read when they are asked for,
    as raw pixels of their own size; `sc.data.to_batch` brings them into a model's frame.

    >>> import seecause as sc
    >>> data = sc.data.open("critters:clean:test", limit=4)
    >>> len(data), data.classes[data[0].label], data[0].image.shape
    (4, 'quillow', torch.Size([3, 96, 96]))
    """
    check_limit(limit)
    spec = str(spec)
    name, _, rest = spec.partition(":")
    if name not in _our_openers() and Path(spec).is_dir():
        raise BadOption("data", spec, f"a dataset; for a folder of pictures give folder:{spec}")
    if not rest:
        raise _unknown(name, rest)
    if name in _our_openers():
        module, _, function = _our_openers()[name].partition(":")
        return getattr(importlib.import_module(module), function)(rest, limit=limit)
    _load()
    if name not in _REGISTERED:
        raise _unknown(name, rest)
    return _open_registered(_REGISTERED[name][1], spec, rest, limit)


def _unknown(name: str, rest: str) -> UnknownName:
    forms = {form.partition(":")[0]: form for form in datasets()}  # such as pets: pets:PATH[:SPLIT]
    near = [forms[kind] for kind in nearest(name, forms)] or forms.values()
    hint = f"Write {', '.join(near)}, or folder:PATH for a folder of images."
    return UnknownName("dataset", f"{name}:{rest}" if rest else name, forms, hint)


def as_data(data: T | str | Path) -> T | Dataset:
    """A dataset as it is, or the one of that name."""
    return open_data(data) if isinstance(data, str | Path) else data


open = open_data  # sc.data.open(...)


def _open_registered(opener: Opener, spec: str, rest: str, limit: int | None) -> Dataset:
    """Checked, for it was written elsewhere."""
    takes_limit = "limit" in keyword_options(opener)
    data: Any = opener(rest, limit=limit) if takes_limit else opener(rest)
    for attribute in ("name", "classes", "fingerprint", "__len__", "__getitem__"):
        if not hasattr(data, attribute):
            raise BadOption(
                "data", spec, f"a dataset with `{attribute}`, as `seecause.data.Dataset` has it"
            )
    if limit is None or len(data) <= limit:
        return data
    return Subset(data.name, data, evenly(range(len(data)), limit))


@cache
def _our_openers() -> dict[str, str]:
    return {spec.partition(":")[0]: opener for spec, opener in _OURS.items()}


@cache
def _load() -> None:
    """Plug-ins: a module that registers as it is imported, or an opener under the dataset's
    name."""
    load_plugins("seecause.datasets")
    for name, opener in plugins("seecause.datasets").items():
        if callable(opener) and name not in _REGISTERED and name not in _our_openers():
            register(name, cast(Opener, opener))
