"""What every dataset is: a sequence of samples that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from seecause.data.sample import Sample
from seecause.errors import BadOption

T = TypeVar("T")


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
    """`limit` of the items, spread over all of them: datasets are sorted by class, and the first hundred would all be fish."""
    check_limit(limit)
    if limit is None or limit >= len(items):
        return tuple(items)
    return tuple(items[place * len(items) // limit] for place in range(limit))


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise BadOption("limit", limit, "at least one sample")
