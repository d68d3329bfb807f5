"""The page of a benchmark run: table, curves, cost, images, protocol and what is missing. Made from
the run folder alone, finished or not."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from markupsafe import Markup
from torch import Tensor

from seecause.attribution.registry import is_signed
from seecause.bench.cells import Plan
from seecause.bench.runner import Status
from seecause.bench.tables import (
    Results,
    Table,
    read_results,
    write_rows,
    write_tables,
)
from seecause.data.batch import raw_in_frame
from seecause.data.dataset import Sample, open_data
from seecause.errors import BadImage, DataMissing, UnknownName
from seecause.files import write_atomic
from seecause.models.preprocess import Preprocess
from seecause.report import (
    Card,
    MapView,
    Section,
    Strip,
    cards_html,
    part,
    protocol_section,
    rows_csv,
    table as facts,
    write_page,
)
from seecause.report.figures import chart, charts, fixed, mean_line, number, scale_of

LISTED = 100  # maximum number of missing values on a page
SHOWN = 3  # images of each kind


def write_report(folder: str | Path, *, against: str | None = None) -> list[Path]:
    """Write index.html, table.csv, table.tex, table.md and rows.csv into the run folder, and
    truth.csv where the truth was measured; `against` is the method that others are compared
    with."""
    folder = Path(folder)
    results = read_results(folder)
    plan, status, truth = results.plan, results.status, results.truth()
    table = results.table(against)
    sections = [
        table_section(table, plan),
        *curves_section(results, plan),
        cost_section(results),
        gallery_section(results, table.reference),
        run_protocol(plan),
        missing_section(status),
    ]
    files = write_tables(table, folder)
    write_rows(results, folder / "rows.csv")
    files.append(folder / "rows.csv")
    if truth:
        rows = [{"method": method, **row} for method, row in truth.items()]
        shown = ([row["method"], *(fixed(v) for v in list(row.values())[1:])] for row in rows)
        note = "FunnyBirds: effects of the parts of a creature, by drawing it without each."
        sections.insert(1, Section("Against the truth", facts(shown, head=list(rows[0])), note))
        write_atomic(folder / "truth.csv", rows_csv(rows))
        files.append(folder / "truth.csv")
    else:
        (folder / "truth.csv").unlink(missing_ok=True)  # of an earlier command that measured more
    title = f"Which method is faithful on {plan.request.model}?"
    lead = f"{plan.data['images']} images of {plan.data['name']}."
    if plan.model["random_weights"]:
        lead += " The model has random weights: its predictions mean nothing."
    if not status.complete:
        lead += f" Not complete: {status.done} of {status.total} cells; see the last section."
    return [write_page(folder / "index.html", title, sections, lead=lead), *files]


def table_section(table: Table, plan: Plan) -> Section:
    """The table of methods by metrics, with explanations."""
    body = part("methods", table, {metric: table.digits(metric) for metric in table.metrics})
    note = (
        "Mean ± standard error over images, and the 95 % bootstrap interval of the mean; ★ marks"
        " the best mean, ↑ higher is better. The last line of a cell is the difference to"
        f" {table.reference}, image by image: the sharpest comparison of two methods."
    )
    terms = {m: plan.columns[m]["meaning"] for m in table.metrics} | dict(plan.summaries)
    return Section("Which method is best?", body, note, terms)


def curves_section(results: Results, plan: Plan) -> list[Section]:
    """Mean insertion and deletion curves of each method; none if they were not measured."""
    by_method, drawn = results.curves(), []
    if not by_method:
        return []
    for kind, done in (("insertion", "uncovered"), ("deletion", "covered")):
        lines = {}
        for method, curves in by_method.items():
            shares = curves["shares"][0].tolist()
            lines[method] = mean_line(
                curves[f"{kind} curve"], shares, control=plan.controls[method]
            )
        title = f"{kind}, mean and standard error"
        drawn.append(chart(lines, title=title, x=f"share of the image {done}", y="class score"))
    note = "The most important pixels first: insertion should rise early, deletion fall early."
    return [Section("Does the prediction follow the map?", charts(drawn), note)]


def cost_section(results: Results) -> Section:
    """Seconds of attribution for each image."""
    spent = {method: seconds for method, seconds in results.seconds().items() if seconds}
    rows = [(method, number(statistics.median(seconds))) for method, seconds in spent.items()]
    request = results.plan.request
    note = (
        f"Attribution alone, the median over images, in cells of {request.cell_size}, on"
        f" {request.device} with {request.threads} threads in each worker."
    )
    return Section("What does it cost?", facts(rows, head=("method", "seconds an image")), note)


def gallery_section(results: Results, reference: str, *, shown: int = SHOWN) -> Section:
    """The images on which the reference is furthest ahead of the best other method, and furthest
    behind it, with all maps. Images are read again; where they are gone, the section says so."""
    plan, title = results.plan, "Which images show most?"
    metrics = plan.request.metrics
    metric = "ins-del" if "ins-del" in metrics else metrics[0]
    sign = 1 if plan.columns[metric]["better"] == "higher" else -1
    scores = {method: sign * results.values[method][metric] for method in results.rows}
    own = scores.pop(reference)
    rival = torch.stack([*scores.values()]).amax(dim=0) if scores else torch.zeros_like(own)
    ahead, body = own - rival, Markup("")
    known = ahead.isfinite().nonzero()[:, 0]
    ranked = known[ahead[known].argsort(descending=True, stable=True)].tolist()
    picked = {
        "ahead of": [index for index in ranked[:shown] if ahead[index] > 0],
        "behind": [index for index in ranked[::-1][:shown] if ahead[index] < 0],
    }
    try:
        data = open_data(plan.request.data, limit=plan.request.limit)
        maps = {method: results.details(method, "map") for method in results.rows}
        for kind, indices in picked.items():
            head = '<h3 class="gallery-head">{} is furthest {} the other methods</h3>'
            cards = [_card(index, data[index], results, maps, metric) for index in indices]
            if cards:
                body += Markup(head).format(reference, kind) + cards_html(cards)
    except (BadImage, DataMissing, UnknownName) as gone:
        return Section(title, Markup("<p>The images cannot be read any more: {}</p>").format(gone))
    note = f"By {metric}, the number beside each method."
    return Section(title, Markup('<div class="gallery">{}</div>').format(body), note)


def _card(
    index: int, sample: Sample, results: Results, maps: Mapping[str, dict[int, Tensor]], metric: str
) -> Card:
    plan, views = results.plan, []
    for method in results.rows:
        if (values := maps[method].get(index)) is not None:
            signed = is_signed(plan.request.method(method), plan.model["architecture"])
            title = f"{method} {number(float(results.values[method][metric][index]))}"
            views.append(MapView(title, values, scale_of(values, signed=signed)))
    frame = Preprocess(**{**plan.model["frame"], "size": tuple(plan.model["frame"]["size"])})
    rows = next(iter(results.rows.values())).select(["index", "predicted"]).to_pylist()
    places = {row["index"]: row["predicted"] for row in rows}
    predicted = _named(plan.model["classes"], places[index])
    truth = "" if sample.label is None else f"; it is {_named(plan.data['classes'], sample.label)}"
    strip = Strip(raw_in_frame(frame, sample.image), views)
    return Card(sample.id, [strip], caption=f"prediction: {predicted}{truth}")


def _named(names: Sequence[str], place: int) -> str:
    return names[place] if 0 <= place < len(names) else f"class {place}"


def run_protocol(plan: Plan) -> Section:
    """The protocol: everything needed to reproduce the numbers."""
    request = plan.request
    arithmetic = ("target", "seed", "cell_size", "threads", "memory", "weights")
    options = {name: getattr(request, name) for name in arithmetic}
    record = {
        "method": list(request.methods),
        "options": {**request.methods, **request.measures, **options},
        "model": request.model,
        "model_fingerprint": plan.model["fingerprint"],
        "random_weights": plan.model["random_weights"],
        "device": request.device,
        "dtype": request.dtype,
        "versions": plan.versions,
        "data": plan.data["name"],
        "data_fingerprint": plan.data["fingerprint"],
    }
    return protocol_section([record])


def missing_section(status: Status) -> Section:
    """Missing values, with reasons."""
    rows = missing_rows(status)
    body = facts(rows[:LISTED]) if rows else Markup("<p>Nothing is missing.</p>")
    note = f"The first {LISTED} of {len(rows)}; rows.csv has all." if len(rows) > LISTED else ""
    return Section("What is missing", body, note)


def missing_rows(status: Status) -> list[tuple[str, str]]:
    """Missing values of a run, with reasons."""
    missing = Counter((value.image, value.reason) for value in status.missing)
    return [
        *((f"cell {name}", f"failed: {text.strip()}") for name, text in status.failed.items()),
        *((method, f"not run on {count} images") for method, count in status.not_run().items()),
        *((image, f"{count} values missing: {why}") for (image, why), count in missing.items()),
    ]
