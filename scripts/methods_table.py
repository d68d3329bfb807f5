"""Every attribution method, by every metric of the paper, on the embedded model and on photos.

    python scripts/methods_table.py                              # critters-vit: writes methods-critters.md and .csv
    python scripts/methods_table.py --real PATH                  # PATH/vit_tiny_patch16_224.safetensors on PATH/pets: methods-photos.md and .csv

Methods of thousands of forwards see fewer pictures (`--limit-expensive`), a fixed part of the others', and are compared with CAAP on those. CAAP is
always among the methods, and first: the others are compared with it. The same command again continues where it stopped. Every number on the page is
written by this script.
"""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress
from torch import Tensor

import seecause as sc
from seecause.attribution.registry import methods as all_methods
from seecause.bench.measures import SETS, higher_is_better
from seecause.bench.plan import Request, make_plan
from seecause.bench.runner import Status, run
from seecause.bench.store import Store
from seecause.bench.table import Table, table_of, to_csv, to_markdown, values
from seecause.bench.work import Worker, open_model
from seecause.data import open_data
from seecause.errors import BadOption
from seecause.metrics import PartScores, Summary

EXPENSIVE = ("mda", "rise", "tis")  # a thousand forwards or more
REFERENCE = "caap"
ROUNDING = 1e-6  # of a difference; a standard error below it is none
TRUTH = ("part-correctness", "part-contrastivity")
Values = dict[str, dict[str, Tensor]]  # by method and metric, [pictures]


def main(
    real: Annotated[Path | None, typer.Option(help="Folder with vit_tiny_patch16_224.safetensors and pets/; without it, critters-vit.")] = None,
    limit: Annotated[int | None, typer.Option(help="Pictures.", show_default="512, with --real 300")] = None,
    limit_expensive: Annotated[int, typer.Option(help=f"Pictures of {', '.join(EXPENSIVE)}.")] = 100,
    method: Annotated[str | None, typer.Option(help="Methods, separated by commas.", show_default="all")] = None,
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the page and the CSV.")] = Path("docs/results"),
    runs: Annotated[Path, typer.Option(help="Where finished work is kept.")] = Path("out/methods"),
    shard_size: Annotated[int, typer.Option(help="Pictures that are finished together.")] = 50,
) -> None:
    kind = "critters" if real is None else "photos"
    limit = limit or (512 if real is None else 300)
    asked = [name.strip() for name in method.split(",")] if method else sorted(all_methods())
    chosen = list(dict.fromkeys([REFERENCE, *asked]))
    request = Request(
        model="builtin:critters-vit" if real is None else "timm:vit_tiny_patch16_224",
        weights=None if real is None else str(real / "vit_tiny_patch16_224.safetensors"),
        data="critters:clean:test" if real is None else f"pets:{real / 'pets'}",
        methods={},
        metrics=(*SETS["paper"], *(TRUTH if real is None else ())),
        measures={"insertion-deletion": {"order": "patch", "steps": 16}} if real is None else {},
        device=device,
        shard_size=shard_size,
    )
    cheap, expensive = [m for m in chosen if m not in EXPENSIVE], [m for m in chosen if m in EXPENSIVE]
    done = [
        _run(Store(runs / f"{kind}-{name}"), request, some, count)
        for name, some, count in (("cheap", cheap, limit), ("expensive", expensive, min(limit, limit_expensive)))
        if some
    ]
    found = merged([(store, worker) for store, worker, _ in done], chosen)
    out.mkdir(parents=True, exist_ok=True)
    given = {"--limit": limit, "--limit-expensive": limit_expensive, **({"--method": ",".join(chosen)} if method else {})}
    text = page(kind, found, done, chosen, " ".join(f"{name} {value}" for name, value in given.items()))
    (out / f"methods-{kind}.md").write_text(text, encoding="utf-8")
    (out / f"methods-{kind}.csv").write_text(to_csv(table_of(found, unranked=EXPENSIVE if len(done) > 1 else ())), encoding="utf-8")
    typer.echo(text)
    if not all(status.complete for _, _, status in done):
        raise typer.Exit(1)


def _run(store: Store, request: Request, methods: list[str], limit: int) -> tuple[Store, Worker, Status]:
    """Whatever is not finished yet, in this process."""
    request = replace(request, methods={name: {} for name in methods}, limit=limit)
    model, data = open_model(request), open_data(request.data, limit=limit)
    worker = Worker(make_plan(request, model, data), model, data)
    todo = [shard for shard in worker.plan.shards if not store.rows_file(shard.id).is_file()]
    with Progress(transient=True) as bar:
        task = bar.add_task(f"{len(methods)} methods, {len(data)} pictures", total=sum(len(shard) for shard in todo))
        return store, worker, run(store, worker, advance=lambda images: bar.advance(task, images))


def merged(done: list[tuple[Store, Worker]], order: list[str]) -> Values:
    """Values over the pictures of the first run; NaN where a later run did not see one."""
    places = {name: place for place, name in enumerate(done[0][1].plan.samples)}
    found: Values = {}
    for store, worker in done:
        strange = set(worker.plan.samples) - set(places)
        if strange:
            raise BadOption("--limit-expensive", len(worker.plan.samples), "a divisor of --limit, so that its pictures are among the others'")
        index = torch.tensor([places[name] for name in worker.plan.samples])
        for method, columns in values(store.rows(worker.plan), worker.plan).items():
            found[method] = {k: torch.full((len(places),), torch.nan, dtype=torch.float64).index_copy(0, index, v) for k, v in columns.items()}
    return {method: found[method] for method in order}


def page(kind: str, found: Values, done: list[tuple[Store, Worker, Status]], chosen: list[str], given: str) -> str:
    """The results page; `given` are the options that decide its numbers."""
    _, worker, _ = done[0]
    request, count = worker.plan.request, len(worker.plan.samples)
    fewer = [m for m in chosen if m in EXPENSIVE]
    less = f" {', '.join(fewer)} saw {len(done[-1][1].plan.samples)} of them (*), and are not ranked." if fewer and len(done) > 1 else ""
    where = torch.cuda.get_device_name(request.device) if request.device.startswith("cuda") else f"{platform.machine()} CPU"
    curves = request.measures["insertion-deletion"]
    table = table_of({_starred(m): columns for m, columns in found.items()}, unranked=[_starred(m) for m in EXPENSIVE] if less else ())
    what = f"{count} pictures of `{worker.plan.data['name'].split(':')[0]}` ({request.model.split(':')[1]})"
    right = _accuracy(done[0][0], worker)
    parts = [
        f"# {len(found)} methods on {'critters-vit' if kind == 'critters' else 'photos'}\n",
        f"Written by `python scripts/methods_table.py{' --real PATH' * (kind == 'photos')} {given}` "
        f"(seecause {sc.__version__}, torch {torch.__version__}, {where}, {request.dtype}). "
        f"Each number with all digits, interval and count: `methods-{kind}.csv`.\n",
        f"{what}; target = label, which the model answers for {right:.1%}.{less} Insertion and deletion in {curves['order']} order, steps: {curves['steps']}. "
        "Every method with its default options. Mean ± standard error; the best mean in bold, which is no claim that the next is worse.\n",
        to_markdown(table),
        "## Image by image, against CAAP\n",
        "The method less CAAP over the pictures both have, and how many standard errors that is. Positive favours the method, except for deletion.\n",
        _differences(table),
        _losses(table),
        *(["## Against the truth\n", _truth([(store, worker) for store, worker, _ in done])] if kind == "critters" else []),
        *_holes([status for _, _, status in done]),
    ]
    return "\n".join(parts)


def _starred(method: str) -> str:
    return f"{method} *" if method in EXPENSIVE else method


def _differences(table: Table) -> str:
    lines = ["| method | " + " | ".join(table.metrics) + " |", "|---|" + "---|" * len(table.metrics)]
    for method in table.methods[1:]:
        gaps = [table.cells[method][metric].difference for metric in table.metrics]
        lines.append(f"| {method} | " + " | ".join(_gap(gap) for gap in gaps) + " |")
    return "\n".join(lines) + "\n"


def _gap(gap: Summary | None) -> str:
    """A difference and how many standard errors it is; a dash where it is the same for every picture and has no error."""
    if gap is None or not gap.n:
        return "no value"
    errors = f"{gap.mean / gap.standard_error:+.0f}" if gap.standard_error > ROUNDING * abs(gap.mean) else "-"
    return f"{gap.mean:+.3f} ± {gap.standard_error:.3f} ({errors})"


def _losses(table: Table) -> str:
    """Which methods beat the reference clearly, metric by metric."""
    lines = [f"Methods better than {table.reference} by more than two standard errors of the difference:\n"]
    for metric in table.metrics:
        sign = 1 if higher_is_better(metric) else -1
        gaps = {m: table.cells[m][metric].difference for m in table.methods[1:]}
        better = [m for m, gap in gaps.items() if gap is not None and gap.n and sign * gap.mean > 2 * gap.standard_error]
        lines.append(f"- {metric}: {', '.join(better) or 'none'}")
    return "\n".join(lines) + "\n"


def _truth(done: list[tuple[Store, Worker]]) -> str:
    """The FunnyBirds scores that need all pictures at once."""
    lines = ["| method | completeness | at threshold | correctness | contrastivity | mean of the three |", "|---|---|---|---|---|---|"]
    for store, worker in done:
        for method in worker.plan.request.methods:
            tensors = [store.tensors(shard) for shard in store.finished(worker.plan) if shard.method == method]
            if not tensors or "parts.thresholds" not in tensors[0]:
                continue
            joined = {part.name: torch.cat([t[f"parts.{part.name}"] for t in tensors]) for part in fields(PartScores) if part.name != "thresholds"}
            scores = PartScores(**joined, thresholds=tensors[0]["parts.thresholds"])
            numbers = (scores.completeness, scores.threshold, float(scores.correctness.nanmean()), float(scores.contrastivity.nanmean()), scores.overall)
            lines.append(f"| {_starred(method)} | " + " | ".join(f"{value:.3f}" for value in numbers) + " |")
    return "\n".join(lines) + "\n"


def _accuracy(store: Store, worker: Worker) -> float:
    rows = store.rows(worker.plan).select(["index", "target", "predicted"]).to_pylist()
    right = {row["index"]: row["target"] == row["predicted"] for row in rows if row["predicted"] is not None}
    return statistics.fmean(right.values()) if right else float("nan")


def _holes(statuses: list[Status]) -> list[str]:
    lines = [f"- a shard failed: {reason}" for status in statuses for reason in status.failed.values()]
    lines += [f"- {hole.method} on {hole.image}, {hole.metric}: {hole.reason}" for status in statuses for hole in status.holes]
    undefined = sum((Counter(status.undefined) for status in statuses), Counter[str]())
    lines += [f"- {metric}: {count} values are not defined (the picture does not ask the question)" for metric, count in undefined.items()]
    return ["## Holes\n", "\n".join(lines) + "\n"] if lines else []


if __name__ == "__main__":
    typer.run(main)
