"""Options of a function, checked against its annotations before anything runs.

@checked
def search(model, *, steps: Count = 10, share: Share = 0.1, law: Literal["a", "b"] = "a"): ...
"""

from __future__ import annotations

import functools
import inspect
import numbers
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from seecause.errors import BadOption

F = TypeVar("F", bound=Callable[..., Any])

_SENTENCE_END = re.compile(r"(?<=\.)(?<!et al\.) (?=[A-Z`])")


@dataclass(frozen=True)
class Limit:
    """A limit of an option's values, as a test and in words, used as `Annotated[int,
    Limit(...)]`."""

    holds: Callable[[Any], bool]
    words: str


Whole = Annotated[int, Limit(lambda value: value >= 0, "a whole number, at least 0")]
Count = Annotated[int, Limit(lambda value: value >= 1, "a whole number, at least 1")]
Positive = Annotated[float, Limit(lambda value: value > 0, "a number above 0")]
NotNegative = Annotated[float, Limit(lambda value: value >= 0, "a number, at least 0")]
Share = Annotated[float, Limit(lambda value: 0 < value <= 1, "a share above 0 and up to 1")]
Fraction = Annotated[float, Limit(lambda value: 0 <= value <= 1, "a number from 0 to 1")]
Seed = Annotated[int, Limit(lambda seed: 0 <= seed < 2**63, "a whole number from 0 to 2^63 - 1")]


def keyword_options(
    function: Callable[..., Any], *, leave_out: Collection[str] = ()
) -> dict[str, Any]:
    """Keyword-only parameters of a function and their defaults."""
    parameters = _signature(function).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in leave_out
    }


def summary_of(function: Callable[..., Any]) -> str:
    """The first sentence of a docstring, for lists; it may go on over several lines.

    >>> summary_of(summary_of)
    'The first sentence of a docstring, for lists; it may go on over several lines.'
    """
    paragraph, _, _ = (inspect.getdoc(function) or "").partition("\n\n")
    return _SENTENCE_END.split(" ".join(paragraph.split()))[0]


def check_options(
    what: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    leave_out: Collection[str] = (),
) -> None:
    """Raises BadOption for an option that `function` has no keyword for, and for a value that does
    not fit its annotation. `what` names the function in messages."""
    known = keyword_options(function, leave_out=leave_out)
    hints = _hints(inspect.unwrap(function))
    for name, value in options.items():
        if name not in known:
            listed = ", ".join(known) or "no options"
            raise BadOption(f"{what} option {name}", value, f"one of {listed}")
        if name in hints and not accepts(hints[name], value):
            raise BadOption(f"{what} option {name}", value, _expected(hints[name]))


def with_options(
    own: Mapping[str, Mapping[str, Any]],
    more: Mapping[str, Mapping[str, Any]],
    known: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """`own` options by name, with `more` of them added. Options with the name "" are
    added to all entries of `known` that have them. Raises BadOption for an option that no entry of
    `known` has."""
    by_name = {name: dict(own.get(name, {})) for name in {**own, **known}}
    for name, key in [(name, key) for name, options in more.items() for key in options]:
        takers = [taker for taker in known if key in known[taker] and name in ("", taker)]
        if not takers:
            listed = [f"{taker}: {', '.join(keys) or 'none'}" for taker, keys in known.items()]
            word = f"{name}.{key}={more[name][key]}".removeprefix(".")
            raise BadOption("--option", word, f"[NAME.]KEY=VALUE with one of {'; '.join(listed)}")
        for taker in takers:
            by_name[taker][key] = more[name][key]
    return by_name


_signature = functools.lru_cache(maxsize=1024)(inspect.signature)  # options of every call


@functools.lru_cache(maxsize=1024)
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError:  # a plug-in may import what it annotates for type checkers only
        if function.__module__.startswith("seecause."):
            raise
        return {}


def checked(thing: F) -> F:
    """Check the arguments of each call of a function, or of each new object of a dataclass.

    A value that does not fit its annotation is a `BadOption`. Types, `Literal`, unions, tuples,
    sequences and `Annotated[..., Limit(...)]` are checked; other annotations accept everything.
    Defaults and `**options` are not checked.

    Example:
        >>> @checked
        ... def blur(image, *, radius: Positive = 1.0): ...
        >>> blur(None, radius=0)
        Traceback (most recent call last):
        seecause.errors.BadOption: radius=0 cannot be used; expected a number above 0.
    """
    if isinstance(thing, type):
        thing.__init__ = checked(thing.__init__)  # type: ignore[misc]
        return cast(F, thing)
    signature = inspect.signature(thing)
    hints: dict[str, Any] = {}

    @functools.wraps(thing)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not hints:
            hints.update(_hints(inspect.unwrap(thing)) or {"": Any})
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return thing(*args, **kwargs)  # whose own message names it
        for name, value in given.items():
            variable = signature.parameters[name].kind in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            )
            if name in hints and not variable and not accepts(hints[name], value):
                raise BadOption(name, value, _expected(hints[name]))
        return thing(*args, **kwargs)

    return cast(F, call)


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value fits an annotation. A list is accepted for a tuple, because manifests are
    JSON."""
    return _kind(hint)[0](value)


def _expected(hint: Any) -> str:
    return " or ".join(dict.fromkeys(_kind(hint)[1]))


@functools.cache
def _kind(hint: Any) -> tuple[Callable[[Any], bool], list[str]]:
    """Returns (test, description) for the values of an annotation. The description is empty for
    types that cannot be given on the command line."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        holds, words = _kind(parts[0])
        limits = [part for part in parts if isinstance(part, Limit)]
        named = [limit.words for limit in limits] or words
        return lambda value: holds(value) and all(limit.holds(value) for limit in limits), named
    if kind in (Union, UnionType):
        kinds = [_kind(part) for part in parts]
        words = [word for _, words in kinds for word in words]
        return lambda value: any(holds(value) for holds, _ in kinds), words
    if kind is Literal:
        typed = [(type(part), part) for part in parts]
        return lambda value: (type(value), value) in typed, [", ".join(map(str, parts))]
    if kind is tuple and ... not in parts:
        words = [f"{len(parts)} values such as 1,8"]
        return (
            lambda value: (
                isinstance(value, tuple | list)
                and len(value) == len(parts)
                and all(map(accepts, parts, value))
            ),
            words,
        )
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return lambda value: isinstance(value, kind), ["a table"]
    if isinstance(kind, type) and issubclass(kind, Collection):
        return (
            lambda value: (
                isinstance(value, Collection)
                and not isinstance(value, str | bytes | Mapping)
                and all(accepts(parts[0], item) for item in value)
            ),
            ["several values, separated by commas"],
        )
    if hint in (None, type(None)):
        return lambda value: value is None, ["None"]
    if hint in (int, float):
        number = numbers.Real if hint is float else numbers.Integral
        words = ["a number" if hint is float else "a whole number"]
        return lambda value: isinstance(value, number) and not isinstance(value, bool), words
    name = getattr(hint, "__name__", str(hint))
    words = [] if name == "Tensor" else [{"bool": "true or false", "str": "a word"}.get(name, name)]
    free = hint is Any or not isinstance(hint, type) or getattr(hint, "_is_protocol", False)
    return lambda value: free or isinstance(value, cast(type, hint)), words
