"""Tables of a run: means, errors, paired differences, what is best, and what is missing."""

import csv
from dataclasses import replace

import pytest
import torch
from PIL import Image

from seecause.attribution.attribute import attribute
from seecause.bench.runner import MissingValue
from seecause.bench.tables import (
    read_results,
    run,
    table,
    table_of,
    write_rows,
    write_tables,
    written,
)
from seecause.errors import UnknownName
from seecause.metrics.parts import part_completeness, part_truth
from seecause.report.bench import missing_section, write_report
from tests.bad_files import bad_file
from tests.bench.toy import model, prepared


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert run(folder, prepared(metrics=("ins-del", "aupr1", "pointing"))).complete
    return read_results(folder)


def test_the_table_marks_the_best_and_compares_image_by_image(results):
    found = table(results.folder, against="random")
    values = {method: columns["ins-del"] for method, columns in results.values.items()}
    cell = found.cells["caap"]["ins-del"]
    assert cell.difference.mean == pytest.approx(float((values["caap"] - values["random"]).mean()))
    assert found.cells["random"]["ins-del"].difference is None
    assert cell.interval[0] <= cell.mean <= cell.interval[1]
    means = {method: row["ins-del"] for method, row in found.numbers().items()}
    best = [method for method in means if found.cells[method]["ins-del"].best]
    assert best == [max(means, key=means.get)]
    lines = csv_lines(found, results.folder)
    assert len(lines) == 1 + 3 * 3 == 1 + len(found.to_pandas())
    with pytest.raises(UnknownName, match="of this run"):
        table(results.folder, against="rollout")


def test_every_number_is_in_a_csv_with_the_reason_where_it_is_missing(results, tmp_path):
    write_rows(results, tmp_path / "rows.csv")
    lines = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert len(lines) == 6 * 3
    by_name = {(m, row["image"]): row for m, t in results.rows.items() for row in t.to_pylist()}
    for line in lines:
        row = by_name[line["method"], line["image"]]
        for name in ("ins-del", "aupr1", "pointing", "label", "target", "predicted"):
            assert float(line[name]) == row[name]
    (tmp_path / "data").mkdir()
    for name in ("=1+1.png", "z.png"):
        Image.new("RGB", (96, 96), "red").save(tmp_path / "data" / name)
    bad_file(tmp_path / "data", "truncated")
    options = {"metrics": ("ins-del",), "methods": {"sobel": {}}, "target": "predicted"}
    run(tmp_path / "run", prepared(data=f"folder:{tmp_path / 'data'}", **options))
    write_rows(read_results(tmp_path / "run"), tmp_path / "rows.csv")
    first, broken, last = csv.DictReader((tmp_path / "rows.csv").read_text().splitlines())
    assert first["image"] == "'=1+1.png" and last["ins-del"]
    assert broken["ins-del"] == broken["predicted"] == "" and "truncated" in broken["reasons"]
    write_report(tmp_path / "run")
    page = (tmp_path / "run" / "index.html").read_text()
    assert "1 of 3 missing" in page and "Not complete" in page


def test_a_page_lists_some_missing_values_and_says_where_all_are(results):
    lost = [MissingValue("caap", f"{number}.png", "ins-del", "torn") for number in range(999)]
    section = missing_section(replace(results.status, missing=lost))
    assert str(section.body).count("torn") == 100 and "The first 100 of 999" in section.note


def test_maps_and_curves_are_read_by_image(results):
    work = prepared()
    found = work.run(work.plan.cells[0])["map"].to_pylist()
    maps = results.details("caap", "map")
    assert sorted(maps) == list(range(6))
    torch.testing.assert_close(maps[1], torch.tensor(found[1]))
    curves = results.curves()["caap"]
    assert curves["insertion curve"].shape == (6, 3)
    assert curves["shares"].tolist() == [[0, 0.5, 1]] * 6
    assert all(len(seconds) == 6 for seconds in results.seconds().values())


def test_truth_is_joined_over_all_images(tmp_path):
    options = {"methods": {"sobel": {}, "center": {}}, "metrics": ("part-correctness",)}
    work = prepared(limit=3, measures={}, **options)
    assert run(tmp_path, work).failed == {}

    def explain(images, target):
        return attribute(model(), images, target, "sobel").native

    whole = part_completeness(part_truth(model(), work.data.latents(0, 3), explain).details)
    row = read_results(tmp_path).truth()["sobel"]
    assert row == pytest.approx(whole, abs=1e-6, nan_ok=True)
    assert "truth.csv" in [path.name for path in write_report(tmp_path)]
    with (tmp_path / "truth.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["sobel", "center"]
    assert "<h2>Against the truth</h2>" in (tmp_path / "index.html").read_text()


def csv_lines(table, folder) -> list[str]:
    write_tables(table, folder)
    return (folder / "table.csv").read_text().splitlines()


@pytest.mark.parametrize(
    ("metric", "found", "marked"),
    [
        ("pointing", {"caap": [1, 0, 1], "gae": [0, 1, 1], "random": [0, 0, 1]}, ["caap", "gae"]),
        ("pointing", {"caap": [1, 0.5], "gae": [1, 0.5 + 1e-9], "c": [0.1, 0.5]}, ["caap", "gae"]),
        ("pointing", {"caap": [1, 0.5], "gae": [1, 0.6], "random": [0.1, 0.5]}, ["gae"]),
        ("pointing", {"caap": [1, 1], "gae": [1, 1 - 1e-9]}, []),
        ("pointing", {"caap": [0.3, 0.4]}, ["caap"]),
        ("insertion", {"caap": [0.99974, 0.99975], "random": [0.99976, 0.99977]}, []),
        ("deletion", {"caap": [1e-6, 2e-6], "random": [3e-6, 4e-6]}, ["caap"]),
    ],
)
def test_the_best_is_marked_where_there_is_one(metric, found, marked):
    made = table_of({m: {metric: torch.tensor(v).double()} for m, v in found.items()})
    assert [method for method, cells in made.cells.items() if cells[metric].best] == marked
    assert written(made, "md").count("**") == 2 * len(marked)


def test_odd_names_and_values_break_no_table(tmp_path):
    endless = {"a": {"ins-del": torch.tensor([torch.inf, 0.5])}, "b": {"ins-del": torch.ones(2)}}
    assert "inf" in "".join(csv_lines(table_of(endless), tmp_path))
    values = {"ins-del": torch.tensor([0.25, 0.5])}
    odd = csv_lines(table_of({"=cmd()": values}), tmp_path)
    assert odd[1].startswith("'=cmd(),ins-del,0.375,")
    latex = written(table_of({r"50%_of#x$y&z{}~^\end": values}), "tex")
    assert r"50\%\_of\#x\$y\&z\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}end &" in latex
