"""Work that can be stopped.

    with stoppable(check):      # check() raises when it is time to stop
        sc.attribute(model, images)

Between two blocks of any run, and between two chunks, work calls `may_stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_check: ContextVar[Callable[[], None] | None] = ContextVar("seecause_stop", default=None)


class Stopped(Exception):
    """The caller does not need the result any more."""


@contextmanager
def stoppable(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` during the work inside the block; what it raises ends the work."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def may_stop() -> None:
    """Called where work can end without harm."""
    check = _check.get()
    if check is not None:
        check()
