"""`seecause explain`: which pictures are read, which are left out, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import seecause as sc
from seecause.cli import app
from seecause.data.registry import open_data
from tests.bad_files import bad_file
from tests.cli.calls import MODEL, explain, photo
from tests.cli.spies import given


def test_unusual_pictures_are_read_right(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [
        photo(tmp_path / "cmyk.jpg", "CMYK"),
        photo(tmp_path / "palette.gif", "P"),
        photo(tmp_path / "clear.png", "RGBA"),
        photo(tmp_path / "turned.jpg", exif=exif),
        tmp_path / "deep.png",
    ]
    Image.fromarray(np.full((50, 50), 40_000, np.uint16)).save(files[-1])
    assert explain(*files, *MODEL, "--method", "center", "--out", tmp_path / "out").exit_code == 0
    images = sc.Attribution.load(tmp_path / "out" / "maps" / "center").images
    assert images[-1].mean() == pytest.approx(40_000 / 65_535, abs=0.01)


REFUSED = {
    "unknown class": (("--class", "tabbi, tabby cat"), "Did you mean tabby, tabby cat"),
    "class out of range": (("--class", "1000"), "classes 0-999"),
    "unknown method": (("--method", "capp"), "Did you mean caap"),
    "no method": (("--method", ","), "at least one method"),
    "unknown option": (("--option", "tale=source"), "tail"),
    "option without value": (("--option", "tail"), "key=value"),
    "bad option value": (("--option", "tail=sauce"), "patched"),
    "unknown model": (("--model", "timm:tset_vit"), "test_vit"),
    "unknown library": (("--model", "tim:test_vit"), "timm:NAME"),
    "no such folder": (("--model", "./nowhere"), "the path of a saved folder"),
    "no adapter": (("--model", "timm:test_mambaout"), "not supported"),
    "no hf folder": (("--model", "hf:./nowhere"), "./nowhere is no folder"),
    "missing weights": (("--weights", "nowhere.safetensors"), "does not exist"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_wrong_option_is_one_line(tmp_path, why):
    words, said = REFUSED[why]
    refused(
        explain(photo(tmp_path / "a.png"), *MODEL, *words, "--out", tmp_path / "out"),
        said,
        tmp_path / "out",
    )


@pytest.mark.parametrize("kind", ["text", "truncated", "empty", "pixel", "huge"])
def test_a_bad_picture_among_good_ones_is_left_out_and_named(tmp_path, kind):
    bad, out = bad_file(tmp_path, kind), tmp_path / "out"
    good = [photo(tmp_path / "first.png"), photo(tmp_path / "last.png")]
    done = explain(good[0], bad, good[1], *MODEL, "--method", "center", "--out", out)
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith(f"left out: {bad}: ") and done.stderr.count("\n") == 1
    assert "first.png: " in done.stdout and "last.png: " in done.stdout
    rows = json.loads((out / "manifest.json").read_text())["images"]
    assert [sorted(row) for row in rows][1] == ["error", "file", "name"]
    overlays = [row["overlay"] for row in rows if "overlay" in row]
    assert overlays == ["overlays/first.png.png", "overlays/last.png.png"]
    page = (out / "index.html").read_text()
    assert "Not read" in page and "1 could not be read" in page and bad.name in page
    assert sc.Attribution.load(out / "maps" / "center").names == ["first.png", "last.png"]


@pytest.mark.parametrize("kind", ["missing", "text", "truncated", "empty", "pixel", "huge"])
def test_a_bad_picture_alone_is_one_line(tmp_path, kind):
    bad = bad_file(tmp_path, kind)
    done = explain(bad, *MODEL, "--method", "center", "--out", tmp_path / "out")
    refused(done, str(bad), tmp_path / "out")


def test_paths_are_checked_before_a_model_is_loaded(tmp_path):
    good, missing = photo(tmp_path / "good.png"), tmp_path / "missing.png"
    done = explain(good, missing, "--model", "nowhere", "--out", tmp_path / "out")
    refused(done, "missing.png: no such file", tmp_path / "out")


@pytest.mark.parametrize("command", ["explain", "bench"])
def test_names_are_checked_before_a_model_is_loaded(tmp_path, monkeypatch, command):
    monkeypatch.setattr("seecause.loading.load", lambda *_, **__: pytest.fail("it was loaded"))
    picture = ["explain", str(photo(tmp_path / "a.png"))]
    words = picture if command == "explain" else ["bench", "run"]
    for flag, value, message in (
        ("--method", "capp", "Did you mean caap"),
        ("--method", "caap,no-such", "'no-such'"),
        ("--classes", "missing.txt", "cannot be read"),
        ("--mean", "0.5,x,1", "three numbers"),
        ("--size", "big", "224,320"),
    ):
        out = tmp_path / "out"
        done = CliRunner().invoke(app, [*words, flag, value, "--out", str(out)])
        refused(done, message, out)


def test_the_option_that_python_calls_target_is_named(tmp_path):
    for target in (["--target", "3"], ["--target=3"]):
        done = explain(photo(tmp_path / "a.png"), *target, "--out", tmp_path / "out")
        refused(done, "it is --class", tmp_path / "out")


def test_nan_weights_are_refused(tmp_path):
    state = sc.load("timm:test_vit", weights="random").module.state_dict()
    state["blocks.3.mlp.fc1.weight"] = state["blocks.3.mlp.fc1.weight"] * float("nan")
    save_file(state, tmp_path / "nan.safetensors")
    done = explain(
        photo(tmp_path / "a.png"),
        "--model",
        "timm:test_vit",
        "--weights",
        tmp_path / "nan.safetensors",
        "--out",
        tmp_path / "out",
    )
    refused(done, "not finite", tmp_path / "out")


def refused(done, said: str, out: Path) -> None:
    """Exit code 2, one line on standard error, and nothing written."""
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("seecause: ") and done.stderr.count("\n") == 1
    assert said in done.stderr
    assert done.stdout == "" and not out.exists()


def test_pictures_of_the_same_name_keep_apart(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        photo(tmp_path / folder / "a.png")
    assert (
        explain(
            tmp_path / "x",
            tmp_path / "y",
            *MODEL,
            "--method",
            "center",
            "--out",
            tmp_path / "out",
            "-q",
        ).exit_code
        == 0
    )
    assert len(list((tmp_path / "out" / "overlays").rglob("*.png"))) == 2


def test_a_name_that_is_not_utf_8_is_refused_before_a_model_is_loaded(tmp_path):
    photo(tmp_path / "a.png").rename(tmp_path / os.fsdecode(b"caf\xe9.png"))
    done = explain(tmp_path, "--model", "nowhere", "--out", tmp_path / "out")
    refused(done, "its name is not UTF-8", tmp_path / "out")


def test_pictures_of_datasets_are_explained_by_index(tmp_path):
    """Also beside files, and whatever the dataset; a file that is called so is a file."""
    (tmp_path / "data").mkdir()
    first, odd = (
        photo(tmp_path / "data" / "a.png"),
        photo(tmp_path / "x:y#3.png").rename(tmp_path / "x:y#3"),
    )
    samples = ["critters:clean:test#3", f"folder:{tmp_path / 'data'}#0"]
    done = explain(*samples, first, odd, "--method", "center", "--out", tmp_path / "out")
    assert done.exit_code == 0 and "critters:clean:test#3: " in done.stdout, done.output
    rows = json.loads((tmp_path / "out" / "manifest.json").read_text())["images"]
    assert [row["file"] for row in rows] == [*samples, str(first), str(odd)]
    assert rows[0]["overlay"] == "overlays/critters-clean-test-3.png" and all(
        (tmp_path / "out" / row["overlay"]).is_file() for row in rows
    )
    images = sc.Attribution.load(tmp_path / "out" / "maps" / "center").images
    torch.testing.assert_close(
        images[0], open_data("critters:clean:test")[3].image, atol=1 / 255, rtol=0
    )
    assert torch.equal(images[1], images[2])
    assert (
        "warning: builtin:critters-vit knows only Critters pictures, so what it says about folder:"
        in done.stderr
    )
    assert "#0 and 2 more means nothing" in done.stderr and done.stderr.count("\n") == 1
    assert "below 512" in explain("critters:clean:test#512", "--out", tmp_path / "no").stderr
    assert "dataset 'criters:" in explain("criters:clean#1", "--out", tmp_path / "no").stderr


@pytest.mark.parametrize(
    "text",
    [
        "critters:clean:test#0-3",
        "critters:clean:test",
        "critters:clean:test#",
        "critters:clean:test#one",
        "criters:clean#1,2",
    ],
)
def test_several_samples_in_one_word_are_refused_before_a_model_is_loaded(tmp_path, text):
    done = explain(text, "--model", "nowhere", "--out", tmp_path / "out")
    refused(done, "one sample of a dataset, DATA#INDEX, such as cri", tmp_path / "out")
    refused(
        explain("missing.png", "--model", "nowhere", "--out", tmp_path / "out"),
        "no such file",
        tmp_path / "out",
    )


def test_frames_are_one_film_and_so_is_its_other_version(opened, called, monkeypatch, tmp_path):
    for folder in ("with", "without"):
        for film in ("a", "b"):
            (tmp_path / folder / film).mkdir(parents=True)
            for frame in range(2):
                photo(tmp_path / folder / film / f"{frame}.png")
    films = [str(tmp_path / "with" / film) for film in ("a", "b")]
    inputs = SimpleNamespace(inputs=lambda files: films)
    monkeypatch.setattr("tests.cli.spies.MODEL.preprocess", inputs)
    line = f"explain {films[0]} {films[1]} --without {tmp_path}/without --method sobel"
    reached = called(line, "seecause.attribution.explain.explain_batches")
    assert reached.words[1] == films and reached.options["names"] == ["a", "b"]
    assert reached.options["others"] == [str(tmp_path / "without" / film) for film in ("a", "b")]


def test_explain_writes_beside_other_things_where_asked(opened, called, monkeypatch, tmp_path):
    file = photo(tmp_path / "a.png")
    monkeypatch.setattr("seecause.attribution.explain.explain_batches", lambda *_, **__: "parts")
    place = "seecause.report.explain.explain_to_folder"
    for words, overwrite in (("", False), (" --overwrite", True)):
        reached = called(f"explain {file} --method sobel{words}", place)
        assert reached.words == (tmp_path / "out", "parts", [str(file)], ["a.png"])
        given(reached, overwrite=overwrite, holes=[])
