"""Pickles of public releases, read without running what they say.

A pickle may name any function and call it. Here it may build dictionaries, lists, sets, text,
numbers and, for CIFAR, arrays of bytes; the few names it may use stand for code of this file.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from seecause.data.photos import Layout


class _Bytes:
    """An array of bytes: made by us from shape and content. numpy's own `__setstate__` would turn
    forged dtypes into pointers."""

    def __new__(cls, *_: Any) -> _Bytes:
        return super().__new__(cls)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", b"u1"):
            raise pickle.UnpicklingError("an array of something else than bytes")
        flat = np.frombuffer(bytearray(content), np.uint8)
        self.array = flat.reshape(shape, order="F" if fortran else "C")


class _Dtype:
    def __init__(self, code: Any = None, *_: Any):
        self.code = code

    def __setstate__(self, state: Any) -> None: ...


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Bytes,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Bytes,
    ("numpy._core.multiarray", "_reconstruct"): _Bytes,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("collections", "defaultdict"): lambda *_: {},
}


class _Reader(pickle._Unpickler):
    """Python's own reader: the one in C fills memory with whatever index a file gives its memo."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it wants to load {module}.{name}, which was not run")
        return _NAMES[module, name]


def read_pickle(path: Path, layout: Layout, *, encoding: str = "ASCII") -> dict[Any, Any]:
    """The dictionary that a pickle holds. `encoding="bytes"` keeps Python 2's text as bytes."""
    if not path.is_file():
        raise layout.refusal(path, "no such file")
    with layout.reading(path):
        try:
            content = _Reader(BytesIO(path.read_bytes()), encoding=encoding).load()
        except pickle.UnpicklingError as refused:
            raise layout.refusal(path, f"a pickle that cannot be used ({refused})") from None
        if not isinstance(content, dict):
            raise TypeError("not a dictionary")
        return {k: v.array if isinstance(v, _Bytes) else v for k, v in content.items()}
