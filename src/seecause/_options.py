"""Keyword options of a function, checked against its signature before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from seecause.errors import BadOption


def keyword_options(
    function: Callable[..., Any], *, leave_out: Collection[str] = ()
) -> dict[str, Any]:
    """Keyword-only parameters of a function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in leave_out
    }


def check_options(
    what: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    leave_out: Collection[str] = (),
) -> None:
    """Refuse an option that `function` has no keyword for, and a value that is not of the kind its
    annotation says. `what` names the function to the user."""
    known = keyword_options(function, leave_out=leave_out)
    hints = get_type_hints(inspect.unwrap(function))
    for name, value in options.items():
        if name not in known:
            listed = ", ".join(known) or "no options"
            raise BadOption(f"option {name!r} of {what}", value, f"one of {listed}")
        if name in hints and not accepts(hints[name], value):
            raise BadOption(f"option {name!r} of {what}", value, " or ".join(_words(hints[name])))


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value is of the kind an annotation says. A tuple may come as a list: manifests are
    JSON."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(accepts(part, value) for part in parts)
    if kind is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if kind is tuple and ... not in parts:
        right_length = isinstance(value, tuple | list) and len(value) == len(parts)
        return right_length and all(map(accepts, parts, value))
    if kind is not None and isinstance(kind, type) and issubclass(kind, Sequence):
        return isinstance(value, tuple | list) and all(accepts(parts[0], item) for item in value)
    if kind is dict:
        return isinstance(value, dict)
    if hint in (None, type(None)):
        return value is None
    if hint in (int, float):
        number = int | float if hint is float else int
        return not isinstance(value, bool) and isinstance(value, number)
    return isinstance(value, hint) if isinstance(hint, type) and hint is not Any else True


def _words(hint: Any) -> Iterator[str]:
    """What `accepts` takes, for a reader; what cannot be typed on a command line is not named."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        for part in parts:
            yield from _words(part)
    elif kind is Literal:
        yield ", ".join(map(str, parts))
    elif kind is dict:
        yield "a table"
    elif kind is tuple and ... not in parts:
        yield f"{len(parts)} values such as 1,8"
    elif isinstance(kind, type) and issubclass(kind, Sequence):
        yield "several values, separated by commas"
    elif hint in (None, type(None)):
        yield "None"
    elif getattr(hint, "__name__", "") != "Tensor":
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
        yield names.get(hint, str(hint))
