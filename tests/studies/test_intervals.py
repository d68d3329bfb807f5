"""Intervals of ratios of means: paired where they are compared, and of whole groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cells_intervals import estimate, ratio_difference, resampled_ratio, resamplings


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def test_changes_are_paired_and_ratios_are_of_means():
    rng = np.random.default_rng(0)
    pairs = [(float64(rng.random(6)), float64(rng.random(6))) for _ in range(2)]
    found = ratio_difference(*(resampled_ratio(big, fig + big) for fig, big in pairs))

    def ratio(pair, weights):
        fig, big = ((weights * part).sum() for part in pair)
        return float(big / (fig + big))

    drawn = [ratio(pairs[0], w) - ratio(pairs[1], w) for w in resamplings(6)]
    ones = torch.ones(6, dtype=torch.float64)
    assert found.value == pytest.approx(ratio(pairs[0], ones) - ratio(pairs[1], ones))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])))


def test_breeds_are_drawn_whole():
    values = float64([1, 1, 1, 0, 0, 0])
    photos = estimate(resampled_ratio(values))
    breeds = estimate(resampled_ratio(values, groups=[0, 0, 0, 1, 1, 1]))
    assert photos.value == breeds.value == 0.5
    assert (breeds.low, breeds.high) == (0, 1) and photos.low > 0 and photos.high < 1
