"""The list of commands, their help, and what a command loads."""

import json
import subprocess
import sys

import pytest

from seecause.cli import GROUPS, USAGE_ERROR, app, run
from tests.cli.calls import invoke, photo

COMMANDS = [name for commands in GROUPS.values() for name in commands]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name, capsys):
    assert run([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: seecause {name}") and len(text) > 400
    command = app
    for word in name.split():
        command = command[word]
    unexplained = [
        argument.names
        for argument in command.assemble_argument_collection(parse_docstring=True)
        if not argument.parameter.help and argument.show
    ]
    assert unexplained == []


def test_the_list_of_commands_says_what_each_does(capsys):
    assert run([]) == 0 and run(["heads"]) == 0 and run(["--version"]) == 0
    text = capsys.readouterr().out
    for words in ("Start here", "Which patches of each image", "Score every head", "seecause 0."):
        assert words in text, words


LOADED = """
import os, sys, timm, torch, transformers  # once for all commands, each of which has a fork
for place, words in enumerate({commands!r}):
    if os.fork():
        assert os.wait()[1] == 0, words
        continue
    from seecause.cli import run
    code = run([*words.split(), "--quiet", "--out", {out!r} + str(place)])
    ours = [name for name in sys.modules if name.split(".")[0] == "seecause"]
    print(len(ours), file=sys.stderr, flush=True)
    os._exit(code)
"""


def test_commands_load_few_modules(tmp_path):
    photo(tmp_path / "a.png")  # instead of a hundred calibration images
    most = {
        "explain critters:clean:test#7": 40,
        "heads prune --limit 4 --top 1 --option draws=1": 45,
        "lvlm trace critters:clean:test#3 --question What? --masks 4 --heads-only"
        f" --calibration {tmp_path}": 40,
    }
    code = LOADED.format(commands=list(most), out=str(tmp_path / "out"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = [int(line) for line in done.stderr.splitlines() if line.isdecimal()]
    assert all(count <= most[words] for words, count in zip(most, counts, strict=True)), counts


def test_help_loads_no_torch():
    code = (
        "import sys; from seecause.cli import run; run(['--help']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("False"), done.stderr


def test_a_user_who_stops_a_command_gets_no_traceback(monkeypatch, tmp_path):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("seecause.data.dataset.find_images", stop)
    done = invoke("explain", "a.png", "--out", tmp_path / "out")
    assert done.exit_code == 130 and done.output == ""


@pytest.mark.parametrize("what", ["methods", "selectors", "metrics", "models", "datasets"])
def test_names_are_listed(what):
    done = invoke("list", what)
    assert done.exit_code == 0 and len(done.stdout.splitlines()) > 5
    assert len(json.loads(invoke("list", what, "--json").stdout)[what]) >= 4


def test_options_of_a_method_are_listed():
    rows = json.loads(invoke("list", "methods", "caap", "--json").stdout)["methods"]
    options = {row["option"]: row["default"] for row in rows}
    assert options["tail"] is None and options["score"] == "prob"
    assert "resnet" not in invoke("list", "methods", "caap").stdout.lower()
    assert "epochs" not in invoke("list", "selectors", "cigma").stdout


def test_doctor_describes_machine_and_model():
    done = invoke("doctor")
    assert done.exit_code == 0 and "torch" in done.stdout and "thread" in done.stdout
    words = ("--model", "timm:test_vit", "--weights", "random", "--device", "cpu")
    done = invoke("doctor", *words, "--list-classes")
    assert done.exit_code == 0 and "RANDOM" in done.stdout and "verified" in done.stdout
    facts = json.loads(invoke("doctor", *words, "--json").stdout)
    assert facts["model"]["classes"] == 1000 and facts["inside"]["grid"].startswith("10 x 10")
    assert set(facts["verified"]) and "caap" in facts["what works"]["methods"]


def test_a_broken_pipe_or_full_disk_is_not_a_mistake_of_ours(monkeypatch, tmp_path):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("seecause.files.os.fsync", full)
    words = ("explain", "critters:clean:test#0", "--method", "center", "--out", tmp_path / "out")
    done = invoke(*words)
    assert done.exit_code == USAGE_ERROR and "No space left" in done.stderr
    assert done.stderr.count("\n") == 1
    monkeypatch.undo()
    assert invoke(*words).exit_code == 0
