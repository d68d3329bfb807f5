"""Masks, both estimators of coefficients, and what they find where the truth is known."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import ElasticNet
from sklearn.metrics import r2_score
from torch.testing import assert_close

from seecause.errors import BadOption
from seecause.lvlm import HeadAttribution, attribute_heads, attribute_tokens
from seecause.lvlm.attribute import (
    MASKS,
    Sampling,
    correlation,
    draw_masks,
    elastic_net,
    estimate,
    fit,
    mean_derivative,
)
from tests.helpers import noise
from tests.lvlm.scenes import GRID, scene

PAPER = {"alpha": 5e-4, "l1_ratio": 0.5, "max_iter": 1000}


@pytest.mark.parametrize(("count", "size"), [(1500, 120), (90, 120)])
def test_coefficients_are_those_of_scikit_learn(count, size):
    """With more masks than heads, and with fewer."""
    x = draw_masks(count, size, seed=1)
    y = x.double() @ (noise(size) * 0.05) + 0.1 * noise(count, seed=2) + 3
    theirs = ElasticNet(**PAPER).fit(x.double().numpy(), y.numpy())
    coefficients, intercept, gram = elastic_net(x, y)
    assert_close(coefficients, torch.from_numpy(theirs.coef_), atol=1e-10, rtol=0)
    assert intercept == pytest.approx(float(theirs.intercept_), abs=1e-10)
    centred = x.double() - x.double().mean(dim=0)
    assert_close(gram, centred.T @ centred, atol=1e-9, rtol=0)


def test_masks_ablate_a_share_each_entry_by_itself():
    masks = draw_masks(3000, 40, p=0.75)
    share = torch.full((40,), 0.25, dtype=torch.float64)
    assert_close(masks.double().mean(dim=0), share, atol=0.04, rtol=0)
    assert masks.sum(dim=1).unique().numel() > 5
    assert torch.equal(draw_masks(700, 40), masks[:700])  # more masks begin with the same ones
    other = draw_masks(3000, 40, seed=1)
    assert 0.5 < float((masks == other).double().mean()) < 0.75


def test_a_fit_is_judged_on_masks_it_has_not_seen():
    truth, x = noise(20), draw_masks(60, 20, seed=4)
    y = x.double() @ truth + 3 * noise(60, seed=1)
    found = fit(x, y, seed=4)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(4))
    train, unseen = order[:48], order[48:]
    theirs = ElasticNet(**PAPER).fit(x[train].double().numpy(), y[train].numpy())
    assert_close(found.coefficients, torch.from_numpy(theirs.coef_), atol=1e-10, rtol=0)
    predicted = x[unseen].double() @ found.coefficients + found.intercept
    assert found.r2 == pytest.approx(r2_score(y[unseen], predicted), abs=1e-9)
    assert found.pearson == pytest.approx(np.corrcoef(y[unseen], predicted)[0, 1], abs=1e-9)
    assert_close(found.unseen, torch.stack([y[unseen], predicted], dim=1))
    halves = (elastic_net(x[rows], y[rows])[0] for rows in (train[::2], train[1::2]))
    assert found.agreement == pytest.approx(correlation(*halves)) and found.masks == 60


def test_the_standard_error_of_a_fit_is_that_of_least_squares():
    x, truth = draw_masks(50, 6, seed=2), noise(6)
    found = fit(x, x.double() @ truth + noise(50), seed=2)
    rows = x.double()[torch.randperm(50, generator=torch.Generator().manual_seed(2))[:40]]
    centred = rows - rows.mean(dim=0)
    error = (found.unseen[:, 0] - found.unseen[:, 1]).square().mean()
    expected = (error * torch.linalg.inv(centred.T @ centred).diagonal()).sqrt()
    assert_close(found.standard_error, expected, atol=1e-10, rtol=0)


def test_defaults_are_the_papers():
    assert MASKS["fit"] == 10_000
    sampling = Sampling.of("fit", None, 0.75, 0)
    assert (sampling.masks, sampling.slopes, sampling.runs) == (10_000, 0, 10_000)
    usual = Sampling.of("derivative", None, 0.75, 0, soften=0.1)
    assert (usual.masks, usual.slopes, usual.runs) == (64, 64, 128)


def test_a_mean_derivative_predicts_one_half_by_the_other():
    x, weights = draw_masks(11, 5, p=0.5, seed=3), noise(5)
    responses = torch.tanh(1.5 * (x.double() @ weights))
    slopes = ((1 - responses.square())[:, None] * 1.5 * weights)[:7]
    x = x.double()
    fast = mean_derivative(x, responses, slopes)
    even, odd = slice(0, 7, 2), slice(1, 7, 2)
    for mine, others in (
        (even, range(1, 7, 2)),
        (odd, range(0, 7, 2)),
        (slice(0, 7), range(7, 11)),
    ):
        for k in others:
            line = (x[k] - x[mine].mean(dim=0)) @ slopes[mine].mean(dim=0)
            assert float(fast.unseen[k, 1]) == pytest.approx(float(responses[mine].mean() + line))
    assert_close(fast.unseen[:, 0], responses)
    assert_close(fast.coefficients, slopes.mean(dim=0))
    intercept = responses.mean() - x.mean(dim=0) @ slopes.mean(dim=0)
    assert fast.intercept == pytest.approx(float(intercept)) and fast.masks == 11
    assert_close(fast.standard_error, slopes.std(dim=0) / 7**0.5)
    halves = (slopes[rows].mean(dim=0) for rows in (even, odd))
    assert fast.agreement == pytest.approx(correlation(*halves))


def test_heads_of_a_model_by_the_papers_fit():
    engine = scene("llava").engine
    result = attribute_heads(engine, how="fit", masks=300, seed=3)
    masks = draw_masks(300, 16, seed=3)
    expected = fit(masks, engine.evaluate(masks), seed=3)
    assert_close(result.coefficients, expected.coefficients.view(GRID), atol=1e-9, rtol=0)
    assert result.r2 == pytest.approx(expected.r2) and result.r2 > 0.5
    assert result.masks == 300 and len(result.unseen) == 60


def test_heads_of_a_model_by_derivatives():
    engine = scene("llava").engine
    found = attribute_heads(engine, masks=64, seed=1)
    slopes = engine.slopes(0.1 + 0.8 * draw_masks(64, 16, seed=1).double())[1]
    assert_close(found.coefficients, slopes.mean(dim=0).view(GRID), atol=1e-12, rtol=0)
    assert found.masks == 64


def test_equal_coefficients_are_ordered_by_layer_and_head():
    even = torch.tensor([[0.5, 0.2, 0.5], [0.2, 0.9, 0.5]])
    heads = HeadAttribution(even, 0.0, 1.0, 1.0, 8, 1.0, even)
    assert heads.top(4) == [(1, 1), (0, 0), (0, 2), (1, 2)]
    assert heads.mask(2).tolist() == [True, False, False, False, True, False]


def test_every_option_reaches_what_is_estimated():
    engine = scene("llava").engine
    own = {"how": "fit", "masks": 60, "p": 0.6, "seed": 3}
    for attribute, soft in ((attribute_heads, 0.1), (attribute_tokens, 0.0)):
        sampling = attribute(engine, **own).protocol["sampling"]
        assert sampling == {**own, "soften": 0.0, "slopes": 0}
        usual = attribute(engine, masks=8).protocol["sampling"]
        assert (usual["how"], usual["p"], usual["soften"]) == ("derivative", 0.75, soft)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"how": "guess"}, "how="),
        ({"masks": 3}, "at least 4"),
        ({"masks": "many"}, "masks"),
        ({"p": 0.0}, "between 0 and 1"),
        ({"p": 1.0}, "between 0 and 1"),
        ({"seed": -1}, "seed=-1"),
        ({"how": "fit", "masks": 20}, "outnumber the 16 coefficients"),
    ],
)
def test_bad_options_are_refused(options, match):
    for attribute in (attribute_heads, attribute_tokens):
        with pytest.raises(BadOption, match=match):
            attribute(scene("llava").engine, **options)


def test_responses_that_are_not_finite_are_refused():
    x = draw_masks(8, 4)
    with pytest.raises(BadOption, match="finite"):
        estimate(x, x.double().sum(dim=1), x.double() * torch.nan)
