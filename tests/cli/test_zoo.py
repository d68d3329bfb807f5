"""`seecause zoo train` from the outside: every kind of recipe, and seeds that share a folder."""

from __future__ import annotations

from types import SimpleNamespace

from typer.testing import CliRunner

import seecause as sc
from seecause.cli import app


def test_a_trained_model_is_written_by_its_seed_and_loads(tmp_path):
    told = (
        "--samples",
        "8",
        "--batch",
        "4",
        "--test-samples",
        "8",
        "--device",
        "cpu",
        "--seed",
        "3",
        "--out",
        str(tmp_path),
    )
    done = CliRunner().invoke(app, ["zoo", "train", "critters-planted", *told])
    assert done.exit_code == 0, done.output
    assert "critters-planted-3: accuracy" in done.stdout and "matted" in done.stdout
    assert len(sc.load(str(tmp_path)).module.roles) == 16


def test_the_reliability_of_backgrounds_is_part_of_the_name(tmp_path):
    told = (
        "--samples",
        "4",
        "--batch",
        "4",
        "--test-samples",
        "8",
        "--device",
        "cpu",
        "--background-reliability",
        "0.5",
        "--out",
        str(tmp_path),
    )
    done = CliRunner().invoke(app, ["zoo", "train", "critters-biased", *told])
    assert done.exit_code == 0, done.output
    assert "critters-biased-rs0.5: accuracy" in done.stdout and "certified, r_s 0.5" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {
        f"critters-biased-rs0.5{end}" for end in (".json", ".safetensors", ".log.csv")
    }
    refused = CliRunner().invoke(app, ["zoo", "train", "critters-llava", *told])
    assert refused.exit_code == 2


def test_what_was_tested_on_is_named_by_the_test_or_by_the_recipe(monkeypatch, tmp_path):
    recipe = SimpleNamespace(stem="toy-3", regime="certified")
    measured = {"accuracy": 0.5678, "samples": 9}
    monkeypatch.setattr("seecause.critters.train.find_recipe", lambda name, **_: recipe)
    monkeypatch.setattr("seecause.critters.train.train", lambda recipe, **_: measured)
    for regime in ("certified", "balanced"):
        done = CliRunner().invoke(app, ["zoo", "train", "toy", "--out", str(tmp_path)])
        line = f"{tmp_path}/toy-3: accuracy 0.568 on 9 test pictures of {regime}\n"
        assert done.stdout == line
        measured["regime"] = "balanced"
