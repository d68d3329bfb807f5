"""A progress bar on standard error, so that standard output holds answers only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def counting(what: str, total: int, *, rate: str = "", quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Hands out `advance(done)`; with `rate`, such as "images/s", its pace is shown too. Shown on terminals only: logs stay clean."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn

    class Rate(TextColumn):
        def render(self, task: Task) -> Any:
            return f"{task.speed:.1f} {rate}" if task.speed else f"-- {rate}"

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *([Rate("")] if rate else []), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, speed_estimate_period=600, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
