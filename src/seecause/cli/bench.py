"""`seecause bench`: which attribution method is faithful on my model?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from seecause.cli import ablate
from seecause.cli.bench_run import (
    INCOMPLETE,
    Cluster,
    DataName,
    Explained,
    MemoryLimit,
    MetricOption,
    RunFolder,
    ShardSize,
    Target,
    Threads,
    Workers,
    go,
    open_bench,
    say,
)
from seecause.cli.options import (
    DEFAULT_MODEL,
    Device,
    DeviceOption,
    Dtype,
    DtypeOption,
    ModelName,
    Quiet,
    Seed,
    Weights,
    names,
)

EXAMPLE = (
    "Example: seecause bench run --method caap,rollout,random --data critters:clean:test --limit 64"
    " --metric ins-del,aupr1 --out run && seecause bench report run"
)
Folder = Annotated[
    Path,
    typer.Argument(
        help="The --out of `seecause bench run` or `bench ablate`.",
        metavar="RUN",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    commands = typer.Typer(
        no_args_is_help=True,
        help="Compare attribution methods over a dataset; runs can be stopped and continued.",
    )
    commands.command("run", epilog=EXAMPLE)(run)
    commands.command("ablate", epilog=ablate.EXAMPLE)(ablate.ablate)
    commands.command("status")(status)
    commands.command("report")(report)
    app.add_typer(commands, name="bench")


def run(
    model: ModelName = DEFAULT_MODEL,
    weights: Weights = None,
    method: Annotated[str, typer.Option(help="Attribution methods, separated by commas.")] = "caap",
    option: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "caap.tail=patched, or tail=patched for every method that has it; repeat for more."
            ),
            metavar="[METHOD.]KEY=VALUE",
        ),
    ] = None,
    data: DataName = "critters:clean:test",
    limit: Annotated[
        int | None,
        typer.Option(help="Use so many images, spread evenly.", min=1, show_default="all"),
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            help=(
                "Metrics, separated by commas, or paper (insertion, deletion, ins-del, aupr1,"
                " aupr0, pointing), or all."
            )
        ),
    ] = "paper",
    metric_option: MetricOption = None,
    target: Target = Explained.label,
    out: RunFolder = Path("bench"),
    workers: Workers = 1,
    cluster: Cluster = None,
    threads: Threads = 1,
    memory: MemoryLimit = None,
    shard_size: ShardSize = 16,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Run methods over a dataset and measure them. The same command again continues where it
    stopped.

    Leaves with 1 if any number is missing, and says which.
    """
    from seecause.bench.plan import Request, Store
    from seecause.cli.options import pick_device

    store = Store(out)
    store.check()
    request = Request(
        model=model,
        weights=weights,
        data=data,
        limit=limit,
        methods={name: {} for name in names(method)},
        metrics=names(metric),
        target=target.value,
        seed=seed,
        dtype=dtype.value,
        device=pick_device(device),
        shard_size=shard_size,
        memory=None if memory is None else memory << 20,
        threads=threads,
    )
    worker = open_bench(request, option or [], metric_option or [], quiet=quiet)
    if not go(store, worker, workers=workers, cluster=cluster, quiet=quiet):
        raise typer.Exit(INCOMPLETE)
    if not quiet:
        typer.echo(f"next: seecause bench report {out}")


def status(folder: Folder) -> None:
    """How far a run is, what failed and why. Leaves with 1 if anything is missing."""
    from seecause.bench.plan import Store
    from seecause.bench.runner import inspect

    store = Store(folder)
    found = inspect(store, store.plan())
    say(found)
    if not found.complete:
        raise typer.Exit(INCOMPLETE)


def report(
    folder: Folder,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare every method with this one, image by image.", show_default="the first"
        ),
    ] = None,
) -> None:
    """Write RUN/report.html, table.csv, table.tex and table.md from what is finished."""
    from seecause.bench.plan import Store
    from seecause.report.ablate import write_report

    for path in write_report(Store(folder), against=against):
        typer.echo(str(path))
