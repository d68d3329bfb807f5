"""Perturbation metrics equal loops that make one image at a time. On a linear model the exact
contributions of patches are known: metrics of correlation must call them perfect."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch.testing import assert_close

import seecause as sc
from seecause.engine.chunks import budget
from seecause.errors import BadOption
from seecause.metrics.faithfulness import (
    coefficient,
    exact_sums,
    perturbation,
    saco,
    single_deletion,
)
from tests.helpers import noise, ready
from tests.linear import GRID, SIZE, contributions, linear_model, patch_sums
from tests.reference import perturbation as reference

CLASSES = [2, 3]
ONES = torch.ones(2, dtype=torch.float64)


@pytest.fixture(scope="module")
def setting():
    model, images = linear_model(), noise(2, 3, *SIZE, seed=5)
    return model, images, noise(2, *GRID, seed=6).round(decimals=1)  # with ties


def ask(model, label):
    return reference.softmax_answer(model, label)


# region perturbation


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
    _, model, images = ready("timm_deit3")
    maps = noise(2, 4, 6)
    flipped = perturbation(model, images, maps, CLASSES, steps=6)
    deleted = sc.metrics.insertion_deletion(model, images, maps, CLASSES, steps=6, order="patch")
    assert_close(flipped["morf"], deleted["deletion curve"], atol=1e-12, rtol=0)
    assert_close(flipped["pixel-flipping"], deleted["deletion"], atol=1e-12, rtol=0)


# correlation with the drop


def test_single_deletion_ranks_cells_as_the_logit_falls_without_them(setting):
    model, images, _ = setting
    exact = contributions(model, images, CLASSES)
    assert_close(single_deletion(model, images, exact, CLASSES, cells=2), ONES)
    assert_close(single_deletion(model, images, -exact, CLASSES, cells=2), -ONES)
    maps = noise(2, *SIZE, seed=9)
    with torch.no_grad():
        for b, goal in enumerate(CLASSES):
            sums, drops = [], []
            for row, column in itertools.product(range(4), range(4)):
                here = tuple(
                    slice(place * side // 4, (place + 1) * side // 4)
                    for place, side in zip((row, column), SIZE, strict=True)
                )
                gone = images[b : b + 1].clone()
                gone[:, :, here[0], here[1]] = 0
                drops.append(float(model(images[b : b + 1])[0, goal] - model(gone)[0, goal]))
                sums.append(float(maps[b][here].sum()))
            expected = torch.tensor(spearmanr(sums, drops).statistic)
            scores = single_deletion(model, images, maps, CLASSES)
            assert_close(scores[b], expected, check_dtype=False)
    with pytest.raises(BadOption, match="cells"):
        single_deletion(model, images, exact, CLASSES, cells=0)


def test_equal_sums_are_equal_whatever_their_order():
    """A flat map of 0.3 has sums that differ by rounding, which Spearman's ranks would show."""
    sets = torch.rand(200, 144, generator=torch.Generator().manual_seed(0)).argsort(dim=1) < 29
    flat, coarse = torch.full((1, 144), 0.3).double(), torch.tensor([0.1, 0.7]).double()
    assert exact_sums(flat, sets).unique().numel() == 1
    values = coarse[torch.arange(144) % 2][None]
    distinct = (sets & (values > 0.5)).sum(dim=1).unique()
    assert exact_sums(values, sets).unique().numel() == distinct.numel()
    assert_close(exact_sums(values, sets), values @ sets.double().T)
    assert exact_sums(torch.zeros(1, 144).double(), sets).eq(0).all()
    many = 0.3 + 1e-3 * torch.rand(1, 1 << 17, generator=torch.Generator().manual_seed(0))
    whole = torch.ones(1, 1 << 17, dtype=torch.bool)
    assert torch.equal(exact_sums(many, whole), exact_sums(many.flip(1), whole))


def test_a_flat_map_has_no_correlation(setting):
    model, images, maps = setting
    for metric in (single_deletion, saco):  # saco also has groups of one patch and of two
        assert metric(model, images, torch.full_like(maps, 0.1), CLASSES).isnan().all()


# SaCo


def test_saco_of_three_groups_by_hand():
    """Salience 5, 3, 1 and drops 4, 1, 2: the pairs weigh 2, 4 and -2, so (2 + 4 - 2) / 8."""
    salience, drops = torch.tensor([[5.0, 3, 1]]), torch.tensor([[4.0, 1, 2]])
    assert coefficient(salience, drops).item() == 0.5
    equal = torch.tensor([[3.0, 3, 3]])  # equal drops do not count against the map
    assert coefficient(salience, equal).item() == 1


def test_saco_equals_the_loop(setting):
    model, images, maps = setting
    result = saco(model, images, maps, CLASSES, groups=5)
    for i, label in enumerate(CLASSES):
        expected = reference.saco(ask(model, label), images[i], maps[i], GRID, 5)
        assert result[i].item() == pytest.approx(expected, abs=1e-12)


def test_saco_knows_the_exact_map(setting):
    model, images, maps = setting
    # the mean colour is zero, so contributions are exact
    grey = images - images.mean(dim=(2, 3), keepdim=True)
    exact = patch_sums(contributions(model, grey, CLASSES))
    for sign in (1, -1):
        found = saco(model, grey, sign * exact, CLASSES, score="logit", groups=15)
        assert_close(found, sign * ONES, atol=1e-12, rtol=0)
    with pytest.raises(BadOption, match="2 to 15"):
        saco(model, images, maps, CLASSES, groups=16)


# bad inputs


@pytest.mark.parametrize("metric", [perturbation, single_deletion, saco])
def test_what_cannot_be_measured_is_refused(setting, metric):
    model, images, maps = setting
    with pytest.raises(BadOption, match="2 images"):
        metric(model, images, noise(3, *GRID), CLASSES)
    with pytest.raises(BadOption, match="finite"):
        metric(model, images, maps.clone().fill_(np.nan), CLASSES)


def test_place_in_the_batch_and_memory_change_nothing(setting):
    model, images, maps = setting

    def morf(*arguments):
        return perturbation(*arguments)["morf"]

    for metric in (morf, single_deletion, saco):
        together = metric(model, images, maps, CLASSES)
        with budget(1):
            alone = metric(model, images[1:], maps[1:], CLASSES[1:])
        assert_close(alone[0], together[1], atol=1e-10, rtol=0)
