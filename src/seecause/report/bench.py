"""The page of a benchmark run: table, curves, cost, images, protocol and what is missing. Made from
the run folder alone, finished or not."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from torch import Tensor

from seecause.attribution.registry import find, is_signed
from seecause.bench.cells import Plan
from seecause.bench.measures import UNDEFINED, higher_is_better, meaning_of
from seecause.bench.runner import Status
from seecause.bench.tables import (
    Results,
    Table,
    TableCell,
    read_results,
    table_of,
    to_csv,
    to_latex,
    to_markdown,
    write_rows,
)
from seecause.data.batch import raw_in_frame
from seecause.data.dataset import evenly
from seecause.data.registry import open_data
from seecause.errors import BadImage, DataMissing
from seecause.files import csv_text, write_atomic
from seecause.metrics import rank_correlation
from seecause.models.preprocess import Preprocess
from seecause.report.figures import Line, chart, charts, fixed, mean_line, number, scale_of
from seecause.report.pages import (
    REPRODUCE,
    Card,
    MapView,
    Section,
    Strip,
    cards_html,
    part,
    table as facts,
    write_page,
)

LISTED = 100  # missing values that a page lists
SHOWN = 3  # images of each kind
COMPARED = 2000  # images whose maps are compared, spread evenly
APART = 0.005  # curves that differ less than this look the same
TRUTH = {  # columns of the truth, and their titles
    "completeness": "completeness",
    "threshold": "at threshold",
    "correctness": "correctness",
    "contrastivity": "contrastivity",
    "overall": "mean of the three",
}


def write_report(folder: str | Path, *, against: str | None = None) -> list[Path]:
    """Write index.html, table.csv, table.tex, table.md and rows.csv into the run folder, and
    truth.csv where the truth was measured; `against` is the method that others are compared
    with."""
    folder = Path(folder)
    results = read_results(folder)
    plan, status, truth = results.plan, results.status, results.truth()
    table = table_of(results.values, against=against)
    sections = [
        table_section(table, methods=summaries(plan)),
        *truth_section(truth),
        *curves_section(results, plan),
        *cost_section(results, plan, table),
        gallery_section(results, plan, reference=table.reference),
        run_protocol(plan),
        missing_section(status, plan),
    ]
    title = f"Which method is faithful on {plan.request.model}?"
    page = write_page(folder / "index.html", title, sections, lead=_lead(plan, status))
    texts = {"csv": to_csv(table), "tex": to_latex(table), "md": to_markdown(table)}
    files = [page, *(folder / f"table.{suffix}" for suffix in texts), folder / "rows.csv"]
    for path, text in zip(files[1:], texts.values(), strict=False):
        write_atomic(path, text)
    write_rows(results, folder / "rows.csv")
    if truth:
        rows = [[method, *row.values()] for method, row in truth.items()]
        write_atomic(folder / "truth.csv", csv_text([["method", *TRUTH.values()], *rows]))
        return [*files, folder / "truth.csv"]
    (folder / "truth.csv").unlink(missing_ok=True)  # of an earlier command that measured more
    return files


def _lead(plan: Plan, status: Status) -> str:
    parts = [
        f"{_counted(plan.data['images'], 'image')} of {plan.data['name']},"
        f" {_counted(len(plan.request.methods), 'method')}."
    ]
    if plan.model["random_weights"]:
        parts.append("The model has random weights: its predictions mean nothing.")
    if not status.complete:
        parts.append(
            f"Not complete: {status.done} of {status.total} cells, {len(status.holes)} values"
            " missing; see the last section."
        )
    return " ".join(parts)


def table_section(
    table: Table,
    *,
    title: str = "Which method is best?",
    methods: Mapping[str, str] | None = None,
) -> Section:
    """Every method by every metric, and what metrics and `methods` are."""
    body = Markup("")
    for name, metrics in table.column_groups():
        digits = {metric: _digits(table, metric) for metric in metrics}
        arrows = {metric: "↑" if table.better[metric] == "higher" else "↓" for metric in metrics}
        rows = [
            (method, *(_cell(table, method, metric, digits[metric]) for metric in metrics))
            for method in table.methods
        ]
        head = ("method", *(f"{metric} {arrow}" for metric, arrow in arrows.items()))
        body += Markup('<h3 class="gallery-head">{}</h3>').format(name) if name else ""
        body += facts(rows, head=head)
    note = (
        "Mean ± standard error over images, and the 95 % bootstrap interval of the mean under it;"
        " none where all images have the same value as shown. ↑ higher is better, ↓ lower is. ★"
        " marks the best mean, all of them where several are equal as shown, none where all are."
        " Intervals that overlap much are no ranking. The last line of a cell is the difference to"
        f" {table.reference}, image by image: the sharpest comparison of two methods."
    )
    meanings = {metric: meaning_of(metric) for metric in table.metrics}
    terms = {metric: meaning for metric, meaning in meanings.items() if meaning}
    return Section(title, body, note, {**terms, **(methods or {})}, short="Table")


def _digits(table: Table, metric: str) -> int:
    """Decimals to read: those of the table, but no more than four digits of the largest mean."""
    cells = [row[metric] for row in table.cells.values()]
    means = [abs(cell.mean) for cell in cells if cell.n and math.isfinite(cell.mean)]
    largest = max(means, default=1.0)
    room = 3 - math.floor(math.log10(largest)) if largest > 0 else 6
    return max(3, min(table.digits(metric), room))


def _cell(table: Table, method: str, metric: str, digits: int) -> Markup:
    cell: TableCell = table.cells[method][metric]
    lines, zero = [Markup("no value")], fixed(0.0, digits)
    if cell.n:
        low, high = (fixed(end, digits) for end in cell.interval)
        mean = Markup("<b>{}</b>").format(fixed(cell.mean, digits))
        if cell.n > 1 and low != high:
            error = fixed(cell.error, digits)
            mean += f" ± {f'<{10.0**-digits:g}' if error == zero and cell.error > 0 else error}"
        star = Markup(' <span class="mark" title="the best mean">★</span>')
        images = "one image" if cell.n < 2 else f"{cell.n} images alike"
        lines = [mean + star if cell.best else mean, f"[{low}, {high}]" if low != high else images]
    if (gap := cell.difference) is not None:
        mean, error = fixed(gap.mean, digits, "+"), fixed(gap.standard_error, digits)
        none = fixed(gap.mean, digits) == error == zero
        lines.append("no difference" if none else f"{mean} ± {error}")
    if cell.missing:
        missing = f"{cell.missing} of {cell.n + cell.missing} missing"
        lines.append(Markup('<span class="mark">{}</span>').format(missing))
    below = Markup("").join(Markup("<small>{}</small>").format(line) for line in lines[1:])
    return Markup("{}{}").format(lines[0], below)


def summaries(plan: Plan) -> dict[str, str]:
    """What each method of a run does."""
    return {
        name: find(plan.request.method(name), plan.model["architecture"]).summary.replace("`", "")
        for name in plan.request.methods
    }


def truth_section(truth: Mapping[str, Mapping[str, float]]) -> list[Section]:
    """The FunnyBirds scores; none if they were not measured."""
    if not truth:
        return []
    means = [row["overall"] for row in truth.values()]
    top = max((mean for mean in means if mean == mean), default=None)
    best = [place for place, mean in enumerate(means) if mean == top]
    rows = [
        (method, *("-" if value != value else f"{value:.3f}" for value in row.values()))
        for method, row in truth.items()
    ]
    note = (
        "The effect of each part of a creature on the model is measured by drawing the image again"
        " without it. Completeness: are the parts that decide declared important, and no others?"
        " Correctness: are the parts ranked by their effects? Contrastivity: does the map follow"
        " the class it is asked about? All from 0 to 1, over all images; read them beside those of"
        " a control such as random. The best mean of the three is shaded."
    )
    body = facts(rows, head=("method", *TRUTH.values()), marked=best)
    return [Section("Against the truth", body, note, short="Truth")]


def curves_section(results: Results, plan: Plan) -> list[Section]:
    """Mean insertion and deletion curves of each method; none if they were not measured."""
    shares, by_method = results.shares().tolist(), results.curves()
    if not shares or not by_method:
        return []
    drawn, same = [], []
    note = (
        "The most important pixels first. A faithful map makes insertion rise early and deletion"
        " fall early."
    )
    for kind, done in (("insertion", "uncovered"), ("deletion", "covered")):
        lines = {
            method: mean_line(curves[kind], shares, control=_is_control(plan, method))
            for method, curves in by_method.items()
            if kind in curves
        }
        steps = list(zip(*(line.y for line in lines.values()), strict=True))
        compared = steps if len(lines) > 1 else [line.y for line in lines.values()]
        if lines and all(max(values) - min(values) < APART for values in compared):
            same.append(kind)
            first = next(iter(lines.values())).y
            if kind == "insertion" and first[0] > 0.9 * first[-1]:
                note += " The image that insertion begins with is predicted like the whole one."
            continue
        # probabilities, unless logits were asked for
        share = all(0 <= y <= 1 for line in lines.values() for y in line.y)
        titles = {"x": f"share of the image {done}", "y": "class score"}
        drawn.append(chart(lines, title=f"{kind}, mean and standard error", share=share, **titles))
    if same:
        note += f" Not drawn: {' and '.join(same)}, which is one line for all maps, or flat."
    return [Section("Does the prediction follow the map?", charts(drawn), note, short="Curves")]


def _is_control(plan: Plan, name: str) -> bool:
    return find(plan.request.method(name), plan.model["architecture"]).forwards == "0"


def cost_section(results: Results, plan: Plan, table: Table) -> list[Section]:
    """Seconds for each image against the headline metric."""
    metric, spent, request = headline(plan), results.seconds(), plan.request
    cells = {method: table.cells[method][metric] for method in request.methods if spent[method]}
    lines = {
        method: Line(
            [statistics.median(spent[method])], [cell.mean], [cell.error], _is_control(plan, method)
        )
        for method, cell in cells.items()
        if cell.n
    }
    if not lines:
        return []
    title, x = f"{metric} against cost", "seconds for one image, logarithmic"
    note = (
        "Attribution alone, without reading and measuring; the median over cells of"
        f" {request.cell_size} images, on {request.device} with"
        f" {_counted(request.threads, 'thread')} in each worker. Bars are standard errors."
    )
    body = charts([chart(lines, title=title, x=x, y=metric, log=True)])
    return [Section("What does faithfulness cost?", body, note, short="Cost")]


def gallery_section(results: Results, plan: Plan, *, reference: str, shown: int = SHOWN) -> Section:
    """Cards with the maps of all methods, `shown` of each kind. Images are read again; where they
    are gone, the section says so."""
    title, metric = "Which images show most?", headline(plan)
    higher = higher_is_better(metric)
    scores = {method: columns[metric] for method, columns in results.values.items()}
    picked = {
        f"{reference} does best": _ranked(scores[reference], higher=higher),
        f"{reference} does worst": _ranked(scores[reference], higher=not higher),
        "methods disagree most": _disagreed(plan, results),
    }
    body = Markup("")
    try:
        data = open_data(plan.request.data, limit=plan.request.limit)
        for kind, indices in picked.items():
            cards = [_card(index, data[index], plan, results, scores) for index in indices[:shown]]
            if cards:
                body += Markup('<h3 class="gallery-head">{}</h3>').format(kind) + cards_html(cards)
    except (BadImage, DataMissing) as gone:
        return Section(title, Markup("<p>The images cannot be read any more: {}</p>").format(gone))
    note = (
        f"Best and worst by {metric}, the number beside each method. Methods disagree where their"
        " maps correlate least (ranks), without controls. Dark to bright: low to high; where"
        " colours run from blue to red, red is for the class and blue against."
    )
    body = Markup('<div class="gallery">{}</div>').format(body)
    return Section(title, body, note, short="Images")


def headline(plan: Plan) -> str:
    """The one metric that orders images and methods."""
    return "ins-del" if "ins-del" in plan.request.metrics else plan.request.metrics[0]


def _ranked(scores: Tensor, *, higher: bool) -> list[int]:
    filled = scores.nan_to_num(-torch.inf if higher else torch.inf)
    order = filled.argsort(descending=higher, stable=True).tolist()
    return [index for index in order if not bool(scores[index].isnan())][:SHOWN]


def _disagreed(plan: Plan, results: Results) -> list[int]:
    """The samples whose maps correlate least between methods; controls, which do not run the model,
    only count if nothing else is there."""
    compared = evenly(range(plan.data["images"]), COMPARED)
    maps = {method: results.details(method, "map", compared) for method in results.rows}
    methods = [method for method in maps if not _is_control(plan, method)]
    methods = methods if len(methods) > 1 else list(maps)
    shared = sorted(set.intersection(*(set(maps[method]) for method in methods)))
    pairs = list(itertools.combinations(methods, 2))
    if not pairs or not shared:
        return []
    stacked = {method: torch.stack([maps[method][index] for index in shared]) for method in methods}
    alike = [rank_correlation(stacked[a], stacked[b]).nan_to_num() for a, b in pairs]
    order = torch.stack(alike).mean(dim=0).argsort(stable=True).tolist()
    return [shared[place] for place in order[:SHOWN]]


def _card(
    index: int, sample: Any, plan: Plan, results: Results, scores: Mapping[str, Tensor]
) -> Card:
    views = []
    for method in results.rows:
        values = results.details(method, "map", [index]).get(index)
        if values is not None:
            signed = is_signed(plan.request.method(method), plan.model["architecture"])
            title = f"{method} {number(float(scores[method][index]))}"
            views.append(MapView(title, values, scale_of(values, signed=signed)))
    frame = Preprocess(**{**plan.model["frame"], "size": tuple(plan.model["frame"]["size"])})
    predicted = _named(plan.model["classes"], int(results.answers["predicted"][index]))
    truth = "" if sample.label is None else f"; it is {_named(plan.data['classes'], sample.label)}"
    strip = Strip(raw_in_frame(frame, sample.image), views)
    return Card(sample.id, [strip], caption=f"prediction: {predicted}{truth}")


def _named(names: Sequence[str], place: int) -> str:
    return names[place] if 0 <= place < len(names) else f"class {place}"


def run_protocol(plan: Plan) -> Section:
    """Everything needed to get the same numbers again."""
    request, model, data = plan.request, plan.model, plan.data
    threads, memory = _counted(request.threads, "thread"), f"{(request.memory or 0) >> 20} MiB"
    rows = {
        "model": request.model + (" with RANDOM weights" if model["random_weights"] else ""),
        "weights": f"{request.weights or 'as published'}, fingerprint {model['fingerprint']}",
        "data": f"{data['name']}, {data['images']} images, fingerprint {data['fingerprint']}",
        "explained class": "the true one" if request.target == "label" else "the predicted one",
    }
    for name, options in request.methods.items():
        method = request.method(name)
        called = "" if method == name else f"{method} with "
        rows[f"method {name}"] = called + _spelled(options)
    rows |= {f"metrics, {name}": _spelled(options) for name, options in request.measures.items()}
    rows |= {
        "seed, dtype, device": f"{request.seed}, {request.dtype}, {request.device}",
        "cells": f"{request.cell_size} images, {threads}, {memory} of activations",
        "versions": ", ".join(f"{name} {version}" for name, version in plan.versions.items()),
    }
    note = f"{REPRODUCE}, bit for bit on the same kind of CPU, with any number of workers."
    return Section("Protocol", part("protocol", [{}, rows]), note, fold="Model, data, methods")


def missing_section(status: Status, plan: Plan) -> Section:
    """What is missing, and why."""
    cells = {c.name: f"{c.method}, images {c.start}-{c.stop - 1}" for c in plan.cells}
    missing = Counter((hole.image, hole.reason) for hole in status.holes)
    rows = [
        *((cells[name], "failed", text.rstrip()) for name, text in status.failed.items()),
        *((image, _counted(count, "value"), reason) for (image, reason), count in missing.items()),
        *((metric, _counted(n, "value"), UNDEFINED) for metric, n in status.undefined.items()),
        *(
            (method, _counted(count, "image"), "not run yet: run the same command again")
            for method, count in status.not_run().items()
        ),
    ]
    if not rows:
        counts = [plan.data["images"], len(plan.request.methods), len(plan.request.metrics)]
        text = "Nothing is missing: {} images x {} methods x {} metrics.".format(*counts)
        return Section("What is missing", Markup("<p>{}</p>").format(text))
    note = f"The first {LISTED} of {len(rows)}; rows.csv has all." if len(rows) > LISTED else ""
    return Section("What is missing", facts(rows[:LISTED]), note)


def _spelled(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "no options"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
