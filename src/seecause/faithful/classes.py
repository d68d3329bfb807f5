"""Labels of any dataset, as a network counts its classes: by name, never by place alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from seecause.data.batch import in_order
from seecause.data.dataset import Dataset, Sample
from seecause.data.imagenet9 import IMAGENET_CLASSES, find_in9_map, read_in9_map
from seecause.errors import BadOption
from seecause.faithful.net import IFAM


@dataclass(frozen=True)
class Relabelled:
    """A dataset whose label c is called places[c]."""

    data: Dataset
    classes: tuple[str, ...]
    places: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def fingerprint(self) -> str:
        return self.data.fingerprint

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        sample = self.data[index]
        return (
            sample
            if sample.label is None
            else dataclasses.replace(sample, label=self.places[sample.label])
        )


def fitting(net: IFAM, data: Dataset) -> tuple[Dataset, Tensor | None]:
    """The dataset with the network's labels; and, for ImageNet-9 and a network with ImageNet's
    classes, which of the nine each answer stands for.

    Names in another order, or some of them only, are mapped. Other classes are refused: accuracy
    would mean nothing.
    """
    kind, names = data.name.partition(":")[0], net.class_names
    if not data.classes:
        raise BadOption("data", data.name, "a dataset with labels")
    if kind == "imagenet9" and net.classes == IMAGENET_CLASSES:
        return data, read_in9_map(find_in9_map(data.name))
    if len(data.classes) == net.classes and in_order(data, names, net.classes):
        return data, None
    strange = next((name for name in data.classes if name not in names), None)
    if strange is not None or len(set(names)) < len(names):
        known = (
            ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")
            if names
            else f"{net.classes}, without names"
        )
        raise BadOption(
            "data",
            data.name,
            f"a dataset with the network's classes ({known}); {strange!r} is none of them",
        )
    return Relabelled(data, names, tuple(names.index(name) for name in data.classes)), None
