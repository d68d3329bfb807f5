"""Errors that a user can cause, and a way to stop work.

Each error says what was wrong, what was expected and what to do; the command line prints it on one
line and exits with code 2. Between two blocks of a run, and between two chunks, work calls
`may_stop`, which raises what the check of `stoppable` raises.
"""

from __future__ import annotations

import copyreg
import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

SHOWN = 30  # maximum number of names in a message
LONGEST = 200  # maximum number of characters of a value in a message
_check: ContextVar[Callable[[], None] | None] = ContextVar("seecause_stop", default=None)


class SeecauseError(Exception):
    """Base class of the errors that this package raises on purpose.

    The subclasses are also a `ValueError`, `TypeError`, `FileNotFoundError` or `ImportError` where
    one of these fits. Errors can be pickled.

    Attributes:
        args (tuple): The message: what was wrong, what was expected, and what to do.

    Example:
        >>> import seecause as sc
        >>> try:
        ...     sc.load("builtin:critters-cat")
        ... except sc.SeecauseError as error:
        ...     print(type(error).__name__)
        UnknownName
    """

    def __reduce__(self) -> tuple[Any, ...]:
        make = copyreg.__newobj__  # type: ignore[attr-defined]  # without `__init__`
        return make, (type(self),), {**vars(self), "args": self.args}


class BadOption(SeecauseError, ValueError):
    """An option has a value that cannot be used."""

    def __init__(self, name: str, got: object, expected: str):
        shown = repr(got)
        if len(shown) > LONGEST:  # for example a module
            shown = f"a {type(got).__name__}"
        value = f"{name} is not set" if got is None else f"{name}={shown} cannot be used"
        super().__init__(f"{value}; expected {expected}.")
        self.option = name


class UnknownName(SeecauseError, ValueError):
    """A class, method, model, dataset or other named thing does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = ""):
        known = sorted(known)
        near = nearest(name, known)
        guess = f" Did you mean {', '.join(near)}?" if near else ""
        listed = ", ".join(known[:SHOWN])
        if len(known) > SHOWN:  # beside a likely name, thirty others do not help
            listed = f"{len(known)} names" if near else f"{listed}, ... ({len(known)} in all)"
        super().__init__(f"{kind} {name!r} not found.{guess} {hint or f'Known: {listed}.'}")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three names that may have been meant. Names that contain `name` come first.

    >>> nearest("persian", ["pelican", "Persian cat", "tabby"])
    ['Persian cat', 'pelican']
    """
    folded = {other.casefold(): other for other in known}
    typed = name.casefold()
    holding = sorted((other for other in folded if typed and typed in other), key=len)
    alike = difflib.get_close_matches(typed, folded, n=3, cutoff=0.5)
    return [folded[other] for other in dict.fromkeys([*holding, *alike])][:3]


class UnsupportedModel(SeecauseError, TypeError):
    """No adapter fits this module, or a part of it cannot be split exactly."""

    def __init__(
        self, what: str, reason: str, remedy: str = "see docs/models.md for the families that work"
    ):
        super().__init__(f"{what} is not supported: {reason}; {remedy}.")


class ViewMismatch(SeecauseError):
    """The view of a model does not compute what the model computes."""

    def __init__(
        self,
        probe: str,
        where: str,
        reason: str,
        remedy: str = "Check mean/std/size/pool/head, or report the model class",
    ):
        self.probe, self.where = probe, where
        super().__init__(
            f"the view does not match the model: probe {probe!r} failed at {where}: {reason}."
            f" No map would be trustworthy, so the wrap is refused. {remedy}."
        )


class EditLost(SeecauseError):
    """An intervention does not change what it is meant to change."""

    def __init__(self, edit: str, part: str, reason: str, versions: str):
        super().__init__(
            f"the edit {edit!r} does not reach {part}: {reason}. Results would be wrong, so the"
            f" edit was not applied. Installed: {versions}; see docs/symptoms.md."
        )


class NotDefined(SeecauseError):
    """The method has no meaning for this model or readout."""

    def __init__(self, method: str, reason: str, remedy: str):
        super().__init__(f"{method} is not defined here: {reason}. {remedy}.")


class BadInput(SeecauseError, ValueError):
    """An image, a prompt, a bank or labels with which the computation has no meaning."""

    def __init__(self, what: str, reason: str, remedy: str):
        super().__init__(f"{what}: {reason}; {remedy}.")
        self.reason = reason


class BadImage(BadInput):
    """A file or tensor that cannot be used as an image."""

    def __init__(
        self,
        what: str,
        reason: str,
        remedy: str = "give an RGB, grey, CMYK or palette image of at least 2 x 2 pixels",
    ):
        super().__init__(what, reason, remedy)


class DataMissing(SeecauseError, FileNotFoundError):
    """A file, a folder or a model's weights are not there, or not in the expected format."""

    def __init__(self, what: str, reason: str, remedy: str):
        super().__init__(f"{what}: {reason}. {remedy[:1].upper()}{remedy[1:]}.")
        self.reason = reason


class MissingExtra(SeecauseError, ImportError):
    """An optional library is not installed; it comes with an extra, or by its own name."""

    def __init__(self, library: str, extra: str = ""):
        package = f"'seecause[{extra}]'" if extra else library
        super().__init__(f"{library} is not installed; run: pip install {package}.")


def printable(text: str) -> str:
    """Text for one line of a terminal, with control and bidirectional characters escaped.

    >>> printable("cat\\x1b[2J.png")
    'cat\\\\x1b[2J.png'
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class Stopped(Exception):
    """The caller does not need the result any more."""


@contextmanager
def stoppable(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` during the work inside the block; what it raises ends the work.

    with stoppable(check):      # check() raises when it is time to stop
        sc.attribute(model, images)
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def may_stop() -> None:
    """Raises if the work should stop; called where this is safe."""
    check = _check.get()
    if check is not None:
        check()
