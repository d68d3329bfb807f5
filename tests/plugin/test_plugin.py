"""What a package installed beside us adds is there on the command line: a method, a dataset, a
metric and a model family."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import seecause

HERE = Path(__file__).parent
# `python -m seecause ARGUMENTS` for each line of a file, in one process: torch is imported once
DRIVER = """
import json, runpy, sys
for line in open(sys.argv[1]).read().splitlines():
    sys.argv = ["seecause", *json.loads(line)]
    try:
        runpy.run_module("seecause", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""
RUN = "bench run --model tinyvit:3 --data sparkles:6 --method sparkle --out run --limit 4 -q"
COMMANDS = (
    "list methods",
    "doctor --model tinyvit:3 --json",
    "explain sparkles:6#1 --model tinyvit:3 --method sparkle,caap --option power=2 --out maps -q",
    f"{RUN} --metric on-sparkle,aupr1,pointing",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Where the package is installed: its files and its entry points."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(HERE / "sparkle", folder / "sparkle")
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    about = folder / "seecause_sparkle-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: seecause-sparkle\nVersion: 1.0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def run_commands(site: Path, folder: Path, *commands: str) -> str:
    (folder / "commands").write_text("\n".join(json.dumps(line.split()) for line in commands))
    paths = [str(site), str(Path(seecause.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    words = [sys.executable, "-c", DRIVER, "commands"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def output(site, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("work")
    return run_commands(site, folder, *COMMANDS), folder


def rows_of(folder: Path) -> list[dict]:
    paths = sorted((folder / "run").rglob("*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def test_everything_is_listed_and_a_broken_plug_in_is_named(output):
    printed, _ = output
    assert "Brightness of each patch above the mean" in printed
    assert "sparkle.TinyViT" in printed
    assert "the plug-in 'broken' of seecause.models (sparkle.nowhere) is skipped" in printed


def test_the_method_explains_a_sample_of_the_dataset_on_the_model(output):
    _, folder = output
    texts = [path.read_text() for path in folder.glob("maps/**/*.json")]
    said = json.dumps([json.loads(text) for text in texts])
    assert '"sparkle"' in said and '"tinyvit:3"' in said and '"power": 2' in said


def test_masks_of_the_dataset_reach_its_own_metric_and_ours(output):
    rows = rows_of(output[1])
    assert len(rows) == 4 and all(row["aupr1"] > 0.9 for row in rows)
    assert {(row["on-sparkle"], row["pointing"]) for row in rows} == {(1.0, 1.0)}


def test_a_run_is_reported_where_the_package_is_not_installed(output, tmp_path):
    _, folder = output
    run_commands(tmp_path, folder, "bench report run -q")
    page = (folder / "run" / "index.html").read_text()
    assert "Brightness of each patch above the mean" in page and "sparkles:6" in page


@pytest.mark.slow
def test_an_edited_plug_in_is_computed_again(site, output):
    _, folder = output
    file = site / "sparkle" / "method.py"
    source = file.read_text()
    file.write_text(source.replace("return (", "return -("))  # the bright square comes last
    try:
        run_commands(site, folder, COMMANDS[-1])
    finally:
        file.write_text(source)
    assert {row["pointing"] for row in rows_of(folder)} == {0.0, 1.0}
