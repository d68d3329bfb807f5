"""`seecause explain` of films: from a folder of weights and a file to a page."""

import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import seecause as sc
from seecause.attribution.result import Attribution
from tests.cli.calls import explain, invoke
from tests.families.film import FRAMES, SIDE, videomae
from tests.tiny import scramble


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A film model with its processor, as transformers saves them."""
    root = tmp_path_factory.mktemp("films")
    torch.manual_seed(0)
    scramble(videomae().module).save_pretrained(root / "videomae")
    transformers.VideoMAEImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": SIDE[0], "width": SIDE[1]}
    ).save_pretrained(root / "videomae")
    return root


def test_a_folder_of_frames_is_one_film(tmp_path, folders):
    frames = np.random.default_rng(0).integers(0, 255, (FRAMES + 2, 20, 30, 3), np.uint8)
    for film in ("a", "b"):
        (tmp_path / "films" / film).mkdir(parents=True)
        for place, frame in enumerate(frames):
            Image.fromarray(frame).save(tmp_path / "films" / film / f"{place}.png")
    out, call = tmp_path / "out", ["--model", f"hf:{folders / 'videomae'}", "--method", "caap"]
    done = explain(tmp_path / "films", *call, "--out", out)
    assert done.exit_code == 0, done.output
    maps = Attribution.load(out / "maps" / "caap")
    assert maps.maps.shape == (2, 3, 2, 3)
    assert torch.equal(maps.maps[0], maps.maps[1])
    manifest = json.loads((out / "manifest.json").read_text())
    assert [row["name"] for row in manifest["images"]] == ["a", "b"]
    frame = tmp_path / "films" / "b" / "0.png"  # one frame names its film, and is not all of it
    assert explain(frame, *call, "--out", tmp_path / "named").exit_code == 0
    (row,) = json.loads((tmp_path / "named" / "manifest.json").read_text())["images"]
    assert row["name"] == "b"


def test_another_version_of_a_film_is_a_film(tmp_path, folders):
    frames = np.random.default_rng(0).integers(0, 255, (2, 2, FRAMES, 20, 30, 3), np.uint8)
    for version, films in zip(("marked", "clean"), frames, strict=True):
        for film, pixels in zip("ab", films, strict=True):
            (tmp_path / version / film).mkdir(parents=True)
            for place, frame in enumerate(pixels):
                Image.fromarray(frame).save(tmp_path / version / film / f"{place}.png")
    marked, clean = tmp_path / "marked", tmp_path / "clean"
    call = ["--model", f"hf:{folders / 'videomae'}", "--method", "caap", "--out"]
    done = explain(marked, "--without", clean, *call, tmp_path / "both")
    assert done.exit_code == 0, done.output
    both = Attribution.load(tmp_path / "both" / "maps" / "caap").maps
    model = sc.load(f"hf:{folders / 'videomae'}")
    for film in "ab":
        done = explain(marked / film, "--without", clean / film, *call, tmp_path / film)
        assert done.exit_code == 0, done.output
    for got, film in zip(both, "ab", strict=True):
        (single,) = Attribution.load(tmp_path / film / "maps" / "caap").maps
        blank = model.preprocess(clean / film)
        expected = sc.attribute(model, [str(marked / film)], blank=blank).maps[0]
        assert torch.allclose(got, single) and torch.allclose(got, expected, atol=1e-5)
    (clean / "b" / "0.png").unlink()
    done = explain(marked, "--without", clean, *call, tmp_path / "fewer")
    assert done.exit_code == 2 and "0.png" in done.output


@pytest.mark.parametrize("command", ["bench run", "audit"])
def test_datasets_hold_images(tmp_path, folders, command):
    words = ["--model", f"hf:{folders / 'videomae'}", "--data", "critters:clean:test"]
    call = [*command.split(), *words, "--limit", "2", "--device", "cpu"]
    done = invoke(*call, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2 and "takes a film" in done.output, done.output
