"""Who does the work of a long command, and where finished pieces are kept: options of all of
them."""

from __future__ import annotations

import functools
import inspect
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.options import grouped
from seecause.cli.progress import shown_as
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.bench.workers import Workers

_option = functools.partial(typer.Option, rich_help_panel="Many processes, many machines")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Who does the work."""

    workers: Annotated[
        int | None,
        _option(
            help="Processes; any number gives the same results. On a CPU, one for each core.",
            min=1,
            show_default="1; with --ray, as many as the cluster holds",
        ),
    ] = None
    ray: Annotated[
        str | None,
        _option(
            help="Work on a Ray cluster: auto for the one that is running, local, or HOST:PORT.",
            metavar="auto|local|HOST:PORT",
            show_default="processes here",
        ),
    ] = None
    cpus_per_worker: Annotated[
        float | None,
        _option(
            help="CPU cores that the cluster sets aside for each worker.",
            min=0.01,
            show_default="its threads: 1",
        ),
    ] = None
    gpus_per_worker: Annotated[
        float | None,
        _option(
            help="GPUs likewise; 0.5 lets two workers share one.",
            min=0,
            show_default="1 on a GPU",
        ),
    ] = None
    memory_per_worker: Annotated[
        float | None,
        _option(
            help="GiB of main memory likewise.",
            min=0.01,
            show_default="not counted",
        ),
    ] = None

    def made(self) -> Workers:
        from seecause.bench.workers import Workers

        if self.ray is not None:
            from seecause.bench.cluster import check_address

            check_address(self.ray)
        memory = self.memory_per_worker
        return Workers(
            count=self.workers,
            ray=self.ray,
            cpus=self.cpus_per_worker,
            gpus=self.gpus_per_worker,
            memory=None if memory is None else round(memory * (1 << 30)),
        ).checked()


@dataclass(frozen=True, kw_only=True)
class Pieces(WorkerOptions):
    """The same, and where finished pieces are kept."""

    work: Annotated[
        str | None,
        _option(
            help="Where finished pieces are kept, a folder or a URL (s3://...): killed, the same"
            " command goes on.",
            metavar="DIR|URL",
            show_default="OUT.work, until all is done",
        ),
    ] = None


def with_pieces(command: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Give a command that writes `--out` the options of `Pieces`: the pieces of its work are kept
    until it is done, and may be done elsewhere. `name` is what it is called, with its group."""
    flat = grouped(command)

    @functools.wraps(command)
    def run(*, pieces: Pieces = Pieces(), **options: Any) -> Any:
        from seecause.bench.pieces import resumable

        folder = _beside(Path(options["out"])) if pieces.work is None else pieces.work
        left = None
        with resumable(folder, name or command.__name__, pieces.made()):
            try:
                result = flat(**options)
            except typer.Exit as incomplete:  # the result is whole; the code tells what it is like
                result, left = None, incomplete
        if pieces.work is None:
            shutil.rmtree(folder, ignore_errors=True)
        if left is not None:
            raise left
        return result

    more = inspect.Parameter("pieces", inspect.Parameter.KEYWORD_ONLY, annotation=Pieces)
    return shown_as(run, [*inspect.signature(flat).parameters.values(), more])


def _beside(out: Path) -> Path:
    """Where pieces are kept until `out` is there."""
    out = out.resolve()
    if not out.name:
        raise BadOption("--out", str(out), "a folder with a name; this is the root of a disk")
    return out.with_name(f"{out.name}.work")
