"""Removal metrics equal loops that make one picture at a time; a map that knows the answer beats
its own negative."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.engine.chunks import budget
from seecause.errors import BadOption
from seecause.metrics.curves import impute, perturbation, removal, road
from seecause.metrics.fidelity import coefficient, saco
from tests.helpers import noise, view
from tests.linear import GRID, SIZE, contributions, linear_model, patch_sums
from tests.reference import perturbation as reference
from tests.tiny import pictures, tiny

CLASSES = [2, 3]


@pytest.fixture(scope="module")
def setting():
    model = linear_model()
    images = noise(2, 3, *SIZE, seed=5)
    return model, images, noise(2, *GRID, seed=6).round(decimals=1)  # with ties


def ask(model, label):
    return reference.softmax_answer(model, label)


def test_curves_equal_the_loop(setting):
    model, images, maps = setting
    result = perturbation(model, images, maps, CLASSES, fill=0.25)
    for i, label in enumerate(CLASSES):
        flat = torch.full_like(images[i], 0.25)
        order = reference.descending(maps[i])
        morf = reference.aopc(ask(model, label), images[i], order, GRID, flat)
        lerf = reference.aopc(ask(model, label), images[i], order[::-1], GRID, flat)
        assert result["aopc-morf"][i].item() == pytest.approx(morf, abs=1e-12)
        assert result["aopc-lerf"][i].item() == pytest.approx(lerf, abs=1e-12)
        assert result["abpc"][i].item() == pytest.approx(morf - lerf, abs=1e-12)
    assert result["morf"].shape == (2, 16) and result["shares"][[0, -1]].tolist() == [0, 1]
    assert_close(result["morf"][:, [0, -1]], result["lerf"][:, [0, -1]], atol=1e-12, rtol=0)


def test_pixel_flipping_is_deletion():
    native = tiny("timm_deit3")
    model, images = view(native, check=False), pictures(native)
    maps = noise(2, 4, 6)
    flipped = perturbation(model, images, maps, CLASSES, steps=6)
    deleted = sc.metrics.insertion_deletion(model, images, maps, CLASSES, steps=6, order="patch")
    assert_close(flipped["morf"], deleted["deletion curve"], atol=1e-12, rtol=0)
    assert_close(flipped["pixel-flipping"], deleted["deletion"], atol=1e-12, rtol=0)


def test_comprehensiveness_sufficiency_and_log_odds_equal_the_loop(setting):
    model, images, maps = setting
    result = removal(model, images, maps, CLASSES, shares=(0.2, 0.6))
    for i, label in enumerate(CLASSES):
        order = reference.descending(maps[i])
        expected = reference.eraser(
            ask(model, label), images[i], order, GRID, torch.zeros_like(images[i]), (3, 9)
        )
        got = [result[name][i].item() for name in ("comprehensiveness", "sufficiency", "log-odds")]
        assert got == pytest.approx(expected, abs=1e-12)
    with pytest.raises(BadOption, match="log-odds"):
        removal(model, images, maps, (1, 2))
    with pytest.raises(BadOption, match="between 0 and 1"):
        removal(model, images, maps, CLASSES, shares=(0.5, 1.0))


def test_the_exact_map_is_better_than_its_negative_everywhere(setting):
    model, images, _ = setting
    maps = patch_sums(contributions(model, images, CLASSES))
    good, bad = (perturbation(model, images, m, CLASSES, score="logit") for m in (maps, -maps))
    assert (good["abpc"] > 0).all() and torch.allclose(good["abpc"], -bad["abpc"])
    good, bad = (removal(model, images, m, CLASSES) for m in (maps, -maps))
    assert (
        (good["comprehensiveness"] > bad["comprehensiveness"]).all()
        and (good["sufficiency"] < bad["sufficiency"]).all()
        and (good["log-odds"] < bad["log-odds"]).all()
    )
    good, bad = (
        road(model, images, m, CLASSES, shares=(0.3, 0.6), score="logit")["road"]
        for m in (maps, -maps)
    )
    assert_close(good, -bad, atol=1e-12, rtol=0)


def test_a_contrast_is_a_target_and_memory_changes_nothing(setting):
    model, images, maps = setting
    together = perturbation(model, images, maps, (1, 3))
    with budget(1):
        alone = perturbation(
            model, images[1:], maps[1:], lambda logits: logits[:, 1] - logits[:, 3]
        )
    assert_close(alone["morf"][0], together["morf"][1], atol=1e-12, rtol=0)


# SaCo


def test_saco_of_three_groups_by_hand():
    """Salience 5, 3, 1 and drops 4, 1, 2: the pairs weigh 2, 4 and -2, so (2 + 4 - 2) / 8."""
    salience, drops = torch.tensor([[5.0, 3, 1]]), torch.tensor([[4.0, 1, 2]])
    assert coefficient(salience, drops).item() == 0.5
    assert (
        coefficient(salience, torch.tensor([[3.0, 3, 3]])).item() == 1
    )  # equal drops do not count against the map


def test_saco_equals_the_loop(setting):
    model, images, maps = setting
    result = saco(model, images, maps, CLASSES, groups=5)
    for i, label in enumerate(CLASSES):
        assert result[i].item() == pytest.approx(
            reference.saco(ask(model, label), images[i], maps[i], GRID, 5), abs=1e-12
        )


def test_saco_knows_the_exact_map_and_says_nothing_of_a_flat_one(setting):
    model, images, maps = setting
    grey = images - images.mean(
        dim=(2, 3), keepdim=True
    )  # then the mean colour is zero, and contributions are exact
    exact = patch_sums(contributions(model, grey, CLASSES))
    assert_close(
        saco(model, grey, exact, CLASSES, score="logit", groups=15),
        torch.ones(2, dtype=torch.float64),
        atol=1e-12,
        rtol=0,
    )
    assert_close(
        saco(model, grey, -exact, CLASSES, score="logit", groups=15),
        -torch.ones(2, dtype=torch.float64),
        atol=1e-12,
        rtol=0,
    )
    assert (
        saco(model, images, torch.full_like(maps, 0.1), CLASSES).isnan().all()
    )  # also with groups of one patch and of two
    with pytest.raises(BadOption, match="2 to 15"):
        saco(model, images, maps, CLASSES, groups=16)


# ROAD


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_imputation_equals_a_dense_solve(share):
    image, gone = (
        noise(3, 9, 11),
        torch.rand(9, 11, generator=torch.Generator().manual_seed(0)) < share,
    )
    expected = reference.impute(image.numpy(), gone.numpy())
    assert_close(impute(image, gone), torch.from_numpy(expected), atol=1e-10, rtol=0)
    assert torch.equal(impute(image, gone)[:, ~gone], image[:, ~gone])


def test_a_flat_picture_is_filled_in_without_a_trace():
    image, gone = (
        torch.full((3, 8, 8), 0.7, dtype=torch.float64),
        torch.ones(8, 8, dtype=torch.bool),
    )
    gone[0, 0] = False
    assert_close(impute(image, gone), image, atol=1e-12, rtol=0)


def test_road_removes_whole_patches_and_adds_seeded_noise(setting):
    model, images, maps = setting
    result = road(model, images, maps, CLASSES, shares=(0.4,), noise=0.05, seed=3)
    for i, label in enumerate(CLASSES):
        order = reference.descending(maps[i])
        marks = torch.zeros_like(images[i])
        gone = reference.without(marks, order[:6], GRID, marks + 1)[0] > 0
        filled = torch.from_numpy(reference.impute(images[i].numpy(), gone.numpy()))
        grain = 0.05 * torch.randn(
            3, *SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
        assert result["morf"][i, 0].item() == pytest.approx(
            ask(model, label)(filled + grain * gone), abs=1e-9
        )
    again = road(model, images[1:], maps[1:], CLASSES[1:], shares=(0.4,), noise=0.05, seed=3)
    assert_close(again["lerf"][0], result["lerf"][1], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("metric", "field"),
    [
        (perturbation, "morf"),
        (removal, "lost without top"),
        (road, "morf"),
        (sc.metrics.insertion_deletion, "deletion curve"),
    ],
)
def test_equals_are_removed_in_the_order_asked_for(setting, metric, field):
    """Of a map that is flat, a seed decides alone what goes first."""
    model, images, maps = setting
    flat = torch.zeros_like(maps)
    some = {"shares": (0.4,)} if metric in (removal, road) else {"steps": 5}
    results = [metric(model, images, flat, CLASSES, ties=ties, **some) for ties in ("raster", 3, 3)]
    raster, drawn, again = (result[field] for result in results)
    assert torch.equal(drawn, again) and not torch.allclose(drawn, raster)
    assert [result.protocol["ties"] for result in results] == ["raster", 3, 3]


@pytest.mark.parametrize("metric", [perturbation, removal, saco, road])
def test_what_cannot_be_measured_is_refused(setting, metric):
    model, images, maps = setting
    with pytest.raises(BadOption, match="2 images"):
        metric(model, images, noise(3, *GRID), CLASSES)
    with pytest.raises(BadOption, match="finite"):
        metric(model, images, maps.clone().fill_(np.nan), CLASSES)
