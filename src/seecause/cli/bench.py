"""`seecause bench`: which attribution method is faithful on my model? And `bench ablate`: do CAAP's
blank, selection, layers, tail or score decide the result?"""

from __future__ import annotations

import csv
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seecause._files import place
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
    value_of,
    with_reading,
)
from seecause.cli.progress import Facts, Incomplete, counting, print_markdown, starting
from seecause.cli.workers import with_workers
from seecause.errors import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seecause.bench.hands import Workers
    from seecause.bench.runner import Status
    from seecause.bench.work import Worker

LISTED = 20  # holes named one by one; the rows have them all
EXAMPLE = (
    "Example: seecause bench run --method caap,rollout,random --data critters:clean:test --limit 64"
    " --metric ins-del,aupr1 --out run && seecause bench report run"
)
ABLATE_EXAMPLE = (
    "Example: seecause bench ablate layers --data critters:clean:test --limit 64 --metric-option"
    " order=patch --out layers"
)


class Explained(StrEnum):
    label = "label"
    predicted = "predicted"


class Study(StrEnum):
    blank = "blank"
    select = "select"
    layers = "layers"
    tail = "tail"
    score = "score"


Methods = Annotated[str, typer.Option("--method", help="Attribution methods, with commas.")]
MethodOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="caap.tail=patched, or tail=patched for every method that has it; repeat for more.",
        metavar="[METHOD.]KEY=VALUE",
    ),
]
SharedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="A setting that is the same for all, such as score=logit; repeat for more.",
        metavar="KEY=VALUE",
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
MetricOption = Annotated[
    list[str] | None,
    typer.Option(
        help="insertion-deletion.steps=16, localization.upsample=nearest, or order=patch; repeat"
        " for more.",
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
Limit = Annotated[
    int | None,
    typer.Option(help="Use so many images, spread evenly.", min=1, show_default="all"),
]
Target = Annotated[
    Explained, typer.Option(help="The class to explain: the true one or the model's answer.")
]
RunFolder = Annotated[
    str,
    typer.Option(
        "--out",
        "-o",
        help="The run folder, or a URL (s3://...); the same command again continues in it.",
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
Folder = Annotated[
    str,
    typer.Argument(
        help="The --out of `seecause bench run` or `bench ablate`.",
        metavar="RUN",
        show_default=False,
    ),
]
StudyName = Annotated[
    Study, typer.Argument(help="Which setting of CAAP to change.", show_default=False)
]
Against = Annotated[
    str | None,
    typer.Option(
        help="Compare every method with this one, image by image.", show_default="the first"
    ),
]


def register(app: typer.Typer) -> None:
    commands = typer.Typer(
        no_args_is_help=True,
        help="Compare attribution methods over a dataset; runs can be stopped and continued.",
    )
    commands.command("run", epilog=EXAMPLE)(with_workers(with_reading(run)))
    commands.command("ablate", epilog=ABLATE_EXAMPLE)(with_workers(with_reading(ablate)))
    commands.command("status")(status)
    commands.command("report")(report)
    app.add_typer(commands, name="bench")


def run(
    model: ModelName = DEFAULT_MODEL,
    weights: Weights = None,
    method: Methods = "caap",
    option: MethodOption = None,
    data: DataName = "critters:clean:test",
    limit: Limit = None,
    metric: Metrics = "paper",
    metric_option: MetricOption = None,
    target: Target = Explained.label,
    out: RunFolder = "bench",
    workers: Any = None,
    threads: Threads = 1,
    memory: MemoryLimit = None,
    shard_size: ShardSize = 16,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> Facts:
    """Run methods over a dataset and measure them. The same command again continues where it
    stopped.

    Leaves with 1 if any number is missing, and says which.
    """
    worker = _prepare(
        out,
        (option or [], metric_option or []),
        model=model,
        weights=weights,
        data=data,
        limit=limit,
        methods={name: {} for name in names(method)},
        metrics=names(metric),
        target=target.value,
        seed=seed,
        dtype=dtype.value,
        device=device,
        shard_size=shard_size,
        memory=memory,
        threads=threads,
        quiet=quiet,
    )
    state = _run(out, worker, workers=workers, quiet=quiet)
    if not quiet and state.complete:
        typer.echo(f"next: seecause bench report {out}")
    return _left(state, {"out": str(out), **status_facts(state)})


def ablate(
    study: StudyName,
    model: ModelName = DEFAULT_MODEL,
    weights: Weights = None,
    option: SharedOption = None,
    data: DataName = "critters:clean:test",
    limit: Limit = 64,
    metric_option: MetricOption = None,
    target: Target = Explained.label,
    out: RunFolder = "ablation",
    workers: Any = None,
    threads: Threads = 1,
    memory: MemoryLimit = None,
    shard_size: ShardSize = 16,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.float32,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> Facts:
    """Change one setting of CAAP at a time: the paper's metrics, paired differences from the
    default, and how alike the maps are.

    Writes OUT/index.html, table.csv, table.tex, table.md, rows.csv and agreement.csv; the same
    command again continues where it stopped.
    """
    from seecause.bench.ablate import save_depth
    from seecause.bench.plan import Store
    from seecause.report.ablate import write_report

    worker = _prepare(
        out,
        (option or [], metric_option or []),
        model=model,
        weights=weights,
        data=data,
        limit=limit,
        methods={"caap": {}},
        study=study.value,
        metrics=("paper",),
        target=target.value,
        seed=seed,
        dtype=dtype.value,
        device=device,
        shard_size=shard_size,
        memory=memory,
        threads=threads,
        quiet=quiet,
    )
    state = _run(out, worker, workers=workers, quiet=quiet)
    if study is Study.layers:
        save_depth(Store(place(out)), worker)
    facts = tell_report(out, write_report(Store(place(out))), quiet=quiet)
    return _left(state, {**facts, **status_facts(state)})


def status(folder: Folder) -> Facts:
    """How far a run is, what failed or was damaged and why. Leaves with 1 if anything is
    missing."""
    with starting(f"reading {folder}"):
        from seecause import bench

        state = bench.status(folder)
    tell_status(state)
    return _left(state, status_facts(state))


def report(folder: Folder, against: Against = None) -> Facts:
    """Print the table, and write RUN/index.html, table.csv, table.tex, table.md and rows.csv (every
    number) from what is finished."""
    with starting(f"reading {folder}"):
        from seecause.bench import Store
        from seecause.report.ablate import write_report

        files = write_report(Store(place(folder)), against=against)
    return tell_report(folder, files)


def tell_report(out: str | Path, files: Sequence[Path], *, quiet: bool = False) -> Facts:
    """The table, and where everything is."""
    folder = place(out)
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
        "shards": state.total,
        "done": state.done,
        "pending": len(state.pending),
        "failed": state.failed,
        "damaged": state.damaged,
        "not run": state.not_run(),
        "holes": [{"picture": hole.image, "reason": hole.reason} for hole in state.holes],
        "gone": list(state.gone),
        "stopped": state.stopped,
    }


def _left(state: Status, facts: Facts) -> Facts:
    """The facts; an exit code says that something is missing."""
    if not state.complete:
        raise Incomplete(facts)
    return facts


def _prepare(
    out: str,
    words: tuple[Sequence[str], Sequence[str]],
    *,
    device: Device,
    memory: int | None,
    quiet: bool,
    **request: Any,
) -> Worker:
    """Check the folder, then open model and data. `words` are --option and --metric-option."""
    from seecause.cli.options import named_option, pick_device, reading

    with starting(f"loading {request['model']} and {request['data']}", quiet=quiet):
        from seecause import bench

        bench.Store(place(out)).check()
        worker = bench.prepare(
            bench.Request(
                **request,
                device=pick_device(device),
                reading=reading(),
                memory=None if memory is None else memory << 20,
            ),
            options=[named_option("--option", word) for word in words[0]],
            metric_options=[named_option("--metric-option", word) for word in words[1]],
        )
    for reason in {} if quiet else dict.fromkeys(worker.left_out.values()):
        metrics = [metric for metric, why in worker.left_out.items() if why == reason]
        typer.echo(f"left out: {', '.join(metrics)}: {reason}", err=True)
    return worker


def _run(out: str, worker: Worker, *, workers: Workers, quiet: bool) -> Status:
    """Run what is not finished and tell how it went."""
    from seecause import bench

    done = {shard.id for shard in bench.Store(place(out)).finished(worker.plan)}
    todo = sum(len(shard) for shard in worker.plan.shards if shard.id not in done)
    with counting("images x methods", todo, quiet=quiet, rate="images/s") as advance:
        state = bench.run(out, worker, workers=workers, advance=advance)
    tell_status(state, quiet=quiet)
    return state


def tell_status(state: Status, *, quiet: bool = False) -> None:
    """Where the run stands, on standard output; what is missing, on standard error, also when
    quiet."""
    if not quiet:
        parts = [
            f"{state.done} of {state.total} shards done",
            f"{len(state.pending)} pending",
            f"{len(state.failed)} failed",
            f"{len(state.stale)} kept from other commands",
        ]
        if state.damaged:
            parts.insert(3, f"{len(state.damaged)} damaged")
        typer.echo(", ".join(parts))
    holes = Counter((hole.image, hole.reason) for hole in state.holes)
    missing = [
        *(f"{name}: gone from the data since an earlier run" for name in state.gone),
        *(f"shard {shard} is to be done again: {why}" for shard, why in state.damaged.items()),
        *(f"{method}: not run on {count} images" for method, count in state.not_run().items()),
        *(f"shard {shard} failed: {reason}" for shard, reason in state.failed.items()),
        *(f"{image}: {count} values missing: {reason}" for (image, reason), count in holes.items()),
    ]
    for line in missing[:LISTED]:
        typer.echo(printable(line), err=True)
    if len(missing) > LISTED:
        typer.echo(f"and {len(missing) - LISTED} more", err=True)
    if state.stopped:
        typer.echo(f"seecause: {state.stopped}", err=True)
