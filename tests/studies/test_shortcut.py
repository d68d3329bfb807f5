"""The shortcut study: its pictures, how settings are chosen, and every method on drawn animals and
a tiny transformer."""

from __future__ import annotations

import cells_shortcut
import numpy as np
import pytest
import shortcut_pictures
import torch
from PIL import Image
from shortcut_pictures import SPLITS, both_ways, compose, read_cutouts, train_pictures

from seecause.bench.study import StudyContext

CPU = torch.device("cpu")
TINY = {"img_size": 48, "patch_size": 12, "embed_dim": 16, "depth": 2, "num_heads": 2}
SETUP = {"size": 48, "epochs": 1, "batch": 8, "mask_steps": 1, "scored": 4, "draws": 2,
         "architecture": {**TINY, "num_classes": 3}}  # fmt: skip


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """Two breeds of discs (cats) and two of squares (dogs), on grey, with a border; one photo whose
    trimap has no animal."""
    root = tmp_path_factory.mktemp("pets")
    for folder in ("images", "annotations/trimaps"):
        (root / folder).mkdir(parents=True)
    generator = np.random.default_rng(0)
    y, x = np.mgrid[:40, :40]
    for split, each in (("trainval", 8), ("test", 3)):
        lines = []
        for breed, number in np.ndindex(4, each):
            name, species = f"breed{breed}_{split}{number}", 1 + breed // 2
            disc, square = np.hypot(x - 20, y - 18), np.maximum(abs(x - 20), abs(y - 18))
            far = disc if species == 1 else square
            ids = np.where(far < 10, 1, np.where(far < 13, 3, 2)).astype(np.uint8)
            pixels = np.where((far < 12)[..., None], generator.integers(60, 250, 3), 128)
            if (split, breed, number) == ("test", 3, 2):
                ids = np.full_like(ids, 2)
            Image.fromarray(ids).save(root / "annotations/trimaps" / f"{name}.png")
            Image.fromarray(pixels.astype(np.uint8)).save(root / "images" / f"{name}.jpg")
            lines.append(f"{name} {breed + 1} {species} 1")
        (root / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="module")
def cutouts(pets):
    return read_cutouts(pets, size=48)


def test_splits_share_no_photo_and_validation_has_every_breed(cutouts):
    names = {s: {cutouts.names[row] for row in cutouts.rows(s).tolist()} for s in SPLITS}
    assert [len(names[split]) for split in SPLITS] == [24, 8, 11]  # one trimap has no animal
    assert len(set().union(*names.values())) == 43 and "breed3_test2" not in names["test"]
    assert {name.partition("_")[0] for name in names["val"]} == {f"breed{b}" for b in range(4)}


def test_training_has_the_shortcut_and_the_test_pairs_have_not(cutouts, monkeypatch):
    monkeypatch.setattr(shortcut_pictures, "UNUSUAL", 0.25)
    train = train_pictures(cutouts, seed=1, size=48, device=CPU)
    for species in range(2):
        assert (train.places[train.labels == species] != species).sum() == 3  # of 12
    others = train_pictures(cutouts, seed=2, size=48, device=CPU)
    assert not torch.equal(train.places, others.places) and torch.equal(train.photos, others.photos)
    test = both_ways(cutouts, "test", size=48, device=CPU)
    boards, leaves = test.take(slice(0, 11)), test.take(slice(11, 22))
    assert torch.equal(boards.photos, leaves.photos) and torch.equal(boards.masks, leaves.masks)
    near = torch.nn.functional.avg_pool2d(boards.masks[:, None].float(), 5, stride=1, padding=2)
    inside, change = near[:, 0] == 1, (boards.images.int() - leaves.images.int()).abs().amax(dim=1)
    assert inside.any() and change[inside].max() <= 1  # the same animal
    assert (change > 0)[~boards.masks].float().mean() > 0.9  # elsewhere


def test_a_picture_does_not_depend_on_its_neighbours_and_its_animal_is_whole(cutouts):
    rows, test = cutouts.rows("test"), both_ways(cutouts, "test", size=48, device=CPU)
    alone = compose(cutouts, rows[3:4], torch.tensor([1]), seed=0, size=48, device=CPU)
    assert torch.equal(alone.images[0], test.images[len(rows) + 3])
    area = test.masks.float().mean(dim=(1, 2))
    assert area.min() > 0.12 and area.max() < 0.5  # a disc or square of 50 to 70 % of the side
    sides = (test.masks[:, 0], test.masks[:, -1], test.masks[:, :, 0], test.masks[:, :, -1])
    assert torch.cat(sides, dim=1).float().mean() < 0.1


def test_leaves_are_darker():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(64, sum(shortcut_pictures.NUMBERS), generator=generator)
    boards, leaves = (shortcut_pictures.texture(i, numbers, 32).mean() for i in range(2))
    assert 0.45 < boards < 0.57 and 0.3 < leaves < 0.4


def test_control_masks_show_as_much_as_ifam_and_know_nothing_of_the_animal():
    masks = cells_shortcut.control_masks
    centre, lot = (masks(5, 14, 0.21, by_lot=by_lot, seed=1) for by_lot in (False, True))
    assert (centre.sum(dim=(1, 2)) == 41).all() and (lot.sum(dim=(1, 2)) == 41).all()  # of 196
    assert (centre == centre[0]).all() and centre[0, 5:9, 5:9].all()
    assert not centre[0, [0, -1]].any() and not centre[0, :, [0, -1]].any()
    assert (lot[0] != lot[1]).any() and (lot != masks(5, 14, 0.21, by_lot=True, seed=2)).any()


def row(rate, worst, average=0.9, changed=False):
    own = {"rate": rate, "length": 1.0, "background": 2.0, "variation": 1.0, "whole": False}
    return {
        **own,
        "val worst": worst,
        "val average": average,
        "val kept": 0.213,
        "changed": changed,
    }


def test_settings_are_chosen_on_validation_pictures_alone():
    tried = [row(1, 0.5), row(2, 0.6, 0.7), row(3, 0.6, 0.8), row(4, 0.9, changed=True)]
    earlier = {"tune erm": tried, "tune mask": [row(7, 0.5)], "tune ifam": tried}
    assert cells_shortcut.best_setting(earlier, "erm")["rate"] == 3
    control = cells_shortcut.best_setting(earlier, "scatter")
    assert control["rate"] == 7 and control["kept"] == 0.21
    whole = {"val worst": 0.5, "val average": 0.9, "removed": 0}
    rows = [whole, {**whole, "removed": 1}, {**whole, "val worst": 0.6, "removed": 4}]
    assert cells_shortcut.choose(rows)["removed"] == 4 and cells_shortcut.choose(rows[:2]) is whole


@pytest.mark.parametrize("method", ["erm", "ifam", "pdisco", "mask", "centre"])
def test_every_method_trains_and_is_measured(pets, tmp_path, method):
    options = {"kept": 0.25} if method == "centre" else {}
    found = cells_shortcut.trained(
        StudyContext("cpu", tmp_path),
        data=str(pets),
        method=method,
        seed=1,
        setup=SETUP,
        rate=1e-3,
        **options,
    )
    assert [one["changed"] for one in found] == [False, *[True] * (method in ("ifam", "pdisco"))]
    for one in found:
        groups = [one[shortcut_pictures.group_name(group)] for group in shortcut_pictures.GROUPS]
        assert one["worst"] == min(groups) <= one["average"] <= 1 and 0 <= one["flips"] <= 1
    if method == "centre":
        assert found[0]["kept"] == pytest.approx(0.25)


def test_repairs_are_those_of_the_chosen_training(pets, tmp_path):
    context, options = StudyContext("cpu", tmp_path), {"data": str(pets), "seed": 1, "setup": SETUP}
    found = cells_shortcut.repaired(context, **options, earlier={"tune erm": [row(1e-3, 0.5)]})
    names = [one["method"] for one in found]
    assert len(set(names)) == 6 and names[0] == cells_shortcut.DFR
    by_name = dict(zip(names, found, strict=True))
    for name in (cells_shortcut.PRINTED, cells_shortcut.GUARDED):
        chosen = by_name[f"ERM without heads: {name}"]
        lots = by_name[f"ERM without as many random heads as {name}"]
        assert chosen["removed"] == lots["removed"]
    assert len(list(tmp_path.glob("shortcut-erm-*"))) == 1
