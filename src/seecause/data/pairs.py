"""`pairs:WITH:WITHOUT`: two versions of each picture that should be answered alike: with and
without a mark, from two devices, before two backgrounds.

Two folders of the same pictures under the same names, each like `folder:PATH`: one sub-folder for
each class, or all together without labels. `paired(data, change)` makes the second version by a
function instead.

Samples are the first version; `other(index)` is the second. What explains, audits, scores heads or
repairs takes the second version as what the first would be without the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from seecause._files import digest
from seecause.data.dataset import (
    Dataset,
    Sample,
    Subset,
    capabilities,
    evenly,
    sample_digests,
    sample_ids,
    sample_labels,
)
from seecause.data.folder import open_folder
from seecause.errors import BadImage, BadOption, DataMissing

Change = Callable[[Tensor], Tensor]  # raw pixels [3, H, W] in [0, 1] -> the same picture, changed

_FORM = "give two folders with pictures of the same names, pairs:WITH:WITHOUT"
_NAMED = 3  # names in a message


@dataclass(frozen=True, eq=False)
class PairedData:
    """A dataset whose samples have a second version."""

    name: str
    data: Dataset
    others: Dataset | Change

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.classes

    @cached_property
    def fingerprint(self) -> str:
        """Of both versions; a function is told by what it makes of the first picture."""
        if not callable(self.others):
            return digest(self.data.fingerprint, self.others.fingerprint)
        first = self.other(0).image.numpy().tobytes() if len(self) else b""
        return digest(self.data.fingerprint, first)

    @property
    def capabilities(self) -> frozenset[str]:
        return (capabilities(self.data) - {"counterfactuals"}) | {"pairs"}

    @property
    def ids(self) -> tuple[str, ...]:
        return sample_ids(self.data)

    @property
    def labels(self) -> tuple[int | None, ...]:
        return sample_labels(self.data)

    def digests(self, start: int, stop: int) -> list[str]:
        own = sample_digests(self.data, start, stop)
        if callable(self.others):
            return [digest(part, self.fingerprint) for part in own]
        others = sample_digests(self.others, start, stop)
        return [digest(*parts) for parts in zip(own, others, strict=True)]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        return self.data[index]

    def other(self, index: int) -> Sample:
        """The second version of sample `index`."""
        if not callable(self.others):
            return self.others[index]
        sample = self.data[index]
        image = self.others(sample.image)
        if not isinstance(image, Tensor) or image.shape != sample.image.shape:
            shape = list(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise BadImage(
                f"the changed version of {sample.id}",
                f"got {shape}",
                f"return raw pixels {list(sample.image.shape)} in [0, 1]",
            )
        if not bool(torch.isfinite(image).all()):
            raise BadImage(f"the changed version of {sample.id}", "pixels that are no numbers")
        return replace(sample, image=image)


def paired(data: Dataset, change: Change | Dataset, *, name: str | None = None) -> PairedData:
    """A dataset beside its changed version: `change` makes one raw picture [3, H, W] of another, or
    is a dataset of the same pictures in the same order.

    >>> import seecause as sc
    >>> data = sc.data.open_data("critters:clean:test", limit=2)
    >>> pairs = sc.data.paired(data, lambda image: image.flip(0))
    >>> pairs.other(0).image.equal(pairs[0].image.flip(0))
    True
    """
    if not callable(change) and len(change) != len(data):
        raise BadOption(
            "change", f"{len(change)} pictures", f"as many as {data.name} has: {len(data)}"
        )
    return PairedData(name or f"{data.name} and its other version", data, change)


def open_pairs(rest: str, *, limit: int | None = None) -> PairedData:
    """Two folders; a path may hold colons, so the one is meant that leaves two folders."""
    pieces = rest.split(":")
    ways = [(":".join(pieces[:at]), ":".join(pieces[at:])) for at in range(1, len(pieces))]
    if not ways:
        raise DataMissing(f"pairs:{rest}", "one folder only", _FORM)
    both = [way for way in ways if all(Path(part).is_dir() for part in way)]
    if not both:
        missing = [part for part in ways[0] if not Path(part).is_dir()]
        raise DataMissing(missing[0], "no such folder", _FORM)
    first, second = (open_folder(part) for part in both[0])
    places = {identity: place for place, identity in enumerate(second.ids)}
    _check_names(first.ids, second.ids, both[0])
    rows = evenly(range(len(first)), limit)
    matching = tuple(places[first.ids[row]] for row in rows)
    name, (left, right) = f"pairs:{rest}", cast(tuple[Dataset, Dataset], (first, second))
    return PairedData(name, Subset(name, left, rows), Subset(name, right, matching))


def _check_names(first: tuple[str, ...], second: tuple[str, ...], paths: tuple[str, str]) -> None:
    for path, missing in (
        (paths[1], sorted(set(first) - set(second))),
        (paths[0], sorted(set(second) - set(first))),
    ):
        if missing:
            listed = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
            raise DataMissing(
                path, f"{len(missing)} pictures have no second version here: {listed}", _FORM
            )
