"""What people see of commands: bars and spinners, help, what doctor says, tables."""

from __future__ import annotations

import io
import json
import re
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import typer
from typer.testing import CliRunner

from seecause.cli import app, doctor, main, options, progress
from seecause.errors import BadOption
from seecause.models.view import VisionModel
from tests.cli.spies import MODEL


def invoke(line: str, **environment):
    return CliRunner().invoke(app, line.split(), env=environment)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch) -> Terminal:
    """On standard error, for the rest of a test."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return shown


ERASED = "\x1b[2K"


def test_a_bar_tells_its_speed_and_goes_when_it_is_done(monkeypatch):
    screen = terminal(monkeypatch)
    with progress.counting("things", 4, rate="images/s") as advance:
        advance(1)
        advance(2)
    shown = screen.getvalue()
    assert "things" in shown and "3/4" in shown and "images/s" in shown
    assert ERASED in shown[shown.rindex("3/4") :] and "things: " not in shown  # no line of a log
    with progress.training(quiet=False) as on_step:
        on_step(2, 5, "loss 3")
        on_step(3, 5, "")
    shown = screen.getvalue().removeprefix(shown)
    assert "3/5" in shown and "loss 3" in shown and "step " not in shown
    screen.truncate(0)
    with progress.counting("things", 4, quiet=True) as advance:
        advance(1)
    with progress.training(quiet=True) as on_step:
        on_step(5, 5, "loss 3")
    assert "things" not in screen.getvalue() and "loss" not in screen.getvalue()
    bar = progress._bar(quiet=False)
    assert bar.speed_estimate_period == 600 and not bar.disable  # a shard may take minutes


def test_a_bar_ends_the_spinner(monkeypatch):
    screen = terminal(monkeypatch)
    with progress.spinning("waiting"):
        assert progress._spinner._live is not None and "waiting" in screen.getvalue()
        with progress.spinning("longer"):
            assert "longer" in screen.getvalue()
            with progress.counting("things", 1):
                assert progress._spinner._live is None
    assert progress._spinner._live is None and sys.stderr is screen
    with progress.spinning("waiting"):
        assert all(isinstance(s, progress._Watched) for s in (sys.stdout, sys.stderr))
        sys.stderr.write("a word")
        assert progress._spinner._live is None and sys.stderr.isatty()
    shown = screen.getvalue()
    assert shown.index(ERASED, shown.rindex("waiting")) < shown.index("a word")
    before = screen.getvalue()

    def command(*, quiet: bool) -> None:
        assert (screen.getvalue() == before) == quiet

    for quiet in (True, False):
        progress.dressed(command)(quiet=quiet)


def test_lines_of_a_log_are_some_time_apart(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "EVERY", 10.0)
    with progress.counting("things", 9) as advance:
        for moment in (9.9, 10.0, 19.9, 20.0, 21.0):
            now[0] = moment
            advance(1)
    assert capsys.readouterr().err == "things: 2 of 9\nthings: 4 of 9\n"


def test_a_table_has_room_in_a_file_and_stars_where_it_is_bold(capsys):
    cells = [f"**{place}.5**" for place in range(12)] + ["**-1**", "**word**"]
    rule = "|".join("---" for _ in cells)
    progress.print_markdown(f"|{'|'.join(cells)}|\n|{rule}|\n|{'|'.join(cells)}|\n")
    shown = capsys.readouterr().out
    assert all(f"{place}.5 ★" in shown for place in range(12)) and "-1 ★" in shown
    assert "word ★" not in shown and "word" in shown  # on one line


def test_rows_stand_under_their_titles_from_the_edge(capsys):
    progress.print_rows(["name", "needs"], [("a", "labels"), ("long", "x")])
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    line = f" {'─' * 13}"
    assert shown == ["", " name   needs", line, " a      labels", " long   x", ""]


def test_facts_are_what_json_can_say():
    class Odd:
        def __str__(self):
            return "odd"

    inf = float("inf")
    value = {"a": [1, 2.5, inf, -inf], "b": {True: None}, "c": ({1}, frozenset("x")), "d": Odd()}
    assert progress.plain(value) == {
        "a": [1, 2.5, None, None], "b": {"True": None}, "c": [[1], ["x"]], "d": "odd"
    }  # fmt: skip


PLACES = {
    "discover": "seecause.background.discover.discover",
    "audit": "seecause.background.audit.audit",
    "gate --max-flips 1": "seecause.background.audit.audit",
    "heads audit": "seecause.background._heads_audit.heads_audit",
    "heads score": "seecause.background.score_heads",
    "heads prune": "seecause.background.prune_and_test",
    "heads ablation-study k": "seecause.background.ablation_study",
}


@pytest.mark.parametrize("line", PLACES)
def test_work_is_counted_unless_quiet(opened, called, monkeypatch, capsys, line):
    monkeypatch.setattr("seecause.cli.progress.EVERY", 0.0)
    for quiet in ("", " --quiet"):
        count = called(f"{line}{quiet}", PLACES[line]).options["progress"]
        with count("things", 3) as advance:
            advance(2)
        assert capsys.readouterr().err == "things: 2 of 3\n" * (not quiet)


SHOWN = {
    "explain": {
        "model": "NAME|FOLDER", "method": "NAME,NAME", "weights": "PATH|random", "out": "PATH",
        "device": "auto | cpu | cuda", "seed": "N", "evidence": "", "option": "KEY=VALUE",
    },
    "audit": {"eye": "NAME|given|own", "data": "KIND:PATH", "limit": "N", "eye_weights": "TEXT"},
    "gate": {"max_flips": "X", "junit": "PATH"},
    "repair": {"test": "KIND:PATH", "groups": ""},
    "serve": {"data": "DATA", "port": "N", "runs": "FOLDER", "host": "TEXT"},
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_help_names_what_an_option_holds(name):
    command = typer.main.get_command(app).get_command(None, name)
    context = command.context_class(command, info_name=name)
    shown = {p.name: p.metavar for p in command.get_params(context)}
    assert {option: shown[option] for option in SHOWN[name]} == SHOWN[name]


def test_help_comes_by_its_short_name_and_where_nothing_is_asked(monkeypatch, capsys):
    for line in ("-h", "--help"):
        done = invoke(line)
        assert done.exit_code == 0 and "seecause --version" not in done.output
        assert "See what causes a vision transformer's answer" in done.output
    for line in ("", "bench", "heads", "zoo"):
        done = invoke(line)
        titles = "Commands" if line else "Start here"
        assert titles in done.output and "--help" in done.output, line
    monkeypatch.setattr(sys, "argv", ["/some/where/__main__.py", "bench", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "Usage: seecause bench" in capsys.readouterr().out  # however it was called
    version = invoke("--version")
    assert version.exit_code == 0 and re.fullmatch(r"seecause \d\S+\n", version.stdout)


def test_words_with_commas_are_names_each_once():
    assert options.names(" b, a,,b ,") == ("b", "a") and options.names(" , ") == ()
    assert options._three("0.5", "--mean") == (0.5, 0.5, 0.5)
    for wrong in ("0.1,0.2", "", "1,2,3,4"):
        with pytest.raises(BadOption, match="--mean"):
            options._three(wrong, "--mean")
    for wrong in ("1,2,3", "", "-3", "1.5"):
        with pytest.raises(BadOption, match="--size"):
            options._sides(wrong)
    assert options._sides("8, 9") == (8, 9)


def test_a_machine_is_described(monkeypatch):
    from importlib.metadata import PackageNotFoundError

    def version(name):
        if name == "timm":
            raise PackageNotFoundError(name)
        return f"{name} 1"

    cards = [SimpleNamespace(name=f"card {k}", total_memory=(k + 1) << 30) for k in range(2)]
    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "ray")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", cards.__getitem__)
    for threads, words in ((1, "1 thread"), (3, "3 threads")):
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        facts = doctor.environment()
        assert facts["devices"] == {
            "cpu": words, "cuda:0": "card 0, 1.0 GiB", "cuda:1": "card 1, 2.0 GiB"
        }  # fmt: skip
    assert facts["versions"]["timm"] == "not installed"
    assert facts["versions"]["torch"] == "torch 1" and "python" in facts["versions"]
    assert facts["extras"]["cluster"] == "installed"
    assert facts["extras"]["clip"] == "pip install 'seecause[clip]'"


def test_what_caap_takes_is_that_of_its_tail(monkeypatch):
    plan, asked = SimpleNamespace(tail="source", live=[0, 1, 2]), []

    def make_plan(of, layout, *, tail, layers):
        assert (of, layout, tail, layers) == (model, model.layout, None, None)
        return plan

    monkeypatch.setattr("seecause.attribution.caap.make_plan", make_plan)
    sizes = {"attribution.caap.row_bytes": 1 << 20, "engine.trace.trace_bytes": 2 << 20}
    for name, size in sizes.items():
        monkeypatch.setattr(
            f"seecause.{name}", lambda *words, size=size: {(model, model.layout): size}[words]
        )
    memory = SimpleNamespace(bytes=lambda device: asked.append(device) or 3 << 30)
    monkeypatch.setattr("seecause.engine.chunks.memory", lambda: memory)
    monkeypatch.setattr("seecause.engine.kernel.usable", lambda *_: False)
    monkeypatch.setattr(doctor, "_graphs", lambda model: "2 graphs")
    model = MagicMock(
        blocks=[SimpleNamespace(heads=3, head_dim=4)], device=torch.device("cpu"),
        dtype=torch.float32,
    )  # fmt: skip
    model.layout.n_patches = 2
    for tail, live, size in (
        ("source", [0, 1, 2], "6.0 MiB"),
        ("source", [], "2.0 MiB"),
        ("patched", [0, 1, 2], "24.0 MiB"),  # a patch and its eight neighbours beside them
    ):
        plan.tail, plan.live = tail, live
        cost = doctor._caap_cost(model)
        assert cost["all patches of one image at once"] == size
        assert cost["default tail"] == tail and "CUDA graphs" not in cost
        assert cost["memory budget"] == "3.0 GiB (work is cut to fit it)"
        assert cost["attention"].endswith("explicit, in chunks, in patched runs")
    assert asked[0] == model.device


def test_whether_graphs_are_replayed_is_tried_three_times(monkeypatch):
    maps = []
    frame = SimpleNamespace(mean=(0.5, 0.5), size=(4, 6))
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float64, preprocess=frame)
    monkeypatch.setattr("seecause.attribution.attribute.attribute", lambda *w: maps.append(w))
    monkeypatch.setattr("seecause.engine.graphs.report", lambda: ["a", "b"])
    assert doctor._graphs(model) == "a; b" and len(maps) == 3
    (asked, picture, target) = maps[0]
    assert (asked, picture.shape, picture.dtype) == (model, (1, 2, 4, 6), torch.float64)
    assert target == 0
    monkeypatch.setenv("SEECAUSE_GRAPHS", "0")
    assert doctor._graphs(model) == "off: SEECAUSE_GRAPHS=0" and len(maps) == 3


def test_every_kind_of_model_says_what_works_and_where_it_reads(monkeypatch):
    works = {
        "transformer": "scores, ablation, pruning, repair", "prompt": "scores, ablation",
        "staged": "none: it is read by stages", "dense": "none: its rows read places",
    }  # fmt: skip
    monkeypatch.setattr("seecause.engine.verify.verify", lambda model: [])
    for name in ("_transformer", "_cells"):
        monkeypatch.setattr(doctor, name, lambda model, name=name: {name: {}})
    for kind, heads in works.items():
        model = MagicMock(architecture=kind)
        if view := kind in ("transformer", "prompt"):
            model.__class__ = VisionModel
        facts = doctor.checkup(model)
        assert facts["what works"]["heads"].startswith(heads)
        assert ("caap" in facts["what works"]["methods"]) == (kind != "prompt")
        assert ("_transformer" if view else "_cells") in facts


def test_a_checkup_says_which_weights_and_lists_classes_where_asked(opened, monkeypatch):
    names = ["ant", "bee"]
    monkeypatch.setattr(doctor, "checkup", lambda model: {"model": {"name": model.name}})
    monkeypatch.setattr(MODEL, "n_classes", 2, raising=False)
    monkeypatch.setattr(MODEL, "class_name", names.__getitem__, raising=False)
    facts = json.loads(invoke("doctor --model timm:x --json").stdout)
    assert facts == {"model": {"name": "opened", "weights": "pretrained, or the model's own"}}
    done = invoke("doctor --model timm:x --weights w.pth --list-classes")
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert rows == [
        ["model"], ["name", "opened"], ["weights", "w.pth"], ["classes"], ["0", "ant"],
        ["1", "bee"],
    ]  # fmt: skip
    done = invoke("doctor --list-classes")
    assert done.exit_code == 2 and "--list-classes" in done.output


def test_facts_with_parts_have_a_column_for_each(capsys):
    probes = {"logits": {"worst": 0.00012, "compared": 12345}, "blocks": {"worst": 0.5, "c": None}}
    doctor._show({"verified": probes})
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert rows[:2] == [["verified"], ["worst", "compared"]]
    assert rows[-2:] == [["logits", "1.2e-04", "12,345"], ["blocks", "5.0e-01", "none"]]


def test_methods_and_selectors_are_tables(monkeypatch):
    from seecause.attribution.registry import methods

    shown = invoke("methods", COLUMNS="250").stdout
    for name, entry in methods("transformer").items():
        (row,) = [line for line in shown.splitlines() if line.split()[:1] == [name]]
        assert ("yes" if entry.class_specific else "any") in row.split(), name
        assert entry.summary.split()[0] in row
    rise = invoke("methods rise", COLUMNS="250").stdout
    entry = methods("transformer")["rise"]
    rows = {line.split()[0]: line.split()[1:] for line in rise.splitlines() if line.strip()}
    assert rise.startswith(f"rise: {entry.summary}\n")
    coloured = CliRunner().invoke(app, ["methods", "rise"], color=True).stdout
    assert coloured.startswith("\x1b[1mrise: ")
    for option, default in entry.options.items():
        if default is not None:
            assert " ".join(rows[option]) == str(default)
    toy = SimpleNamespace(needs="labels", cost="3 forwards", summary="a toy")
    monkeypatch.setattr("seecause.background.heads.selectors", lambda: {"b": toy, "a": toy})
    told = invoke("heads selectors", COLUMNS="120").stdout.splitlines()
    rows = [line.split() for line in told if line.strip()]
    assert rows[0][0] == "name" and rows[-2][0] == "a" and rows[-1][0] == "b"
    assert rows[-1][1:] == ["labels", "3", "forwards", "a", "toy"]
    facts = json.loads(invoke("heads selectors --json").stdout)
    assert facts["a"] == vars(toy)
