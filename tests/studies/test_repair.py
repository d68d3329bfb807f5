"""The repair study on drawn animals and a tiny transformer."""

from __future__ import annotations

import cells_repair
import cells_repair_masks
import pytest
import torch

from seecause.bench.study import StudyContext
from tests.painted import drawn_pets

TINY = {"img_size": 48, "patch_size": 12, "embed_dim": 16, "depth": 2, "num_heads": 2}
SETUP = {"size": 48, "epochs": 1, "batch": 8, "tuned": 1,
         "architecture": {**TINY, "num_classes": 3}}  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Options of every cell about pets."""
    root = tmp_path_factory.mktemp("pets")
    context = StudyContext("cpu", root / "work", root)
    return context, {"data": str(drawn_pets(root)), "seed": 1, "setup": SETUP}


def test_every_cell_is_measured_by_group_and_learns_from_none(case):
    context, options = case
    rows = cells_repair.trained(context, **options)
    rows += cells_repair.by_masks(context, **options, earlier={})
    named = ["directions", "fine-tune"]
    rows += cells_repair.remedied(context, **options, remedies=named, earlier={})
    assert {row.get("masks") for row in rows} == {
        None, "eye", "true", "random patches", "centre", "another picture's",
    }  # fmt: skip
    assert {row.get("donors") for row in rows} == {None, "any", "same-class"}
    assert all(0 <= row["worst"] <= row["average"] <= 1 for row in rows)
    material = cells_repair._case(context, **options).material
    assert not material.pictures.grouped


def test_wrong_masks_are_as_large_as_true_ones(case):
    context, options = case
    case_ = cells_repair._case(context, **options)
    masks = cells_repair._masks(context, case_, seed=0)
    truth = masks["true"].masks
    assert torch.equal(
        masks["random patches"].masks.flatten(1).sum(dim=1), truth.flatten(1).sum(dim=1)
    )
    assert masks["another picture's"].masks.sum() == truth.sum()
    assert (masks["centre"].masks == masks["centre"].masks[0]).all()


def test_every_criterion_chooses_the_setting_that_it_likes_best():
    names = ("transplant-worst", "transplants", "held-out accuracy", "val worst", "val average")
    rows = [
        {"rate": place, "background": 2.0, "variation": 1.0, "whole": True,
         **{name: float(best == place) for name, best in zip(names, (0, 0, 1, 2, 2), strict=True)}}
        for place in range(3)
    ]  # fmt: skip
    chosen = cells_repair_masks.chosen_settings(rows)
    assert {name: setting["rate"] for name, setting in chosen.items()} == {
        "transplant-worst": 0, "accuracy": 1, "group labels": 2,
    }  # fmt: skip


def test_edge_patches_are_left_out_or_filled():
    pixels = torch.zeros(1, 40, 40, dtype=torch.bool)
    pixels[:, 8:32, 8:35] = True  # of 8 x 8 patches: whole but for the last column, covered by 3/8
    grid = torch.zeros(1, 5, 5, dtype=torch.bool)
    grid[:, 1:4, 1:5] = True
    images = torch.ones(1, 3, 40, 40)
    whole = cells_repair_masks._whole(images, pixels, grid)[1]
    assert whole[0, 1:4, 1:4].all() and int(whole.sum()) == 9
    eroded = cells_repair_masks._eroded(images, pixels, grid)[1]
    assert int(eroded.sum()) == 3 and eroded[0, 2, 2:5].all()
    filled, same = cells_repair_masks._filled(images, pixels, grid)
    assert same.equal(grid) and filled[0, 0].bool().equal(pixels[0])
