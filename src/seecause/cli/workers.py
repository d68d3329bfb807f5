"""Who does the work of a long command, and where finished pieces are kept: options of all of
them."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.options import with_flags
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.bench.hands import Workers

PANEL = "Many processes, many machines"
Count = Annotated[
    int | None,
    typer.Option(
        "--workers",
        help="Processes; any number gives the same results. On a CPU, one for each core.",
        min=1,
        show_default="1; with --ray, as many as the cluster holds",
        rich_help_panel=PANEL,
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        help="Work on a Ray cluster: auto for the one that is running, local, or HOST:PORT.",
        metavar="auto|local|HOST:PORT",
        show_default="processes here",
        rich_help_panel=PANEL,
    ),
]
Cpus = Annotated[
    float | None,
    typer.Option(
        "--cpus-per-worker",
        help="CPU cores that the cluster sets aside for each worker.",
        min=0.01,
        show_default="its threads: 1",
        rich_help_panel=PANEL,
    ),
]
Gpus = Annotated[
    float | None,
    typer.Option(
        "--gpus-per-worker",
        help="GPUs likewise; 0.5 lets two workers share one.",
        min=0,
        show_default="1 on a GPU",
        rich_help_panel=PANEL,
    ),
]
Memory = Annotated[
    float | None,
    typer.Option(
        "--memory-per-worker",
        help="GiB of main memory likewise.",
        min=0.01,
        show_default="not counted",
        rich_help_panel=PANEL,
    ),
]
Work = Annotated[
    str | None,
    typer.Option(
        "--work",
        help="Where finished pieces are kept, a folder or a URL (s3://...): killed, the same"
        " command goes on.",
        metavar="DIR|URL",
        show_default="OUT.work, until all is done",
        rich_help_panel=PANEL,
    ),
]
FLAGS = {
    "workers": Count,
    "ray": Ray,
    "cpus_per_worker": Cpus,
    "gpus_per_worker": Gpus,
    "memory_per_worker": Memory,
}


def with_workers(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--workers --ray --cpus-per-worker ...`; it gets them as `workers`."""

    @functools.wraps(command)
    def run(**options: Any) -> Any:
        asked = {name: options.pop(name, None) for name in FLAGS}
        return command(workers=_workers(**asked), **options)

    return with_flags(command, run, FLAGS)


def with_pieces(command: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Give a command that writes `--out` the same and `--work`: the pieces of its work are kept
    until it is done, and may be done elsewhere. `name` is what it is called, with its group."""

    @functools.wraps(command)
    def run(**options: Any) -> Any:
        from seecause.bench.carry import carrying

        asked, work = {name: options.pop(name, None) for name in FLAGS}, options.pop("work", None)
        folder = _beside(Path(options["out"])) if work is None else work
        left = None
        with carrying(folder, name or command.__name__, _workers(**asked)):
            try:
                result = command(**options)
            except typer.Exit as incomplete:  # the result is whole; the code tells what it is like
                result, left = None, incomplete
        if work is None:
            shutil.rmtree(folder, ignore_errors=True)
        if left is not None:
            raise left
        return result

    return with_flags(command, run, {**FLAGS, "work": Work})


def _beside(out: Path) -> Path:
    """Where pieces are kept until `out` is there."""
    out = out.resolve()
    if not out.name:
        raise BadOption("--out", str(out), "a folder with a name; this is the root of a disk")
    return out.with_name(f"{out.name}.work")


def _workers(
    workers: int | None,
    ray: str | None,
    cpus_per_worker: float | None,
    gpus_per_worker: float | None,
    memory_per_worker: float | None,
) -> Workers:
    from seecause.bench.hands import Workers

    if ray is not None:
        from seecause.bench.cluster import check_address

        check_address(ray)
    return Workers(
        count=workers,
        ray=ray,
        cpus=cpus_per_worker,
        gpus=gpus_per_worker,
        memory=None if memory_per_worker is None else round(memory_per_worker * (1 << 30)),
    ).placed()
