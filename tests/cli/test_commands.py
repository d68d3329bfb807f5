"""The list of commands, and that a command loads no other's file."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import seecause.cli
from seecause.cli import COMMANDS, app
from seecause.cli.progress import starting

FILES = {file.stem for file in Path(seecause.cli.__file__).parent.glob("*.py")}
LOADED = """
import json, sys
{}
print(json.dumps(list(sys.modules)))
"""


def loaded(code: str) -> set[str]:
    """The modules after some code, in a process of its own."""
    command = [sys.executable, "-c", LOADED.format(code)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(json.loads(output.splitlines()[-1]))


def test_every_file_that_registers_a_command_is_listed():
    texts = {name: Path(seecause.cli.__file__).with_name(f"{name}.py") for name in FILES}
    registering = {name for name, path in texts.items() if "def register(app" in path.read_text()}
    assert registering == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_loads_and_its_line_is_in_the_list(name):
    group = typer.main.get_command(app)
    command = group.get_command(None, name)
    assert command.name == name
    listed = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "140"}).output
    assert f" {name} " in listed and COMMANDS[name] in listed
    first = " ".join((command.help or "").split())
    words = COMMANDS[name].split(";")[0].split(",")[0].rstrip(".")
    assert first.startswith(words)  # the same sentence, or its beginning


def test_a_mistyped_command_is_told_the_nearest():
    result = CliRunner().invoke(app, ["explan"])
    assert result.exit_code == 2 and "explain" in result.output


def test_a_command_loads_its_own_file_alone():
    modules = loaded(
        "from typer.testing import CliRunner; from seecause.cli import app\n"
        "assert CliRunner().invoke(app, ['explain', '--help']).exit_code == 0"
    )
    ours = {name.removeprefix("seecause.cli.") for name in modules if "seecause.cli." in name}
    assert "explain" in ours and not ours & (set(COMMANDS) - {"explain"})


def test_a_method_is_found_without_loading_the_others():
    modules = loaded("from seecause.attribution.registry import find; find('raw-attention')")
    assert "seecause.attribution.raw_attention" in modules
    assert not modules & {f"seecause.attribution.{name}" for name in ("rollout", "rise", "caap")}


def test_a_missing_picture_is_refused_before_torch_is_loaded():
    modules = loaded(
        "from typer.testing import CliRunner; from seecause.cli import app\n"
        "assert CliRunner().invoke(app, ['explain', 'missing.jpg']).exit_code == 2"
    )
    assert "seecause.data.images" in modules and "torch" not in modules


def test_a_spinner_turns_while_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes what captures for a terminal
    monkeypatch.setenv("TERM", "xterm")
    with starting("loading builtin:critters-vit"), starting("nothing", quiet=True):
        pass
    shown = capsys.readouterr()
    assert "loading builtin:critters-vit" in shown.err and "nothing" not in shown.err
    assert not shown.out


@pytest.mark.parametrize("name", sorted(FILES - {"__init__"}))
def test_every_option_of_a_command_is_used(name):
    """An option that is declared and goes nowhere is a promise that is not kept."""
    tree = ast.parse(Path(seecause.cli.__file__).with_name(f"{name}.py").read_text())
    for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
        declared = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        reads = [node for part in function.body for node in ast.walk(part)]
        used = {node.id for node in reads if isinstance(node, ast.Name)}
        assert declared <= used, f"{name}.{function.name}: {sorted(declared - used)}"
