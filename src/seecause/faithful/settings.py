"""Whether a value from a file or the command line is of the kind a setting has."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    NoneType: "nothing",
    dict: "a table",
    tuple: "numbers",
}


def fits(value: Any, kind: Any) -> bool:
    """A whole number is a number too; true and false are none."""
    origin = get_origin(kind) or kind
    if origin is UnionType:
        return any(fits(value, one) for one in get_args(kind))
    if origin is Literal:
        return value in get_args(kind)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(one, float) for one in value)
    if origin in (int, float):
        return isinstance(value, int if origin is int else int | float) and not isinstance(
            value, bool
        )
    return isinstance(value, origin)


def in_words(kind: Any) -> str:
    """`int | None` -> a whole number or nothing."""
    origin = get_origin(kind) or kind
    if origin is UnionType:
        return " or ".join(in_words(one) for one in get_args(kind))
    return f"one of {', '.join(map(str, get_args(kind)))}" if origin is Literal else _WORDS[origin]
