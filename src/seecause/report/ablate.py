"""The page of an ablation: scores and paired differences, how alike the maps are, and for layers
where the class token looks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from seecause._files import write_atomic
from seecause.bench.ablate import STUDIES, Agreement, Depth, agreement_of, read_depth
from seecause.bench.measures import higher_is_better
from seecause.bench.plan import Plan, Store
from seecause.bench.results import read_results
from seecause.bench.runner import inspect
from seecause.bench.tables import Table, table_of
from seecause.metrics import summarise
from seecause.report import bench
from seecause.report.bench_gallery import gallery_section
from seecause.report.cards import GridCell
from seecause.report.charts import Difference, Series, chart, forest, styled
from seecause.report.folder import rows_csv
from seecause.report.page import Section, chart_row, fragment, write_page

INTERVAL = 1.96  # standard errors: 95 %


def write_report(store: Store, *, against: str | None = None) -> list[Path]:
    """The report of a run folder, whatever was run: a benchmark, or an ablation."""
    plan = store.plan()
    if not plan.request.study:
        return bench.write_report(store, against=against)
    results = read_results(store, plan)
    status = inspect(store, plan, results.condition)
    table, alike = table_of(results.values, against=against), agreement_of(results.maps)
    layers = plan.request.study == "layers"
    sections = [
        bench.table_section(table, title="Do the scores change?", what="setting"),
        *(sweep_section(table, plan) if layers else differences_section(table)),
        agreement_section(alike),
        *(depth_section(read_depth(store), plan) if layers else []),
        gallery_section(results, plan, reference=table.reference),
        bench.run_protocol(plan),
        bench.holes_section(status, plan),
    ]
    opening = (
        f"CAAP on {plan.request.model} with {len(plan.request.methods)} settings;"
        f" {len(plan.samples)} images of {plan.data['name']}."
    )
    page, title = store.folder / "index.html", STUDIES[plan.request.study]
    write_page(page, title, sections, lead=bench.lead(plan, status, opening))
    write_atomic(store.folder / "agreement.csv", agreement_csv(alike))
    tables = bench.write_tables(store.folder, table, results)
    return [page, *tables, store.folder / "agreement.csv"]


def differences_section(table: Table) -> list[Section]:
    """Paired differences from the default, a panel for each metric."""
    charts = []
    for metric in table.metrics:
        known = {name: cells[metric].difference for name, cells in table.cells.items()}
        rows = [
            Difference(name, gap.mean, INTERVAL * gap.standard_error)
            for name, gap in known.items()
            if gap is not None and gap.n
        ]
        if rows:
            x_title = f"difference to {table.reference}"
            charts.append(forest(rows, title=_headed(metric), x_title=x_title))
    note = (
        f"Differences to {table.reference}, image by image, with 95 % intervals. A hollow dot may"
        " be no difference at all."
    )
    title = "How far from the default?"
    return [Section(title, chart_row(charts), note, short="Differences")] if charts else []


def sweep_section(table: Table, plan: Plan) -> list[Section]:
    """Scores against the first patched layer, where it has an effect, and against the last."""
    kinds = {
        kind: plan.request.methods[name]
        for kind in ("from", "to")
        for name in table.methods
        if name.startswith(kind)
    }  # options of one of each
    looks = styled(list(kinds))
    charts = []
    for metric in table.metrics:
        series = [_sweep(table, metric, kind, look) for kind, look in looks.items()]
        drawn = [line for line in series if line.x]
        if drawn:
            x_title = "layer; 0 is the embedding"
            charts.append(chart(drawn, title=_headed(metric), x_title=x_title, y_title=metric))
    note = f"To l: the embedding to layer l are patched (tail={kinds['to']['tail']})."
    if "from" in kinds:
        last, tail = kinds["from"]["layers"][1], kinds["from"]["tail"]
        end = "the end" if last is None else last
        note = f"From l: layers l to {end} are patched (tail={tail}). {note}"
    else:
        note += (
            " The first patched layer has no effect here: this model has no class token that is"
            " computed meanwhile."
        )
    note += " Bands are standard errors."
    names = {"from": "from this layer on", "to": "up to this layer"}
    keys = {f"{names[kind]}, tail {kinds[kind]['tail']}": look for kind, look in looks.items()}
    title = "Which layers are needed?"
    return [Section(title, chart_row(charts, keys), note, short="Layers")] if charts else []


def agreement_section(result: Agreement) -> Section:
    values = zip(result.names, result.mean.tolist(), result.error.tolist(), strict=True)
    rows = [(name, list(map(_shade, means, errors))) for name, means, errors in values]
    note = (
        "Spearman's rank correlation between the maps under two settings, mean over"
        f" {result.images} images: 1 is the same order of patches, 0 is no relation. Point at a"
        " cell for its standard error."
    )
    body = fragment("shaded.html.j2", corner="", names=result.names, rows=rows)
    return Section("Are the maps the same?", body, note, short="Maps")


def depth_section(result: Depth | None, plan: Plan) -> list[Section]:
    """Attention of the class token to object and background, block by block."""
    title = "Where does the class token look?"
    if result is None:
        why = (
            f"This needs masks and a class token that is read; {plan.data['name']} or"
            f" {plan.request.model} has none."
        )
        return [Section(title, chart_row([]), why)]
    on_object, on_background, alike = (
        "a patch of the object",
        "a patch of the background",
        "any patch, if all were alike",
    )
    looks, blocks = styled([on_object, on_background, alike]), result.on_object.shape[1]
    curves = [
        _curve(on_object, result.on_object, looks[on_object]),
        _curve(on_background, result.on_background, looks[on_background]),
        Series(alike, range(1, blocks + 1), [result.uniform] * blocks, (), *looks[alike]),
    ]
    drawn = chart(
        curves,
        title="attention to one patch, mean over images and heads",
        x_title="block",
        y_title="attention of the class token",
    )
    note = (
        "Where the first curve is above the second, the class token takes more from the object."
        " Bands are standard errors."
    )
    return [Section(title, chart_row([drawn], looks), note, short="Attention")]


def agreement_csv(result: Agreement) -> str:
    """One line for each pair of settings."""
    rows = []
    for i, j in torch.tril_indices(len(result.names), len(result.names), -1).T.tolist():
        row: dict[str, str | float] = {"setting": result.names[i]}
        row["other setting"] = result.names[j]
        row["rank correlation"] = float(result.mean[i, j])
        row["standard error"] = float(result.error[i, j])
        rows.append({**row, "images": result.images})
    return rows_csv(rows)


def _sweep(table: Table, metric: str, kind: str, look: tuple[str, str]) -> Series:
    """The settings called `from l` or `to l`, in order of l."""
    cells = {
        int(name.split()[1]): table.cells[name][metric]
        for name in table.methods
        if name.split()[0] == kind
    }
    known = {layer: cell for layer, cell in sorted(cells.items()) if cell.n}
    return Series(
        kind,
        list(known),
        [cell.mean for cell in known.values()],
        [cell.error for cell in known.values()],
        *look,
    )


def _curve(name: str, values: Tensor, look: tuple[str, str]) -> Series:
    means = [summarise(column) for column in values.T]
    return Series(
        name,
        range(1, len(means) + 1),
        [column.mean for column in means],
        [column.standard_error for column in means],
        *look,
    )


def _headed(metric: str) -> str:
    """A metric, and where it is better."""
    return f"{metric} ({'higher' if higher_is_better(metric) else 'lower'} is better)"


def _shade(mean: float, error: float) -> GridCell:
    """What a cell says, and how dark it is; a correlation below 0 is as light as 0."""
    if mean != mean:
        return GridCell(0, "none", "--", "no value")
    return GridCell(
        round(60 * max(0.0, mean)),
        "for",
        f"{mean:z.2f}",
        f"{mean:z.4f}" + ("" if error != error else f" ± {error:.4f}"),
    )
