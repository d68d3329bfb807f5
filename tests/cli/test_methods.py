"""The list of methods is what the registry says."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

import seecause as sc
from seecause.attribution.registry import methods
from seecause.cli import app


@pytest.mark.parametrize("architecture", ["transformer", "staged"])
def test_every_method_is_listed_with_what_it_needs_and_costs(architecture):
    shown = CliRunner().invoke(
        app,
        ["methods", *(["--staged"] if architecture == "staged" else [])],
        env={"COLUMNS": "200"},
    )
    assert shown.exit_code == 0
    blocks = re.split(
        r"\n (?=\S)", shown.stdout
    )  # a method begins at the left, its further lines are indented
    for name, entry in methods(architecture).items():
        (block,) = [block for block in blocks if block.split()[:1] == [name]]
        assert f"forwards: {entry.forwards}" in block and entry.needs.split(",")[0] in block


def test_the_list_is_readable_on_a_narrow_terminal():
    shown = CliRunner().invoke(app, ["methods"], env={"COLUMNS": "80"}).stdout
    assert all(len(line) <= 80 for line in shown.splitlines()) and "…" not in shown
    assert all(name in shown for name in sc.methods())  # no name is broken in two


@pytest.mark.parametrize("architecture", ["transformer", "staged"])
def test_a_default_that_is_decided_later_is_said_in_words(architecture):
    """None is no value a reader could give or understand."""
    for entry in methods(architecture).values():
        assert set(entry.unset) >= {
            option for option, default in entry.options.items() if default is None
        }, entry.name
        assert set(entry.unset) <= set(entry.options), entry.name


def test_options_of_one_method_are_listed_and_a_wrong_name_is_one_line():
    shown = CliRunner().invoke(app, ["methods", "caap"], env={"COLUMNS": "200"})
    assert all(option in shown.stdout for option in ("tail", "layers", "select", "blank", "white"))
    rows = {
        words[0]: " ".join(words[1:])
        for words in map(str.split, shown.stdout.splitlines())
        if words
    }
    assert rows["tail"] == "source; patched where the model reads no class token" and rows[
        "layers"
    ].startswith("0 (embedding) to the last block")
    wrong = CliRunner().invoke(app, ["methods", "cap"])
    assert wrong.exit_code == 2 and "caap" in wrong.stderr and wrong.stderr.count("\n") == 1
