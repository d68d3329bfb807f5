"""The page and the figure of an experiment, with printed values beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from seecause.bench.tables import Table, texts_of
from seecause.experiments.base import Experiment, Row, line_of
from seecause.files import write_atomic
from seecause.report import Section, protocol_section, rows_csv, table as facts, write_page
from seecause.report.figures import Line, chart, charts

Points = dict[Any, tuple[float, float]]  # mean and error by place


def write_results(
    home: Path, found: Experiment, table: Table, rows: Sequence[Row], record: Mapping[str, Any]
) -> Path:
    """Write rows.csv, figure-N.svg for each panel of a figure, and index.html."""
    write_atomic(home / "rows.csv", rows_csv(rows))
    seeds = all(str(row["image"]).startswith("seed ") for row in rows)
    over = "trainings" if seeds else "images"
    note = (
        f"Mean ± standard error over {over}; ★ is best. In brackets: what the paper printed."
        f" table.csv has the differences to {table.reference}. {found.differs}"
    )
    arrows = {"higher": "↑", "lower": "↓"}
    head, *lines = texts_of(table, {}, arrows, "{} ± {}", "{} ± {} ★")
    sections = [Section("Table", facts(lines, head=head), note)]
    drawn = panels(found, table, rows) if found.figure else []
    for number, panel in enumerate(drawn, start=1):
        write_atomic(home / f"figure-{number}.svg", panel[panel.index("<svg") : -len("</figure>")])
    if drawn:
        sections.insert(0, Section("Figure", charts(drawn), "Mean and standard error over images."))
    setting = {**record["setting"], "model": record["setting"]["models"]}
    sections.append(protocol_section([{**record, **setting, "question": found.question}]))
    missing = f" {record['cells'] - record['done']} of {record['cells']} cells are missing."
    lead = found.question + (missing if record["done"] < record["cells"] else "")
    title = f"{found.name}: {record['title']}" if record["title"] else found.name
    return write_page(home / "index.html", title, sections, lead=lead)


def panels(found: Experiment, table: Table, rows: Sequence[Row]) -> list[Markup]:
    """Lines or a heat map along x, a panel for each model and value; bars or a radar over models, a
    panel for each value."""
    along, drawn = found.figure in ("lines", "heat"), dict[str, dict[str, Points]]()
    for name, row in {line_of(found, row): row for row in rows}.items():
        group = ", ".join(str(row[key]) for key in ("model", "data") if row.get(key))
        for value, cell in table.cells[name].items():
            points = drawn.setdefault(f"{group}: {value}" if along else value, {})
            place = row[found.x] if along else group
            points.setdefault(str(row[found.by]), {})[place] = (cell.mean, cell.error)

    def line(points: Points) -> Line:
        means, errors = zip(*points.values(), strict=True)
        return Line([*points], means, errors)

    return [
        chart(
            {name: line(points) for name, points in by.items()},
            title=title, x=found.x, y=title, kind=found.figure or "lines",
        )
        for title, by in drawn.items()
    ]  # fmt: skip
