"""`seecause bench`: which attribution method is faithful on my model?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause.cli.options import DEFAULT_MODEL, Device, DeviceOption, Dtype, DtypeOption, ModelName, Quiet, Seed, Weights

if TYPE_CHECKING:
    from seecause.bench.runner import Status
    from seecause.bench.work import Worker

INCOMPLETE = 1  # exit code: something is missing
LISTED = 20  # holes named one by one; the rows have them all
EXAMPLE = (
    "Example: seecause bench run --method caap,rollout,random --data critters:clean:test --limit 64 --metric ins-del,aupr1 --out run "
    "&& seecause bench report run"
)


class Explained(StrEnum):
    label = "label"
    predicted = "predicted"


Folder = Annotated[Path, typer.Argument(help="The --out of `seecause bench run`.", metavar="RUN", show_default=False)]


def register(app: typer.Typer) -> None:
    commands = typer.Typer(no_args_is_help=True, help="Compare attribution methods over a dataset; runs can be stopped and continued.")
    commands.command("run", epilog=EXAMPLE)(run)
    commands.command("status")(status)
    commands.command("report")(report)
    app.add_typer(commands, name="bench")


def run(
    model: ModelName = DEFAULT_MODEL,
    weights: Weights = None,
    method: Annotated[str, typer.Option(help="Attribution methods, separated by commas.")] = "caap",
    option: Annotated[
        list[str] | None, typer.Option(help="caap.tail=patched, or tail=patched for every method that has it; repeat for more.", metavar="[METHOD.]KEY=VALUE")
    ] = None,
    data: Annotated[str, typer.Option(help="critters:REGIME[:SPLIT], folder:PATH, imagenet-s:PATH, pets:PATH and others.")] = "critters:clean:test",
    limit: Annotated[int | None, typer.Option(help="Use so many images, spread evenly.", min=1, show_default="all")] = None,
    metric: Annotated[str, typer.Option(help="Metrics, separated by commas: insertion, deletion, ins-del, aupr1, aupr0, pointing.")] = (
        "insertion,deletion,ins-del"
    ),
    metric_option: Annotated[
        list[str] | None, typer.Option(help="curves.steps=16, localization.upsample=nearest, or order=patch; repeat for more.", metavar="[GROUP.]KEY=VALUE")
    ] = None,
    target: Annotated[Explained, typer.Option(help="The class to explain: the true one or the model's answer.")] = Explained.label,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder; the same command again continues in it.")] = Path("bench"),
    workers: Annotated[int, typer.Option(help="Processes; any number gives the same results. On a CPU, one for each core.", min=1)] = 1,
    threads: Annotated[int, typer.Option(help="Threads of one worker; part of the protocol.", min=1)] = 1,
    memory: Annotated[int | None, typer.Option(help="MiB of activations in one worker; part of the protocol.", min=1, show_default="1024, GPU 8192")] = None,
    shard_size: Annotated[int, typer.Option(help="Images that are finished together.", min=1)] = 16,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Run methods over a dataset and measure them. The same command again continues where it stopped.

    Leaves with 1 if any number is missing, and says which.
    """
    from seecause.bench.plan import Request
    from seecause.bench.runner import run as run_all
    from seecause.bench.store import Store
    from seecause.cli.options import pick_device

    store = Store(out)
    store.check()
    request = Request(
        model=model,
        weights=weights,
        data=data,
        limit=limit,
        methods={name: {} for name in _names(method)},
        metrics=_names(metric),
        target=target.value,
        seed=seed,
        dtype=dtype.value,
        device=pick_device(device),
        shard_size=shard_size,
        memory=None if memory is None else memory << 20,
        threads=threads,
    )
    worker = _open(request, option or [], metric_option or [])
    done = {shard.id for shard in store.finished(worker.plan)}
    todo = sum(len(shard) for shard in worker.plan.shards if shard.id not in done)
    with _progress(todo, quiet=quiet) as advance:
        found = run_all(store, worker, workers=workers, advance=advance)
    _say(found, quiet=quiet)
    if found.stopped or not found.complete:
        raise typer.Exit(INCOMPLETE)
    if not quiet:
        typer.echo(f"next: seecause bench report {out}")


def status(folder: Folder) -> None:
    """How far a run is, what failed and why. Leaves with 1 if anything is missing."""
    from seecause.bench.runner import inspect
    from seecause.bench.store import Store

    store = Store(folder)
    found = inspect(store, store.plan())
    _say(found)
    if not found.complete:
        raise typer.Exit(INCOMPLETE)


def report(
    folder: Folder,
    against: Annotated[str | None, typer.Option(help="Compare every method with this one, image by image.", show_default="the first")] = None,
) -> None:
    """Write RUN/report.html, table.csv, table.tex and table.md from what is finished."""
    from seecause.bench.store import Store
    from seecause.report.bench import write_report

    for path in write_report(Store(folder), against=against):
        typer.echo(str(path))


def _open(request: Any, option: Sequence[str], metric_option: Sequence[str]) -> Worker:
    """Model, data and plan. Which options there are depends on the model, so it comes first."""
    from dataclasses import replace

    from seecause.attribution.registry import find
    from seecause.bench.measures import MEASURES, groups_of
    from seecause.bench.plan import make_plan
    from seecause.bench.work import Worker, open_model
    from seecause.data.registry import open_data

    groups = {group: MEASURES[group].options for group in groups_of(request.metrics)}
    measures = _options("--metric-option", metric_option, groups)
    data = open_data(request.data, limit=request.limit)
    model = open_model(request)
    methods = _options("--option", option, {name: find(name, model.architecture).options for name in request.methods})
    return Worker(make_plan(replace(request, methods=methods, measures=measures), model, data), model, data)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _options(flag: str, words: Sequence[str], known: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`[name.]key=value` words -> options by name; without a name it goes to all that have the option."""
    from seecause.cli.options import value_of
    from seecause.errors import BadOption

    found: dict[str, dict[str, Any]] = {name: {} for name in known}
    for word in words:
        path, equals, text = word.partition("=")
        name, _, key = path.rpartition(".")
        takers = [taker for taker, options in known.items() if key in options and name in ("", taker)]
        if not equals or not takers:
            there = "; ".join(f"{taker}: {', '.join(options) or 'none'}" for taker, options in known.items())
            raise BadOption(flag, word, f"[NAME.]KEY=VALUE with an option of {there}")
        for taker in takers:
            found[taker][key] = value_of(text)
    return found


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar with images a second and the time left, on terminals only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn

    class Rate(TextColumn):
        def render(self, task: Task) -> Any:
            return f"{task.speed:.1f} images/s" if task.speed else "-- images/s"

    console = Console(stderr=True)
    columns = (TextColumn("images x methods"), BarColumn(), MofNCompleteColumn(), Rate(""), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, speed_estimate_period=600, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)


def _say(found: Status, *, quiet: bool = False) -> None:
    """Where the run stands, on standard output; what is missing, on standard error, also when quiet."""
    if not quiet:
        parts = [
            f"{found.done} of {found.total} shards done",
            f"{len(found.pending)} pending",
            f"{len(found.failed)} failed",
            f"{len(found.stale)} stale (ignored)",
        ]
        typer.echo(", ".join(parts))
    holes = Counter((hole.image, hole.reason) for hole in found.holes)
    missing = [
        *(f"{method}: not run on {count} images" for method, count in found.not_run().items()),
        *(f"shard {shard} failed: {reason}" for shard, reason in found.failed.items()),
        *(f"{image}: {count} values missing: {reason}" for (image, reason), count in holes.items()),
    ]
    for line in missing[:LISTED]:
        typer.echo(line, err=True)
    if len(missing) > LISTED:
        typer.echo(f"and {len(missing) - LISTED} more", err=True)
    if found.stopped:
        typer.echo(f"seecause: {found.stopped}", err=True)
