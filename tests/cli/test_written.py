"""What commands print and write after their work is done, which is made up here."""

from __future__ import annotations

import errno
import json
import logging
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from seecause.attribution.registry import find
from seecause.background.heads import HeadScores
from seecause.cli import app, bench, doctor, explain, heads_options, heads_prune
from seecause.errors import BadOption
from seecause.models.view import VisionModel
from tests.cli.spies import Reached, reach


def invoke(line: str):
    return CliRunner().invoke(app, line.split())


def test_a_report_is_told_and_its_table_is_for_programs(tmp_path, capsys):
    (tmp_path / "table.md").write_text("| method |\n|---|\n| **0.5** caap |\n")
    (tmp_path / "table.csv").write_text("method,ins-del,n\ncaap,0.5,3\n")
    files = [tmp_path / name for name in ("index.html", "table.csv", "rows.csv")]
    facts = bench.tell_report(tmp_path, files)
    assert facts == {
        "out": str(tmp_path), "files": ["index.html", "table.csv", "rows.csv"],
        "table": [{"method": "caap", "ins-del": 0.5, "n": 3}],
    }  # fmt: skip
    told = capsys.readouterr().out
    assert "0.5 ★ caap" in told
    assert told.splitlines()[-2:] == ["also: table.csv, rows.csv", f"page: {files[0]}"]
    assert bench.tell_report(tmp_path, files, quiet=True) == facts
    assert capsys.readouterr().out == ""


def test_a_run_that_is_done_names_the_next_command(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.BenchRun, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(bench, "status_facts", lambda state: {"complete": state.complete})
    for complete in (True, False):
        state = SimpleNamespace(complete=complete)
        monkeypatch.setattr(bench.BenchRun, "perform", lambda *_, state=state: state)
        done = invoke(f"bench run --out {tmp_path}/run")
        assert done.exit_code == (0 if complete else 1)
        assert done.stdout == f"next: seecause bench report {tmp_path}/run\n" * complete
        assert invoke(f"bench run --quiet --out {tmp_path}/run").stdout == ""
        facts = json.loads(invoke(f"bench run --json --out {tmp_path}/run").stdout)
        assert facts == {"out": f"{tmp_path}/run", "complete": complete}


def test_a_report_is_against_the_method_that_was_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("seecause.report.ablate.write_report", reach)
    reached = invoke(f"bench report {tmp_path} --against random").exception
    assert isinstance(reached, Reached) and reached.options == {"against": "random"}
    assert reached.words[0].folder == tmp_path


def test_the_demo_is_one_page_and_opens_where_that_is_asked(monkeypatch, tmp_path, caplog):
    shown = SimpleNamespace(sections=[], manifests=[{"method": "toy"}], lines=["a line"])
    opened = []
    monkeypatch.setattr("seecause.critters.demo.JOBS", {"Toy": None})
    log = logging.getLogger("seecause.background.transplant")
    run = lambda *_: log.warning("left out") or shown  # noqa: E731
    monkeypatch.setattr("seecause.critters.demo.run_job", run)
    monkeypatch.setattr("typer.launch", opened.append)
    page = tmp_path / "demo" / "index.html"
    done = invoke(f"demo --out {tmp_path}/demo")
    assert done.stdout == f"a line\npage: {page}\n" and not opened
    assert caplog.messages == ["left out"]
    manifest = json.loads((tmp_path / "demo" / "manifest.json").read_text())
    assert (manifest["command"], manifest["runs"]) == ("demo", shown.manifests)
    assert "seecause on Critters" in page.read_text() and "Protocol" in page.read_text()
    assert invoke(f"demo --out {tmp_path}/demo --open --quiet").stdout == ""
    assert caplog.messages == ["left out"]  # once: nothing but errors is said
    assert opened == [page.as_uri()]


def test_a_checkup_holds_what_the_model_says(monkeypatch):
    probe = SimpleNamespace(name="logits", worst=0.5, compared="4 numbers")
    monkeypatch.setattr("seecause.engine.verify.verify", lambda model: [probe])
    monkeypatch.setattr(doctor, "_cells", lambda model: {"features": {"stages": "one"}})
    frame = SimpleNamespace(geometry=lambda: "96 x 96", mean=(0.1, 0.2), std=(0.3, 0.4))
    model = SimpleNamespace(
        architecture="staged", name="toy", random_weights=True, family="resnet", sigmoid=True,
        fingerprint=lambda: "0123", module=torch.nn.Linear(3, 2), readout_name="mean", n_classes=7,
        device=torch.device("cpu"), dtype=torch.float64, preprocess=frame, fixed_size=False,
    )  # fmt: skip
    facts = doctor.checkup(model)
    works = facts.pop("what works")
    assert facts == {
        "verified": {"logits": {"worst relative difference": 0.5, "compared": "4 numbers"}},
        "model": {
            "name": "toy (RANDOM weights)", "family": "resnet", "fingerprint": "0123",
            "parameters": 8, "readout": "mean", "classes": 7, "probability": "sigmoid",
            "device": "cpu", "dtype": "float64",
        },
        "preprocessing": {"pictures": "96 x 96; others too", "mean": "0.1, 0.2", "std": "0.3, 0.4"},
        "features": {"stages": "one"},
    }  # fmt: skip
    assert "caap" in works["methods"].split(", ") and works["heads"].startswith("none")
    model.random_weights, model.sigmoid, model.fixed_size = False, False, True
    facts = doctor.checkup(model)
    assert facts["model"]["name"] == "toy" and facts["model"]["probability"] == "softmax"
    assert facts["preprocessing"]["pictures"] == "96 x 96"


def test_a_method_is_told_to_programs():
    (facts,) = json.loads(invoke("methods rollout --json").stdout)["methods"]
    entry = find("rollout")
    assert facts == {
        "name": "rollout", "summary": entry.summary, "needs": entry.needs,
        "forwards": entry.forwards, "class specific": False, "options": dict(entry.options),
    }  # fmt: skip
    staged = json.loads(invoke("methods --staged --json").stdout)["methods"]
    names = [method["name"] for method in staged]
    assert names == sorted(names) and "rollout" not in names and "caap" in names


def test_an_option_goes_to_every_method_that_has_it():
    options = explain._options_of(
        ["caap", "random"], ["tail=patched", "layers=1,2"], seed=3, architecture="transformer"
    )
    assert options["random"] == {"seed": 3}
    assert {name: options["caap"][name] for name in ("tail", "layers")} == {
        "tail": "patched", "layers": (1, 2),
    }  # fmt: skip
    assert explain._methods(None, None, True) == ["caap"]
    assert tuple(explain._methods("a, b", None, True)) == ("a", "b")


def test_how_many_heads_may_go():
    limits = {"16": 16, "1": 1, "0.1": 0.1, "1.0": 1.0}
    for text, limit in limits.items():
        assert heads_options.head_limit(text) == limit
        assert type(heads_options.head_limit(text)) is type(limit)
    for wrong in ("0", "-1", "0.0", "1.5", "nan", "many", ""):
        with pytest.raises(BadOption, match="--top"):
            heads_options.head_limit(wrong)


def test_the_lead_names_pictures_holes_and_random_weights():
    class Pictures(list):
        name, holes = "birds", ()

    pictures, model = Pictures([1, 2, 3]), SimpleNamespace(random_weights=False)
    assert heads_options.lead_of(model, pictures) == "3 pictures of birds."
    pictures.holes, model.random_weights = ("hole", "hole"), True
    assert heads_options.lead_of(model, pictures) == (
        "3 pictures of birds. 2 could not be read."
        " The model has random weights: its answers mean nothing."
    )


def test_the_highest_heads_are_named(monkeypatch, tmp_path):
    scores = HeadScores(torch.tensor([[0.1, 0.6, 0.2], [0.4, -1.0, 0.5], [0.3, 0.0, 0.05]]))
    result = SimpleNamespace(scores=scores, pictures=SimpleNamespace(holes=()))
    monkeypatch.setattr("seecause.background.score_heads", lambda *_, **__: result)
    monkeypatch.setattr("seecause.data.registry.open_data", lambda *_, **__: None)
    monkeypatch.setattr(heads_options.AskedModel, "ask", lambda *_: None)
    monkeypatch.setattr(heads_prune, "_write_scores", lambda *_: None)
    done = invoke(f"heads score --out {tmp_path}/s")
    highest = "(0, 1) 0.6, (1, 2) 0.5, (1, 0) 0.4, (2, 0) 0.3, (0, 2) 0.2"
    assert done.stdout.splitlines()[0] == f"highest (layer, head): {highest}", done.output
    assert heads_prune._plain({"a": 1, "b": torch.float32, "c": None, "d": [1]}) == {
        "a": 1, "b": "torch.float32", "c": None, "d": [1],
    }  # fmt: skip


def test_a_checkpoint_is_written_by_its_kind_of_model(monkeypatch, tmp_path):
    exports = []
    result = SimpleNamespace(
        model=SimpleNamespace(architecture="transformer"), heads=[(0, 1)], note="why",
        export=lambda folder, form: exports.append((folder, form)),
    )  # fmt: skip
    heads_prune._export(result, tmp_path, heads_prune.Form.sliced)
    assert exports == [(tmp_path, "sliced")]
    monkeypatch.setattr("seecause.lvlm.prompt_classifier.export", reach)
    result.model.architecture = "prompt"
    with pytest.raises(Reached) as reached:
        heads_prune._export(result, tmp_path, heads_prune.Form.zeroed)
    assert reached.value.words == (result.model, [(0, 1)], tmp_path)
    assert reached.value.options == {"note": "why"} and len(exports) == 1
    asked = object.__new__(type("Asked", (VisionModel,), {"architecture": "prompt"}))
    heads_prune._check_form(asked, "zeroed")
    with pytest.raises(BadOption, match="keeps its architecture"):
        heads_prune._check_form(asked, "sliced")


def test_an_edit_tells_before_and_after(monkeypatch, tmp_path):
    edited = []
    lvlm = SimpleNamespace(
        prompt=lambda picture, question: question, fingerprint=lambda: "0123",
        speak=lambda prompt, length: [*edited, prompt, length],
        processor=SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: f" {ids} ")),
    )  # fmt: skip

    @contextmanager
    def edited_heads(*_, **__):
        edited.append("edited")
        yield
        edited.clear()

    monkeypatch.setattr("seecause.cli.lvlm_options.open_lvlm", lambda *_: lvlm)
    monkeypatch.setattr("seecause.lvlm.edited_heads", edited_heads)
    line = "lvlm edit critters:clean:test#1 --question Q --heads 0.4 --boost 2 --length 3"
    done = invoke(f"{line} --out {tmp_path}/edit")
    assert done.stdout == "before: ['Q', 3]\nafter:  ['edited', 'Q', 3]\n", done.output
    manifest = json.loads((tmp_path / "edit" / "manifest.json").read_text())
    expected = {
        "command": "lvlm edit", "image": "critters:clean:test#1", "question": "Q",
        "model": "builtin:critters-llava", "before": "['Q', 3]", "after": "['edited', 'Q', 3]",
        "heads": [[0, 4]], "model_fingerprint": "0123",
        "options": {"blind": False, "redirect": None, "boost": 2, "length": 3},
    }  # fmt: skip
    assert {name: manifest[name] for name in expected} == expected
    assert invoke(f"{line} --quiet").stdout == ""
    monkeypatch.setattr("seecause.cli.progress.EVERY", 0.0)
    assert invoke(line).stderr == "speaking: 1 of 2\nspeaking: 2 of 2\n"


def test_what_the_system_refuses_is_one_line_with_its_place(monkeypatch):
    def refuse(failure):
        def status(folder):
            raise failure

        monkeypatch.setattr("seecause.bench.status", status)
        return invoke("bench status run")

    done = refuse(PermissionError(errno.EACCES, "Permission denied", "x/y"))
    line = "seecause: Permission denied: x/y; nothing half-written counts\n"
    assert (done.exit_code, done.stderr) == (2, line)
    done = refuse(OSError(errno.ENOSPC, "No space left on device"))
    assert done.stderr == "seecause: No space left on device; nothing half-written counts\n"
    assert isinstance(refuse(OSError("odd")).exception, OSError)  # no answer of the system: a bug
    assert "half-written" not in refuse(BrokenPipeError(errno.EPIPE, "Broken pipe")).output
    assert Path("run").exists() is False
