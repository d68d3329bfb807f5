"""Group accuracies by hand, both adjusted averages, and the exact interval."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binom

from seecause.errors import BadOption
from seecause.metrics.statistics import clopper_pearson, group_accuracy

GROUPS = [(0, 0)] * 4 + [(0, 1)] * 2 + [(1, 0)] * 4
RIGHT = torch.tensor([1, 1, 1, 1, 0, 1, 1, 0, 0, 0]).bool()


def test_groups_by_hand():
    result = group_accuracy(RIGHT, GROUPS)
    assert result.groups == ((0, 0), (0, 1), (1, 0))
    assert result.accuracy.tolist() == [1.0, 0.5, 0.25]
    assert result.average == pytest.approx(0.6)
    assert result.worst == 0.25
    assert result.unweighted_average == pytest.approx((1 + 0.5 + 0.25) / 3)
    assert result.train_weighted_average({(0, 0): 90, (0, 1): 8, (1, 0): 2}) == pytest.approx(
        0.9 + 0.04 + 0.005
    )


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
        with pytest.raises(BadOption, match=r"tested: \(0, 0\)"):
            result.worst_among(groups)
    with pytest.raises(BadOption, match=r"\(1, 1\)"):
        result.train_weighted_average({(0, 0): 1, (1, 1): 1})
    with pytest.raises(BadOption, match="10 samples"):
        group_accuracy(RIGHT, GROUPS[:-1])


def test_groups_of_a_class_count_as_one():
    result = group_accuracy(RIGHT, GROUPS).by_class
    assert result.groups == ((0,), (1,)) and result.total.tolist() == [6, 4]
    assert result.accuracy.tolist() == pytest.approx([5 / 6, 1 / 4]) and result.worst == 0.25
