"""What a package installed beside us adds is there on the command line: a method, a dataset, a
metric and a model family."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
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
    print("$", *sys.argv[1:3], flush=True)
    try:
        runpy.run_module("seecause", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""
RUN = [
    "bench",
    "run",
    "--model",
    "tinyvit:3",
    "--data",
    "sparkles:6",
    "--method",
    "sparkle",
    "--out",
    "run",
    "--metric",
    "on-sparkle,aupr1,pointing",
    "--limit",
    "4",
    "-q",
]


def build_wheel(folder: Path) -> Path:
    """A wheel of the package in this folder, as a build backend makes it of its pyproject.toml."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    entry_points = []
    for group, entries in project["entry-points"].items():
        entry_points += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file in sorted((HERE / "sparkle").glob("*.py")):
            wheel.write(file, f"sparkle/{file.name}")
        wheel.writestr(f"{stem}.dist-info/METADATA", about)
        wheel.writestr(f"{stem}.dist-info/entry_points.txt", "\n".join(entry_points) + "\n")
    return folder / f"{stem}-py3-none-any.whl"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Where the wheel is installed: a pure wheel is unpacked, nothing else."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("dist"))).extractall(folder)
    return folder


def seecause_commands(site: Path, folder: Path, *commands: list[str]) -> str:
    lines = folder / "commands.jsonl"
    lines.write_text("\n".join(map(json.dumps, commands)))
    paths = [str(site), str(Path(seecause.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(lines)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def output(site, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("work")
    printed = seecause_commands(
        site,
        folder,
        ["methods"],
        ["doctor", "--model", "tinyvit:3", "--json"],
        [
            "explain",
            "sparkles:6#1",
            "--model",
            "tinyvit:3",
            "--method",
            "sparkle,caap",
            "--option",
            "power=2",
            "--out",
            "maps",
            "-q",
        ],
        RUN,
    )
    return printed, folder


def run_rows(folder: Path) -> list[dict]:
    rows: list[dict] = []
    for path in sorted((folder / "run").rglob("*.parquet")):
        rows += pq.read_table(path).to_pylist()
    return rows


def test_the_method_is_listed_and_the_model_is_verified(output):
    printed, _ = output
    assert "Brightness of each patch above the mean" in printed
    assert "sparkle.TinyViT" in printed


def test_the_method_explains_a_sample_of_the_dataset_on_the_model(output):
    _, folder = output
    said = [json.loads(path.read_text()) for path in folder.glob("maps/**/*.json")]
    text = json.dumps(said)
    assert '"method": "sparkle"' in text and '"model": "tinyvit:3"' in text
    assert '"power": 2' in text


def test_masks_of_the_dataset_reach_its_own_metric_and_ours(output):
    _, folder = output
    rows = run_rows(folder)
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row["metric"], []).append(row["value"])
    assert values["on-sparkle"] == [1.0] * 4 and values["pointing"] == [1.0] * 4
    assert all(value > 0.9 for value in values["aupr1"])
    assert {row["higher_is_better"] for row in rows} == {True}


def test_a_broken_plug_in_is_named_and_the_rest_works(output):
    printed, _ = output
    assert "the plug-in 'broken' of seecause.models (sparkle.nowhere) is skipped" in printed


@pytest.mark.slow
def test_an_edited_plug_in_is_not_served_stale_shards(site, output):
    pytest.importorskip("seecause._software")  # what digests code outside the package
    _, folder = output
    assert {row["value"] for row in run_rows(folder) if row["metric"] == "pointing"} == {1.0}
    file = site / "sparkle" / "method.py"
    source = file.read_text()
    file.write_text(source.replace("return (", "return -("))  # the bright square comes last
    try:
        seecause_commands(site, folder, RUN)
    finally:
        file.write_text(source)
    assert 0.0 in {row["value"] for row in run_rows(folder) if row["metric"] == "pointing"}
