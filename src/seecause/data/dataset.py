"""What every dataset is: a sequence of samples that are made when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from seecause.errors import BadOption, UnknownName

T = TypeVar("T")
IGNORE = 255  # in integer masks: neither object nor background
# one photo in so many of each class is kept back for validation where a release has no such split
HELD_OUT = 10


@dataclass(frozen=True)
class Sample:
    """Loaders yield these, so metrics and methods need to know no dataset.

    Pictures have their own size; `to_batch` brings them and their masks into a model's frame. A
    field a dataset cannot fill is None; it is never guessed.
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


class Dataset(Protocol):
    """Iterating works too: an index beyond the end raises IndexError."""

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

    def __getitem__(self, index: int) -> Sample: ...


def evenly(items: Sequence[T], limit: int | None) -> tuple[T, ...]:
    """`limit` of the items, spread over all of them: datasets are sorted by class, and the first
    hundred would all be fish."""
    check_limit(limit)
    if limit is None or limit >= len(items):
        return tuple(items)
    return tuple(items[place * len(items) // limit] for place in range(limit))


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise BadOption("limit", limit, "at least one sample")


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
    """`trainval`: all items; `val`: every tenth of each class; `train`: the others. The same on
    every machine: nothing is drawn."""
    if split == "trainval":
        return list(items)
    seen: Counter[Hashable] = Counter()
    kept = []
    for item, of in zip(items, classes, strict=True):
        seen[of] += 1
        if (seen[of] % HELD_OUT == 0) == (split == "val"):
            kept.append(item)
    return kept
