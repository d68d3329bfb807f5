"""The repair panel's functions give the numbers of `sc.audit` and `sc.repair`."""

import json
import zipfile
from pathlib import Path

import pytest

import seecause as sc
from seecause.app.panels import explain, repair
from seecause.app.panels.repair import OnData, RepairRequest
from seecause.app.state import ServerState, named_data
from seecause.data.dataset import to_pil
from seecause.errors import BadOption
from tests.app.conftest import context_of
from tests.cli.calls import invoke

TEST, TRAIN = "critters:certified:test", "critters:certified:train"
ON = {"model": "critters-biased", "data": TEST, "limit": 16}
FORCED = RepairRequest(**ON, learn=TRAIN, remedy="directions", force=True)


@pytest.fixture
def context(state):
    return context_of(state, "critters-biased")


def pictures(name):
    return sc.data.open_data(name, limit=ON["limit"])


@pytest.mark.slow
@pytest.mark.parametrize("source", ["critters-vit", "own"])
def test_an_audit_has_the_numbers_of_sc_audit(context, source):
    answer = repair.audit(context, OnData(**ON, masks=source))
    given = {"critters-vit": "builtin:critters-vit", "own": "own"}[source]
    result = sc.audit(sc.load("builtin:critters-biased"), pictures(TEST), masks=given)
    assert answer["verdict"] == result.verdict
    assert (answer["flips"], answer["control"]) == (result.flips, result.control_flips)
    assert tuple(answer["interval"]) == result.interval
    assert {row["name"]: row["value"] for row in answer["rows"]} == pytest.approx(result.numbers())
    assert len(answer["sheet"]) == len(answer["worst"]) == repair.TILES


def test_tiles_show_the_answers_to_object_and_transplant(context):
    answer = repair.audit(context, OnData(**ON))
    result = sc.audit(context.model, pictures(TEST))
    for tile, (place, version) in zip(answer["worst"], result.worst(repair.TILES), strict=True):
        assert tile["picture"] == result.data.ids[place]
        rows = (result.judged.plain[place], result.judged.moved[version])
        names = [context.model.class_name(int(row.argmax())) for row in rows]
        assert [each["name"] for each in tile["answers"][0]] == names
        assert tile["truth"] != tile["donor"] or names[0] != names[1]
    assert answer["worst"][0]["answers"][0][0]["right"]  # worst: right answers that change
    assert not answer["worst"][0]["answers"][0][1]["right"]


def command(*words, out):
    """Run a command into a folder; returns its manifest."""
    done = invoke(*words, "--limit", ON["limit"], "--device", "cpu", "--out", out)
    assert done.exit_code == 0, done.output
    return json.loads((out / "manifest.json").read_text())


def test_evidence_is_that_of_the_command_line(context, tmp_path):
    given = ("--model", "builtin:critters-biased", "--evidence", "--out", tmp_path)
    assert invoke("explain", "critters:clean:test#0", *given).exit_code == 0
    (found,) = json.loads((tmp_path / "findings.json").read_text())
    answer = explain.evidence(context, explain.OfClass(model="critters-biased", picture="s0"))
    assert answer["probability"] == pytest.approx(found["evidence"]["probability"], abs=1e-6)
    assert (answer["order"], answer["answered"], answer["of"]) == ("mosaic", True, 144)
    for name in ("enough", "needed"):
        places = [row * 12 + column for row, column in found["evidence"][name]["patches"]]
        assert answer[name]["patches"] == places
        assert answer[name]["answer"] == found["evidence"][name]["answer"]


def test_an_audit_is_that_of_the_command_line(context, tmp_path):
    manifest = command("audit", "--model", "builtin:critters-biased", "--data", TEST, out=tmp_path)
    answer = repair.audit(context, OnData(**ON))
    assert answer["verdict"] == manifest["verdict"]
    rows = {row["name"]: row["value"] for row in answer["rows"]}
    assert rows == pytest.approx(manifest["numbers"])


def test_a_repair_is_that_of_the_command_line_and_gives_its_checkpoint(context, tmp_path):
    words = ("repair", "--model", "builtin:critters-biased", "--data", TRAIN, "--test", TEST)
    manifest = command(*words, "--remedies", "directions", "--force", out=tmp_path / "out")
    answer = repair.run_repair(context, FORCED)
    rows = {name: {row["name"]: row[name] for row in answer["rows"]} for name in ("value", "after")}
    assert answer["taken"] and answer["sentence"] == manifest["sentence"]
    assert rows["value"] == pytest.approx(manifest["before"])
    assert rows["after"] == pytest.approx(manifest["after"])
    packed = repair.export(context, FORCED)
    name, path = context.session.file(packed["file"])
    assert name == "critters-biased-repaired-by-directions.zip"
    zipfile.ZipFile(path).extractall(tmp_path / "repaired")
    images = context.image("s9")
    of_page, of_command = (
        sc.load(str(folder))(images)
        for folder in (tmp_path / "repaired", tmp_path / "out" / "model")
    )
    assert of_page.flatten().tolist() == pytest.approx(of_command.flatten().tolist(), abs=1e-4)
    assert of_page.sub(context.model(images)).abs().max() > 0.01


def test_a_repair_is_not_computed_again(context, monkeypatch):
    before = repair.run_repair(context, FORCED)
    monkeypatch.setattr(repair, "repair", None)
    assert repair.run_repair(context, FORCED) == before


def test_doing_nothing_is_a_remedy_without_a_checkpoint(context):
    request = RepairRequest(**ON, learn=TRAIN, remedy="nothing")
    answer = repair.run_repair(context, request)
    assert not answer["taken"]
    assert all(row["value"] == row["after"] for row in answer["rows"])
    with pytest.raises(BadOption, match="nothing was changed"):
        repair.export(context, request)


def test_remedies_are_those_that_fit_the_model_and_the_data(context):
    names = [each["name"] for each in repair.fitting_remedies(context.model, grouped=False)]
    assert {"nothing", "last-layer", "fine-tune"} < set(names) and "dfr" not in names
    grouped = repair.fitting_remedies(context.model, grouped=True)
    assert "dfr" in [each["name"] for each in grouped]


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": "folder:/etc"},
        {"data": "critters:clean:test"},
        {"masks": "timm:resnet50"},
        {"masks": "critters-ifam"},
    ],
)
def test_only_what_the_server_was_started_with_can_be_named(context, wrong):
    with pytest.raises(BadOption):
        repair.audit(context, OnData(**{**ON, **wrong}))


@pytest.mark.parametrize(
    ("changes", "python"),
    [
        ({}, "sc.repair(model, learn, test=data, remedies=('last-layer',))"),
        ({"learn": TEST}, "sc.repair(model, learn, remedies=('last-layer',))"),
        ({"masks": "critters-vit"}, "masks='builtin:critters-vit'"),
        ({"masks": "critters-biased"}, "masks='own'"),
        ({"remedy": "dfr"}, "groups=True"),
        ({"force": True}, "force=True"),
    ],
)
def test_copies_name_the_settings(context, changes, python):
    copied = repair.copy(context, RepairRequest(**{**ON, "learn": TRAIN, **changes}))
    assert python in copied["python"]
    compile(copied["python"], "copied", "exec")


@pytest.mark.slow
def test_the_copied_python_gives_the_same_answer(context, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(repair.copy(context, FORCED)["python"], {})
    first, sentence = capsys.readouterr().out.splitlines()
    answer = repair.audit(context, OnData(**ON))
    assert first.startswith(f"{answer['verdict']} {answer['flips']} {answer['control']}")
    assert sentence == repair.run_repair(context, FORCED)["sentence"]


def test_pictures_that_cannot_be_read_are_named_without_folders_of_this_machine(state, tmp_path):
    bad = photo_folder(tmp_path / "pictures")
    spec = f"folder:{tmp_path / 'pictures'}"
    opened = ServerState(state.models, data=named_data([spec]))
    context = context_of(opened, "critters-biased")
    request = {"model": "critters-biased", "data": "folder:pictures", "limit": 40, "masks": "own"}
    answer = repair.audit(context, OnData(**request))
    (skipped,) = answer["skipped"]
    assert skipped["name"] == bad and bad.rpartition("/")[2] in skipped["reason"]
    assert str(tmp_path) not in str(answer) and answer["pictures"] == 15


def photo_folder(root: Path) -> str:
    """Critters by class, one of which is no picture; its name."""
    data = pictures(TEST)
    for place in range(len(data)):
        sample = data[place]
        (root / data.classes[sample.label]).mkdir(parents=True, exist_ok=True)
        to_pil(sample.image).save(root / data.classes[sample.label] / f"{place}.png")
    first = next(root.rglob("*.png"))
    first.write_bytes(b"no picture")
    return first.relative_to(root).as_posix()
