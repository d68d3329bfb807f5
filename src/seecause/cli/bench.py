"""`seecause bench` and `seecause reproduce`: which attribution method is faithful on my model, and
the tables of the papers again."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from seecause.cli.shared import (
    INCOMPLETE,
    VIT,
    Count,
    Data,
    Device,
    Limit,
    ModelName,
    Output,
    Reading,
    Values,
    check_methods,
    counting,
    loading,
    named_value,
    names,
    pick_device,
    tell,
)
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.bench import Status
    from seecause.bench.cells import Prepared

LISTED = 20  # missing values that are named one by one; the rows have them all
RUN = ("threads", "memory", "cell_size", "precision")  # of a request, without flags of their own
RAY = {"cpus": "num_cpus", "gpus": "num_gpus", "memory": "memory"}
RunFolder = Annotated[
    Path,
    Parameter(name=["--out", "-o"], help="The run folder; the same command again continues in it."),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who computes the cells.

    Attributes:
        workers: Processes; any number gives the same results. Default: this process; with --ray,
            as many as the cluster holds.
        ray: Work on a Ray cluster: auto for the one that is running, local, or HOST:PORT.
    """

    workers: Count | None = None
    ray: str | None = None


def run(
    *,
    model: ModelName = VIT,
    reading: Reading = Reading(),
    data: Data = "critters:clean:test",
    limit: Limit | None = None,
    method: str = "caap",
    metric: str = "paper",
    target: Literal["label", "predicted"] = "label",
    option: Values = None,
    workers: Workers = Workers(),
    out: RunFolder = Path("bench"),
    output: Output = Output(),
) -> int:
    """Run attribution methods over a dataset and measure them. The same command again continues
    where it stopped; the exit code is 1 if any number is missing.

    For example: seecause bench run --method caap,rollout,random --data folder:PATH --limit 64
    --metric ins-del,aupr1 --out run && seecause bench report run

    Args:
        method: Attribution methods, separated by commas.
        metric: Metrics, separated by commas, or paper (insertion, deletion, ins-del, aupr1, aupr0,
            pointing), or all.
        target: The class to explain: the true one or the predicted one.
        option: An option of a method (caap.tail=patched, or tail=patched for every method that has
            it), of a metric (insertion-deletion.steps=16), of the run (run.threads=2,
            run.memory=64 (MiB), run.cell_size=16) or of a Ray task (ray.gpus=0.5, ray.cpus=2,
            ray.memory=4 (GiB)); repeat for more.
    """
    methods = names(method)
    check_methods(methods)
    with loading(f"{model} and {data}", quiet=output.quiet):
        prepared, resources = _prepare(model, reading, option, {
            "data": data, "limit": limit, "methods": {name: {} for name in methods},
            "metrics": names(metric), "target": target,
        }, out)  # fmt: skip
        from seecause import bench
        from seecause.bench.runner import read_cell

    for reason in {} if output.quiet else dict.fromkeys(prepared.left_out.values()):
        metrics = [name for name, why in prepared.left_out.items() if why == reason]
        tell(f"left out: {', '.join(metrics)}: {reason}")
    cells = prepared.plan.cells
    todo = sum(len(cell) for cell in cells if read_cell(out, cell.name) is None)
    with counting("images x methods", todo, quiet=output.quiet, rate="images/s") as progress:
        options = {**asdict(workers), "resources": resources, "progress": progress}
        state = bench.run(out, prepared, **options)
    for line in _missing(state):
        tell(line)
    lines = [
        f"{state.done} of {state.total} cells done, {len(state.failed)} failed,"
        f" {len(state.pending)} pending"
    ]
    lines += [f"next: seecause bench report {out}"] if state.complete else []
    facts = {"out": str(out), **_facts(state)}
    return output.finish(facts, lines, code=0 if state.complete else INCOMPLETE)


def _prepare(
    model: str, reading: Reading, words: list[str] | None, request: dict[str, Any], out: Path
) -> tuple[Prepared, dict[str, Any]]:
    """The request with model and data opened, and resources of a Ray task."""
    from seecause import bench
    from seecause.bench.runner import check_folder
    from seecause.metrics.registry import metrics

    check_folder(out)
    method_words: list[tuple[str, str, Any]] = []
    metric_words: list[tuple[str, str, Any]] = []
    settings: dict[str, Any] = {}
    resources: dict[str, Any] = {}
    for word in words or ():
        name, key, value = named_value("--option", word)
        if name == "run" and key in RUN:
            settings[key] = value << 20 if key == "memory" else value
        elif name == "ray" and key in RAY:
            resources[RAY[key]] = value * (1 << 30) if key == "memory" else value
        elif name in ("run", "ray"):
            known = RUN if name == "run" else RAY
            raise BadOption("--option", word, f"one of {', '.join(f'{name}.{k}' for k in known)}")
        else:
            (metric_words if name in metrics() else method_words).append((name, key, value))
    made = bench.Request(
        model=model,
        weights=reading.weights,
        reading=reading.options(),
        seed=reading.seed,
        device=pick_device(reading.device),
        dtype=reading.dtype or "float32",
        **request,
        **settings,
    )
    prepared = bench.prepare(made, options=method_words, metric_options=metric_words)
    return prepared, resources


def report(
    folder: Annotated[Path, Parameter(name="RUN")],
    /,
    *,
    against: str | None = None,
    output: Output = Output(),
) -> int:
    """Print the table, and write RUN/index.html, table.csv, table.tex, table.md and rows.csv (every
    number) from what is finished. The exit code is 1 while anything is missing.

    Args:
        folder: The --out of `seecause bench run`.
        against: Compare every method with this one, image by image. Default: the first.
    """
    with loading(str(folder), quiet=output.quiet):
        from seecause import bench
        from seecause.report.bench import write_report

        files = write_report(folder, against=against)
        state = bench.status(folder)
    if not output.silent:
        _print_markdown((folder / "table.md").read_text(encoding="utf-8"))
    for line in _missing(state):
        tell(line)
    table = bench.table(folder, against=against)
    facts = {"out": str(folder), "files": [path.name for path in files], "table": table.records()}
    lines = [f"also: {', '.join(path.name for path in files[1:])}", f"page: {files[0]}"]
    code = 0 if state.complete else INCOMPLETE
    return output.finish({**facts, **_facts(state)}, lines, code=code)


def _facts(state: Status) -> dict[str, Any]:
    """How far a run is, for programs."""
    return {
        "complete": state.complete,
        "cells": state.total,
        "done": state.done,
        "pending": len(state.pending),
        "failed": state.failed,
        "not run": state.not_run(),
        "missing": [{"image": hole.image, "reason": hole.reason} for hole in state.holes],
    }


def _missing(state: Status) -> list[str]:
    """What is missing and why, also when quiet."""
    holes = Counter((hole.image, hole.reason) for hole in state.holes)
    lines = [
        *(f"cell {name} failed: {_last(error)}" for name, error in state.failed.items()),
        *(f"{method}: not run on {count} images" for method, count in state.not_run().items()),
        *(f"{image}: {count} values missing: {reason}" for (image, reason), count in holes.items()),
    ]
    more = [f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return lines[:LISTED] + more


def _last(error: str) -> str:
    """The last line of a traceback; the file beside the cell has all of it."""
    return error.strip().splitlines()[-1] if error.strip() else "for no known reason"


def _print_markdown(text: str) -> None:
    """Tables with columns of one width; what is bold has a star."""
    import re

    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console = console if console.is_terminal else Console(width=240)  # a file has room
    console.print(Markdown(re.sub(r"\*\*([-\d][^*]*)\*\*", r"\1 ★", text)))


def reproduce(
    name: Annotated[str, Parameter(name="EXPERIMENT")],
    /,
    *,
    limit: Limit | None = None,
    device: Device = "auto",
    workers: Workers = Workers(),
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    output: Output = Output(),
) -> int:
    """Compute a table of the papers, or of this project's own evidence, again. The same command
    continues where it stopped; the exit code is 1 while anything is missing.

    For example: seecause reproduce caap --limit 8 --device cpu

    Args:
        name: An experiment (`seecause list experiments`).
        limit: Use this many images in each cell: a quick look. Default: all.
        device: Where to compute; auto takes the GPU if there is one.
        out: The folder of the experiment. Default: experiments/EXPERIMENT.
    """
    with loading(name, quiet=output.quiet):
        from seecause.experiments import find_experiment, run as run_experiment

    folder, cells = out or Path("experiments") / name, len(find_experiment(name).cells)
    with output.progress("cells", cells) as progress:
        options: dict[str, Any] = {"limit": limit, "device": pick_device(device)}
        state = run_experiment(name, folder, progress=progress, **options, **asdict(workers))
    for line in _missing(state):
        tell(line)
    text = folder / "table.md"
    if text.is_file() and not output.silent:
        _print_markdown(text.read_text(encoding="utf-8"))
    lines = [f"{state.done} of {state.total} cells done", f"table: {folder / 'table.csv'}"]
    code = 0 if state.complete else INCOMPLETE
    return output.finish({"out": str(folder), **_facts(state)}, lines, code=code)
