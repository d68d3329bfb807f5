"""A spinner and a progress bar on standard error, so that standard output holds answers only; and
`--json`, which makes of these answers what a program reads."""

from __future__ import annotations

import functools
import gc
import inspect
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Annotated, Any, get_type_hints

import typer

EVERY = 10.0  # seconds between two lines where there is no terminal
INCOMPLETE = 1  # exit code: something is missing
Facts = dict[str, Any]
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, for programs, instead of text.")
]


class Incomplete(typer.Exit):
    """A command that did what it could: its facts, and an exit code that says so."""

    def __init__(self, facts: Facts):
        super().__init__(INCOMPLETE)
        self.facts = facts


def with_json(command: Callable[..., Facts]) -> Callable[..., None]:
    """Give a command `--json`: what it returns is printed then, and nothing else on standard
    output."""

    @functools.wraps(command)
    def run(*, as_json: bool = False, **options: Any) -> None:
        if not as_json:
            command(**options)
            return
        incomplete = None
        with redirect_stdout(io.StringIO()):
            try:
                facts = command(**options)
            except Incomplete as left:
                facts, incomplete = left.facts, left
        typer.echo(json.dumps(plain(facts), indent=2, allow_nan=False))
        if incomplete is not None:
            raise incomplete

    hints = {**get_type_hints(command, include_extras=True), "as_json": JsonFlag, "return": None}
    signature = inspect.signature(command)
    flag = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False)
    parameters = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in (*signature.parameters.values(), flag)
    ]
    run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore
    run.__annotations__ = hints
    return run


def plain(value: Any) -> Any:
    """What JSON can say: numbers that are none become null, paths and words text."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if value - value == 0 else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


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
