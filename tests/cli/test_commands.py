"""The list of commands, and that a command loads no other's file."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import subprocess
import sys
import textwrap
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import seecause.cli
from seecause.cli import COMMANDS, HOMES, app
from seecause.cli.options import ReadOptions, RunOptions
from seecause.cli.progress import counting, dressed, plain, starting
from seecause.cli.workers import WorkerOptions

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
    assert registering == {HOMES.get(name, name) for name in COMMANDS}


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


def test_help_has_commands_and_options_in_panels_by_what_they_are_for():
    listed = CliRunner().invoke(app, ["--help"]).output
    titles = ("Start here", "Explain ─", "Audit and repair", "Build and trace")
    places = [listed.index(title) for title in titles]
    assert places == sorted(places)
    heads = [line.split()[1] for line in listed.splitlines() if re.match(r"│ [a-z]|╭─ ", line)]
    assert heads[heads.index("Start") :] == [
        "Start", "demo", "doctor", "Explain", "explain", "methods", "bench", "serve", "Audit",
        "audit", "discover", "repair", "heads", "Build", "faithful", "lvlm",
        
    ]  # fmt: skip
    many = CliRunner().invoke(app, ["audit", "--help"]).output
    assert many.index("─ Many processes, many machines ─") < many.index("--workers")
    help_text = CliRunner().invoke(app, ["explain", "--help"]).output
    own, model, running = (
        help_text.index(f"─ {t} ─") for t in ("Options", "Model", "Running and writing")
    )
    assert own < help_text.index("--evidence") < model < help_text.index("--weights") < running
    assert running < help_text.index("--overwrite")


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
    files = {name.rpartition(".")[2] for name in modules if "seecause.attribution." in name}
    assert files == {"attention", "gradients", "registry"}


def test_a_missing_picture_is_refused_before_torch_is_loaded():
    modules = loaded(
        "from typer.testing import CliRunner; from seecause.cli import app\n"
        "assert CliRunner().invoke(app, ['explain', 'missing.jpg']).exit_code == 2"
    )
    assert "seecause.data.images" in modules and "torch" not in modules


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def commands(group=None, path=()):
    """Every command, by its words."""
    group = group or typer.main.get_command(app)
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def group_of(function, name):
    """The dataclass that a parameter is annotated with, or None."""
    known = vars(sys.modules[function.__module__])
    kind = known.get(str(function.__annotations__.get(name)))
    return kind if is_dataclass(kind) else None


def read_fields(function, name, kind):
    """The fields of a group that a function reads of its parameter, itself or by what it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    fields_of, used = {field.name for field in fields(kind)}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name:
            method = getattr(kind, node.attr, None)
            if node.attr in fields_of:
                used.add(node.attr)
            elif inspect.isfunction(method):
                used |= read_fields(method, "self", kind)
        if isinstance(node, ast.Call):
            words = [*node.args, *(keyword.value for keyword in node.keywords)]
            if name in [ast.unparse(word) for word in words]:
                used |= read_by_callee(function, node, name, kind)
    return used


def read_by_callee(function, call, name, kind):
    """The same of what a call hands on: to `asdict`, to a function of the file, to a method."""
    if ast.unparse(call.func) == "asdict":
        return {field.name for field in fields(kind)}
    callee = vars(sys.modules[function.__module__]).get(ast.unparse(call.func))
    if isinstance(call.func, ast.Attribute):
        known, owner = vars(sys.modules[function.__module__]), call.func.value
        made = ast.unparse(owner.func) if isinstance(owner, ast.Call) else ""
        own = function.__qualname__.split(".")[0] if ast.unparse(owner) == "self" else made
        callee = getattr(
            known.get(own) or group_of(function, ast.unparse(owner)), call.func.attr, None
        )
    if not inspect.isfunction(callee):
        return set()
    names = [other for other in inspect.signature(callee).parameters if other != "self"]
    places = [place for place, word in enumerate(call.args) if ast.unparse(word) == name]
    return read_fields(callee, names[places[0]], kind) if places else set()


def test_every_option_of_a_group_is_used():
    """Also in the commands that take it: each reads all that the group declares."""
    groups = 0
    for words, command in commands():
        function = inspect.unwrap(command.callback)
        for name in inspect.signature(function).parameters:
            if kind := group_of(function, name):
                groups += 1
                missing = {field.name for field in fields(kind)} - read_fields(function, name, kind)
                assert not missing, f"{' '.join(words)}: {sorted(missing)}"
    assert groups > 30
    for kind in (ReadOptions, WorkerOptions):  # groups inside groups are read as a whole
        assert read_fields(kind.made, "self", kind) == {field.name for field in fields(kind)}
    assert read_fields(RunOptions.made, "self", RunOptions) == {"device", "dtype"}


def test_help_says_what_to_write():
    """No type of Python, nothing behind a flag, and choices that no narrow terminal cuts."""
    for words, command in commands():
        context = command.context_class(command, info_name=words[-1])
        options = [p for p in command.get_params(context) if p.param_type_name == "option"]
        shown = [p.metavar for p in options]
        assert not re.search(r"[<\[]\w+>|list\[", " ".join(shown)), (words, shown)
        words_for = {p.name: p.metavar for p in options}
        assert words_for.get("method", "NAME,NAME") == "NAME,NAME" or words == ("discover",)
        assert words_for.get("model", "NAME|FOLDER") == "NAME|FOLDER", words
    for words in (["explain"], ["lvlm"], []):
        narrow = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).output
        assert not re.search(r"<\w+|list\[", narrow), words
        assert all(name in narrow for name in ("bfloat16", "float64")) or words != ["explain"]
    assert "any number of classes" in " ".join(
        CliRunner().invoke(app, ["explain", "--help"], env={"COLUMNS": "250"}).output.split()
    )


def test_every_command_with_results_speaks_json():
    flags = {words: [o for p in command.params for o in p.opts] for words, command in commands()}
    without = {" ".join(words) for words, options in flags.items() if "--json" not in options}
    assert not any("--out" in flags[tuple(words.split())] for words in without)
    assert {"doctor", "methods", "bench report"}.isdisjoint(without)


def test_json_holds_what_the_manifest_holds_and_nothing_else_is_printed(tmp_path):
    out = tmp_path / "audit"
    words = ["audit", "--limit", "8", "--per-picture", "1", "--out", str(out), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["out"] == str(out) and facts["numbers"] and facts["page"] == "index.html"
    assert json.loads(CliRunner().invoke(app, ["methods", "caap", "--json"]).stdout)["methods"]
    nowhere = CliRunner().invoke(app, ["bench", "status", str(tmp_path / "no"), "--json"])
    assert nowhere.exit_code == 2 and nowhere.stdout == ""


def test_numbers_that_are_none_are_null():
    assert plain({"a": float("nan"), 1: (2.5, Path("x"))}) == {"a": None, "1": [2.5, "x"]}


def test_a_spinner_is_there_from_the_start_and_gone_before_the_first_word(monkeypatch):
    screen, answers = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", answers)
    monkeypatch.setenv("TERM", "xterm")
    seen = []

    def command() -> None:
        seen.append(screen.getvalue())
        with starting("loading it"):
            seen.append(screen.getvalue())
        typer.echo("an answer")
        with counting("things", 2) as advance:
            advance(2)

    dressed(command)()
    assert "starting" in seen[0] and "loading it" in seen[1]
    assert answers.getvalue() == "an answer\n"
    assert sys.stdout is answers and sys.stderr is screen
    quiet = Terminal()
    monkeypatch.setattr(sys, "stderr", quiet)
    dressed(lambda: None)()
    with starting("loading it", quiet=True):
        assert "loading" not in quiet.getvalue()
