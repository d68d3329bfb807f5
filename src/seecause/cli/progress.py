"""A progress bar on standard error, so that standard output holds answers only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counting(what: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Hands out `advance(done)`. Shown on terminals only: logs stay clean."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
