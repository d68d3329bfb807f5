"""`seecause bench` and `seecause reproduce`: complete, continued, or listing what is missing."""

import json
import re

import pytest

from seecause.bench.tables import read_plan
from tests.bad_files import bad_file
from tests.cli.calls import invoke, photo

SMALL = ("--option", "insertion-deletion.steps=2", "--option", "run.cell_size=2", "--device", "cpu")
RUN = ("--method", "caap,random,sobel", "--metric", "ins-del,insertion,aupr1", "--limit", 6, *SMALL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 9 cells."""
    out = tmp_path_factory.mktemp("bench") / "run"
    done = invoke("bench", "run", *RUN, "--quiet", "--out", out)
    assert done.exit_code == 0 and done.output == "", done.output
    return out


def test_options_reach_methods_metrics_and_the_run(tmp_path):
    options = ("run.memory=3000000", "run.threads=1", "caap.tail=patched", "score=logit")
    words = [word for option in options for word in ("--option", option)]
    words += ["--seed", 5, "--target", "predicted", "--limit", 2, "--device", "cpu"]
    run = ("--method", "caap", "--metric", "aupr1", *words, "--json", "--out", tmp_path / "run")
    done = invoke("bench", "run", *run)
    assert done.exit_code == 0 and json.loads(done.stdout)["complete"], done.output
    request = read_plan(tmp_path / "run").request
    assert request.memory == 3_000_000
    assert (request.threads, request.seed, request.limit, request.target) == (1, 5, 2, "predicted")
    assert {"tail": "patched", "score": "logit"}.items() <= request.methods["caap"].items()


def test_the_same_command_continues(whole):
    before = {path: path.stat().st_mtime_ns for path in (whole / "cells").iterdir()}
    gone = sorted(before)[0]
    gone.unlink()
    assert invoke("bench", "report", whole, "--quiet").exit_code == 1
    done = invoke("bench", "run", *RUN, "--out", whole)
    assert done.exit_code == 0 and "9 of 9 cells done" in done.stdout, done.output
    after = {path: path.stat().st_mtime_ns for path in (whole / "cells").iterdir()}
    assert set(after) == set(before)
    assert all(after[path] == before[path] for path in after if path != gone)


def test_the_report_is_one_file_with_everything_in_it(whole):
    done = invoke("bench", "report", whole, "--against", "random")
    assert done.exit_code == 0, done.output
    *table, also, page_line = done.stdout.splitlines()
    assert also == "also: table.csv, table.tex, table.md, rows.csv"
    assert page_line == f"page: {whole / 'index.html'}"
    assert all(word in "\n".join(table) for word in ("method", "ins-del ↑", "random", "±", "★"))
    page = (whole / "index.html").read_text()
    for title in (
        "Which method is best?",
        "Does the prediction follow the map?",
        "What does it cost?",
        "Which images show most?",
        "What is missing",
    ):
        assert f"<h2>{title}</h2>" in page
    assert "Nothing is missing." in page
    assert not re.search(r'(src|href)="(?!data:|#|\$)', page)


def test_a_bad_image_leaves_with_one_and_is_listed(tmp_path):
    for name in ("a.png", "z.png"):
        (tmp_path / "data" / "tabby, tabby cat").mkdir(parents=True, exist_ok=True)
        photo(tmp_path / "data" / "tabby, tabby cat" / name)
    bad = bad_file(tmp_path / "data" / "tabby, tabby cat", "text")
    words = ("--model", "timm:test_vit", "--weights", "random", "--data", f"folder:{tmp_path}/data")
    words += ("--method", "sobel", "--metric", "insertion", *SMALL, "--out", tmp_path / "run")
    done = invoke("bench", "run", *words)
    assert done.exit_code == 1 and bad.name in done.stderr, done.output
    done = invoke("bench", "report", tmp_path / "run")
    assert done.exit_code == 1 and bad.name in (tmp_path / "run" / "index.html").read_text()


def test_an_experiment_is_reproduced(tmp_path, monkeypatch):
    facts = json.loads(invoke("list", "experiments", "--json").stdout)
    assert "caap/table-1" in [row["experiment"] for row in facts["experiments"]]
    done = invoke("reproduce", "caap/tabel-1")
    assert done.exit_code == 2 and "caap/table-1" in done.stderr
