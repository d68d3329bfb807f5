"""Experiments: cells that are kept, a table from what is finished, failures that are listed."""

import csv
import json

import pytest

import seecause as sc
from seecause.errors import BadOption, UnknownName
from seecause.experiments import base
from seecause.experiments.base import Experiment, table_of_rows

CELLS = [{"method": "a"}, {"method": "b"}, {"method": "broken"}]
CALLS: list[str] = []


def measured(*, method: str, limit: int | None, device: str) -> list[base.Row]:
    CALLS.append(method)
    if method == "broken":
        raise ValueError("it cannot be measured")
    shift = 0.5 if method == "b" else 0.0
    return [{"image": f"{n}.png", "score": n + shift} for n in range(limit or 4)]


@pytest.fixture
def toy(monkeypatch) -> Experiment:
    registry = base.Registry("experiment")
    monkeypatch.setattr(base, "_registry", registry)
    about = {"question": "Which?", "cells": CELLS, "by": "method", "values": {"score": "lower"}}
    base.experiment("toy", **about)(measured)
    CALLS.clear()
    return base.find_experiment("toy")


def test_an_experiment_is_run_once_and_its_table_written(toy, tmp_path):
    heard = []
    status = sc.experiments.run("toy", tmp_path, progress=heard.append)
    assert (status.done, status.total, heard) == (2, 3, [1, 1, 1]) and not status.complete
    (error,) = status.failed.values()
    assert "Traceback" in error and "it cannot be measured" in error
    rows = list(csv.DictReader((tmp_path / "toy" / "table.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == ["a", "b"] and rows[0]["best"] == "1"
    assert float(rows[1]["difference to a"]) == 0.5
    record = json.loads((tmp_path / "toy" / "experiment.json").read_text())
    assert record["question"] == "Which?" and record["failed"] == 1
    sc.experiments.run("toy", tmp_path)
    assert CALLS == ["a", "b", "broken", "broken"]
    assert sc.experiments.read_table(tmp_path, "toy").cells["b"]["score"].mean == 2.0
    assert sc.experiments.run("toy", tmp_path, limit=2).done == 2  # other cells
    assert sc.experiments.read_table(tmp_path, "toy").cells["b"]["score"].mean == 1.0


def test_a_run_that_is_stopped_writes_the_table_of_what_is_finished(toy, tmp_path):
    def stop(cells):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sc.experiments.run("toy", tmp_path, progress=stop)
    assert [*sc.experiments.read_table(tmp_path, "toy").cells] == ["a"]
    assert "2 of 3 cells are missing" in (tmp_path / "toy" / "index.html").read_text()


def test_mistakes_are_refused(toy, tmp_path):
    with pytest.raises(UnknownName, match="Did you mean toy"):
        sc.experiments.run("toi", tmp_path)
    with pytest.raises(BadOption, match="limit"):
        sc.experiments.run("toy", tmp_path, limit=0)
    with pytest.raises(BadOption, match="folder"):
        sc.experiments.read_table(tmp_path, "toy")


def test_rows_are_paired_by_image(toy):
    rows = [{"method": "a", "image": "x", "score": 1.0}, {"method": "a", "image": "y", "score": 3}]
    rows += [{"method": "b", "image": "y", "score": 2.0}, {"method": "b", "image": "z"}]
    cell = table_of_rows(toy, rows).cells["b"]["score"]
    assert (cell.n, cell.difference.mean, cell.difference.n) == (1, -1.0, 1)


def test_a_cell_of_caap_is_what_the_library_measures(tmp_path):
    assert sc.experiments.run("critters/caap", tmp_path, quick=True).complete
    table = sc.experiments.read_table(tmp_path, "critters/caap")
    model, data = sc.load("builtin:critters-vit"), sc.data.open_data("critters:clean:test", limit=2)
    images, labels, masks = sc.data.to_batch(model, data)
    for line, options in (
        ("center", {"method": "center"}),
        ("caap, patched, from block 1", {"tail": "patched", "layers": (1, None)}),
        ("e-caap as printed", {"approx": "e-caap-printed"}),
    ):
        maps = sc.attribute(model, images, labels, **options).maps
        expected = sc.metrics.localization(maps, masks)["aupr1"].mean()
        assert table.cells[f"critters-vit, {line}"]["AUPR_1"].mean == pytest.approx(100 * expected)
