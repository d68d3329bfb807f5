"""`seecause bench` and `seecause reproduce`: benchmarks of attribution methods, and the tables of
the papers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
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
    Facts,
    Limit,
    ModelName,
    Printing,
    Reading,
    Values,
    by_name,
    check_methods,
    loading,
    names,
    pick_device,
    refuse,
    tell,
)
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.bench.runner import Status

LISTED = 20  # maximum number of missing values that are printed
LONG = 400  # lines of a table that is not printed
OWN = {  # options of the run and of a Ray task, without flags of their own
    "run": ("threads", "memory", "cell_size"),
    "ray": ("num_cpus", "num_gpus", "memory"),
}
RunFolder = Annotated[
    Path,
    Parameter(name=["--out", "-o"], help="The run folder; the same command again continues in it."),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Workers:
    """Where cells are computed.

    Attributes:
        workers: Number of processes; it does not change the results. Default: with --ray, as many
            as the cluster can run; for `bench run` on a CPU, one for each core if there is enough
            to do; otherwise this process alone.
        ray: Run on a Ray cluster: auto (the one that is running), local, or HOST:PORT.
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
    output: Printing = Printing(),
) -> int:
    """Run attribution methods over a dataset and measure them. The same command resumes a
    stopped run; the exit code is 1 if any number is missing.

    For example: seecause bench run --method caap,rollout,random --data folder:PATH --limit 64
    --metric ins-del,aupr1 --out run && seecause bench report run

    Args:
        method: Attribution methods, separated by commas.
        metric: Metrics, separated by commas, or paper (insertion, deletion, ins-del, aupr1, aupr0,
            pointing), or all.
        target: The class to explain: the true one or the predicted one.
        option: An option of a method (caap.tail=patched, or tail=patched for every method that has
            it), of a metric (insertion-deletion.steps=16), of the run (run.threads=2,
            run.memory=64000000 (bytes), run.cell_size=16) or of a Ray task (ray.num_gpus=0.5);
            repeat for more.
    """
    methods = names(method)
    check_methods(methods)
    given = by_name(option)
    own = {name: given.pop(name, {}) for name in OWN}
    for name, known in OWN.items():
        refuse(own[name].keys() - known, f"{name}.KEY=VALUE with one of {', '.join(known)}")
    device = pick_device(reading.device)
    with loading(f"{model} and {data}", quiet=output.quiet):
        from seecause import bench
        from seecause.bench.runner import read_cell, usual_workers
        from seecause.bench.tables import check_folder
        from seecause.data.dataset import reading_with

        check_folder(out)
        request = bench.Request(
            model=model, weights=reading.weights, reading=reading.options(), data=data,
            limit=limit, methods={name: {} for name in methods}, metrics=names(metric),
            target=target, seed=reading.seed, device=device, dtype=reading.dtype or "float32",
            **{"cell_size": 16 if device == "cpu" else 64, **own["run"]},  # a GPU takes more
        )  # fmt: skip
        prepared = bench.prepare(request, options=given)
    output.say(f"images: {prepared.model.preprocess.sentence()}")
    for name, reason in {} if output.quiet else prepared.left_out.items():
        tell(f"left out: {name}: {reason}")
    todo = sum(c.images for c in prepared.plan.cells if read_cell(out, c.name) is None)
    with output.progress("images x methods", todo) as progress:
        options = {**asdict(workers), "resources": own["ray"], "progress": progress}
        if workers == Workers() and request.device == "cpu":
            options["workers"] = usual_workers(todo)
        with reading_with(None):
            state = bench.run(out, prepared, **options)
    lines = [f"next: seecause bench report {out}"] if state.complete else []
    return _finish(state, {"out": str(out)}, lines, output)


def report(
    folder: Annotated[Path, Parameter(name="RUN")],
    /,
    *,
    against: str | None = None,
    output: Printing = Printing(),
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

        page, *files = write_report(folder, against=against)
        state = bench.status(folder)
    _print_table(folder, output)
    table = bench.table(folder, against=against)
    facts = {"out": str(folder), "table": table.records()}
    lines = [f"also: {', '.join(path.name for path in files)}", f"page: {page}"]
    return _finish(state, facts, lines, output)


def reproduce(
    name: Annotated[str, Parameter(name="EXPERIMENT")] = "",
    /,
    *,
    listed: Annotated[bool, Parameter(name="--list")] = False,
    data: Values = None,
    models: str = "",
    weights: Values = None,
    limit: Limit | None = None,
    quick: bool = False,
    as_printed: bool = False,
    option: Values = None,
    device: Device = "auto",
    workers: Workers = Workers(),
    out: Annotated[Path, Parameter(name=["--out", "-o"])] = Path("reproduced"),
    output: Printing = Printing(),
) -> int:
    """Compute a table or figure of the papers, or of this project's own evidence, and print the
    published numbers beside the new ones. Without a name, all experiments are listed. The same
    command continues a stopped run; the exit code is 1 while anything is missing.

    For example: seecause reproduce caap/table-1 --data imagenet-s=PATH --models vit-l,deit3-l
    --limit 500 --out reproduced

    Args:
        name: An experiment, such as caap/table-1 (docs/papers.md).
        listed: List all experiments with the data, models and GPU hours they need.
        data: NAME=PATH, such as imagenet-s=PATH, or a whole name, such as pets:PATH; repeat for
            more.
        models: Names of models (`--list` shows them) or models of a library, separated by commas.
            NAME=timm:MODEL gives it a name in the table. Default: all of the paper.
        weights: NAME=FILE, a checkpoint of a model by its name in the table; repeat for more.
        limit: Use this many images. Default: the paper's number.
        quick: Try the command in a minute: an embedded model, generated images, no download.
        as_printed: Use the paper's settings where our defaults differ.
        option: KEY=VALUE, an option of the experiment, such as tail=patched; repeat for more.
        device: Where to compute; auto takes the GPU if there is one.
        out: Folder of all experiments: they share finished cells; the table is in OUT/EXPERIMENT.
    """
    if listed or not name:
        from seecause.cli.info import list_names

        return list_names("experiments", output=output)
    with loading(name, quiet=output.quiet):
        from seecause.experiments.base import run as run_experiment

    given = by_name(option)
    given = {**given.pop("", {}), **given}  # training.epochs=1 goes into the table `training`
    options: Facts = {"limit": limit, "quick": quick, "as_printed": as_printed}
    options |= {"data": _named(data, "--data", rest=True), "options": given}
    options |= {
        "models": _named(names(models), "--models"),
        "weights": _named(weights, "--weights"),
    }
    with ExitStack() as stack:
        bar: list[Any] = []

        def count(cells: int) -> None:
            bar.append(stack.enter_context(output.progress("cells", cells)))

        state = run_experiment(
            name, out, **options, device=pick_device(device), **asdict(workers), count=count,
            progress=lambda done: bar[0](done),
        )  # fmt: skip
    home = out / name
    _print_table(home, output)
    lines = [f"page: {home / 'index.html'}"] if (home / "index.html").is_file() else []
    return _finish(state, {"out": str(home)}, lines, output)


def _named(words: Sequence[str] | None, flag: str, *, rest: bool = False) -> dict[str, str]:
    """NAME=VALUE by name; a word alone is its own name, of a dataset its first word."""
    named = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if equals and ":" not in key:
            named[key] = value
        elif flag == "--weights" or (rest and ":" not in word):
            raise BadOption(flag, word, "NAME=PATH")
        else:
            named[word.partition(":")[0] if rest else word] = word
    return named


def _finish(state: Status, facts: Facts, lines: list[str], output: Printing) -> int:
    """Print missing values with reasons (also with --quiet) and the progress of the run."""
    from seecause.report.bench import missing_rows

    missing = missing_rows(state)
    for what, why in missing[:LISTED]:
        tell(f"{what}: {why.splitlines()[-1]}")
    if len(missing) > LISTED:
        tell(f"and {len(missing) - LISTED} more")
    facts |= {"complete": state.complete, "cells": state.total, "done": state.done}
    facts["missing"] = [{"what": what, "why": why} for what, why in missing]
    lines = [f"{state.done} of {state.total} cells done", *lines]
    return output.finish(facts, lines, code=0 if state.complete else INCOMPLETE)


def _print_table(folder: Path, output: Printing) -> None:
    """Print table.md with aligned columns, unless it is long; bold numbers get a star."""
    import re

    from rich.console import Console
    from rich.markdown import Markdown

    file = folder / "table.md"
    if file.is_file() and not output.silent:
        console = Console()
        console = console if console.is_terminal else Console(width=240)  # a file has room
        text = file.read_text(encoding="utf-8")
        if text.count("\n") > LONG:
            return
        console.print(Markdown(re.sub(r"\*\*([-\d][^*]*)\*\*", r"\1 ★", text)))
