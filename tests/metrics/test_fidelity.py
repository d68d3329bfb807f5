"""On a linear model the exact contributions of patches are known: every fidelity metric must call
them perfect."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from torch.testing import assert_close

from seecause.engine.chunks import budget
from seecause.errors import BadOption
from seecause.metrics.fidelity import (
    exact_sums,
    faithfulness_estimate,
    infidelity,
    mu_fidelity,
    pearson,
    random_subsets,
    sensitivity_n,
    single_deletion,
)
from tests.helpers import noise
from tests.linear import GRID, SIZE, contributions, linear_model, patch_sums
from tests.reference import perturbation as reference

CLASSES = [2, 3]
ONES = torch.ones(2, dtype=torch.float64)


@pytest.fixture(scope="module")
def setting():
    model, images = linear_model(), noise(2, 3, *SIZE, seed=5)
    return model, images, contributions(model, images, CLASSES)


@pytest.mark.parametrize("metric", [mu_fidelity, sensitivity_n, faithfulness_estimate])
@pytest.mark.parametrize("scale", [1, 7, -2])
def test_the_exact_map_correlates_perfectly(setting, metric, scale):
    model, images, exact = setting
    for maps in (patch_sums(exact), exact):  # by patch and by pixel
        assert_close(
            metric(model, images, scale * maps, CLASSES, score="logit"),
            ONES if scale > 0 else -ONES,
            atol=1e-9,
            rtol=0,
        )


def test_single_deletion_ranks_cells_as_the_logit_falls_without_them(setting):
    model, images, exact = setting
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
        single_deletion(model, images, exact, CLASSES, cells=1)


def test_infidelity_of_the_exact_map_is_zero_and_scaling_repairs_a_factor(setting):
    model, images, exact = setting
    for maps in (patch_sums(exact), exact):
        assert infidelity(model, images, maps, CLASSES, score="logit").abs().max() < 1e-20
        assert (infidelity(model, images, 3 * maps, CLASSES, score="logit") > 1e-3).all()
        assert (
            infidelity(model, images, 3 * maps, CLASSES, score="logit", scaled=True).abs().max()
            < 1e-20
        )
    empty = infidelity(model, images, 0 * exact, CLASSES, score="logit")
    assert (
        torch.equal(
            empty, infidelity(model, images, 0 * exact, CLASSES, score="logit", scaled=True)
        )
        and (empty > 0).all()
    )


@pytest.mark.parametrize(("correlation", "scipy"), [("spearman", spearmanr), ("pearson", pearsonr)])
def test_mu_fidelity_equals_the_loop(setting, correlation, scipy):
    model, images, _ = setting
    maps = noise(2, *GRID, seed=8)
    result = mu_fidelity(
        model,
        images,
        maps,
        CLASSES,
        share=0.4,
        subsets=12,
        correlation=correlation,
        fill="mean",
        seed=4,
    )
    sets = random_subsets([0.4], 12, GRID, seed=4).flatten(1)
    for i, label in enumerate(CLASSES):
        answer, mean = (
            reference.softmax_answer(model, label),
            images[i].mean(dim=(1, 2), keepdim=True).expand_as(images[i]),
        )
        chosen = [row.nonzero()[:, 0].tolist() for row in sets]
        drops = [
            answer(images[i]) - answer(reference.without(images[i], patches, GRID, mean))
            for patches in chosen
        ]
        sums = [maps[i].flatten()[patches].sum().item() for patches in chosen]
        assert result[i].item() == pytest.approx(scipy(sums, drops)[0], abs=1e-10)


def test_sensitivity_n_is_the_mean_over_sizes(setting):
    model, images, _ = setting
    maps = noise(2, *GRID, seed=8)
    both = sensitivity_n(model, images, maps, CLASSES, shares=(0.2, 0.6), subsets=20)
    sums, drops = [], []
    for patches in random_subsets((0.2, 0.6), 20, GRID, seed=0).flatten(1):
        sums.append((maps.flatten(1) * patches).sum(dim=1))
        cut = [
            reference.without(
                image, patches.nonzero()[:, 0].tolist(), GRID, torch.zeros_like(image)
            )
            for image in images
        ]
        drops.append(-torch.softmax(model(torch.stack(cut)), dim=-1)[range(2), CLASSES])
    sums, drops = torch.stack(sums, dim=1), torch.stack(drops, dim=1)
    assert_close(
        both,
        (pearson(sums[:, :20], drops[:, :20]) + pearson(sums[:, 20:], drops[:, 20:])) / 2,
        atol=1e-10,
        rtol=0,
    )
    tenths = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]  # as in the paper, unless told otherwise
    usual, named = (sensitivity_n(model, images, maps, 2, **x) for x in ({}, {"shares": tenths}))
    assert torch.equal(usual, named)


def test_subsets_have_their_size_and_their_seed():
    sets = random_subsets((0.2, 0.8), 50, GRID, seed=1)
    assert sets.shape == (100, *GRID)
    assert sets.flatten(1).sum(dim=1).tolist() == [3] * 50 + [12] * 50
    assert torch.equal(sets, random_subsets((0.2, 0.8), 50, GRID, seed=1)) and not torch.equal(
        sets, random_subsets((0.2, 0.8), 50, GRID, seed=2)
    )


def test_a_flat_map_has_no_correlation(setting):
    model, images, _ = setting
    flat = torch.full((2, *GRID), 0.1)
    for metric in (mu_fidelity, faithfulness_estimate):
        assert metric(model, images, flat, CLASSES).isnan().all()


def test_equal_sums_are_equal_whatever_their_order():
    """A flat map of 0.3 has sums that differ by rounding, which Spearman's ranks would show."""
    sets = random_subsets((0.2,), 200, (12, 12), seed=0).flatten(1)
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


def test_place_in_the_batch_and_memory_change_nothing(setting):
    model, images, _ = setting
    maps = noise(2, *GRID, seed=8)
    for metric in (mu_fidelity, sensitivity_n, faithfulness_estimate, infidelity):
        together = metric(model, images, maps, CLASSES)
        with budget(1):
            assert_close(
                metric(model, images[1:], maps[1:], CLASSES[1]), together[1:], atol=1e-12, rtol=0
            )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.0}, "between 0 and 1"),
        ({"subsets": 1}, "at least 2"),
        ({"correlation": "kendall"}, "pearson"),
    ],
)
def test_unknown_options_are_refused(setting, options, message):
    model, images, exact = setting
    with pytest.raises(BadOption, match=message):
        mu_fidelity(model, images, exact, CLASSES, **options)


def test_pearson_equals_scipy():
    x, y = noise(3, 20), noise(3, 20, seed=1)
    for i in range(3):
        assert pearson(x, y)[i].item() == pytest.approx(pearsonr(x[i], y[i])[0], abs=1e-12)
    assert all(
        pearson(a, b).isnan().all() for a, b in itertools.permutations((x, torch.full_like(x, 0.3)))
    )
