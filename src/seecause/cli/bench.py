"""`seecause bench`: which attribution method is faithful on my model?"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.options import (
    ModelOptions,
    Quiet,
    RunOptions,
    check_methods,
    named_option,
    names,
    value_of,
)
from seecause.cli.progress import Facts, Incomplete, counting, print_markdown, starting
from seecause.cli.workers import WorkerOptions
from seecause.errors import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seecause.bench.cells import Prepared
    from seecause.bench.runner import Status

LISTED = 20  # holes named one by one; the rows have them all
EXAMPLE = (
    "Example: seecause bench run --method caap,rollout,random --data critters:clean:test --limit 64"
    " --metric ins-del,aupr1 --out run && seecause bench report run"
)


class Explained(StrEnum):
    label = "label"
    predicted = "predicted"


Methods = Annotated[str, typer.Option("--method", help="Attribution methods, with commas.")]
MethodOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="caap.tail=patched, or tail=patched for every method that has it; repeat for more.",
        metavar="[METHOD.]KEY=VALUE",
    ),
]
Metrics = Annotated[
    str,
    typer.Option(
        "--metric",
        help="Metrics, separated by commas, or paper (insertion, deletion, ins-del, aupr1, aupr0,"
        " pointing), or all.",
    ),
]
Folder = Annotated[
    str,
    typer.Argument(
        help="The --out of `seecause bench run`.",
        metavar="RUN",
        show_default=False,
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        help="Compare every method with this one, image by image.", show_default="the first"
    ),
]


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """What is measured on which pictures, where the run lies and what it takes."""

    data: Annotated[
        str,
        typer.Option(
            help="critters:REGIME[:SPLIT], folder:PATH, imagenet-s:PATH, pets:PATH and others.",
        ),
    ] = "critters:clean:test"
    limit: Annotated[
        int | None,
        typer.Option(help="Use so many images, spread evenly.", min=1, show_default="all"),
    ] = None
    metric_option: Annotated[
        list[str] | None,
        typer.Option(
            help="insertion-deletion.steps=16, localization.upsample=nearest, or order=patch;"
            " repeat for more.",
            metavar="[GROUP.]KEY=VALUE",
        ),
    ] = None
    target: Annotated[
        Explained, typer.Option(help="The class to explain: the true one or the model's answer.")
    ] = Explained.label
    out: Annotated[
        str,
        typer.Option(
            "--out",
            "-o",
            help="The run folder; the same command again continues in it.",
        ),
    ]
    hands: WorkerOptions = WorkerOptions()
    threads: Annotated[
        int, typer.Option(help="Threads of one worker; part of the protocol.", min=1)
    ] = 1
    memory: Annotated[
        int | None,
        typer.Option(
            help="MiB of activations in one worker; part of the protocol.",
            min=1,
            show_default="64, GPU 8192",
        ),
    ] = None
    cell_size: Annotated[int, typer.Option(help="Images that are finished together.", min=1)] = 16
    where: RunOptions = RunOptions()
    quiet: Quiet = False

    def prepare(
        self, model: ModelOptions, option: Sequence[str] | None, **request: Any
    ) -> Prepared:
        """Check the folder, then open model and data. `request` is what is compared."""
        with starting(f"loading {model.model} and {self.data}", quiet=self.quiet):
            reading = model.reading.made()
            check_methods(request["methods"])
            from seecause import bench
            from seecause.bench.runner import check_folder

            check_folder(Path(self.out))
            worker = bench.prepare(
                bench.Request(
                    model=model.model,
                    weights=model.weights,
                    reading=reading,
                    data=self.data,
                    limit=self.limit,
                    target=self.target.value,
                    cell_size=self.cell_size,
                    threads=self.threads,
                    memory=None if self.memory is None else self.memory << 20,
                    seed=self.where.seed,
                    **self.where.made(),
                    **request,
                ),
                options=[named_option("--option", word) for word in option or ()],
                metric_options=[
                    named_option("--metric-option", word) for word in self.metric_option or ()
                ],
            )
        for reason in {} if self.quiet else dict.fromkeys(worker.left_out.values()):
            metrics = [metric for metric, why in worker.left_out.items() if why == reason]
            typer.echo(f"left out: {', '.join(metrics)}: {reason}", err=True)
        return worker

    def perform(self, worker: Prepared) -> Status:
        """Run what is not finished and tell how it went."""
        from seecause import bench
        from seecause.bench.runner import read_cell

        cells = worker.plan.cells
        todo = sum(len(cell) for cell in cells if read_cell(Path(self.out), cell.name) is None)
        with counting("images x methods", todo, quiet=self.quiet, rate="images/s") as progress:
            state = bench.run(self.out, worker, progress=progress, **self.hands.made())
        tell_status(state, quiet=self.quiet)
        return state


def register(app: typer.Typer) -> None:
    commands = typer.Typer(
        no_args_is_help=True,
        help="Compare attribution methods over a dataset; runs can be stopped and continued.",
    )
    commands.command("run", epilog=EXAMPLE)(run)
    commands.command("report")(report)
    app.add_typer(commands, name="bench")


def run(
    model: ModelOptions = ModelOptions(),
    method: Methods = "caap",
    option: MethodOption = None,
    metric: Metrics = "paper",
    run: BenchRun = BenchRun(out="bench"),
) -> Facts:
    """Run methods over a dataset and measure them. The same command again continues where it
    stopped.

    Leaves with 1 if any number is missing, and says which.
    """
    methods: dict[str, Any] = {name: {} for name in names(method)}
    state = run.perform(run.prepare(model, option, methods=methods, metrics=names(metric)))
    if not run.quiet and state.complete:
        typer.echo(f"next: seecause bench report {run.out}")
    return _left(state, {"out": run.out, **status_facts(state)})


def report(folder: Folder, against: Against = None) -> Facts:
    """Print the table, and write RUN/index.html, table.csv, table.tex, table.md and rows.csv (every
    number) from what is finished."""
    with starting(f"reading {folder}"):
        from seecause.report.bench import write_report

        files = write_report(folder, against=against)
    return tell_report(folder, files)


def tell_report(out: str | Path, files: Sequence[Path], *, quiet: bool = False) -> Facts:
    """The table, and where everything is."""
    folder = Path(out)
    if not quiet:
        print_markdown((folder / "table.md").read_text(encoding="utf-8"))
        typer.echo(f"also: {', '.join(path.name for path in files[1:])}")
        typer.echo(f"page: {files[0]}")
    table = csv.DictReader((folder / "table.csv").read_text(encoding="utf-8").splitlines())
    rows = [{key: value_of(text) for key, text in row.items()} for row in table]
    return {"out": str(out), "files": [path.name for path in files], "table": rows}


def status_facts(state: Status) -> Facts:
    """Where a run stands, for programs."""
    return {
        "complete": state.complete,
        "cells": state.total,
        "done": state.done,
        "pending": len(state.pending),
        "failed": state.failed,
        "not run": state.not_run(),
        "holes": [{"picture": hole.image, "reason": hole.reason} for hole in state.holes],
    }


def _left(state: Status, facts: Facts) -> Facts:
    """The facts; an exit code says that something is missing."""
    if not state.complete:
        raise Incomplete(facts)
    return facts


def tell_status(state: Status, *, quiet: bool = False) -> None:
    """Where the run stands, on standard output; what is missing, on standard error, also when
    quiet."""
    if not quiet:
        typer.echo(
            f"{state.done} of {state.total} cells done, {len(state.failed)} failed,"
            f" {len(state.pending)} pending"
        )
    holes = Counter((hole.image, hole.reason) for hole in state.holes)
    missing = [
        *(f"cell {name} failed:\n{error.rstrip()}" for name, error in state.failed.items()),
        *(f"{method}: not run on {count} images" for method, count in state.not_run().items()),
        *(f"{image}: {count} values missing: {reason}" for (image, reason), count in holes.items()),
    ]
    for line in missing[:LISTED]:
        typer.echo("\n".join(map(printable, line.splitlines())), err=True)
    if len(missing) > LISTED:
        typer.echo(f"and {len(missing) - LISTED} more", err=True)
