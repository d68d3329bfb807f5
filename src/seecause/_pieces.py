"""Long work that somebody else may keep, have done elsewhere, or stop.

    scores = in_pieces(score_piece, model, ({"images": part} for part in images.split(64)))

A long computation calls its expensive part through `in_pieces`. Alone that is a loop. Inside
`pieces_run_by` somebody else does it: `bench.pieces` keeps finished pieces in a store, so that a
killed job goes on, and gives the others to processes or to a cluster.

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
RunPieces = Callable[[Work, Any, Iterable[Piece], Ended], list[Tensors]]

_run_pieces: ContextVar[RunPieces | None] = ContextVar("seecause_pieces", default=None)
_check: ContextVar[Callable[[], None] | None] = ContextVar("seecause_stop", default=None)


@contextmanager
def pieces_run_by(run: RunPieces) -> Iterator[None]:
    """Let `run` do the pieces of all work inside the block."""
    token = _run_pieces.set(run)
    try:
        yield
    finally:
        _run_pieces.reset(token)


def in_pieces(
    work: Work,
    model: Any,
    pieces: Iterable[Piece],
    *,
    ended: Ended = lambda number, result: None,
) -> list[Tensors]:
    """`work(model, **piece)` of every piece, in their order. Pieces are asked for as they are
    needed; `ended` hears the number and the result of each that is done."""
    run = _run_pieces.get()
    if run is not None:
        return run(work, model, pieces, ended)
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
