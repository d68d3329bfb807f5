"""Pickles of public releases, read without running them.

A pickle is a program: it may name any function and call it. Here it may name what its caller
allows, and nothing else: dictionaries, lists, text, numbers and bools are built by the format
itself, and numpy arrays by the three names below.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seecause.errors import DataMissing

_REMAKE = np.empty(0).__reduce__()[0]  # type: ignore[index]  # what numpy itself names when it pickles an array; its module moved in numpy 2

ARRAYS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _REMAKE,
    ("numpy._core.multiarray", "_reconstruct"): _REMAKE,
}
_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    MemoryError,
    struct.error,
)


class _Forbidden(pickle.UnpicklingError):
    """The pickle names something that may not be loaded."""


class _Reader(pickle.Unpickler):
    allowed: Mapping[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise _Forbidden(f"{module}.{name}")
        return self.allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise _Forbidden(f"a persistent id {pid!r}")


def read_pickle(
    path: Path,
    layout: str,
    *,
    allowed: Mapping[tuple[str, str], Any] | None = None,
    encoding: str = "ASCII",
) -> Any:
    """What a pickle holds. `allowed` maps (module, name) to what may stand for it; `encoding` is
    how text of Python 2 is read ("bytes" leaves it)."""
    if not path.is_file():
        raise DataMissing(str(path), "no such file", layout)
    with path.open("rb") as file:
        reader = _Reader(file, encoding=encoding)
        reader.allowed = allowed or {}
        try:
            return reader.load()
        except _Forbidden as named:
            raise DataMissing(
                str(path),
                f"a pickle that wants to load {named}, which this dataset does not need; it was"
                " not run",
                layout,
            ) from None
        except _BROKEN as broken:
            raise DataMissing(str(path), f"a damaged pickle ({broken})", layout) from broken
