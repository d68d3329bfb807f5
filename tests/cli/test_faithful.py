"""`seecause faithful` from the outside: train, evaluate, intervene, parts, export."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import seecause as sc
from seecause.cli import app
from tests.faithful.runs import tiny_config


def call(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["faithful", *map(str, words)], env={"COLUMNS": "120"})
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    config = tiny_config(folder)
    told = ("--data", config.data, "--backbone", config.backbone, "--parts", "2", "--out", config.out, "--epochs", "1", "--batch", "4", "--device", "cpu")
    said = call("train", *told, "--option", "workers=0", "--option", "learning_rate=1e-3", "--option", "options.gradient=none", "--option", "head_factor=10")
    assert "4 steps; best average on validation" in said
    return config.folder


def test_settings_reach_the_run(run):
    config = json.loads((run / "config.json").read_text())
    assert config["options"] == {"gradient": "none"} and config["learning_rate"] == 1e-3 and config["augment"] == "birds"


def test_evaluation_tells_what_was_chosen_and_where(run):
    said = call("evaluate", run, "--device", "cpu", "--quantiles", "0.9")
    assert "AA" in said and "WGA" in said and "plain" in said
    found = json.loads((run / "evaluation.json").read_text())
    assert found["data"].endswith("test") and found["chosen_on"].endswith("val") and len(found["tried"]) == 6
    assert found["plain"]["worst"] <= found["plain"]["average"] and 0 < found["plain"]["kept"] <= 1
    card = json.loads((run / "best" / "ifam.json").read_text())
    assert card["thresholds"][0]["quantile"] == 0.9 and card["epoch"] == 0


def test_intervening_shows_before_and_after(run):
    said = call("intervene", run, "--drop", "0,1", "--quantile", "0.95", "--device", "cpu")
    after = next(line for line in said.splitlines() if "without part 0, 1 and tokens within 0.95" in line)
    assert after.split()[-1] == "6"  # nothing is left to see in any of the six pictures
    assert "drop_parts=[5]" in call("intervene", run, "--drop", "5", "--device", "cpu", code=2)
    assert "--drop" in call("intervene", run, "--drop", "two", "--device", "cpu", code=2)


def test_a_page_of_parts(run, tmp_path):
    call("parts", run, "--out", tmp_path / "page", "--limit", "2", "--device", "cpu")
    page = (tmp_path / "page" / "index.html").read_text()
    assert page.count('<article class="card') == 2 and page.count("without part") >= 2 and "stage 2 sees" in page


def test_export_is_a_model_like_any_other(run, tmp_path):
    call("export", run, tmp_path / "shipped")
    assert sc.load(str(tmp_path / "shipped")).classes == ("left", "right")
    assert "new or empty" in call("export", run, tmp_path / "shipped", code=2)


def test_mistakes_are_one_line(tmp_path):
    assert "backbone" in call("train", "--data", "folder:x", "--out", tmp_path / "x", code=2)
    assert "no setting is called 'epoch'" in call("train", "--option", "epoch=3", code=2)
    assert "no config.json there" in call("evaluate", tmp_path, code=2)
