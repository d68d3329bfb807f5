"""What the README shows can be typed: its Python runs, and its commands have the options they are
given."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tests.cli.calls import flags_of

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^seecause .*$", README, flags=re.MULTILINE)
DOCS = Path(__file__).parents[1] / "docs"
PAGES = [path for path in sorted(DOCS.glob("*.md")) if path.name != "decisions.md"]


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


def unknown_flags(line):
    """Options of a command line that its command does not have."""
    words = shlex.split(re.sub(r"\s+# .*", "", line))[1:]
    return {word.partition("=")[0] for word in words if word.startswith("--")} - flags_of(words)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_has_the_options_it_is_given(line):
    assert unknown_flags(line) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_docs_have_the_options_they_are_given(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^    (seecause [a-z].*)$", text, flags=re.MULTILINE):
        assert unknown_flags(line) == set(), line


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
