"""The runner of studies: what it keeps, what it does again, and what it says of holes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from seecause.bench.study import (
    StudyContext,
    StudyRun,
    read_csv,
    read_study,
    run_cells,
    run_study,
    summarised,
    write_results,
)
from seecause.cli import app
from seecause.errors import DataMissing
from tests.bench import study_toy as toy

ROOT = Path(__file__).parents[2]
TOML = """
name = "toy"
question = "How much?"
[settings]
scale = 2
[quick]
scale = 5
[[cells]]
group = "first"
call = "tests.bench.study_toy.scaled"
label = {{ table = "one" }}
set = {{ method = "a" }}
grid = {{ seed = {seeds} }}
[[cells]]
group = "sum"
call = "tests.bench.study_toy.total"
needs = ["first"]
[output]
groups = ["first"]
columns = ["table", "method", "seed", "value"]
"""


@pytest.fixture
def study(tmp_path):
    toy.CALLS.clear()

    def opened(seeds=(1, 2, 3), limit=None, text=TOML):
        file = tmp_path / "toy.toml"
        file.write_text(text.format(seeds=list(seeds)))
        return StudyRun(read_study(file), StudyContext("cpu", tmp_path / "work", limit=limit))

    return opened


def test_a_finished_cell_is_not_done_again_and_a_changed_line_does_only_its_own(study, tmp_path):
    run_cells(study(), minutes=1)
    assert toy.CALLS == [("scaled", 1), ("scaled", 2), ("scaled", 3), ("total", 12)]
    toy.CALLS.clear()
    run_cells(study(), minutes=1)
    assert toy.CALLS == []
    run_cells(study(seeds=(1, 2, 4)), minutes=1)  # and what needs it
    assert toy.CALLS == [("scaled", 4), ("total", 14)]
    toy.CALLS.clear()
    run_cells(study(limit=1), minutes=1)  # other settings
    assert toy.CALLS == [("scaled", 1), ("scaled", 2), ("scaled", 3), ("total", 30)]


@pytest.mark.parametrize("changed", ["cells.py", "helpers.py"])
def test_a_changed_helper_asks_for_the_cell_again(tmp_path, changed):
    files = {
        "cells.py": "from helpers import TWICE\n\n\ndef f(context):\n    return [{'x': g()}]\n\n\n"
        "def g():\n    return TWICE\n",
        "helpers.py": "TWICE = 2\n",
        "mine.toml": "name = 'mine'\nquestion = '?'\n[[cells]]\ngroup = 'a'\ncall = 'cells.f'\n"
        "[output]\ncolumns = ['x']\n",
    }
    keys = []
    for folder in (tmp_path / "before", tmp_path / "after"):
        folder.mkdir()
        for name, text in files.items():
            later = name == changed and folder.name == "after"
            (folder / name).write_text(f"{text}\nMORE = 1\n" if later else text)
        study = read_study(folder / "mine.toml")
        keys.append(StudyRun(study, StudyContext("cpu", tmp_path / "work")).keys)
    assert keys[0] != keys[1]


def test_a_slice_does_at_least_one_cell_and_the_next_goes_on(study, tmp_path):
    for _ in range(4):
        run_cells(study(), minutes=1e-9)
    assert toy.CALLS == [("scaled", 1), ("scaled", 2), ("scaled", 3), ("total", 12)]
    run = study()
    run_cells(run, minutes=0)
    path = write_results(run, tmp_path / "out", "toy")
    assert path.read_text() == "table,method,seed,value\none,a,1,2\none,a,2,4\none,a,3,6\n"


def test_a_failing_cell_is_a_hole_with_its_reason_and_is_tried_again(study, tmp_path):
    run = study(seeds=(1, 0, 3))
    run_cells(run, minutes=1)
    record = json.loads(
        write_results(run, tmp_path / "out", "toy").with_suffix(".json").read_text()
    )
    assert record["holes"] == {
        "first one a 0": "ValueError: nothing to scale",
        "sum": "it needs first one a 0, which failed",
    }
    assert list(run.store.failures(run.keys.values()).values()) == ["ValueError: nothing to scale"]
    again = study(seeds=(1, 0, 3))
    assert not again.failed and not again.is_done(again.study.cells[1])
    toy.CALLS.clear()
    run_cells(again, minutes=1)
    assert toy.CALLS == [("scaled", 0)]


def test_what_a_cell_came_from_is_kept(study, tmp_path):
    run = study()
    run_cells(run, minutes=1, only="a 2")
    assert toy.CALLS == [("scaled", 2)]
    record = json.loads(
        write_results(run, tmp_path / "out", "toy").with_suffix(".json").read_text()
    )
    assert record["fingerprints"] == {"toy data": "seed 2"} and "CPU" in record["machines"][0]
    assert "torch" in record["versions"][0] and record["cells"] == 4
    assert record["not done yet"] == ["first one a 1", "first one a 3", "sum"]


def test_progress_counts_the_cells_that_are_asked_for(study, tmp_path):
    study()
    heard = []
    options = {"work": tmp_path / "work", "out": tmp_path, "only": "A 2"}
    begin = lambda todo: (heard.append(todo), heard.append)[1]  # noqa: E731
    status = run_study(tmp_path / "toy.toml", begin=begin, **options)
    assert heard == [1, "first one a 2"] and len(status.missing) == 3 and status.total == 4


def test_a_damaged_cell_is_done_again(study):
    run = study()
    run_cells(run, minutes=1)
    file = run.store.file(run.keys["first one a 2"], "json")
    file.write_text(file.read_text().replace('"value": 4', '"value": 5'))
    toy.CALLS.clear()
    run_cells(study(), minutes=1)
    assert toy.CALLS == [("scaled", 2)]


def test_a_run_that_is_killed_goes_on_where_it_was(study, tmp_path):
    (tmp_path / "toy.toml").write_text(TOML.format(seeds=[1, 2, -1]))  # the third never ends
    code = (
        f"import seecause as sc; p = {str(tmp_path)!r};"
        "sc.bench.run_study(p + '/toy.toml', work=p + '/work', out=p)"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    try:
        ends = time.monotonic() + 300
        while len(list((tmp_path / "work/toy/shards").glob("*.json"))) < 2:
            assert time.monotonic() < ends and process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    run = study(seeds=(1, 2, -1))
    assert [run.is_done(cell) for cell in run.study.cells] == [True, True, False, False]
    run_cells(study(), minutes=1)  # another line in the place of the one that never ends
    assert toy.CALLS == [("scaled", 3), ("total", 12)]


def test_missing_folders_and_files_are_named(tmp_path):
    text = TOML.format(seeds=[1]).replace("question =", 'files = ["weights"]\nquestion =')
    (tmp_path / "toy.toml").write_text(text)
    study = read_study(tmp_path / "toy.toml")
    with pytest.raises(DataMissing, match="--real"):
        StudyRun(study, StudyContext("cpu", tmp_path))
    done = CliRunner().invoke(app, ["study", str(tmp_path / "toy.toml"), "--real", str(tmp_path)])
    assert done.exit_code == 2 and "weights" in done.output
    with pytest.raises(DataMissing, match="--models"):
        StudyContext("cpu", tmp_path).fill("{models}/a")
    context = StudyContext("cpu", tmp_path, models=Path("m"))
    assert context.fill("{models}/a") == "m/a"
    assert context.fill({"of": ["{models}/a", 1]}) == {"of": ["m/a", 1]}


def test_two_cells_of_one_name_are_refused(tmp_path):
    """The rows of the one would stand for both."""
    text = TOML.format(seeds=[1]).replace("grid = { seed = [1] }", "each = [{ a = 1 }, { b = 1 }]")
    (tmp_path / "toy.toml").write_text(text)
    with pytest.raises(DataMissing, match="2 cells are called 'first one a 1'"):
        read_study(tmp_path / "toy.toml")


def test_anyone_can_write_a_study(tmp_path, monkeypatch):
    """The one of docs/bench.md, as it stands there."""
    text = (
        (ROOT / "docs/bench.md").read_text(encoding="utf-8").partition("## A study of your own")[2]
    )
    for language, name in (("toml", "mine.toml"), ("python", "cells.py")):
        code = text.partition(f"```{language}\n")[2].partition("```")[0]
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    call = ["study", "mine.toml", "--limit", "2", "--device", "cpu", "--out", "."]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    rows = read_csv(tmp_path / "mine.csv")
    assert [row["method"] for row in rows] == ["caap", "rollout"] and rows[1]["n"] == "2"
    assert rows[1]["difference"] and (tmp_path / "mine.png").is_file()
    before = (tmp_path / "mine.csv").read_bytes()
    assert CliRunner().invoke(app, call).exit_code == 0
    assert (tmp_path / "mine.csv").read_bytes() == before
    (tmp_path / "mine.toml").write_text(
        (tmp_path / "mine.toml").read_text().replace("cells.", "x.")
    )
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 2 and "No module named 'x'" in done.output


def test_grids_lists_and_labels(tmp_path):
    text = TOML.format(seeds=[1]).replace("[settings]", "[lists]\nfew = [1, 2]\n[settings]")
    text = text.replace(
        "grid = { seed = [1] }", 'grid.seed = "few"\neach = [{ at = 1 }, { at = 2 }]'
    )
    (tmp_path / "toy.toml").write_text(text.replace('"one"', '"at {at}"'))
    cells = read_study(tmp_path / "toy.toml").cells
    labels = [(cell.label["table"], cell.options["seed"]) for cell in cells[:-1]]
    assert labels == [("at 1", 1), ("at 1", 2), ("at 2", 1), ("at 2", 2)]


def test_differences_are_paired_and_over_what_both_have():
    rows = [{"method": "a", "picture": i, "x": float(i)} for i in range(4)]
    rows += [{"method": "b", "picture": i, "x": i + 1.0 + (i == 3)} for i in range(1, 4)]
    rows.append({"method": "b", "picture": 9, "x": None})
    first, second = summarised(rows, ["method"], ["x", "y"], against={"method": "a"})
    assert first["mean"] == 1.5 and "difference" not in first and first["n"] == 4
    assert second["mean"] == pytest.approx(10 / 3) and (second["n"], second["missing"]) == (3, 1)
    assert second["difference"] == pytest.approx(4 / 3)
    assert second["error of difference"] == pytest.approx(1 / 3)


def test_rows_of_one_picture_all_count():
    """Two seeds of the same pictures: none takes the place of another, and each has its partner."""
    rows = [{"method": m, "picture": 7, "x": x} for m, x in zip("aabb", (1, 3, 2, 6), strict=True)]
    first, second = summarised(rows, ["method"], ["x"], against={"method": "a"})
    assert (first["n"], first["mean"]) == (2, 2) and (second["n"], second["mean"]) == (2, 4)
    assert second["difference"] == 2 and second["error of difference"] == 1


def test_what_is_published_names_no_folder_of_the_run(tmp_path):
    context = StudyContext("cpu", tmp_path / "work", real=tmp_path / "photos")
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "photos/a.png")
    context.data(context.fill("folder:{real}"))
    assert list(context.fingerprints) == ["folder:{real}"]
