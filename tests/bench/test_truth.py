"""Tables: names in them, and against the truth, where what shards keep of single pictures is joined
to the scores of all of them, and the report shows it."""

from __future__ import annotations

import csv
import re

import pytest
import torch

from seecause.attribution.attribute import attribute
from seecause.bench.plan import Store
from seecause.bench.results import read_results
from seecause.bench.runner import run
from seecause.bench.tables import (
    TRUTH_COLUMNS,
    against_truth,
    score_texts,
    table_of,
    to_csv,
    to_latex,
)
from seecause.metrics import part_completeness, part_truth
from seecause.report.bench import table_section, truth_section, write_report
from tests.bench.toy import model, worker


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Two shards of each method, of two pictures and of one."""
    work, store = (
        worker(
            limit=3, methods={"sobel": {}, "center": {}}, metrics=("part-correctness",), measures={}
        ),
        Store(tmp_path_factory.mktemp("truth")),
    )
    assert run(store, work).failed == {}
    return work, store


def test_shards_join_to_the_scores_of_all_pictures(done):
    work, store = done
    whole = part_truth(
        model(),
        work.data.latents(0, 3),
        lambda images, target: attribute(model(), images, target, "sobel").native,
    )
    mine = read_results(store, work.plan).parts["sobel"]
    for name, values in mine.items():
        torch.testing.assert_close(values, whole[name], rtol=1e-5, atol=1e-6, equal_nan=True)
    row = against_truth(read_results(store, work.plan))["sobel"]
    assert [*row] == [*TRUTH_COLUMNS]
    summary = part_completeness(whole.details)
    assert row["completeness"] == pytest.approx(summary["completeness"])
    assert row["mean of the three"] == pytest.approx(summary["overall"], nan_ok=True)


def test_the_report_shows_the_truth_and_keeps_it_as_csv(done, monkeypatch):
    work, store = done
    reads = []

    def read(*words, **options):  # another limit may choose other pictures
        reads.append((words, options))
        return work.data

    monkeypatch.setattr("seecause.report.bench_gallery.open_data", read)
    found = against_truth(read_results(store, work.plan))
    assert "truth.csv" in [path.name for path in write_report(store)]
    assert reads == [((work.plan.request.data,), {"limit": 3})]
    page = (store.folder / "index.html").read_text()
    assert "<h2>Against the truth</h2>" in page and all(
        f"<td>{number}</td>" in page for row in found.values() for number in score_texts(row)
    )
    with (store.folder / "truth.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["sobel", "center"]


def test_a_run_without_the_truth_says_nothing_of_it(tmp_path):
    work, store = (
        worker(limit=1, methods={"center": {}}, metrics=("aupr1",), measures={}),
        Store(tmp_path / "run"),
    )
    run(store, work)
    (store.folder / "truth.csv").write_text("of an earlier command")
    assert against_truth(read_results(store, work.plan)) == {} and truth_section({}) == []
    assert (
        "truth.csv" not in [path.name for path in write_report(store)]
        and not (store.folder / "truth.csv").exists()
    )
    page = (store.folder / "index.html").read_text()
    assert (
        "Against the truth" not in page and "one image" in page
    )  # one picture has no standard error


def test_what_no_picture_asks_is_a_dash():
    names = ("csdc", "preservation", "deletion", "distractibility", "correctness", "contrastivity")
    empty = part_completeness({name: torch.full((2, 80), torch.nan) for name in names})
    assert (
        empty["completeness"] != empty["completeness"] and empty["threshold"] != empty["threshold"]
    )
    assert score_texts({"completeness": empty["completeness"], "x": 0.5}) == ["-", "0.500"]


def test_a_value_without_end_breaks_no_table():
    endless = {"a": {"ins-del": torch.tensor([torch.inf, 0.5])}, "b": {"ins-del": torch.ones(2)}}
    assert "inf" in to_csv(table_of(endless)) and table_section(table_of(endless)).body


def test_no_name_is_a_formula_in_the_table():
    named = {"=cmd()": {"ins-del": torch.tensor([0.25, 0.5])}}
    assert to_csv(table_of(named)).splitlines()[1].startswith("'=cmd(),ins-del,0.375,")


def test_names_are_escaped_for_latex():
    named = {r"50%_of#x$y&z{}~^\end": {"ins-del": torch.tensor([0.25, 0.5])}}
    assert (
        r"50\%\_of\#x\$y\&z\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}end &"
        in to_latex(table_of(named))
    )


def test_the_best_mean_is_shaded_and_one_that_is_not_known_is_not():
    means = {"a": 0.2, "b": 0.6, "c": float("nan"), "d": 0.6}
    truth = {method: dict.fromkeys(TRUTH_COLUMNS, mean) for method, mean in means.items()}
    (section,) = truth_section(truth)
    assert re.findall(r'class="best"><th scope="row">(.)<', section.body) == ["b", "d"]
