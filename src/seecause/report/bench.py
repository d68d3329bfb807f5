"""The page of a benchmark run: table, curves, cost, pictures, protocol and holes. Made from the run
folder alone, finished or not."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seecause.attribution.registry import find
from seecause.bench.measures import UNDEFINED, higher_is_better, meaning_of
from seecause.bench.plan import Plan, Store
from seecause.bench.results import RunResults, read_results
from seecause.bench.runner import Status, inspect
from seecause.bench.tables import (
    TRUTH_COLUMNS,
    Table,
    Truth,
    against_truth,
    score_texts,
    table_of,
    to_csv,
    to_latex,
    to_markdown,
    truth_csv,
    write_rows,
)
from seecause.files import write_atomic
from seecause.report.bench_gallery import gallery_section, headline
from seecause.report.charts import Series, chart, mean_series, styled
from seecause.report.page import (
    AGAIN,
    Section,
    chart_row,
    fragment,
    protocol_table,
    table,
    write_page,
)

LISTED = 100  # holes that a page lists


def write_report(store: Store, *, against: str | None = None) -> list[Path]:
    """index.html, table.csv, table.tex, table.md and rows.csv in the run folder, and truth.csv
    where the truth was measured."""
    plan = store.plan()
    results = read_results(store, plan)
    status = inspect(store, plan, results.condition)
    table, truth = table_of(results.values, against=against), against_truth(results)
    sections = [
        table_section(table, methods=summaries(plan)),
        *truth_section(truth),
        *curves_section(results, plan),
        *cost_section(results, plan, table),
        gallery_section(results, plan, reference=table.reference),
        run_protocol(plan),
        holes_section(status, plan),
    ]
    opening = (
        f"{_counted(len(plan.samples), 'image')} of {plan.data['name']},"
        f" {_counted(len(plan.request.methods), 'method')}."
    )
    page = write_page(
        store.folder / "index.html",
        f"Which method is faithful on {plan.request.model}?",
        sections,
        lead=lead(plan, status, opening),
    )
    tables = write_tables(store.folder, table, results)
    return [page, *tables, *write_truth(store.folder, truth)]


def write_tables(folder: Path, table: Table, results: RunResults) -> list[Path]:
    """table.csv, table.tex and table.md; rows.csv with every number behind them."""
    texts = {
        "table.csv": to_csv(table),
        "table.tex": to_latex(table),
        "table.md": to_markdown(table),
    }
    for name, text in texts.items():
        write_atomic(folder / name, text)
    write_rows(results, folder / "rows.csv")
    return [*(folder / name for name in texts), folder / "rows.csv"]


def write_truth(folder: Path, truth: Truth) -> list[Path]:
    """truth.csv; none is left of an earlier command that measured more."""
    path = folder / "truth.csv"
    if not truth:
        path.unlink(missing_ok=True)
        return []
    write_atomic(path, truth_csv(truth))
    return [path]


def table_section(
    table: Table,
    *,
    title: str = "Which method is best?",
    what: str = "method",
    methods: Mapping[str, str] | None = None,
) -> Section:
    """Every method by every metric. Below it: what the metrics measure, and what the `methods`
    are."""
    note = (
        "Mean ± standard error over images, and the 95 % bootstrap interval of the mean under it;"
        " none where all images are alike in the digits shown, which does not make the mean"
        " certain. ↑ higher is better, ↓ lower is. ★ marks the best mean, all of them where"
        " several are equal as shown, none where all are. Intervals that overlap much are no"
        f" ranking. The last line of a cell is the difference to {table.reference}, image by image:"
        f" the sharpest comparison of two {what}s."
    )
    higher = {metric: higher_is_better(metric) for metric in table.metrics}
    meanings = {metric: meaning_of(metric) for metric in table.metrics}
    terms = {metric: meaning for metric, meaning in meanings.items() if meaning}
    terms |= methods or {}
    return Section(
        title,
        fragment(
            "bench_table.html.j2", table=table, higher=higher, digits=_digits(table), what=what
        ),
        note,
        terms,
        short="Table",
    )


def _digits(table: Table) -> dict[str, int]:
    """Decimals to read: those of the table, but no more than four digits of the largest mean."""
    digits = {}
    for metric in table.metrics:
        cells = [row[metric] for row in table.cells.values()]
        means = [abs(cell.mean) for cell in cells if cell.n]
        largest = max((mean for mean in means if mean < math.inf), default=1.0)
        room = 3 - math.floor(math.log10(largest)) if largest > 0 else 6
        digits[metric] = max(3, min(table.digits(metric), room))
    return digits


def summaries(plan: Plan) -> dict[str, str]:
    """What each method of a run does."""
    return {
        name: find(plan.request.method(name), plan.model["architecture"]).summary.replace("`", "")
        for name in plan.request.methods
    }


def truth_section(truth: Truth) -> list[Section]:
    """The FunnyBirds scores; none if they were not measured."""
    if not truth:
        return []
    means = [row["mean of the three"] for row in truth.values()]
    top = max((mean for mean in means if mean == mean), default=None)
    best = [place for place, mean in enumerate(means) if mean == top]
    rows = [(method, *score_texts(row)) for method, row in truth.items()]
    note = (
        "What each part of a creature is worth to the model is measured by drawing the picture"
        " again without it. Completeness: are the parts that decide declared important, and no"
        " others? Correctness: are the parts ranked by what they are worth? Contrastivity: does the"
        " map follow the class it is asked about? All from 0 to 1, over all pictures; read them"
        " beside those of a control such as random. The best mean of the three is shaded."
    )
    body = table(rows, head=("method", *TRUTH_COLUMNS), marked=best)
    return [Section("Against the truth", body, note, short="Truth")]


def curves_section(results: RunResults, plan: Plan) -> list[Section]:
    """Mean curves of each method; none if curves were not measured."""
    if not len(results.shares):
        return []
    looks, shares = styled(list(plan.request.methods)), results.shares.tolist()
    means: dict[str, list[Series]] = {"insertion": [], "deletion": []}
    for kind, series in means.items():
        for method, curves in results.curves.items():
            if kind in curves:
                series.append(mean_series(method, curves[kind], looks[method], x=shares))
    insertion, deletion = means.values()
    # probabilities, unless logits were asked for
    share = all(0 <= y <= 1 for curve in (*insertion, *deletion) for y in curve.y)
    same = [kind for kind, curves in means.items() if _tell_nothing(curves)]
    charts = [
        chart(
            curves,
            title=f"{kind}, mean and standard error",
            x_title=f"share of the picture {done}",
            y_title="class score",
            share=share,
            beside=others,
        )
        for kind, done, curves, others in (
            ("insertion", "uncovered", insertion, deletion),
            ("deletion", "covered", deletion, insertion),
        )
        if kind not in same
    ]
    note = (
        "The most important pixels first. A faithful map makes insertion rise early and deletion"
        " fall early."
    )
    if same:
        note += (
            f" Not drawn: {' and '.join(same)}, which is one line for all maps, or flat. It tells"
            " nothing here."
        )
    if "insertion" in same and insertion[0].y[0] > 0.9 * insertion[0].y[-1]:
        note += (
            " The picture that insertion begins with (blurred, if nothing else was asked for) is"
            " answered like the whole one."
        )
    title = "Does the answer follow the map?"
    return [Section(title, chart_row(charts, looks), note, short="Curves")]


def cost_section(results: RunResults, plan: Plan, table: Table) -> list[Section]:
    """Seconds for each image against the headline metric."""
    metric, looks, spent = headline(plan), styled(list(plan.request.methods)), results.seconds
    cells = {
        method: table.cells[method][metric]
        for method in plan.request.methods
        if spent[method] and table.cells[method][metric].n
    }
    if not cells:
        return []
    series = [
        Series(m, [statistics.median(spent[m])], [cell.mean], [cell.error], *looks[m])
        for m, cell in cells.items()
    ]
    drawn = chart(
        series,
        title=f"{metric} against cost",
        x_title="seconds for one image, logarithmic",
        y_title=metric,
        log=True,
    )
    request = plan.request
    note = (
        "Attribution alone, without reading and measuring; the median over shards of"
        f" {request.shard_size} images, on {request.device} with"
        f" {_counted(request.threads, 'thread')} in each worker. Bars are standard errors."
    )
    return [Section("What does faithfulness cost?", chart_row([drawn]), note, short="Cost")]


def run_protocol(plan: Plan) -> Section:
    """Everything needed to get the same numbers again."""
    request, model, data = plan.request, plan.model, plan.data
    prints = [f"fingerprint {part['fingerprint']}" for part in (model, data)]
    memory = f"{(request.memory or 0) >> 20} MiB of activations"
    threads = _counted(request.threads, "thread")
    rows = {
        "model": request.model + (" with RANDOM weights" if model["random_weights"] else ""),
        "weights": f"{request.weights or 'as published'}, {prints[0]}",
        "data": f"{data['name']}, {len(plan.samples)} images, {prints[1]}",
        "explained class": "the true one" if request.target == "label" else "the model's answer",
    }
    for name, options in request.methods.items():
        rows[f"method {name}"] = _called(plan, name) + _spelled(options)
    for name, options in request.measures.items():
        rows[f"metrics, {name}"] = _spelled(options)
    rows |= {
        "seed, dtype, device": f"{request.seed}, {request.dtype}, {request.device}",
        "shards": f"{request.shard_size} images, {threads}, {memory}",
        "versions": ", ".join(f"{name} {version}" for name, version in plan.versions.items()),
    }
    note = f"{AGAIN}, bit for bit on the same kind of CPU, with any number of workers."
    return Section("Protocol", protocol_table(rows.items()), note)


def holes_section(status: Status, plan: Plan) -> Section:
    """What is not there, and why."""
    shards = {
        shard.id: f"{shard.method}, images {shard.start}-{shard.stop - 1}" for shard in plan.shards
    }
    missing = Counter((hole.image, hole.reason) for hole in status.holes)
    holes = [
        *((name, "gone", "an earlier run had it; the data has it no more") for name in status.gone),
        *((shards[shard], "failed", reason) for shard, reason in status.failed.items()),
        *((shards[shard], "damaged", reason) for shard, reason in status.damaged.items()),
        *((image, _counted(count, "value"), reason) for (image, reason), count in missing.items()),
        *(
            (metric, _counted(count, "value"), UNDEFINED)
            for metric, count in status.undefined.items()
        ),
        *(
            (method, _counted(count, "image"), "not run yet: run the same command again")
            for method, count in status.not_run().items()
        ),
    ]
    counts = {
        "images": len(plan.samples),
        "methods": len(plan.request.methods),
        "metrics": len(plan.request.metrics),
    }
    note = f"The first {LISTED} of {len(holes)}; rows.csv has all." if len(holes) > LISTED else ""
    return Section("Holes", fragment("bench_holes.html.j2", holes=holes[:LISTED], **counts), note)


def _tell_nothing(curves: Sequence[Series], apart: float = 0.005) -> bool:
    """No two differ anywhere by what an eye could see; a curve alone is flat."""
    steps = zip(*(curve.y for curve in curves), strict=True)
    compared = [curve.y for curve in curves] if len(curves) == 1 else list(steps)
    return bool(curves) and all(max(values) - min(values) < apart for values in compared)


def _called(plan: Plan, name: str) -> str:
    """The method behind a name that is none itself."""
    method = plan.request.method(name)
    return "" if method == name else f"{method} with "


def _spelled(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "no options"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def lead(plan: Plan, status: Status, opening: str) -> str:
    """The opening, and what a reader must know before any number."""
    parts = [opening]
    if plan.model["random_weights"]:
        parts.append("The model has random weights: its answers mean nothing.")
    if not status.complete:
        parts.append(
            f"Not complete: {status.done} of {status.total} shards, {len(status.holes)} values"
            " missing; see Holes."
        )
    return " ".join(parts)
