"""`seecause doctor` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

import seecause as sc
from seecause.cli import app
from seecause.cli.options import _sides
from seecause.data.batch import class_places, take_names
from seecause.errors import BadOption, DataMissing
from seecause.models import load as sources
from seecause.models.load import read_class_names
from seecause.models.preprocess import Preprocess

MODEL = ("--model", "timm:test_vit", "--weights", "random", "--device", "cpu")


def invoke(*words: str):
    return CliRunner().invoke(app, list(words))


def test_the_four_probes_and_the_layout_are_told_to_machines():
    done = invoke("doctor", *MODEL, "--json", "--list-classes")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found["verified"]) == ["logits", "blocks", "attention", "locality"]
    assert all(probe["worst relative difference"] < 1e-4 for probe in found["verified"].values())
    assert (
        found["tokens"]["grid"].startswith("10 x 10 patches of 16 x 16")
        and found["tokens"]["prefix"] == 1
    )
    assert found["model"]["parameters"] > 300_000 and "RANDOM" in found["model"]["name"]
    assert found["caap"]["all patches of one image at once"].endswith("MiB")
    assert "CUDA graphs" not in found["caap"]  # on a CPU there are none
    assert found["classes"]["281"] == "tabby, tabby cat"


def test_people_get_tables():
    done = invoke("doctor", *MODEL)
    assert done.exit_code == 0
    for words in ("locality", "10 x 10 patches", "cls", "float32", "default tail"):
        assert words in done.stdout


def test_without_a_model_it_describes_the_machine():
    found = json.loads(invoke("doctor", "--json").stdout)
    assert (
        found["versions"]["torch"][0].isdigit()
        and "cpu" in found["devices"]
        and "clip" in found["extras"]
    )


def test_a_model_that_does_not_exist_is_one_line():
    done = invoke("doctor", "--model", "timm:test_vot")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and "test_vit" in done.stderr


def test_every_embedded_model_is_named_where_a_name_is_wrong():
    said = invoke("doctor", "--model", "builtin:foo").stderr
    assert all(name in said for name in ("critters-vit", "critters-ifam", "critters-llava"))


@pytest.mark.parametrize(
    "command", [("doctor",), ("explain", "critters:clean:test#3"), ("bench", "run")]
)
def test_a_vision_language_model_is_told_where_to_go(command, tmp_path):
    folder = Path(sources.ZOO / "critters-llava")
    for model in ("builtin:critters-llava", f"hf:{folder}", folder):
        done = invoke(
            *command,
            "--model",
            str(model),
            *([] if command == ("doctor",) else ["--out", str(tmp_path / "out")]),
        )
        assert (
            done.exit_code == 2
            and "vision-language model" in done.stderr
            and "seecause lvlm" in done.stderr
        )


def test_version():
    assert invoke("--version").stdout.startswith("seecause 0.")


def photos(folder: Path, names: list[str]) -> Path:
    for place, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), (50 * place, 90, 9)).save(folder / name / "a.png")
    return folder


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """Of three classes, without names."""
    import timm
    import torch

    path = tmp_path / "last.pt"
    torch.save(timm.create_model("test_vit", num_classes=3).state_dict(), path)
    return path


def test_how_a_model_is_read_can_be_said_and_is_seen(tmp_path, checkpoint):
    (tmp_path / "names.txt").write_text("ant\nbee\ncat\n")
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    reading = ("--classes", tmp_path / "names.txt", "--mean", "0.4,0.5,0.6", "--std", "0.2")
    reading += ("--size", "96", "--model", "timm:test_vit", "--weights", checkpoint)
    reading = [*map(str, reading), "--device", "cpu"]
    facts = json.loads(invoke("doctor", *reading, "--json", "--list-classes").stdout)
    unnamed = ("--method", "random", "--out", str(tmp_path / "unnamed"), *reading[2:])
    assert "--classes FILE" in invoke("explain", str(tmp_path / "a.png"), *unnamed).stderr
    assert facts["preprocessing"]["mean"] == "0.4, 0.5, 0.6"
    assert facts["preprocessing"]["pictures"].startswith("96 x 96 pixels (short side 101, centre")
    assert list(facts["classes"].values()) == ["ant", "bee", "cat"]
    out = tmp_path / "out"
    done = invoke("explain", str(tmp_path / "a.png"), *reading, "--class", "bee", "--out", str(out))
    assert done.exit_code == 0, done.output
    manifest = json.loads((out / "maps" / "caap" / "manifest.json").read_text())
    assert manifest["preprocessing"]["std"] == [0.2, 0.2, 0.2]
    assert manifest["preprocessing"]["filter"] == "bicubic"
    assert Preprocess(**manifest["preprocessing"]).size == (96, 96)
    page = (out / "index.html").read_text()
    assert "mean 0.4, 0.5, 0.6; std 0.2, 0.2, 0.2" in page and "96 x 96 pixels (short side" in page


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--mean", "0.5,x,1", "three numbers"),
        ("--std", "0,0,0", "above 0"),
        ("--size", "big", "224,320"),
        ("--classes", "missing.txt", "cannot be read"),
        ("--classes", "{}", "no class names"),
        ("--classes", "a", "1 names"),
    ],
)
def test_a_wrong_reading_is_one_line(tmp_path, checkpoint, flag, value, words):
    if flag == "--classes" and value != "missing.txt":
        (tmp_path / "names").write_text(value)
        value = str(tmp_path / "names")
    model = ("--model", "timm:test_vit", "--weights", str(checkpoint))
    done = invoke("doctor", *model, flag, value)
    assert done.exit_code == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_class_names_may_be_json(tmp_path):
    (tmp_path / "a.json").write_text('["ant", "bee"]')
    (tmp_path / "b.json").write_text('{"bee": 1, "ant": 0}')
    (tmp_path / "c.json").write_text('{"0": "ant", "1": "bee"}')
    (tmp_path / "d.txt").write_text("ant\n\n bee \n", encoding="utf-8-sig")
    for name in ("a.json", "b.json", "c.json", "d.txt"):
        assert read_class_names(tmp_path / name) == ("ant", "bee")


def test_python_takes_the_same_files_of_class_names(tmp_path, checkpoint):
    file = tmp_path / "names.txt"
    file.write_text("ant\nbee\ncat\n")
    for names in (file, str(file)):
        model = sc.load("timm:test_vit", weights=checkpoint, classes=names)
        assert model.classes == ("ant", "bee", "cat")
    wrapped = sc.wrap(model.module, preprocess=model.preprocess, classes=str(file))
    assert wrapped.classes == ("ant", "bee", "cat")
    with pytest.raises(DataMissing, match=r"ant,bee,cat.*one a line"):
        sc.load("timm:test_vit", weights=checkpoint, classes="ant,bee,cat")


def test_folders_are_matched_by_name_else_by_order_which_is_said(tmp_path, checkpoint, caplog):
    def places(names, **options):
        model = sc.load("timm:test_vit", weights=checkpoint, **options)
        photos(tmp_path / "".join(names), names)
        return class_places(model, sc.data.open_data(f"folder:{tmp_path / ''.join(names)}"))

    assert places(["ant", "bee"], classes=["cat", "bee", "ant"]) == (2, 1)
    assert not caplog.records
    assert places(["x", "y", "z"]) == (0, 1, 2)
    assert "x is class 0" in caplog.text and "--classes FILE" in caplog.text
    with pytest.raises(BadOption, match=r"4 classes.*expected 3.*--classes FILE"):
        places(["k", "l", "m", "n"])
    for given, taken in ((None, ("x", "y", "z")), (["a", "b", "c"], ("a", "b", "c"))):
        model = sc.load("timm:test_vit", weights=checkpoint, classes=given)
        take_names(model, sc.data.open_data(f"folder:{tmp_path / 'xyz'}"))
        assert model.classes == taken


def test_a_size_is_height_then_width():
    assert _sides("224,320") == _sides("224x320") == (224, 320)
    assert _sides("96") == (96, 96)
