"""A spinner and a progress bar on standard error, so that standard output holds answers only."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import typer

EVERY = 10.0  # seconds between two lines where there is no terminal


@contextmanager
def starting(what: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner on terminals while libraries are imported and weights are read. The collector of
    cycles waits meanwhile and later passes over what was loaded: modules stay, and looking through
    them took a sixth of the time."""
    from rich.console import Console

    console = Console(stderr=True)
    shown = console.is_terminal and not quiet
    first = "torch" not in sys.modules
    if first:
        gc.disable()
    try:
        with console.status(what) if shown else nullcontext():
            yield
    finally:
        if first:
            gc.freeze()
            gc.enable()


@contextmanager
def counting(
    what: str, total: int, *, quiet: bool = False, rate: str = ""
) -> Iterator[Callable[[int], None]]:
    """Hands out `advance(done)`: a bar on terminals, with its speed in the unit `rate`; in logs a
    plain line now and then, and none for what is quickly done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )

    class Rate(TextColumn):
        def render(self, task: Task) -> Any:
            return f"{task.speed:.1f} {rate}" if task.speed else f"-- {rate}"

    console = Console(stderr=True)
    if not quiet and not console.is_terminal:
        yield _lines(what, total)
        return
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    columns += [Rate("")] if rate else []
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet,
        speed_estimate_period=600,
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def _lines(what: str, total: int) -> Callable[[int], None]:
    count, last = 0, time.monotonic()

    def advance(done: int) -> None:
        nonlocal count, last
        count += done
        if time.monotonic() - last >= EVERY:
            typer.echo(f"{what}: {count} of {total}", err=True)
            last = time.monotonic()

    return advance
