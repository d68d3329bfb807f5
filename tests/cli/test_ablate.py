"""`seecause bench ablate` from the outside: one page, and the same command again does nothing
twice."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from seecause.bench.plan import Store
from seecause.bench.runner import Status
from seecause.cli import app, bench as commands
from seecause.cli.progress import INCOMPLETE

SMALL = (
    "--limit",
    "2",
    "--metric-option",
    "order=patch",
    "--metric-option",
    "steps=2",
    "--device",
    "cpu",
    "--out",
)


def bench(*words: object):
    return CliRunner().invoke(app, ["bench", *map(str, words)])


@pytest.mark.parametrize(
    ("study", "settings", "title"),
    [("select", 4, "How far from the default?"), ("layers", 13, "Which layers are needed?")],
)
def test_one_command_makes_the_page(tmp_path, study, settings, title):
    done = bench("ablate", study, *SMALL, tmp_path)
    assert done.exit_code == 0, done.output
    *_, also, page_line = done.stdout.splitlines()
    assert also == "also: table.csv, table.tex, table.md, rows.csv, agreement.csv"
    assert Path(page_line.removeprefix("page: ")) == tmp_path / "index.html"
    page = (tmp_path / "index.html").read_text()
    titles = [
        "Do the scores change?",
        title,
        "Are the maps the same?",
        *(["Where does the class token look?"] if study == "layers" else []),
    ]
    assert re.findall(r"<h2>([^<]+)</h2>", page)[: len(titles)] == titles
    assert (
        not re.search(r'(src|href)="(?!data:|#)', page)
        and "http:" not in page
        and "https:" not in page
    )
    pairs = list(csv.DictReader((tmp_path / "agreement.csv").read_text().splitlines()))
    assert len(pairs) == settings * (settings - 1) // 2 and all(
        -1 <= float(pair["rank correlation"]) <= 1 for pair in pairs
    )
    before = len(Store(tmp_path).events())
    assert (
        bench("report", tmp_path).exit_code == 0 and (tmp_path / "index.html").read_text() == page
    )
    assert (
        bench("ablate", study, *SMALL, tmp_path).exit_code == 0
        and len(Store(tmp_path).events()) == before
    )


def test_a_fixed_setting_holds_for_all(tmp_path):
    done = bench("ablate", "tail", "--option", "score=logit", *SMALL, tmp_path)
    assert done.exit_code == 0, done.output
    assert {options["score"] for options in Store(tmp_path).plan().request.methods.values()} == {
        "logit"
    }


def test_without_masks_the_curves_are_left(tmp_path):
    (tmp_path / "data").mkdir()
    Image.new("RGB", (96, 96), "red").save(tmp_path / "data" / "a.png")
    done = bench(
        "ablate",
        "layers",
        "--data",
        f"folder:{tmp_path / 'data'}",
        "--target",
        "predicted",
        *SMALL,
        tmp_path / "out",
    )
    assert done.exit_code == 0, done.output
    assert "left out: aupr1, aupr0, pointing" in done.stderr
    assert "needs masks and a class token" in (tmp_path / "out" / "index.html").read_text()


def test_an_ablation_with_holes_leaves_with_1(tmp_path, monkeypatch):
    monkeypatch.setattr(commands.BenchRun, "prepare", lambda *_, **__: None)
    monkeypatch.setattr("seecause.report.ablate.write_report", lambda store: [])
    monkeypatch.setattr(commands, "tell_report", lambda *_, **__: {})
    for failed, code in (({}, 0), ({"a": "no memory"}, INCOMPLETE)):
        state = Status(1, 1 - len(failed), failed, {}, (), (), (), {})
        monkeypatch.setattr(commands.BenchRun, "perform", lambda *_, state=state: state)
        done = CliRunner().invoke(app, ["bench", "ablate", "tail", "--out", str(tmp_path)])
        assert done.exit_code == code, done.output
