"""Pairs on the command line: two versions of each picture, explained and exchanged."""

import csv
import json

import pytest
import torch
from PIL import Image

import seecause as sc
from seecause.attribution.result import Attribution
from seecause.data import to_pil
from tests.cli.calls import invoke


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Four Critters with a white corner, and without it."""
    root = tmp_path_factory.mktemp("pairs")
    data = sc.data.open_data("critters:clean:test", limit=4)
    for sample in data:
        marked = sample.image.clone()
        marked[:, :24, :24] = 1.0
        name = f"{data.classes[sample.label]}/{sample.id}.png"
        for version, image in (("with", marked), ("without", sample.image)):
            file = root / version / name
            file.parent.mkdir(parents=True, exist_ok=True)
            to_pil(image).save(file)
    return root


def test_explain_takes_the_other_version_as_blank(folders, tmp_path):
    spec = f"pairs:{folders}/with:{folders}/without"
    done = invoke("explain", f"{spec}#0", f"{spec}#2", "--out", tmp_path / "a", "--quiet")
    assert done.exit_code == 0, done.output
    attribution = Attribution.load(tmp_path / "a" / "maps" / "caap")
    model, data = sc.load("builtin:critters-vit"), sc.data.open_data(spec)
    images = sc.data.to_batch(model, [data[0], data[2]]).images
    others = sc.data.to_batch(model, [data.other(0), data.other(2)]).images
    assert torch.allclose(
        attribution.maps, sc.attribute(model, images, blank=others).maps, atol=1e-6
    )
    assert not torch.allclose(attribution.maps, sc.attribute(model, images).maps, atol=1e-3)
    assert attribution.manifest["options"]["blank"].startswith("tensor [2, 3, 96, 96]")


def test_explain_takes_a_folder_of_other_versions(folders, tmp_path):
    (kind,) = [path for path in sorted((folders / "with").iterdir())][:1]
    out = tmp_path / "b"
    plain = folders / "without" / kind.name
    done = invoke("explain", kind, "--without", plain, "--out", out, "--quiet")
    assert done.exit_code == 0, done.output
    file = next(iter(kind.iterdir()))
    model = sc.load("builtin:critters-vit")
    both = [model.preprocess(Image.open(path)) for path in (file, plain / file.name)]
    maps = sc.attribute(model, both[0], blank=both[1]).maps
    assert torch.allclose(Attribution.load(out / "maps" / "caap").maps[:1], maps, atol=1e-6)


def test_what_has_no_other_version_is_refused(folders, tmp_path):
    kind = next(iter(sorted((folders / "with").iterdir())))
    done = invoke("explain", kind, "--without", tmp_path, "--out", tmp_path / "c")
    assert done.exit_code == 2 and "no such file" in done.output
    done = invoke(
        "explain", "critters:clean:test#0", "--without", tmp_path, "--out", tmp_path / "c"
    )
    assert done.exit_code == 2 and "another version of each image" in done.output
    spec = f"pairs:{folders}/with:{folders}/without"
    done = invoke("explain", f"{spec}#0", "--method", "rollout", "--out", tmp_path / "c")
    assert done.exit_code == 2 and "methods with a blank" in done.output
    assert not (tmp_path / "c").exists()


def test_heads_are_exchanged_between_the_versions(folders, tmp_path):
    spec = f"pairs:{folders}/with:{folders}/without"
    words = ("--model", "builtin:critters-vit", "--by", "interchange", "--out", tmp_path / "d")
    done = invoke("heads", "score", "--data", spec, *words)
    assert done.exit_code == 0, done.output
    assert "the highest heads carry" in " ".join(done.output.split())
    manifest = json.loads((tmp_path / "d" / "manifest.json").read_text())
    assert manifest["images"] == 4 and set(manifest["run"]["mediated"]) == {"1", "2", "4", "8"}
    with (tmp_path / "d" / "scores.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 48
