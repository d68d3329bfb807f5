"""The list of methods is what the registry says."""

from __future__ import annotations

from typer.testing import CliRunner

import seecause as sc
from seecause.cli import app


def test_every_method_is_listed_with_its_cost():
    shown = CliRunner().invoke(app, ["methods"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for name, entry in sc.methods().items():
        assert name in shown.stdout and entry.forwards.split()[0] in shown.stdout


def test_options_of_one_method_are_listed_and_a_wrong_name_is_one_line():
    shown = CliRunner().invoke(app, ["methods", "caap"], env={"COLUMNS": "200"})
    assert all(option in shown.stdout for option in ("tail", "layers", "select", "blank", "white"))
    wrong = CliRunner().invoke(app, ["methods", "cap"])
    assert wrong.exit_code == 2 and "caap" in wrong.stderr and wrong.stderr.count("\n") == 1
