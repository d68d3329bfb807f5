"""`seecause doctor` and `zoo` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from seecause.cli import app
from seecause.models import sources

MODEL = ("--model", "timm:test_vit", "--weights", "random", "--device", "cpu")


def invoke(*words: str):
    return CliRunner().invoke(app, list(words))


def test_the_four_probes_and_the_layout_are_told_to_machines():
    done = invoke("doctor", *MODEL, "--json", "--classes")
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


def test_the_zoo_lists_its_recipes_and_refuses_others():
    listed = CliRunner().invoke(app, ["zoo", "list"], env={"COLUMNS": "80"}).stdout
    assert "critters-llava-planted" in listed and listed.count("0.786") == 2 and "…" not in listed
    assert max(map(len, listed.splitlines())) <= 80
    done = invoke("zoo", "train", "critters-vut")
    assert done.exit_code == 2 and "critters-vit" in done.stderr


def test_version():
    assert invoke("--version").stdout.startswith("seecause 0.")
