"""What every command has: a spinner from its start and a progress bar on standard error, so that
standard output holds answers only; and `--json`, which makes of these answers what a program
reads."""

from __future__ import annotations

import functools
import gc
import inspect
import io
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, TextIO, cast, get_type_hints

import typer

EVERY = 10.0  # seconds between two lines where there is no terminal
INCOMPLETE = 1  # exit code: something is missing
Facts = dict[str, Any]
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, for programs, instead of text.")
]


class Incomplete(typer.Exit):
    """A command that did what it could: its facts (None: those of its manifest), and an exit code
    that says so."""

    def __init__(self, facts: Facts | None = None):
        super().__init__(INCOMPLETE)
        self.facts = facts


def dressed(command: Callable[..., Any]) -> Callable[..., None]:
    """A command with a spinner and, if it has facts, with `--json`: it returns them (`-> Facts`),
    or writes them to the manifest in its `out`. Nothing else is on standard output then."""
    hints = get_type_hints(command, include_extras=True)
    has_facts = hints.get("return") == Facts or "out" in hints

    @functools.wraps(command)
    def run(*, as_json: bool = False, **options: Any) -> None:
        with ExitStack() as stack:
            quiet = options.get("quiet", False)
            stack.enter_context(spinning("starting", quiet=quiet))
            if quiet:
                stack.enter_context(_without_warnings())
            if not as_json:
                command(**options)
                return
            stack.enter_context(redirect_stdout(io.StringIO()))
            left = None
            try:
                facts = command(**options)
            except typer.Exit as code:
                facts, left = getattr(code, "facts", None), code
        facts = _manifest(options.get("out")) if facts is None else facts
        typer.echo(json.dumps(plain(facts), indent=2))
        if left is not None:
            raise left

    own = inspect.signature(command).parameters.values()
    shown = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
    if has_facts:
        keyword = inspect.Parameter.KEYWORD_ONLY
        shown.append(inspect.Parameter("as_json", keyword, default=False, annotation=JsonFlag))
    return shown_as(run, shown)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Inside the block loggers of this package tell errors only."""
    log = logging.getLogger("seecause")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def shown_as(
    run: Callable[..., Any], parameters: Sequence[inspect.Parameter], returned: Any = None
) -> Callable[..., Any]:
    """`run`, of which the command line sees these parameters, with their annotations."""
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": returned}
    return run


def _manifest(out: Path | None) -> Facts:
    """What a result folder says about itself."""
    file = None if out is None else out / "manifest.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file and file.is_file() else {}
    return {"out": out, **record}


def plain(value: Any) -> Any:
    """What JSON can say: numbers that are none become null, paths and words text."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if value - value == 0 else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


class _Spinner:
    """On a terminal, until something else is written to it."""

    def __init__(self) -> None:
        self._live: Any = None

    def show(self, what: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        self.stop()
        stream = sys.stderr.stream if isinstance(sys.stderr, _Watched) else sys.stderr
        console, drawn = Console(file=stream), Spinner("dots", text=what)
        if console.is_terminal:
            self._live = Live(
                drawn, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start(refresh=True)

    def stop(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()


class _Watched:
    """A stream that ends the spinner before anything is written to it."""

    def __init__(self, stream: TextIO, spinner: _Spinner):
        self.stream, self._spinner = stream, spinner

    def write(self, text: str) -> int:
        self._spinner.stop()
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_spinner = _Spinner()


@contextmanager
def spinning(what: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner on terminals, gone when the block ends or anything is written."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    with ExitStack() as stack:
        if not isinstance(sys.stderr, _Watched):
            stack.enter_context(redirect_stdout(cast(TextIO, _Watched(sys.stdout, _spinner))))
            stack.enter_context(redirect_stderr(cast(TextIO, _Watched(sys.stderr, _spinner))))
        stack.callback(_spinner.stop)
        _spinner.show(what)
        yield


@contextmanager
def starting(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Say on terminals what takes time while libraries are imported and weights are read. The
    collector of cycles waits meanwhile and later passes over what was loaded: modules stay, and
    looking through them took a sixth of the time."""
    first = "torch" not in sys.modules
    if first:
        gc.disable()
    try:
        with spinning(what, quiet=quiet):
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
    from rich.progress import Task, TextColumn

    class Rate(TextColumn):
        def render(self, task: Task) -> Any:
            return f"{task.speed:.1f} {rate}" if task.speed else f"-- {rate}"

    count, due = 0, _clock()
    with _bar(*([Rate("")] if rate else []), quiet=quiet) as bar:
        task = bar.add_task(what, total=total)

        def advance(done: int) -> None:
            nonlocal count
            count += done
            bar.advance(task, done)
            if not quiet and not bar.console.is_terminal and due():
                typer.echo(f"{what}: {count} of {total}", err=True)

        yield advance


@contextmanager
def training(*, quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Hands out `on_step(done, total, losses)`: the same of a training, with its last losses."""
    from rich.progress import TextColumn

    due = _clock()
    with _bar(TextColumn("{task.fields[losses]}"), quiet=quiet) as bar:
        task = bar.add_task("training", total=None, losses="")

        def on_step(done: int, total: int, losses: str) -> None:
            bar.update(task, completed=done, total=total)
            if not losses:
                return
            bar.update(task, losses=losses)
            if not quiet and not bar.console.is_terminal and (done == total or due()):
                typer.echo(f"step {done} of {total}, {losses}", err=True)

        yield on_step


def _bar(*columns: Any, quiet: bool) -> Any:
    """A bar for terminals, with some more columns."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if console.is_terminal:
        _spinner.stop()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
        speed_estimate_period=600,
    )


def _clock() -> Callable[[], bool]:
    """Whether it is time for another line."""
    last = time.monotonic()

    def due() -> bool:
        nonlocal last
        if time.monotonic() - last < EVERY:
            return False
        last = time.monotonic()
        return True

    return due


def print_rows(titles: Sequence[Any], rows: Iterable[Sequence[str]]) -> None:
    """Rows under the titles of their columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*titles, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_markdown(text: str) -> None:
    """Tables with columns of one width; what is bold has a star."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    if not console.is_terminal:  # a file has room
        console = Console(width=240)
    console.print(Markdown(re.sub(r"\*\*([-\d][^*]*)\*\*", r"\1 ★", text)))
