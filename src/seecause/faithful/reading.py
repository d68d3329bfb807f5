"""Samples read by other processes, with our own errors whole: torch would turn an error of several
arguments into a RuntimeError with a traceback in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from seecause.errors import SeecauseError


class Readable(Protocol):
    def __getitem__(self, key: Any) -> Any: ...


@dataclass(frozen=True)
class _Careful:
    """Samples by key, or the error that reading one raised."""

    data: Readable

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.data[key]
        except SeecauseError as error:
            return error


@dataclass(frozen=True)
class _Collate:
    make: Callable[[list[Any]], Any]

    def __call__(self, items: list[Any]) -> Any:
        broken = next((item for item in items if isinstance(item, SeecauseError)), None)
        try:
            return self.make(items) if broken is None else broken
        except SeecauseError as error:
            return error


def read(
    data: Readable,
    keys: Sequence[list[Any]],
    make: Callable[[list[Any]], Any],
    *,
    workers: int,
    pin: bool = False,
) -> Iterator[Any]:
    """`make` of the samples of each list of keys, in this order whatever the number of reading
    processes (0: none but this one)."""
    loader: DataLoader[Any] = DataLoader(
        _Careful(data),  # type: ignore[arg-type]
        batch_sampler=keys,
        collate_fn=_Collate(make),
        num_workers=min(workers, len(keys), os.cpu_count() or 1),
        pin_memory=pin,
        generator=torch.Generator(),
    )
    for found in loader:
        if isinstance(found, SeecauseError):
            raise found
        yield found
