"""What commands write of a result that is made up: manifest, title, lead, every section with what
it is drawn from, tables, checkpoints; then what they print and the code they leave with."""

from __future__ import annotations

import importlib
import json
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from seecause.background.heads import HeadScores
from seecause.cli import app
from seecause.cli.options import Output
from seecause.data.dataset import Hole
from tests.cli.spies import MODEL

ANSWERING = SimpleNamespace(name="answering", classes=("x", "y"))
HOLE = Hole("a.png", "cut short")


class Drawn(NamedTuple):
    """A call of a function that draws or lists."""

    name: str
    words: tuple
    options: dict


def drawn(name, *words, **options):
    return Drawn(name, words, options)


class Pictures(list):
    def __init__(self, name, count, holes=()):
        super().__init__(range(count))
        self.name, self.holes = name, holes


@pytest.fixture
def drawing(monkeypatch):
    """Put a note of the call in the place of functions; `listed` ones give a list of it."""

    def put(module, *names, listed=()):
        home = importlib.import_module(f"seecause.report.{module}")
        for name in names:
            monkeypatch.setattr(home, name, lambda *w, name=name, **o: Drawn(name, w, o))
        for name in listed:
            monkeypatch.setattr(home, name, lambda *w, name=name, **o: [Drawn(name, w, o)])

    put("page", "protocol_section", listed=["holes_section"])
    put("folder", "rows_csv")
    return put


@pytest.fixture
def written(opened, monkeypatch, tmp_path):
    """Call a command whose work gives `result`: what it hands to `Output.write`, how it ended."""
    module = importlib.import_module("seecause.background.images")
    monkeypatch.setattr(module, "model_for", lambda model, pictures: ANSWERING)
    writes = []

    def write(output, manifest, title, sections, *, more=lambda folder: None, **options):
        more(output.out)
        writes.append(SimpleNamespace(manifest=manifest, title=title, sections=sections, **options))

    def call(line, place, result, code=0):
        home, _, name = place.rpartition(".")
        monkeypatch.setattr(importlib.import_module(home), name, lambda *_, **__: result)
        monkeypatch.setattr(Output, "write", write)
        monkeypatch.setattr(Output, "check", lambda output: True)
        done = CliRunner().invoke(app, [*line.split(), "--out", str(tmp_path / "out")])
        assert done.exit_code == code, (done.output, done.exception)
        return (*writes, done.stdout.splitlines())

    return call


def ending(out):
    return [f"replaced the earlier result in {out}", f"page: {out / 'index.html'}"]


def test_heads_audit(written, drawing, monkeypatch, tmp_path):
    drawing("heads_audit", "audit_csv", "audit_gallery", "verdict_section",
            listed=["groups_section"])  # fmt: skip
    monkeypatch.setattr("seecause.report.heads_audit.verdict", lambda result: ["first", "second"])
    result = SimpleNamespace(pictures=Pictures("birds", 3), holes=(HOLE,), protocol={"seed": 4})
    page, told = written("heads audit", "seecause.background._heads_audit.heads_audit", result, code=1)
    assert page.manifest == {
        "command": "heads audit", "table": "audit.csv", "verdict": ["first", "second"],
        "run": {"seed": 4},
    }  # fmt: skip
    assert page.title == "Does opened answer from the background?"
    assert page.lead == "3 pictures of birds."
    assert page.sections == [
        drawn("verdict_section", result), drawn("groups_section", result),
        drawn("audit_gallery", ANSWERING, result), drawn("holes_section", (HOLE,)),
        drawn("protocol_section", [{"seed": 4}]),
    ]  # fmt: skip
    assert page.tables == {"audit.csv": drawn("audit_csv", result, ("x", "y"))}
    assert page.holes == (HOLE,)
    assert told == ["first", "second", *ending(tmp_path / "out")]


def test_an_ablation_study(written, drawing, tmp_path):
    drawing("heads", "settings_section", "study_section")
    result = SimpleNamespace(
        train=Pictures("train", 5), test=Pictures("test", 3, holes=(HOLE, HOLE)), holes=(HOLE,),
        masks=SimpleNamespace(source="true masks"), rows=[{"K": 1}, {"K": 2}],
    )  # fmt: skip
    line = "heads ablation-study masks --top 3 --fill blur --guard none"
    page, told = written(line, "seecause.background.ablation_study", result, code=1)
    record = {
        "data": "train", "pictures": 5, "test": "test", "masks": "true masks", "top": 3,
        "fill": "blur", "guard": "none",
    }  # fmt: skip
    named = {"command": "heads ablation-study", "study": "masks", "table": "table.csv"}
    assert page.manifest == {**named, **record}
    assert page.title == "CIGMA on opened: study masks"
    assert page.lead == "3 pictures of test. 2 could not be read."
    assert page.sections == [
        drawn("study_section", result), drawn("holes_section", (HOLE,)),
        drawn("settings_section", MODEL, record),
    ]  # fmt: skip
    assert page.tables == {"table.csv": drawn("rows_csv", result.rows)} and page.holes == (HOLE,)
    assert told == ["2 settings", *ending(tmp_path / "out")]


def scored(protocol):
    values = torch.tensor([[0.1, 0.6], [-0.4, 0.5]])
    return SimpleNamespace(
        scores=HeadScores(values, None, protocol=protocol), selector="taylor",
        record={"by": "taylor", "pictures": 2}, pictures=Pictures("birds", 2, holes=(HOLE,)),
    )  # fmt: skip


def test_heads_score(written, drawing, tmp_path):
    drawing("heads", "settings_section", "scores_section", "scores_csv")
    result = scored({"dtype": torch.float32, "seed": 4})
    page, told = written("heads score", "seecause.background.score_heads", result, code=1)
    assert page.manifest == {
        "command": "heads score", "table": "scores.csv", "by": "taylor", "pictures": 2,
        "run": {"dtype": "torch.float32", "seed": 4},
    }  # fmt: skip
    assert page.title == "opened: heads by taylor"
    assert page.lead == "2 pictures of birds. 1 could not be read."
    assert page.sections == [
        drawn("scores_section", result.scores, by="taylor"), drawn("holes_section", (HOLE,)),
        drawn("settings_section", MODEL, result.record),
    ]  # fmt: skip
    assert page.tables == {"scores.csv": drawn("scores_csv", result.scores)}
    assert page.holes == (HOLE,)
    highest = "highest (layer, head): (0, 1) 0.6, (1, 1) 0.5, (0, 0) 0.1"
    assert told == [highest, *ending(tmp_path / "out")]


def test_heads_prune(written, drawing, tmp_path):
    drawing("heads", "change_section", "curves_section", "scores_csv", "scores_section",
            "settings_section")  # fmt: skip
    drawing("heads", "repair_gallery")
    outcomes = [SimpleNamespace(numbers=lambda k=k: {"NLL": k / 2}) for k in (0, 1)]
    exports = []
    result = SimpleNamespace(
        scored=scored({"seed": 4}), model=SimpleNamespace(**vars(MODEL)), heads=[(0, 1)],
        before="before", after="after", gaps="gaps", test=Pictures("test", 3), holes=(HOLE,),
        curve=SimpleNamespace(ks=[0, 1], chosen=outcomes), examples="examples",
        changes=lambda: {"accuracy": (0.5, 0.75)},
        export=lambda folder, form: exports.append((folder, form)),
    )  # fmt: skip
    line = "heads prune --form sliced"
    page, told = written(line, "seecause.background.prune_and_test", result, code=1)
    record = {"by": "taylor", "pictures": 2, "form": "sliced"}
    assert page.manifest == {
        "command": "heads prune", "model": "model", "removed": [(0, 1)], **record,
        "run": {"seed": 4},
    }  # fmt: skip
    assert page.title == "opened without 1 heads" and page.lead == "3 pictures of test."
    assert page.sections == [
        drawn("change_section", "before", "after", result.test, gaps="gaps"),
        drawn("curves_section", result.curve, by="taylor"),
        drawn("scores_section", result.scored.scores, by="taylor", chosen=[(0, 1)]),
        drawn("repair_gallery", ANSWERING, "examples"), drawn("holes_section", (HOLE,)),
        drawn("settings_section", result.model, record),
    ]  # fmt: skip
    assert page.tables == {
        "scores.csv": drawn("scores_csv", result.scored.scores),
        "curve.csv": drawn("rows_csv", [{"K": 0, "NLL": 0.0}, {"K": 1, "NLL": 0.5}]),
    }
    out = tmp_path / "out"
    assert page.holes == (HOLE,) and exports == [(out / "model", "sliced")]
    assert told == [
        "removed 1 heads: [(0, 1)]", "accuracy: 0.500 -> 0.750", f"checkpoint: {out / 'model'}",
        *ending(out),
    ]  # fmt: skip


def background_audit(holes=()):
    return SimpleNamespace(
        pictures=Pictures("birds", 3, holes), verdict="yes", numbers=lambda: {"flips": 0.5},
        protocol={"seed": 4},
    )  # fmt: skip


def test_audit(written, drawing, tmp_path):
    drawing("repair", "audit_csv", "audit_sections", listed=["audit_lines"])
    result = background_audit((HOLE,))
    page, told = written("audit", "seecause.background.audit.audit", result, code=1)
    assert page.manifest == {
        "command": "audit", "table": "audit.csv", "verdict": "yes", "numbers": {"flips": 0.5},
        "run": {"seed": 4},
    }  # fmt: skip
    assert page.title == "Does opened answer from the background?"
    assert page.lead == "3 pictures of birds. 1 could not be read." and page.holes == (HOLE,)
    assert page.sections == drawn("audit_sections", ANSWERING, result)
    assert page.tables == {"audit.csv": drawn("audit_csv", result, ("x", "y"))}
    assert told[0] == str(drawn("audit_lines", result, notes=False))
    assert told[1:] == ending(tmp_path / "out")


def test_the_model_that_answers_in_the_classes_of_the_data_is_audited_and_shown_to_the_eye(
    opened, called, monkeypatch
):
    for place, name in (("heads.pictures", "model_for"), ("repair.eye", "eye")):
        module = importlib.import_module(f"seecause.{place}")
        monkeypatch.setattr(module, name, lambda *words, **options: Drawn("", words, options))
    reached = called("audit --data d --eye own", "seecause.background.audit.audit")
    answering = drawn("", MODEL, "d, 160")
    assert reached.words == (answering, "d, 160")
    options = {"model": answering, "method": "caap", "cache": None, "weights": None}
    assert reached.options["eye"] == drawn("", "own", **options)


@pytest.mark.parametrize("passed", [True, False])
def test_gate(opened, monkeypatch, tmp_path, passed):
    audit, packs, limits = background_audit((HOLE,)), [], []
    result = SimpleNamespace(
        passed=passed, sentence="Verdict.", checks=[SimpleNamespace(sentence="flips: 0.5")]
    )
    monkeypatch.setattr("seecause.cli.audit.audited", lambda *_, **__: (ANSWERING, audit))
    monkeypatch.setattr(
        "seecause.background._gate.gate", lambda *w, **o: limits.append(w) or result
    )
    monkeypatch.setattr("seecause.report.gate.junit_xml", lambda result, name: f"{name}")
    monkeypatch.setattr("seecause.report.gate.write_pack", lambda *w, **o: packs.append((w, o)))
    monkeypatch.setattr("seecause.cli.audit.weights_files", lambda *words: words)
    out, junit = tmp_path / "out", tmp_path / "reports" / "gate.xml"
    line = f"gate --weights w --max-flips 0.1 --junit {junit} --out {out}"
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == (1 if passed else 3) and limits == [(audit,)], done.output
    ((folder, *words), options) = packs.pop()
    assert words == [ANSWERING, result] and folder.parent == tmp_path
    assert options == {
        "command": f"seecause {line}", "files": ("builtin:critters-biased", "w"),
        "lead": "3 pictures of birds. 1 could not be read.",
    }  # fmt: skip
    assert junit.read_text() == "answering"
    assert done.stdout.splitlines() == ["Verdict.", "flips: 0.5", f"page: {out / 'index.html'}"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["command"] == "gate" and manifest["page"] == "index.html"
    assert manifest["passed"] is passed
    again = CliRunner().invoke(app, [*line.split(), "--json"])
    assert json.loads(again.stdout)["passed"] is passed and again.exit_code == done.exit_code


def discovered(count):
    findings = [
        SimpleNamespace(is_object=k == 0, sentence=lambda k=k: f"kind {k}") for k in range(count)
    ]
    pictures = Pictures("birds", 3, holes=(HOLE,))
    return SimpleNamespace(findings=findings, pictures=pictures, protocol={"seed": 4})


def test_discover(written, drawing, monkeypatch, tmp_path):
    drawing("discover", "discover_sections", "findings_rows")
    pairs, out = [], tmp_path / "out"
    module = importlib.import_module("seecause.report.discover")
    monkeypatch.setattr(module, "write_pairs", lambda *words: pairs.append(words) or 12)
    result, place = discovered(7), "seecause.background.discover.discover"
    page, told = written("discover --pairs 3,1", place, result, code=1)
    assert page.manifest == {
        "command": "discover", "table": "findings.csv", "pairs": [3, 1], "run": {"seed": 4}
    }  # fmt: skip
    assert page.title == "What turns pictures into another class for opened?"
    assert page.lead == "3 pictures of birds. 1 could not be read." and page.holes == (HOLE,)
    assert page.sections == drawn("discover_sections", result)
    rows = drawn("findings_rows", result)
    assert page.tables == {"findings.csv": drawn("rows_csv", rows)}
    assert pairs.pop() == (result, [2, 0], out / "pairs")
    spec = f"--data pairs:{out}/pairs/with:{out}/pairs/without"
    assert told == [
        *(f"{rank}. kind {rank - 1}" for rank in range(1, 6)),
        f"12 pairs of finding 3, 1 to repair by: {spec}", *ending(out),
    ]  # fmt: skip
    *_, page, told = written("discover --pairs none", place, result, code=1)
    assert page.manifest["pairs"] == [] and not pairs and len(told) == 7
    *_, page, told = written("discover", place, result, code=1)
    assert page.manifest["pairs"] == [2] and pairs.pop()[1] == [1]
    *_, page, told = written("discover", place, discovered(0), code=1)
    assert page.manifest["pairs"] == [] and not pairs
    nothing = "no kind of patch turns pictures into a class by more than chance"
    assert told == [nothing, *ending(out)]


@pytest.fixture
def processes(monkeypatch):
    """Those that work together: this one, its place among them, and what happened."""
    state = SimpleNamespace(first=True, events=[])
    state.wait = lambda: state.events.append("waited")

    @contextmanager
    def join(device):
        state.events.append(device)
        yield state
        state.events.append("left")

    monkeypatch.setattr("seecause.faithful.run.join_processes", join)
    return state


def mended(remedy="heads"):
    events = []
    return SimpleNamespace(
        remedy=remedy, sentence="Mended.", original=SimpleNamespace(name="toy"), holes=(HOLE,),
        facts=lambda: {"remedy": remedy}, events=events, candidates={}, record={"notes": ["odd"]},
        before=SimpleNamespace(masks=None), export=events.append,
    )  # fmt: skip


@pytest.mark.parametrize("remedy", ["heads", "nothing"])
def test_repair(written, drawing, processes, tmp_path, remedy):
    drawing("repair", "repair_sections")
    out, result = tmp_path / "out", mended(remedy)
    if remedy == "heads":  # where nothing was to be done, nothing may be left either
        (tmp_path / "out.work").mkdir()
    page, told = written("repair", "seecause.background.repair.repair", result, code=1)
    assert page.manifest == {"command": "repair", "model": "model", "remedy": remedy}
    assert page.title == "toy: before and after" and page.lead == "Mended."
    assert page.sections == drawn("repair_sections", result)
    mends = remedy != "nothing"
    assert result.events == [out / "model"] * mends
    checkpoint = [f"checkpoint: {out / 'model'}"] * mends
    assert told == ["Mended.", "note: odd", *checkpoint, *ending(out)]
    assert processes.events == ["cpu", "waited", "left"] and not (tmp_path / "out.work").exists()


def test_only_the_first_process_of_a_repair_writes_and_speaks(
    opened, processes, called, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr("seecause.cli.progress.EVERY", 0.0)
    for first, quiet in ((True, ""), (True, " --quiet"), (False, "")):
        processes.first = first
        progress = called(f"repair{quiet}", "seecause.background.repair.repair").options["progress"]
        with progress("things", 2) as advance:
            advance(1)
        assert capsys.readouterr().err == "things: 1 of 2\n" * (first and not quiet)
    module = importlib.import_module("seecause.background.repair")
    monkeypatch.setattr(module, "repair", lambda *_, **__: mended())
    (tmp_path / "out.work").mkdir()
    done = CliRunner().invoke(app, ["repair", "--out", str(tmp_path / "out")])
    assert (done.exit_code, done.stdout) == (0, "") and not (tmp_path / "out").exists()
    assert (tmp_path / "out.work").exists()  # the first one's


def test_the_maps_of_a_repairs_eye_wait_beside_it(opened, called, monkeypatch, tmp_path):
    eyes = []
    module = importlib.import_module("seecause.background.objects")
    monkeypatch.setattr(module, "eye", lambda *w, **o: eyes.append((w, o)) or "eye")
    work = tmp_path / "out.work"
    for line, cache in (("own", work / "eye"), ("timm:x --eye-method mosaic", work / "eye")):
        reached = called(f"repair --eye {line}", "seecause.background.repair.repair")
        assert reached.options["eye"] == "eye" and reached.options["work"] == work
        (words, options) = eyes.pop()
        method = "mosaic" if "mosaic" in line else "caap"
        assert words == (line.split()[0],)
        assert options == {"model": MODEL, "method": method, "cache": cache, "weights": None}
    for line in ("repair --eye given", "repair"):
        reached = called(line, "seecause.background.repair.repair")
        assert reached.options["eye"] == ("given" if "given" in line else None) and not eyes
        assert reached.options["test"] is None
