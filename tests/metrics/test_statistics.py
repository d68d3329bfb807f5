"""Means with their errors, intervals that cover, and rank correlation as scipy has it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.stats import spearmanr

from seecause.errors import BadOption
from seecause.metrics import statistics
from seecause.metrics.statistics import (
    bootstrap_interval,
    paired_difference,
    rank_correlation,
    ratio_interval,
    standard_error,
    summarise,
)
from tests.helpers import noise


def test_the_standard_error_is_that_of_scipy():
    values = noise(7)
    assert summarise(values).standard_error == pytest.approx(stats.sem(values))
    hits = torch.tensor([1.0] * 94 + [0.0] * 34)  # a pointing game of 73.44 % on 128 images
    result = summarise(hits)
    assert result.standard_error == pytest.approx((result.mean * (1 - result.mean) / 127) ** 0.5)
    assert (result.n, result.skipped) == (128, 0)
    many = noise(5, 3)
    assert torch.allclose(standard_error(many), torch.tensor(stats.sem(many, axis=0)))


def test_one_image_has_no_standard_error():
    result = summarise(torch.tensor([0.25, torch.nan]))
    assert (result.mean, result.n) == (0.25, 1) and math.isnan(result.standard_error)
    assert standard_error(noise(1, 3)).isnan().tolist() == [True] * 3


def test_skipped_images_are_left_out_and_counted():
    result = summarise(torch.tensor([1.0, torch.nan, 3.0]))
    assert (result.mean, result.n, result.skipped) == (2.0, 2, 1)
    nothing = summarise(torch.tensor([torch.nan]))
    assert np.isnan(nothing.mean) and np.isnan(nothing.standard_error)
    assert (nothing.n, nothing.skipped) == (0, 1)


def test_a_paired_difference_is_sharper_than_its_parts():
    first = noise(200)
    second = first - 0.1 + 0.05 * noise(200, seed=1)
    result = paired_difference(first, second)
    assert result.mean == pytest.approx((first - second).mean().item())
    assert result.standard_error < summarise(first).standard_error / 10
    assert paired_difference(torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 1.0])).n == 0


def test_beyond_ten_thousand_images_the_interval_is_the_normal_one():
    values = noise(60_000)
    low, high = bootstrap_interval(values)
    resampled = values[torch.randint(60_000, (200, 60_000))].mean(dim=1)
    assert high - low == pytest.approx(2 * 1.96 * summarise(values).standard_error, rel=1e-3)
    assert high - low == pytest.approx(2 * 1.96 * float(resampled.std()), rel=0.2)


@pytest.mark.parametrize("levels", [None, 6])
def test_rank_correlation_equals_scipy(levels):
    first, second = noise(4, 5, 7), noise(4, 5, 7, seed=1) + noise(4, 5, 7)
    if levels is not None:
        first, second = (first * levels / 4).round(), (second * levels / 4).round()
    expected = [
        spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(first, second, strict=True)
    ]
    assert rank_correlation(first, second).tolist() == pytest.approx(expected, abs=1e-12)
    assert rank_correlation(torch.zeros(1, 4, 4), noise(1, 4, 4)).isnan().all()


def test_what_is_not_one_number_for_each_image_is_refused():
    with pytest.raises(BadOption, match="one number for each image"):
        summarise(noise(2, 3))
    with pytest.raises(BadOption, match="same images"):
        paired_difference(noise(2), noise(3))


def test_the_bootstrap_interval_is_as_wide_as_it_should_be(monkeypatch):
    values = noise(400)
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values) and low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * summarise(values).standard_error, rel=0.05)
    with_hole = torch.cat([values, torch.tensor([torch.nan], dtype=torch.float64)])
    assert bootstrap_interval(with_hole) == (low, high)
    monkeypatch.setattr(statistics, "_CACHED", 0)
    monkeypatch.setattr(statistics, "_DRAWN_AT_ONCE", 400 * 999)  # in parts, the last one smaller
    assert bootstrap_interval(values) == pytest.approx((low, high), abs=1e-12)
    assert np.isnan(bootstrap_interval(torch.tensor([torch.nan]))).all()


def test_the_interval_of_a_ratio_is_that_of_its_means():
    top = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = ratio_interval(top, torch.ones(50))
    assert plain == pytest.approx(bootstrap_interval(top))  # over 1, that of the mean
    assert ratio_interval(3 * top, top) == pytest.approx((3.0, 3.0))  # resampled together
    holes = [top.clone(), torch.ones(50, dtype=torch.float64)]
    holes[0][3], holes[1][7] = torch.nan, torch.nan
    rest = torch.tensor([place not in (3, 7) for place in range(50)])
    assert ratio_interval(*holes) == pytest.approx(bootstrap_interval(top[rest]))
    assert np.isnan(ratio_interval(holes[0][3:4], holes[1][3:4])).all()
