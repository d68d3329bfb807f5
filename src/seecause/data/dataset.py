"""What every dataset is: a sequence of samples that are made when they are asked for."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from seecause.errors import BadImage, BadOption, DataMissing, SeecauseError, UnknownName
from seecause.files import digest

if TYPE_CHECKING:  # torch is not loaded before a path is known to exist
    from torch import Tensor

T = TypeVar("T")
IGNORE = 255  # in integer masks: neither object nor background
HELD_OUT = 10  # one training photo in so many of each class is `val` where a release has none
_FIELDS = {  # capability -> the field of a sample that it fills
    "labels": "label",
    "groups": "group",
    "masks": "mask",
    "parts": "parts",
    "boxes": "box",
    "points": "points",
}
CAPABILITIES = (*_FIELDS, "counterfactuals", "pairs")


@dataclass(frozen=True)
class Sample:
    """What datasets yield, so that metrics and methods need to know no dataset.

    Images have their own size; `to_batch` brings them and their masks into a model's frame. A field
    that a dataset cannot fill is None; it is never guessed.
    """

    image: Tensor  # [3, H, W] float32, raw pixels in [0, 1], not normalised
    label: int | None
    # (foreground code, background code): what a shortcut confuses, such as bird and place
    group: tuple[int, int] | None = None
    # [H, W] bool, True on the object; or integers: 1 object, 0 background, IGNORE neither
    mask: Tensor | None = None
    parts: Tensor | None = None  # [H, W] uint8: 0 background, 1 body, 2.. parts
    box: tuple[float, float, float, float] | None = None  # x, y, width, height in pixels
    # [P, 3] float32: x, y of each key point in pixels, and 1 where it is visible
    points: Tensor | None = None
    id: str = ""


@dataclass(frozen=True)
class Hole:
    """An image that was skipped because it could not be read, and why."""

    name: str
    reason: str


class Dataset(Protocol):
    """What every dataset has. Iterating works too: an index beyond the end raises IndexError; so do
    slices of those of this package (`Sliceable`).

    It may also have, and is asked for through the functions below:
        capabilities     some of CAPABILITIES: what its samples have
        ids, labels      of all samples, without reading them
        digests(a, b)    of samples a to b: each changes when its sample does
        latents(a, b)    with "counterfactuals": what samples a to b are drawn from (Critters)
        other(index)     with "pairs": the second version of a sample, to be predicted alike
    """

    @property
    def name(self) -> str:
        """As `open_data` takes it."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the labels, in order; empty for a dataset without labels."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the samples do."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


def capabilities(data: Dataset) -> frozenset[str]:
    """What its samples have. Of a dataset that does not say, the first eight are looked at."""
    declared = getattr(data, "capabilities", None)
    if declared is not None:
        return frozenset(declared)
    seen: set[str] = set()
    for index in range(min(len(data), 8)):
        with contextlib.suppress(SeecauseError):  # a file that cannot be read
            sample = data[index]
            seen |= {word for word, field in _FIELDS.items() if getattr(sample, field) is not None}
    return frozenset(seen)


def has_pairs(data: Dataset) -> bool:
    """Whether samples have a second version, `data.other(index)`."""
    return "pairs" in capabilities(data)


def has_counterfactuals(data: Dataset) -> bool:
    """Whether samples can be drawn again with one thing changed: `data.latents(start, stop)`."""
    return "counterfactuals" in capabilities(data)


def sample_ids(data: Dataset) -> tuple[str, ...]:
    """The name of each sample, without reading it."""
    ids = getattr(data, "ids", None)
    return tuple(ids) if ids else tuple(f"{data.name}:{index}" for index in range(len(data)))


def sample_labels(data: Dataset) -> tuple[int | None, ...]:
    """The label of each sample; samples are read where the dataset does not know them otherwise."""
    labels = getattr(data, "labels", None)
    return tuple(labels if labels is not None else (data[i].label for i in range(len(data))))


def sample_digests(data: Dataset, start: int = 0, stop: int | None = None) -> list[str]:
    """One for each sample from `start` to `stop`, whatever else is in the dataset."""
    stop = len(data) if stop is None else stop
    digests = getattr(data, "digests", None)
    if digests is not None:
        return list(digests(start, stop))
    return [_sample_digest(data, index) for index in range(start, stop)]


def _sample_digest(data: Dataset, index: int) -> str:
    try:
        sample = data[index]
    except (BadImage, DataMissing) as error:
        return digest(str(error))
    tensors = (sample.image, sample.mask, sample.parts, sample.points)
    pixels = [b"" if tensor is None else tensor.cpu().numpy().tobytes() for tensor in tensors]
    return digest(repr((sample.id, sample.label, sample.group, sample.box)), *pixels)


class Sliceable:
    """What datasets of this package share: `data[3]` is a sample, `data[2:6]` a `Subset`."""

    def sample(self, index: int, /) -> Sample:
        """One sample, read or made now."""
        raise NotImplementedError

    @overload
    def __getitem__(self: Dataset, index: int, /) -> Sample: ...

    @overload
    def __getitem__(self: Dataset, index: slice, /) -> Subset: ...

    def __getitem__(self: Any, index: int | slice, /) -> Sample | Subset:
        if not isinstance(index, slice):
            return self.sample(index)
        rows = tuple(range(len(self))[index])
        return Subset(f"{self.name}, {len(rows)} of {len(self)}", self, rows)


@dataclass(frozen=True, eq=False)
class Subset(Sliceable):
    """Some samples of a dataset, under a name of their own."""

    name: str
    data: Any  # Dataset
    rows: tuple[int, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.classes

    @property
    def fingerprint(self) -> str:
        return digest(self.data.fingerprint, repr(self.rows))

    @property
    def capabilities(self) -> frozenset[str]:
        return capabilities(self.data)

    @property
    def ids(self) -> tuple[str, ...]:
        ids = sample_ids(self.data)
        return tuple(ids[row] for row in self.rows)

    @property
    def labels(self) -> tuple[int | None, ...]:
        if hasattr(self.data, "labels"):
            labels = self.data.labels
            return tuple(labels[row] for row in self.rows)
        return tuple(self.data[row].label for row in self.rows)

    def digests(self, start: int, stop: int) -> list[str]:
        return [sample_digests(self.data, row, row + 1)[0] for row in self.rows[start:stop]]

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, /) -> Sample:
        return self.data[self.rows[index]]

    def latents(self, start: int, stop: int, **options: Any) -> Any:
        """What samples `start` to `stop` are drawn from."""
        rows = self.rows[start:stop]
        first, last = min(rows, default=0), max(rows, default=-1)
        drawn = self.data.latents(first, last + 1, **options)
        return drawn[[row - first for row in rows]]

    def other(self, index: int) -> Sample:
        """The second version of a sample."""
        return self.data.other(self.rows[index])


def evenly(items: Sequence[T], limit: int | None) -> tuple[T, ...]:
    """`limit` of the items, spread over all of them: datasets are sorted by class, and the first
    hundred would all be fish."""
    check_limit(limit)
    if limit is None or limit >= len(items):
        return tuple(items)
    return tuple(items[place * len(items) // limit] for place in range(limit))


def check_limit(limit: int | None) -> None:
    if limit is not None and not (isinstance(limit, Integral) and limit >= 1):
        raise BadOption("limit", limit, "a whole number, at least one sample")


def path_and_split(rest: str, splits: Sequence[str], default: str = "test") -> tuple[Path, str]:
    """`PATH:SPLIT` or `PATH`. A path may hold colons, so what follows the last one is a split only
    if it is the name of one."""
    path, _, last = rest.rpartition(":")
    if path and last in splits:
        return Path(path), last
    if path and Path(path).exists() and not Path(rest).exists():
        raise UnknownName("split", last, splits)
    return Path(rest), default


def part_of_train(items: Sequence[T], classes: Sequence[Hashable], split: str) -> list[T]:
    """`trainval`: all items; `val`: every tenth of each class; `train`: the others. Nothing is
    drawn, so the splits are the same on every machine."""
    if split == "trainval":
        return list(items)
    seen: Counter[Hashable] = Counter()
    part = []
    for item, of in zip(items, classes, strict=True):
        seen[of] += 1
        if (seen[of] % HELD_OUT == 0) == (split == "val"):
            part.append(item)
    return part
