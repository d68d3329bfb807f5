"""Every attribution method, by every metric of the paper and against the truth, on the embedded
model.

    python scripts/methods_table.py                              # critters-vit: writes
    methods-critters.md and .csv

A real model and photos: `scripts/evidence_attribution.py`. Methods of thousands of forwards see
fewer pictures (`--limit-expensive`), a fixed part of the others', and are compared with CAAP on
those. CAAP is always among the methods, and first: the others are compared with it. The same
command again continues where it stopped. Every number on the page is written by this script.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1]))

import seecause as sc
from scripts import tables
from scripts.tables import Values, differences, holes, losses, over, undefined, with_reference
from seecause.attribution.registry import methods as all_methods
from seecause.bench.measures import PAPER
from seecause.bench.plan import Request, Store, make_plan
from seecause.bench.runner import Status, run
from seecause.bench.tables import (
    TRUTH_COLUMNS,
    against_truth,
    read_results,
    shown,
    table_of,
    to_csv,
    to_markdown,
)
from seecause.bench.work import Worker, open_model
from seecause.data import open_data
from seecause.engine.machine import machine
from seecause.errors import BadOption

TRUTH = ("part-correctness", "part-contrastivity")


def main(
    limit: Annotated[int, typer.Option(help="Pictures.")] = 512,
    limit_expensive: Annotated[
        int, typer.Option(help=f"Pictures of {', '.join(tables.EXPENSIVE)}.")
    ] = 100,
    method: Annotated[
        str | None, typer.Option(help="Methods, separated by commas.", show_default="all")
    ] = None,
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the page and the CSV.")] = Path(
        "docs/results"
    ),
    runs: Annotated[Path, typer.Option(help="Where finished work is kept.")] = Path("out/methods"),
    shard_size: Annotated[int, typer.Option(help="Pictures that are finished together.")] = 50,
) -> None:
    asked = [name.strip() for name in method.split(",")] if method else sorted(all_methods())
    chosen = with_reference(asked)
    request = Request(
        model="builtin:critters-vit",
        data="critters:clean:test",
        methods={},
        metrics=(*PAPER, *TRUTH),
        measures={"insertion-deletion": {"order": "patch", "steps": 16}},
        device=device,
        shard_size=shard_size,
    )
    cheap, expensive = (
        [m for m in chosen if m not in tables.EXPENSIVE],
        [m for m in chosen if m in tables.EXPENSIVE],
    )
    done = [
        _run(Store(runs / f"critters-{name}"), request, some, count)
        for name, some, count in (
            ("cheap", cheap, limit),
            ("expensive", expensive, min(limit, limit_expensive)),
        )
        if some
    ]
    found = merged([(store, worker) for store, worker, _ in done], chosen)
    out.mkdir(parents=True, exist_ok=True)
    given = {
        "--limit": limit,
        "--limit-expensive": limit_expensive,
        **({"--method": ",".join(chosen)} if method else {}),
    }
    text = page(found, done, chosen, " ".join(f"{name} {value}" for name, value in given.items()))
    (out / "methods-critters.md").write_text(text, encoding="utf-8")
    (out / "methods-critters.csv").write_text(
        to_csv(table_of(found, unranked=tables.EXPENSIVE if len(done) > 1 else ())),
        encoding="utf-8",
    )
    typer.echo(text)
    if not all(status.complete for _, _, status in done):
        raise typer.Exit(1)


def _run(
    store: Store, request: Request, methods: list[str], limit: int
) -> tuple[Store, Worker, Status]:
    """Whatever is not finished yet, in this process."""
    request = replace(request, methods={name: {} for name in methods}, limit=limit)
    model, data = open_model(request), open_data(request.data, limit=limit)
    worker = Worker(make_plan(request, model, data), model, data)
    todo = [shard for shard in worker.plan.shards if not store.file(shard.id, "parquet").is_file()]
    with Progress(transient=True) as bar:
        task = bar.add_task(
            f"{len(methods)} methods, {len(data)} pictures", total=sum(len(shard) for shard in todo)
        )
        return store, worker, run(store, worker, advance=lambda images: bar.advance(task, images))


def merged(done: list[tuple[Store, Worker]], order: list[str]) -> Values:
    """Values over the pictures of the first run; NaN where a later run did not see one."""
    names = done[0][1].plan.samples
    for _, worker in done:
        if set(worker.plan.samples) - set(names):
            raise BadOption(
                "--limit-expensive",
                len(worker.plan.samples),
                "a divisor of --limit, so that its pictures are among the others'",
            )
    found: Values = {}
    for store, worker in done:
        found |= over(names, store, worker.plan)
    return {method: found[method] for method in order}


def page(
    found: Values, done: list[tuple[Store, Worker, Status]], chosen: list[str], given: str
) -> str:
    """The results page; `given` are the options that decide its numbers."""
    _, worker, _ = done[0]
    request, count = worker.plan.request, len(worker.plan.samples)
    fewer = [m for m in chosen if m in tables.EXPENSIVE]
    less = (
        f" {', '.join(fewer)} saw {len(done[-1][1].plan.samples)} of them (*), and are not ranked."
        if fewer and len(done) > 1
        else ""
    )
    curves = request.measures["insertion-deletion"]
    table = table_of(
        {tables.starred(m): columns for m, columns in found.items()},
        unranked=[tables.starred(m) for m in tables.EXPENSIVE] if less else (),
    )
    what = (
        f"{count} pictures of `{worker.plan.data['name'].split(':')[0]}`"
        f" ({request.model.split(':')[1]})"
    )
    right = _accuracy(done[0][0], worker)
    parts = [
        f"# {len(found)} methods on critters-vit\n",
        (
            f"Written by `python scripts/methods_table.py {given}` (seecause {sc.__version__},"
            f" torch {torch.__version__}, {machine(request.device)}, {request.dtype}). Each number"
            " with all digits, interval and count: `methods-critters.csv`.\n"
        ),
        (
            f"{what}; target = label, which the model answers for {right:.1%}.{less} Insertion and"
            f" deletion in {curves['order']} order, steps: {curves['steps']}. Every method with its"
            " default options. Mean ± standard error; the best mean in bold, which is no claim"
            " that the next is worse.\n"
        ),
        to_markdown(table),
        "## Image by image, against CAAP\n",
        (
            "The method less CAAP over the pictures both have, and how many standard errors that"
            " is. Positive favours the method, except for deletion.\n"
        ),
        differences(table),
        losses(table),
        "## Against the truth\n",
        _truth([(store, worker) for store, worker, _ in done]),
        *undefined([status for _, _, status in done]),
        *holes([status for _, _, status in done]),
    ]
    return "\n".join(parts)


def _truth(done: list[tuple[Store, Worker]]) -> str:
    """The FunnyBirds scores over all pictures of each run."""
    lines = [
        "| method | " + " | ".join(TRUTH_COLUMNS) + " |",
        "|---|" + "---|" * len(TRUTH_COLUMNS),
    ]
    for store, worker in done:
        lines += [
            f"| {tables.starred(method)} | " + " | ".join(shown(row)) + " |"
            for method, row in against_truth(read_results(store, worker.plan)).items()
        ]
    return "\n".join(lines) + "\n"


def _accuracy(store: Store, worker: Worker) -> float:
    rows = store.rows(worker.plan).select(["index", "target", "predicted"]).to_pylist()
    right = {
        row["index"]: row["target"] == row["predicted"]
        for row in rows
        if row["predicted"] is not None
    }
    return statistics.fmean(right.values()) if right else float("nan")


if __name__ == "__main__":
    typer.run(main)
