"""Datasets by name. A new one is a file with an `open_...` function, and a line here."""

from __future__ import annotations

import importlib

from seecause.data.dataset import Dataset
from seecause.errors import UnknownName

_LOADERS = {  # spec -> where its loader is; imported on first use
    "celeba:PATH[:SPLIT]": ("seecause.data.celeba", "open_celeba"),
    "cifar10:PATH[:SPLIT]": ("seecause.data.cifar", "open_cifar10"),
    "cifar100:PATH[:SPLIT]": ("seecause.data.cifar", "open_cifar100"),
    "critters:REGIME[:SPLIT]": ("seecause.critters.dataset", "open_critters"),
    "cub:PATH[:SPLIT]": ("seecause.data.cub", "open_cub"),
    "folder:PATH": ("seecause.data.folder", "open_folder"),
    "food101:PATH[:SPLIT]": ("seecause.data.food101", "open_food101"),
    "imagenet:PATH[:SPLIT]": ("seecause.data.imagenet", "open_imagenet"),
    "imagenet-hard:PATH": ("seecause.data.imagenet_hard", "open_imagenet_hard"),
    "imagenet-s:PATH": ("seecause.data.imagenet_s", "open_imagenet_s"),
    "imagenet9:PATH[:VARIANT]": ("seecause.data.imagenet9", "open_imagenet9"),
    "metashift:PATH[:SPLIT]": ("seecause.data.metashift", "open_metashift"),
    "pets:PATH[:SPLIT]": ("seecause.data.pets", "open_pets"),
    "siim:PATH[:SPLIT]": ("seecause.data.siim", "open_siim"),
    "tiny-imagenet:PATH[:SPLIT]": ("seecause.data.tiny_imagenet", "open_tiny_imagenet"),
    "waterbird200:PATH": ("seecause.data.waterbirds", "open_waterbird200"),
    "waterbirds:PATH[:SPLIT]": ("seecause.data.waterbirds", "open_waterbirds"),
}


def is_data(text: str) -> bool:
    """Whether a text begins like a dataset's name."""
    return text.partition(":")[0] in {known.partition(":")[0] for known in _LOADERS} and ":" in text


def open_data(spec: str, *, limit: int | None = None) -> Dataset:
    """`critters:clean:test`, `folder:PATH`, `pets:PATH`, `imagenet-s:PATH` and the others above; at
    most `limit` samples, spread evenly over the whole."""
    kind, _, rest = spec.partition(":")
    for known, (module, function) in _LOADERS.items():
        if rest and known.partition(":")[0] == kind:
            return getattr(importlib.import_module(module), function)(rest, limit=limit)
    raise UnknownName("dataset", spec, _LOADERS)
