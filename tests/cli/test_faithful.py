"""`seecause faithful`: train, evaluate, intervene, parts, export."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import seecause as sc
from seecause.faithful import open_network
from seecause.faithful.evaluation import examine
from tests.cli.calls import invoke
from tests.faithful.runs import tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = tiny_config(tmp_path_factory.mktemp("cli"))
    flags = ("--data", config.data, "--backbone", config.backbone, "--parts", 2, "--epochs", 1)
    flags += ("--out", config.out, "--batch", 4, "--device", "cpu")
    options = ("workers=0", "learning_rate=1e-3", "options.gradient=none", "head_factor=10")
    words = [word for option in options for word in ("--option", option)]
    done = invoke("faithful", "train", *flags, *words)
    assert done.exit_code == 0, done.output
    assert "4 steps; best average on validation" in done.stdout
    return Path(config.out)


def test_settings_reach_the_run(run):
    config = json.loads((run / "config.json").read_text())
    assert config["options"] == {"gradient": "none"} and config["learning_rate"] == 1e-3


def test_evaluation_prints_what_the_library_measures(run):
    done = invoke("faithful", "evaluate", run, "--device", "cpu", "--quantiles", "0.9", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    (result,) = json.loads((run / "evaluation.json").read_text()).values()
    assert facts["plain"] == pytest.approx(result["plain"])
    assert result["data"].endswith("test") and result["chosen_on"].endswith("val")
    network = open_network(str(run))
    assert result["plain"] == pytest.approx(examine(network.net, network.images("test")).table())
    text = invoke("faithful", "evaluate", run, "--device", "cpu", "--no-interventions").stdout
    assert "worst" in text and f"{result['plain']['average']:.4f}" in text


def test_interventions_are_tested(run):
    words = ("--quantile", 0.7, "--by", "dot", "--device", "cpu")
    done = invoke("faithful", "intervene", run, "--drop", "1", *words)
    assert done.exit_code == 0, done.output
    assert "plain" in done.stdout and "0.7" in done.stdout
    quiet = invoke("faithful", "intervene", run, *words, "--quiet")
    assert quiet.exit_code == 0 and quiet.stdout == ""


def test_parts_are_drawn_and_the_network_is_exported(run, tmp_path):
    out = tmp_path / "parts"
    done = invoke("faithful", "parts", run, "--limit", 2, "--device", "cpu", "--out", out)
    assert done.exit_code == 0, done.output
    page = (out / "index.html").read_text()
    assert page.count('<article class="card') == 2 and (out / "parts.png").is_file()
    assert "part 0: " in done.stdout
    shipped = invoke("faithful", "export", run, tmp_path / "shipped")
    assert shipped.exit_code == 0, shipped.output
    model = sc.load(str(tmp_path / "shipped"))
    assert model.classes and asdict(open_network(str(run)).net.options)["gradient"] == "none"
