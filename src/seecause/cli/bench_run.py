"""What `seecause bench run` and `bench ablate` share: options, opening, running with a bar, and
telling what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from seecause.bench.plan import Request, Store
    from seecause.bench.runner import Status
    from seecause.bench.work import Worker

INCOMPLETE = 1  # exit code: something is missing
LISTED = 20  # holes named one by one; the rows have them all


class Explained(StrEnum):
    label = "label"
    predicted = "predicted"


MetricOption = Annotated[
    list[str] | None,
    typer.Option(
        help=(
            "insertion-deletion.steps=16, localization.upsample=nearest, or order=patch; repeat for"
            " more."
        ),
        metavar="[GROUP.]KEY=VALUE",
    ),
]
DataName = Annotated[
    str,
    typer.Option(
        "--data",
        help="critters:REGIME[:SPLIT], folder:PATH, imagenet-s:PATH, pets:PATH and others.",
    ),
]
Target = Annotated[
    Explained, typer.Option(help="The class to explain: the true one or the model's answer.")
]
RunFolder = Annotated[
    Path,
    typer.Option("--out", "-o", help="The run folder; the same command again continues in it."),
]
Workers = Annotated[
    int,
    typer.Option(
        help="Processes; any number gives the same results. On a CPU, one for each core.", min=1
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        help="Run on a Ray cluster: auto for the one that is running, local, or HOST:PORT.",
        show_default="processes here",
    ),
]
Threads = Annotated[int, typer.Option(help="Threads of one worker; part of the protocol.", min=1)]
MemoryLimit = Annotated[
    int | None,
    typer.Option(
        "--memory",
        help="MiB of activations in one worker; part of the protocol.",
        min=1,
        show_default="64, GPU 8192",
    ),
]
ShardSize = Annotated[int, typer.Option(help="Images that are finished together.", min=1)]


def open_bench(
    request: Request, option: Sequence[str], metric_option: Sequence[str], *, quiet: bool = False
) -> Worker:
    """Model, data and plan for a request whose metrics are still words. Which options and metrics
    there are depends on model and data."""
    from dataclasses import replace

    from seecause.attribution.registry import find
    from seecause.bench.ablate import with_settings
    from seecause.bench.measures import (
        group_of,
        group_options,
        groups_of,
        metric_sets,
        pick_metrics,
    )
    from seecause.bench.plan import make_plan
    from seecause.bench.work import Worker, open_model
    from seecause.data.registry import open_data

    for word in request.metrics:
        if word not in metric_sets():
            group_of(word)
    data = open_data(request.data, limit=request.limit)
    model = open_model(request)
    metrics, left_out = pick_metrics(request.metrics, model, data)
    measures = by_name(
        "--metric-option",
        metric_option,
        {group: group_options(group) for group in groups_of(metrics)},
    )
    given = by_name(
        "--option",
        option,
        {name: find(name, model.architecture).options for name in request.methods},
    )
    request = replace(
        request,
        metrics=metrics,
        measures=measures,
        methods={name: {**own, **given[name]} for name, own in request.methods.items()},
    )
    plan = make_plan(with_settings(request, model), model, data)
    for why in {} if quiet else dict.fromkeys(left_out.values()):
        typer.echo(
            f"left out: {', '.join(metric for metric, said in left_out.items() if said == why)}:"
            f" {why}",
            err=True,
        )
    return Worker(plan, model, data)


def go(store: Store, worker: Worker, *, workers: int, cluster: str | None, quiet: bool) -> bool:
    """Run what is not finished and tell how it went; whether every number is there."""
    from seecause.bench.runner import run as run_all

    done = {shard.id for shard in store.finished(worker.plan)}
    todo = sum(len(shard) for shard in worker.plan.shards if shard.id not in done)
    with _progress(todo, quiet=quiet) as advance:
        found = run_all(store, worker, workers=workers, cluster=cluster, advance=advance)
    say(found, quiet=quiet)
    return found.complete and not found.stopped


def by_name(
    flag: str, words: Sequence[str], known: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """`[name.]key=value` words -> options by name; without a name it goes to all that have the
    option."""
    from seecause.cli.options import value_of
    from seecause.errors import BadOption

    found: dict[str, dict[str, Any]] = {name: {} for name in known}
    for word in words:
        path, equals, text = word.partition("=")
        name, _, key = path.rpartition(".")
        takers = [
            taker for taker, options in known.items() if key in options and name in ("", taker)
        ]
        if not equals or not takers:
            there = "; ".join(
                f"{taker}: {', '.join(options) or 'none'}" for taker, options in known.items()
            )
            raise BadOption(flag, word, f"[NAME.]KEY=VALUE with an option of {there}")
        for taker in takers:
            found[taker][key] = value_of(text)
    return found


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar with images a second and the time left, on terminals only."""
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
            return f"{task.speed:.1f} images/s" if task.speed else "-- images/s"

    console = Console(stderr=True)
    columns = (
        TextColumn("images x methods"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(""),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        speed_estimate_period=600,
        disable=quiet or not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)


def say(found: Status, *, quiet: bool = False) -> None:
    """Where the run stands, on standard output; what is missing, on standard error, also when
    quiet."""
    if not quiet:
        parts = [
            f"{found.done} of {found.total} shards done",
            f"{len(found.pending)} pending",
            f"{len(found.failed)} failed",
            f"{len(found.stale)} kept from other commands",
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
