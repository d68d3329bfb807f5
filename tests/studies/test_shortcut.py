"""The shortcut study: how settings are chosen, and every method on drawn animals and
a tiny transformer."""

from __future__ import annotations

import cells_shortcut
import pytest

from seecause.bench.study import StudyContext
from seecause.data.painted import GROUPS, group_name
from tests.painted import drawn_pets

TINY = {"img_size": 48, "patch_size": 12, "embed_dim": 16, "depth": 2, "num_heads": 2}
SETUP = {"size": 48, "epochs": 1, "batch": 8, "mask_steps": 1, "scored": 4, "draws": 2,
         "architecture": {**TINY, "num_classes": 3}}  # fmt: skip


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    return drawn_pets(tmp_path_factory.mktemp("pets"))


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
        groups = [one[group_name(group)] for group in GROUPS]
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
