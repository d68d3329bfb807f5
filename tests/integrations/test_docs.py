"""What docs/integrations.md shows runs as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from seecause.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_blocks_run_top_to_bottom(tmp_path, monkeypatch):
    for package in ("captum", "tensorboard", "torchmetrics"):
        pytest.importorskip(package, reason="pip install 'seecause[tools]'")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks("python"):
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["attributions"].shape == names["smooth"].shape == names["images"].shape
    assert names["maps"].shape == (4, 1, 96, 96)
    assert set(names["metric"].compute()) == {"insertion", "deletion", "ins-del"}
    assert list((tmp_path / "runs").glob("events.*"))


def test_the_workflow_is_yaml_and_its_command_is_ours():
    (text,) = blocks("yaml")
    steps = yaml.safe_load(text)["jobs"]["gate"]["steps"]
    (command,) = [step["run"] for step in steps if "seecause gate" in step.get("run", "")]
    indented = re.findall(r"^    (seecause gate .*)$", PAGE.read_text(encoding="utf-8"), re.M)
    group = typer.main.get_command(app)
    for line in [command, *indented]:
        program, name, *words = shlex.split(line)
        context = group.get_command(None, name).make_context(name, words)
        assert program == "seecause" and context.params["max_flips"] == 0.1
        assert context.params["junit"] == Path("gate.xml")
