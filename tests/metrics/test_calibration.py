"""Calibration by hand and against the loop of its definition; areas under the ROC curve by counting
pairs."""

from __future__ import annotations

import math

import pytest
import torch

from seecause.errors import BadOption
from seecause.metrics.statistics import auroc, calibration, nll
from tests.helpers import noise


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
    with pytest.raises(BadOption, match="no sample of class 2"):
        auroc(logits, labels.clamp(max=1))
