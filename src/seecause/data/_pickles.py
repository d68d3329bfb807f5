"""Pickles of public releases, read without running them.

A pickle is a program: it may name any function and call it. Here it may build dictionaries, lists,
text, numbers and bools, and call the few names its caller allows, which all stand for code of this
file. An array (`arrays=True`, CIFAR) is made by us from a shape and raw bytes; it is uint8 and has
one or two dimensions. Nothing a file says reaches numpy's own `__setstate__`: a forged dtype there
turns bytes into pointers.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from seecause._pictures import BROKEN
from seecause.data.photos import Layout

_BROKEN = (pickle.UnpicklingError, *BROKEN)
# what plain values are written with; anything else is refused
_OPCODES = """
    MARK STOP PROTO FRAME MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 BINFLOAT FLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
    BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST LIST APPEND APPENDS
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT GLOBAL STACK_GLOBAL
"""
_LARGEST = 1 << 63  # number that is a key


class _Forbidden(pickle.UnpicklingError):
    """The pickle names something that may not be loaded."""


class _Dtype:
    """Stands for numpy.dtype: its code is checked, its state is not looked at."""

    def __init__(self, code: object, *_: object):
        if code not in ("u1", b"u1", "|u1", b"|u1"):
            raise _Forbidden(f"an array of {str(code)[:20]}, not of bytes")


class _Array:
    """Stands for a numpy array until its state has come."""

    pixels: np.ndarray | None = None

    def fill(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        sides = isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)
        if not sides or len(shape) not in (1, 2) or not isinstance(dtype, _Dtype):
            raise ValueError("not an array of bytes with one or two dimensions")
        if type(content) is not bytes or len(content) != math.prod(shape):
            raise ValueError("pixels that do not fill their array")
        flat = np.frombuffer(bytearray(content), np.uint8)
        self.pixels = flat.reshape(shape, order="F" if fortran is True or fortran == 1 else "C")


_ARRAYS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): lambda *_: _Array(),
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
}
_SETS: dict[tuple[str, str], Callable[..., Any]] = {  # as a list: nothing is hashed
    ("builtins", "set"): list,
    ("__builtin__", "set"): list,
    ("collections", "defaultdict"): lambda *_: {},
}


def _no_sets() -> None:
    raise _Forbidden("a set")


class _Reader(pickle._Unpickler):
    """Python's own reader, less most of its instructions. The one in C fills memory with
    whatever place a file names for its memo."""

    if TYPE_CHECKING:  # what `load` makes
        stack: list[Any]
        append: Callable[[Any], None]

        def pop_mark(self) -> list[Any]: ...

    names: Mapping[tuple[str, str], Callable[..., Any]] = MappingProxyType({})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            raise _Forbidden(f"{module}.{name}")
        return self.names[module, name]

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if not any(function is allowed for allowed in self.names.values()):
            raise _Forbidden("something that is no function")
        self.stack[-1] = function(*arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], _Array):
            self.stack[-1].fill(state)
        elif not isinstance(self.stack[-1], _Dtype):
            raise _Forbidden("an object with a state")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._set(self.stack[-1], items)

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append(self._set({}, items))

    def load_empty_set(self) -> None:
        self.append(self.names.get(("builtins", "set"), _no_sets)())

    def load_additems(self) -> None:
        items = self.pop_mark()
        self.stack[-1].extend(items)

    def _set(self, target: Any, items: list[Any]) -> dict[Any, Any]:
        if type(target) is not dict:
            raise ValueError("an item for what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, bytes) and not (type(key) is int and abs(key) < _LARGEST):
                raise ValueError("a dictionary with odd keys")  # the hash of a deep tuple overflows
            target[key] = value
        return target

    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code]
        for code in (getattr(pickle, name)[0] for name in _OPCODES.split())
    } | {
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.EMPTY_SET[0]: load_empty_set,
        pickle.ADDITEMS[0]: load_additems,
    }


def read_pickle(path: Path, layout: str, *, arrays: bool = False, sets: bool = False) -> Any:
    """What a pickle holds: plain values, with `arrays` also arrays of bytes among the values of a
    dictionary (and Python 2's text as bytes), with `sets` also sets, as lists."""
    release = Layout(layout)
    file = BytesIO(release.file(path).read_bytes())
    reader = _Reader(file, encoding="bytes" if arrays else "ASCII")
    reader.names = (_ARRAYS if arrays else {}) | (_SETS if sets else {})
    try:
        content = reader.load()
    except _Forbidden as name:
        odd = f"wants to load {name}, which this dataset does not need; it was not run"
        raise release.refusal(path, f"a pickle that {odd}") from None
    except _BROKEN as broken:
        raise release.refusal(path, f"a damaged pickle ({str(broken)[:80]})") from broken
    if arrays and isinstance(content, dict):
        return {key: _finished(value) for key, value in content.items()}
    return content


def _finished(value: Any) -> Any:
    return value.pixels if isinstance(value, _Array) else value
