"""Means with their errors, intervals that cover, rank correlation as scipy has it, calibration and
areas under the ROC curve by their definitions, and accuracies of groups by hand."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.stats import binom, spearmanr

from seecause.errors import BadOption
from seecause.metrics import statistics
from seecause.metrics.statistics import (
    auroc,
    bootstrap_interval,
    calibration,
    clopper_pearson,
    group_accuracy,
    nll,
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


def logits_of(confidences: list[float], right: list[bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes: the answer is class 0 with the given confidence (over one half)."""
    p = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack([p, 1 - p], dim=1).log(), (~torch.tensor(right)).long()


def slow_ece(logits: torch.Tensor, labels: torch.Tensor, bins: int) -> float:
    """The definition, photo by photo."""
    binned = [[] for _ in range(bins)]
    for row, label in zip(logits.softmax(dim=1).tolist(), labels.tolist(), strict=True):
        confidence = max(row)
        binned[min(int(confidence * bins), bins - 1)].append(
            (confidence, row.index(confidence) == label)
        )
    gaps = [abs(sum(c for c, _ in rows) - sum(r for _, r in rows)) for rows in binned]
    return sum(gaps) / len(labels)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_is_its_definition(bins):
    logits, labels = 3 * noise(300, 5), torch.arange(300) % 5
    assert calibration(logits, labels, bins=bins).error == pytest.approx(
        slow_ece(logits, labels, bins), abs=1e-12
    )
    assert calibration(logits, labels).error == pytest.approx(
        slow_ece(logits, labels, 15), abs=1e-12
    )


def test_full_confidence_is_in_the_last_bin():
    result = calibration(torch.tensor([[100.0, -1000.0]]), torch.tensor([0]))
    assert result.count.tolist() == [0] * 14 + [1] and result.error == 0


def test_nll_by_hand_and_far_from_the_truth():
    logits, labels = logits_of([0.8, 0.75], [True, False])
    assert nll(logits, labels).tolist() == pytest.approx([-math.log(0.8), -math.log(0.25)])
    assert nll(torch.tensor([[1000.0, 0.0]]), torch.tensor([1])).item() == 1000


def test_the_area_counts_pairs_and_ties_as_half():
    scores, labels = torch.tensor([0.1, 0.4, 0.4, 0.8, 0.3]), torch.tensor([0, 0, 1, 1, 1])
    logits = torch.stack([torch.zeros(5), scores.logit()], dim=1)
    pairs = [
        (p > n) + 0.5 * (p == n)
        for p in scores[labels == 1].tolist()
        for n in scores[labels == 0].tolist()
    ]
    assert auroc(logits, labels) == pytest.approx(sum(pairs) / len(pairs))
    assert auroc(logits.flip(1), labels) == pytest.approx(1 - auroc(logits, labels))


def test_the_area_of_many_classes_is_the_mean_of_one_against_the_rest():
    logits, labels = noise(60, 3), torch.arange(60) % 3
    p = logits.softmax(dim=1)
    each = [
        auroc(torch.stack([1 - p[:, c], p[:, c]], dim=1).log(), (labels == c).long())
        for c in range(3)
    ]
    assert auroc(logits, labels) == pytest.approx(sum(each) / 3)


GROUPS = [(0, 0)] * 4 + [(0, 1)] * 2 + [(1, 0)] * 4
RIGHT = torch.tensor([1, 1, 1, 1, 0, 1, 1, 0, 0, 0]).bool()


def test_groups_by_hand():
    result = group_accuracy(RIGHT, GROUPS)
    assert result.groups == ((0, 0), (0, 1), (1, 0))
    assert result.accuracy.tolist() == [1.0, 0.5, 0.25]
    assert result.average == pytest.approx(0.6)
    assert result.worst == 0.25
    assert result.unweighted_average == pytest.approx((1 + 0.5 + 0.25) / 3)


def test_the_interval_is_exact():
    """At each end the observed count, or a more extreme one, has probability 2.5 %."""
    low, high = clopper_pearson(torch.tensor([7]), torch.tensor([20]))[0].tolist()
    assert binom.sf(6, 20, low) == pytest.approx(0.025, abs=1e-9)
    assert binom.cdf(7, 20, high) == pytest.approx(0.025, abs=1e-9)


def test_the_interval_of_none_and_all():
    result = clopper_pearson(torch.tensor([0, 10]), torch.tensor([10, 10]))
    assert result[0, 0] == 0 and result[1, 1] == 1
    assert result[0, 1].item() == pytest.approx(1 - 0.025 ** (1 / 10))
    expected = clopper_pearson(torch.tensor([4, 1, 1]), torch.tensor([4, 2, 4]))
    assert torch.equal(group_accuracy(RIGHT, GROUPS).intervals(), expected)


def test_the_worst_of_some_groups_and_what_was_not_tested():
    result = group_accuracy(RIGHT, GROUPS)
    assert result.worst_among([(0, 0), (0, 1)]) == 0.5
    assert result.worst_among(result.groups) == result.worst
    for groups in ([(1, 1)], []):
        with pytest.raises(ValueError):
            result.worst_among(groups)
    with pytest.raises(IndexError):
        group_accuracy(RIGHT, GROUPS[:-1])


def test_groups_of_a_class_count_as_one():
    result = group_accuracy(RIGHT, GROUPS).by_class
    assert result.groups == ((0,), (1,)) and result.total.tolist() == [6, 4]
    assert result.accuracy.tolist() == pytest.approx([5 / 6, 1 / 4]) and result.worst == 0.25
