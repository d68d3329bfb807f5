"""`seecause study`: run a study, a TOML file, and draw its figure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from seecause.cli.options import Device, DeviceOption, Quiet, pick_device
from seecause.cli.progress import Incomplete, counting
from seecause.cli.workers import WorkerOptions

EXAMPLE = "Example: seecause study studies/caap.toml --limit 8 --device cpu --out quick"

File = Annotated[Path, typer.Argument(help="A study: a TOML file.", show_default=False)]
Limit = Annotated[
    int | None,
    typer.Option(help="So many pictures, small settings: a quick look.", min=1, show_default="all"),
]
Minutes = Annotated[
    float | None,
    typer.Option(help="Begin no cell after so many; 0: none.", min=0, show_default="no limit"),
]
Only = Annotated[str, typer.Option(help="Only cells with this text in their name.")]
Real = Annotated[
    Path | None,
    typer.Option(help="Folder with real weights and photos, {real} in the study."),
]
Models = Annotated[
    Path | None, typer.Option(help="Folder of trained checkpoints, {models} in the study.")
]
Results = Annotated[Path, typer.Option("--out", "-o", help="Folder of CSV, JSON and figure.")]
Work = Annotated[str, typer.Option(help="Where finished cells are kept: a folder, or a URL.")]
Draw = Annotated[bool, typer.Option("--draw", help="Only draw the figure of the CSV in --out.")]


def register(app: typer.Typer) -> None:
    app.command("study", epilog=EXAMPLE)(study)


def study(
    file: File,
    limit: Limit = None,
    device: DeviceOption = Device.auto,
    minutes: Minutes = None,
    hands: WorkerOptions = WorkerOptions(),
    only: Only = "",
    real: Real = None,
    models: Models = None,
    out: Results = Path("docs/results"),
    work: Work = "out/studies",
    draw: Draw = False,
    quiet: Quiet = False,
) -> None:
    """Run what is missing of a study: one CSV, one figure, and where they come from.

    The same command again goes on where it stopped. Leaves with 1 while a cell is missing.
    """
    from seecause.bench.study import read_study, run_study
    from seecause.report.study import draw_figure

    def tell(path: Path) -> None:
        if not quiet:
            typer.echo(path)

    if draw:
        plan = read_study(file)
        tell(draw_figure(plan.figure, out / f"{plan.name}.csv"))
        return
    with ExitStack() as stack:

        def begin(todo: int) -> Callable[[str], None]:
            advance = stack.enter_context(counting("cells", todo, quiet=quiet))
            return lambda cell: advance(1)

        status = run_study(
            file,
            limit=limit,
            device=pick_device(device),
            minutes=1e9 if minutes is None else minutes,
            workers=hands.made(),
            only=only,
            real=real,
            models=models,
            out=out,
            work=work,
            begin=begin,
        )
    tell(status.csv)
    if status.figure and not status.missing:
        tell(draw_figure(status.figure, status.csv))
    for name, reason in status.holes.items():
        typer.echo(f"hole: {name}: {reason}", err=True)
    if status.missing:
        typer.echo(
            f"{len(status.missing)} of {status.total} cells are missing; the same command goes on",
            err=True,
        )
        raise Incomplete
