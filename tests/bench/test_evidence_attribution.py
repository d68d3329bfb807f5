"""The attribution study on a tiny folder of the real layout: it says what is missing, stops, goes on, and shows its holes."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import typer
from PIL import Image
from safetensors.torch import save_file

from scripts import attribution_figures, attribution_parts, evidence_attribution, tables
from scripts.attribution_page import merged
from seecause.bench.store import Store
from seecause.data.imagenet import imagenet_wnids
from tests.files import grey, lines, photo

METHODS = "caap,center,random"


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """Two pets and two ImageNet photos; a model with random weights, 160 pixels and 100 patches."""
    folder = tmp_path_factory.mktemp("real")
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit").state_dict(), folder / "test_vit.safetensors")
    for seed, name in enumerate(("Abyssinian_1", "beagle_2")):
        photo(folder / "pets" / "images" / f"{name}.jpg", (200, 180), seed)
        trimap = np.full((180, 200), 2)
        trimap[40:120, 50:150], trimap[40:44, 50:150] = 1, 3
        grey(folder / "pets" / "annotations" / "trimaps" / f"{name}.png", trimap)
    lines(folder / "pets" / "annotations" / "test.txt", "Abyssinian_1 1 1 1", "beagle_2 5 2 1")
    lines(folder / "pets" / "imagenet_labels.csv", "breed,imagenet_index", "Abyssinian,285", "beagle,162")
    for seed, wnid in enumerate(imagenet_wnids()[:2]):
        photo(folder / "imagenet" / "val" / wnid / "a.JPEG", (170, 190), seed + 2)
    return folder


def study(real: Path, out: Path, *, minutes: float = 9, method: str = METHODS, only_page: bool = False) -> int:
    """The exit code."""
    try:
        evidence_attribution.main(str(real), None, "cpu", minutes, out / "page", out / "work", method, "timm:test_vit", only_page)
    except typer.Exit as ended:
        return ended.exit_code
    return 0


def test_a_study_stops_goes_on_and_shows_its_holes(real, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attribution_parts, "STUDIES", {"score": "Does the score decide?"})
    monkeypatch.setattr(tables, "EXPENSIVE", ("random",))
    assert study(real, tmp_path, minutes=0) == 1  # nothing yet
    page = tmp_path / "page" / "evidence-attribution.md"
    assert "not complete" in page.read_text() and "maps are not made yet" in page.read_text()

    assert study(real, tmp_path) == 0
    whole, said = page.read_text(), capsys.readouterr().out
    assert said.index("answered right") < said.index("forwards") < said.rindex("pets-label: 2 of")
    assert "not complete" not in whole and "random *" in whole and "not made yet" not in whole
    assert "](evidence-attribution-gallery.png)" in whole and "](evidence-attribution-photos.png)" not in whole  # photos are not in the repository
    for part in ("radar", "curves", "gallery", "photos"):
        with Image.open(tmp_path / "page" / f"evidence-attribution-{part}.png") as drawn:
            assert min(drawn.size) > 200
    for picture in ("radar", "curves", "gallery"):  # once is enough
        monkeypatch.setattr(attribution_figures, picture, lambda *given, **told: None)
    rows = list(csv.DictReader((tmp_path / "page" / "evidence-attribution.csv").read_text().splitlines()))
    assert {row["table"] for row in rows} == {"pets, label", "pets, predicted", "imagenet, label", "imagenet, predicted", "sanity", "ablate score"}
    assert {row["method"] for row in rows if row["table"] == "imagenet, predicted"} == {"caap", "center", "random *"}
    assert all(row["missing"] == "0" for row in rows if row["table"].startswith("pets") and row["metric"] == "ins-del" and row["method"] != "random *")

    store = Store(tmp_path / "work" / "attribution" / "imagenet-label")
    lost = next(shard for shard in store.plan().shards if shard.method == "center")
    store.rows_file(lost.id).unlink()
    assert study(real, tmp_path, minutes=0) == 1
    assert "- center: 2 maps are not made yet; run the same command again" in page.read_text()
    assert study(real, tmp_path) == 0
    assert _timeless(page.read_text()) == _timeless(whole)  # the same numbers
    again = page.read_text()
    with monkeypatch.context() as elsewhere:  # other versions ask for other shards; the page alone takes those that are there
        elsewhere.setattr("seecause.bench.plan.versions", lambda: {"torch": "0.0"})
        elsewhere.setattr(evidence_attribution, "machine", lambda device: "another machine")
        assert study(real, tmp_path, only_page=True) == 0 and page.read_text() == again
        with pytest.raises(typer.Exit):
            evidence_attribution.main(str(real), 1, "cpu", 9, tmp_path / "page", tmp_path / "work", METHODS, "timm:test_vit", True)
    assert "other photos" in capsys.readouterr().err
    ended = [event["shard"] for event in store.events() if event["event"] == "done"]
    assert sorted(ended) == sorted([*(shard.id for shard in store.plan().shards), lost.id])  # nothing else was done twice


def _timeless(page: str) -> list[str]:
    return [line for line in page.splitlines() if not re.search(r"\| machine|[\d.]+ \|$", line) or "±" in line]


def test_an_outline_shows_nothing_of_the_photo(real):
    data = evidence_attribution._photos(f"pets:{real / 'pets'}", None)
    drawn = attribution_figures._seen(data, 0, photos=False)
    assert drawn.shape == data[0].image.shape and drawn.unique().tolist() == pytest.approx([0.7, 0.88, 1.0])
    assert (attribution_figures._seen(data, 0, photos=True) == data[0].image).all()


def test_what_is_missing_is_named(real, tmp_path, capsys):
    assert study(Path(), tmp_path) == 2 and "test_vit.safetensors" in capsys.readouterr().err
    evidence = [("", "REAL=PATH"), (str(tmp_path), "test_vit.safetensors")]
    for given, said in evidence:
        with pytest.raises(typer.Exit):
            evidence_attribution.main(given, None, "cpu", 0, tmp_path / "page", tmp_path / "work", METHODS, "timm:test_vit")
        assert said in capsys.readouterr().err
    assert not (tmp_path / "page").exists()


def test_the_predicted_class_is_computed_where_it_is_another(real, monkeypatch):
    class Photos(attribution_parts.Photoset):
        names = ("a", "b", "c")

    photos = Photos("pets", "", None, torch.tensor([1, 2, 3]), torch.tensor([1, 5, -1]))
    runs = {"pets-label": [1.0, 2.0, 3.0], "pets-predicted": [torch.nan, 20.0, torch.nan]}
    by = {name: type("Run", (), {"store": values, "plan": None}) for name, values in runs.items()}
    monkeypatch.setattr("scripts.attribution_page.over", lambda names, store, plan: {"caap": {"ins-del": torch.tensor(store)}})
    assert merged(photos, "label", by)["caap"]["ins-del"].tolist() == [1, 2, 3]
    found = merged(photos, "predicted", by)["caap"]["ins-del"]
    assert found[:2].tolist() == [1, 20] and found[2].isnan()
    assert photos.right.tolist() == [True, False]


def test_the_pictures_of_a_small_part_are_among_those_of_a_larger_one(real):
    data = evidence_attribution._photos(f"imagenet:{real / 'imagenet'}", None)
    fewer, more = (attribution_parts.some(data, count, 0).photos for count in (1, 2))
    assert len(fewer) == 1 and set(fewer) < set(more) and more == data.photos
