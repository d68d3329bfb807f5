"""What the README shows can be typed: its Python runs, and its commands have the options they are
given."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from seecause.cli import app

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^seecause .*$", README, flags=re.MULTILINE)


def test_the_snippet_runs_without_any_file(tmp_path, monkeypatch):
    (snippet,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(snippet, names)
    assert (
        names["att"].maps.shape == (2, 12, 12)
        and names["masks"].any()
        and (tmp_path / "overlay.png").is_file()
    )


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_has_the_options_it_is_given(line):
    words = shlex.split(re.sub(r"\s+# .*", "", line))[1:]
    command = typer.main.get_command(app)
    while hasattr(command, "get_command"):
        command = command.get_command(None, words.pop(0))
    known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


def test_it_is_short_and_names_every_extra():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert len(README.split()) <= 700
    assert all(f"`{name}`" in README for name in project["optional-dependencies"] if name != "docs")


def test_it_leads_with_a_picture_says_how_to_install_and_answers_for_captum():
    picture = README.index("](docs/first.jpg)")
    assert picture < README.index("make demo") < README.index("pip install") < len(README) / 3
    assert "## Why not captum?" in README and "](docs/others.md)" in README


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((docs/[^)#]+)", README))))
def test_every_link_leads_somewhere(target):
    assert (Path(__file__).parents[1] / target).is_file()
