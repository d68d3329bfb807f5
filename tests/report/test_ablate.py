"""The page of an ablation shows what was measured, each number in its place."""

from __future__ import annotations

import csv
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from markupsafe import Markup

from seecause.bench.ablate import Agreement, Depth
from seecause.bench.tables import Cell, Table
from seecause.metrics.statistics import Summary
from seecause.report import ablate


@pytest.fixture
def drawn(monkeypatch):
    """What charts are given."""
    given = []

    def keep(lines, **options):
        given.append((lines, options))
        return Markup("")

    for name in ("chart", "forest"):
        monkeypatch.setattr(ablate, name, keep)
    return given


def cell(mean: float, gap: float | None = None) -> Cell:
    difference = None if gap is None else Summary(gap, 0.5, 4)
    return Cell(mean, mean / 10, (0.0, 1.0), 4, 0, difference)


def test_differences_have_intervals_of_95_percent(drawn):
    cells = {"white": {"insertion": cell(1.0)}, "black": {"insertion": cell(2.0, 1.0)}}
    (section,) = ablate.differences_section(
        Table(["white", "black"], ["insertion"], "white", cells)
    )
    (((row,), options),) = drawn
    assert (row.name, row.mean, row.reach) == ("black", 1.0, pytest.approx(0.98))
    assert options["title"] == "insertion (higher is better)"
    assert options["x_title"] == "difference to white" and "to white" in section.note
    assert ablate._headed("deletion") == "deletion (lower is better)"


def test_layers_are_swept_in_order_from_and_to(drawn):
    names = ["to 10", "to 2", "from 2", "from 0"]
    cells = {name: {"insertion": cell(place + 1.0)} for place, name in enumerate(names)}
    cells["from 2"]["insertion"] = replace(cells["from 2"]["insertion"], n=0)  # not known
    options = {"layers": (0, None), "tail": "patched"}
    plan = SimpleNamespace(request=SimpleNamespace(methods=dict.fromkeys(names, options)))
    ablate.sweep_section(Table(names, ["insertion"], "to 10", cells), plan)
    (((first, last), _),) = drawn
    assert (first.name, first.x, first.y, first.error) == ("from", [0], [4.0], [0.4])
    assert (last.name, last.x, last.y, last.error) == ("to", [2, 10], [2.0, 1.0], [0.2, 0.1])


def test_attention_has_a_curve_of_the_object_of_the_background_and_of_chance(drawn):
    on_object = torch.tensor([[0.1, 0.3], [0.3, 0.5]]).double()
    on_background = torch.tensor([[0.2, 0.1], [0.2, 0.2]]).double()
    ablate.depth_section(Depth(on_object, on_background, 0.05), None)
    ((curves, _),) = drawn
    assert [list(curve.x) for curve in curves] == [[1, 2]] * 3
    values = [curve.y for curve in curves]
    assert values == [pytest.approx(y) for y in ([0.2, 0.4], [0.2, 0.15], [0.05, 0.05])]
    assert curves[0].error == pytest.approx([0.1, 0.1])
    assert curves[1].error == pytest.approx([0.0, 0.05])
    assert curves[0].name == "a patch of the object"


def test_each_pair_of_settings_has_its_own_line_and_shade():
    mean = torch.tensor([[1.0, 0.5, -0.25], [0.5, 1.0, 0.75], [-0.25, 0.75, 1.0]])
    result = Agreement(("a", "b", "c"), mean, mean / 10, 3)
    rows = list(csv.DictReader(ablate.agreement_csv(result).splitlines()))
    pairs = [(row["setting"], row["other setting"]) for row in rows]
    assert pairs == [("b", "a"), ("c", "a"), ("c", "b")]
    assert [float(row["rank correlation"]) for row in rows] == [0.5, -0.25, 0.75]
    errors = [float(row["standard error"]) for row in rows]
    assert errors == pytest.approx([0.05, -0.025, 0.075])
    assert {row["images"] for row in rows} == {"3"}
    shades = [ablate._shade(value, 0.1) for value in (0.5, -0.25)]
    assert [(shade.strength, shade.text) for shade in shades] == [(30, "0.50"), (0, "-0.25")]
    assert shades[0].title == "0.5000 ± 0.1000"
    assert ablate._shade(torch.nan, 0.1).text == "--"
    assert "0.75" in ablate.agreement_section(result).body
