"""The background study on a toy folder: every piece, the page, resuming; and the photos it makes."""

from __future__ import annotations

import csv
import re

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import seecause as sc
from scripts import evidence_background as study
from scripts.background import composites, numbers
from scripts.kept_pieces import Pieces, pack, unpack
from seecause.data.imagenet import imagenet_wnids
from seecause.errors import BadOption
from tests.files import lines
from tests.tiny import scramble

SIDE, BREEDS = 48, ("Abyssinian", "pug", "beagle")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    module = scramble(VisionTransformer(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=1000))
    return sc.wrap(module, mean=(0.5,) * 3, std=(0.5,) * 3, size=(32, 32))


@pytest.fixture
def real(tmp_path, model):
    """The layout of the real folder. Photos of a breed are nearly alike and labelled as the model answers, so that it is right."""
    pets, rng, table, listed = tmp_path / "real" / "pets", np.random.default_rng(0), ["image,breed,imagenet_index,wnid"], []
    (pets / "images").mkdir(parents=True)
    (pets / "annotations" / "trimaps").mkdir(parents=True)
    bases: dict[int, np.ndarray] = {}  # by answer
    while len(bases) < len(BREEDS):
        base = (rng.integers(20, 230, 3) + rng.integers(-19, 20, (SIDE, SIDE, 3))).astype(np.uint8)
        bases[int(model(model.preprocess(Image.fromarray(base))).argmax())] = base
    for number, (breed, (answer, base)) in enumerate(zip(BREEDS, bases.items(), strict=True)):
        for count in range(5):
            pixels = base + rng.integers(0, 2, base.shape, dtype=np.uint8)
            trimap = np.full((SIDE, SIDE), 2, np.uint8)
            trimap[12:36, 10:30], trimap[14:34, 12:28] = 3, 1
            Image.fromarray(pixels).save(pets / "images" / f"{breed}_{count}.jpg", format="PNG")
            Image.fromarray(trimap).save(pets / "annotations" / "trimaps" / f"{breed}_{count}.png")
            table.append(f"{breed}_{count},{breed},{answer},x")
            listed.append(f"{breed}_{count} {number + 1} 1 1")
    lines(pets / "imagenet_labels.csv", *table)
    lines(pets / "annotations" / "test.txt", *listed)
    for wnid in imagenet_wnids()[:3]:
        folder = tmp_path / "real" / "imagenet" / "val" / wnid
        folder.mkdir(parents=True)
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / "a.JPEG", format="PNG")
    (tmp_path / "real" / study.WEIGHTS).write_bytes(b"")
    return tmp_path / "real"


def test_the_study_runs_in_parts_and_its_page_follows_from_its_pieces(real, model, tmp_path, monkeypatch, capsys):
    small = study.Sizes(ks=(1, 2), mask_steps=2, mixes=1, draws=2, regression_draws=32, gating_masks=1, gating_steps=1, gating_batch=4)
    monkeypatch.setattr(study, "SMALL", small)
    monkeypatch.setattr(study, "load", lambda real, device: model)

    def run(minutes, **told):
        with pytest.raises(typer.Exit) as ended:
            study.main(real=real, limit=9, device="cpu", minutes=minutes, tf32=True, seed=0, out=tmp_path / "out", work=tmp_path / "work", **told)
        return ended.value.exit_code, (tmp_path / "out" / "evidence-background.md").read_text()

    code, page = run(-1.0)
    assert code == 1 and "stopped before 'plain'" in page and page.count("Not there yet") == 6
    code, page = run(5.0)
    assert code == 0 and "Not there yet" not in page and "nan" not in page
    said = capsys.readouterr().out
    assert re.search(r"plain accuracy, 8 photos of pets: [\d.]+\nplain accuracy, 3 photos of imagenet", said)  # first
    for name in ("plain", "searched", "audited"):  # finished pieces are not made again
        monkeypatch.setattr(study, name, lambda *given: pytest.fail("made again"))
    kept = next((tmp_path / "work").glob("*/random-2.json"))
    kept.unlink()
    again = run(5.0)
    assert again[0] == 0 and kept.is_file() and again[1].split("## Seconds")[0] == page.split("## Seconds")[0]  # what is missing is
    assert "](evidence-background.png)" in page and "](evidence-background-photos.png)" not in page  # photos are not in the repository
    monkeypatch.setattr(study, "machine", lambda device: "another machine")
    assert run(5.0, only_page=True) == again  # it tells of the machine that made the pieces

    rows = list(csv.DictReader((tmp_path / "out" / "evidence-background.csv").read_text().splitlines()))
    methods = {row["row"] for row in rows if row["table"] == "removal"}
    assert {"cigma as printed", "cigma as printed + guard", "cigma, true masks, grey", "regression, true masks, grey", "weight norm", "taylor"} <= methods
    assert {"attention mass", "loss gain", "gating", "gating, contrastive", "random"} <= methods
    gap = {row["row"]: float(row["value"]) for row in rows if row["table"] == "composites" and row["measure"] == "right"}
    assert gap["BG-gap"] == pytest.approx(gap["mixed_same"] - gap["mixed_rand"], abs=1e-5)
    assert all(f"| {method} |" in page for method in methods - {"random"})
    assert "| random, 1 head | 1 |" in page and "control: another photo's true mask" in page
    for picture in ("evidence-background.png", "evidence-background-photos.png"):
        with Image.open(tmp_path / "out" / picture) as drawn:
            assert drawn.width > 300
    kept.unlink()
    assert run(5.0, only_page=True)[0] == 1 and not kept.is_file()


def test_a_folder_without_its_files_is_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"vit_tiny.* is not there"):
        study.main(real=tmp_path)


def test_filling_keeps_what_is_known_and_takes_the_rest_from_around_it():
    pixels = torch.rand(2, 3, 37, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    holes = torch.zeros(2, 37, 24, dtype=torch.bool)
    holes[0, 10:20, 8:16] = True
    filled = composites.fill_holes(pixels, holes, margin=2)
    wide = torch.zeros(37, 24, dtype=torch.bool)
    wide[8:22, 6:18] = True
    assert torch.equal(filled[0][:, ~wide], pixels[0][:, ~wide]) and torch.equal(filled[1], pixels[1])
    other = pixels.clone()
    other[0][:, wide] = 7.0  # nothing of the object is left in it
    assert torch.allclose(composites.fill_holes(other, holes, margin=2), filled)
    flat = torch.full_like(pixels, 0.3)
    assert torch.allclose(composites.fill_holes(flat, holes), flat)


def test_backgrounds_come_from_the_right_class_and_half():
    classes, parts = torch.tensor([0] * 6 + [1] * 4 + [2] * 6), composites.halves(torch.tensor([0] * 6 + [1] * 4 + [2] * 6))
    assert [int(parts[classes == c].sum()) for c in range(3)] == [3, 2, 3]
    same, other = (pick(classes, parts, draws=3, seed=1) for pick in (composites.same_class, composites.other_class))
    places = torch.arange(16)
    for rows in (*same, *other):
        assert torch.equal(rows.sort().values, places) and torch.equal(parts[rows], parts)  # each background once, of the same half
    assert (classes[same] == classes).all() and (same != places).all() and (classes[other] != classes).all()
    assert not torch.equal(other[0], other[1])
    with pytest.raises(BadOption, match="at least two of each class"):
        composites.same_class(torch.tensor([0, 0, 1]), torch.zeros(3, dtype=torch.long), draws=1)


def test_composites_are_what_their_names_say():
    pixels = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    shapes = torch.zeros(4, 32, 32, dtype=torch.bool)
    shapes[:, 12:20, 12:20] = True
    shapes[:, 12, 12] = False  # the box is larger than the shape
    shapes[3] = True
    classes, parts = torch.tensor([0, 0, 1, 1]), torch.zeros(4, dtype=torch.long)
    made = composites.compose(pixels, shapes, classes, parts, draws=1)
    shown, inside = shapes[0], torch.zeros(32, 32, dtype=torch.bool)
    inside[12:20, 12:20] = True
    assert (made.alone["only_fg"][0][:, ~shown] == 0).all() and torch.equal(made.alone["only_fg"][0][:, shown], pixels[0][:, shown])
    for kind in ("only_bg_b", "only_bg_t"):
        assert torch.equal(made.alone[kind][0][:, ~inside], pixels[0][:, ~inside])
    assert (made.alone["only_bg_b"][0][:, inside] == 0).all()
    assert torch.equal(made.alone["only_bg_t"][0][:, 12:20, 12:20], pixels[0][:, 0:8, 12:20])  # the first strip, above: 12 rows, and again from the 13th
    assert made.untiled == 1 and made.boxes.tolist() == pytest.approx([1 / 16] * 3 + [1])
    for kind in composites.MIXED:
        donor = made.donors[kind][0, 0]
        assert torch.equal(made.mixed[kind][0, 0][:, shown], pixels[0][:, shown])
        assert torch.equal(made.mixed[kind][0, 0][:, ~shown], made.alone["only_bg_f"][donor][:, ~shown])


def test_changes_are_paired_and_help_needs_more_than_luck():
    whole = {"imagenet": "1110", "pets": "1100", "mixed_same": [1, 1, 0, 0], "mixed_rand": [0, 0, 0, 0]}
    whole["gains"] = {name: [[0.2, 0.4], [0.2, 0.2]] for name in (*numbers.AFTER, numbers.SWAP)}
    better = {**whole, "mixed_rand": [1, 1, 0, 0], "gains": {name: [[0.2, 0.4], [0.0, 0.0]] for name in whole["gains"]}}
    found = numbers.effects(better, whole)
    assert found["BG-gap"].value == 0 and found["BG-gap"].change.value == -0.5
    grey = found["BIR, true masks, grey"]
    assert grey.value == 0 and grey.change.value == pytest.approx(-0.4) and grey.change.low == pytest.approx(-0.5) and grey.change.high < 0
    assert numbers.falls(found, "BIR, true masks, grey") and not numbers.falls(numbers.effects({**better, "pets": "1000"}, whole), "BIR, true masks, grey")
    same = numbers.effects(whole, whole)
    assert not numbers.falls(same, "BIR, true masks, grey") and same["pets accuracy"].change == numbers.Estimate(0.0, 0.0, 0.0)
    assert numbers.beyond(found, [same], "BG-gap") and not numbers.beyond(found, [same, found], "BG-gap")


def test_numbers_are_kept_to_the_last_bit(tmp_path):
    values = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    kept = Pieces(tmp_path).get("a, b", lambda: pack(values))
    assert torch.equal(unpack(kept), values) and [path.name for path in tmp_path.iterdir()] == ["a--b.json"]
