"""`seecause explain --class box:3` and `--class region:...`: from folders of weights to pages."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from seecause.attribution.result import Attribution
from tests.cli.calls import MODEL, explain, photo
from tests.families.dense import tiny_dense


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A detector and a model of pixels, as transformers saves them."""
    root = tmp_path_factory.mktemp("rows")
    for family, size in (
        ("detr", {"shortest_edge": 96, "longest_edge": 160}),
        ("segformer", {"height": 64, "width": 96}),
    ):
        tiny_dense(family, torch.float32).module.save_pretrained(root / family)
        card = {"size": size, "image_mean": [0.4] * 3, "image_std": [0.5] * 3, "do_pad": True}
        (root / family / "preprocessor_config.json").write_text(json.dumps(card))
    return root


def manifest_of(out):
    return json.loads((out / "manifest.json").read_text())


def test_a_box_is_explained_and_drawn(tmp_path, folders):
    picture, out = photo(tmp_path / "a.jpg"), tmp_path / "out"
    call = ["--model", folders / "detr", "--method", "caap", "--out", out, "--overwrite"]
    done = explain(picture, *call, "--class", "box:3:frog")
    assert done.exit_code == 0, done.output
    assert "box 3: " in done.stdout
    (row,) = manifest_of(out)["images"]
    assert row["row"] == "box 3" and row["explained"] == "frog of box 3"
    assert 'class="outline"' in (out / "index.html").read_text()
    maps = Attribution.load(out / "maps" / "caap")
    assert maps.regions.any() and maps.maps.shape == (1, 6, 8)  # 96 x 128 pixels, cells of 16


def test_a_region_is_in_pixels_of_the_picture(tmp_path, folders):
    picture, out = tmp_path / "a.png", tmp_path / "out"
    Image.fromarray(np.full((128, 192, 3), 200, np.uint8)).save(picture)
    call = ["--model", folders / "segformer", "--method", "sobel", "--out", out, "--overwrite"]
    done = explain(picture, *call, "--class", "region:20,40,60,80:frog")
    assert done.exit_code == 0, done.output
    corners = manifest_of(out)["images"][0]["place"]
    assert corners == [10, 20, 30, 40]  # the frame has half the size


def test_what_has_no_such_row_is_refused(tmp_path, folders):
    picture = photo(tmp_path / "a.jpg")
    for words, call in (
        ("one prediction", [*MODEL, "--class", "box:1"]),
        ("one prediction", [*MODEL, "--class", "region:1,2"]),
        ("predicts boxes", ["--model", folders / "detr", "--class", "region:1,2"]),
        ("0 to 4", ["--model", folders / "detr", "--class", "box:9"]),
        ("many rows", ["--model", folders / "detr", "--evidence"]),
    ):
        done = explain(picture, *call, "--out", tmp_path / "out")
        assert done.exit_code == 2 and words in done.output.replace("\n", " "), done.output


@pytest.mark.parametrize("region", ["20,40", "20,40,60,60"])
def test_a_picture_that_does_not_reach_the_region_is_a_hole(tmp_path, folders, region):
    sizes = {"small.png": (30, 20), "large.png": (192, 128)}
    for name, size in sizes.items():
        Image.new("RGB", size).save(tmp_path / name)
    call = ["--model", folders / "segformer", "--method", "sobel", "--out", tmp_path / "out"]
    done = explain(*(tmp_path / name for name in sizes), *call, "--class", f"region:{region}")
    assert done.exit_code == 1 and "skipped: small.png: region=" in done.output, done.output
    assert "place" in manifest_of(tmp_path / "out")["images"][1]
    done = explain(tmp_path / "small.png", *call, "--overwrite", "--class", f"region:{region}")
    assert done.exit_code == 2 and "small.png: region=" in done.output, done.output
