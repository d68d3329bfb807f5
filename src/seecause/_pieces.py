"""Work in pieces, and work that can be stopped.

    with stoppable(check):      # check() raises when it is time to stop
        sc.attribute(model, images)

Between two blocks of any run, and between two chunks, work asks whether it `may_stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

PIECE = 32  # pictures of a piece: the same wherever it is done, so that bits are, too

Tensors = dict[str, Tensor]
Work = Callable[..., Tensors]  # (model, **piece) -> tensors on the CPU; a function of a module
Piece = Mapping[str, Any]
Ended = Callable[[int, Tensors], None]

_check: ContextVar[Callable[[], None] | None] = ContextVar("seecause_stop", default=None)


def in_pieces(
    work: Work,
    model: Any,
    pieces: Iterable[Piece],
    *,
    ended: Ended = lambda number, result: None,
) -> list[Tensors]:
    """`work(model, **piece)` of every piece; `ended` is called with the number and the result."""
    results = []
    for number, piece in enumerate(pieces):
        results.append(work(model, **piece))
        ended(number, results[-1])
    return results


class Stopped(Exception):
    """Somebody who waited for this work does not want it any more."""


@contextmanager
def stoppable(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` all along the work inside the block; what it raises ends the work."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def may_stop() -> None:
    """A place where work can end without harm."""
    check = _check.get()
    if check is not None:
        check()
