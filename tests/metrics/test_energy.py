"""Mass and peaks inside the mask, and how concentrated a map is, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from seecause.engine.chunks import budget
from seecause.errors import BadOption
from seecause.metrics._localization import complexity, energy
from tests.helpers import noise
from tests.reference import perturbation as reference

MAP = torch.tensor([[[4.0, -2, 1], [3, 0, -2]]])  # positive mass 8, absolute 12
MASK = torch.tensor([[[1, 1, 0], [0, 0, 1]]])


def test_six_pixels_by_hand():
    result = energy(MAP, MASK, k=2)
    assert result["energy-pointing"].item() == pytest.approx(4 / 8)
    assert result["relevance-mass"].item() == pytest.approx((4 + 2 + 2) / 12)
    assert result["relevance-rank"].item() == pytest.approx(1 / 3)  # the first three are 4, 3 and 1
    assert result["top-k"].item() == pytest.approx(1 / 2)  # the first two are 4 and 3
    both = torch.tensor([[[1, 0, 0], [1, 0, 0]], [[0, 0, 0], [1, 0, 0]]])  # 4 and 3; 3 alone
    first = energy(MAP.expand(2, -1, -1), both, k=1)
    assert first["top-k"].tolist() == [1, 0] and first["relevance-rank"].tolist() == [1, 0]


def test_ignored_pixels_count_nowhere():
    ids = MASK.clone()
    ids[0, 1, 0] = 255  # the pixel with 3
    result = energy(MAP, ids, k=2)
    assert result["energy-pointing"].item() == pytest.approx(4 / 5) and result[
        "relevance-mass"
    ].item() == pytest.approx(8 / 9)
    assert result["top-k"].item() == pytest.approx(1 / 2)  # 4 and 1
    counted = energy(MAP, ids, k=2, ignore=None)  # then it is object
    assert counted["energy-pointing"].item() == pytest.approx(7 / 8)


def test_a_perfect_map_scores_one_and_a_flat_one_the_share_of_the_object():
    masks = noise(3, 12, 20, seed=1) > 0.5
    perfect = energy(masks.double(), masks, k=10)
    flat = energy(torch.ones(3, 3, 5), masks, k=10)
    for name in perfect.columns:
        assert_close(perfect[name], torch.ones(3, dtype=torch.float64))
    for name in ("energy-pointing", "relevance-mass"):
        assert_close(flat[name], masks.double().mean(dim=(1, 2)))


def test_what_cannot_be_scored_is_a_hole():
    result = energy(
        torch.stack([MAP[0], -MAP[0].abs()]),
        torch.stack([torch.zeros(2, 3), torch.ones(2, 3)]),
        k=1,
    )
    assert result["relevance-mass"].isnan().tolist() == [True, False] and result[
        "energy-pointing"
    ].isnan().tolist() == [
        True,
        True,
    ]  # no object; no positive mass
    with pytest.raises(BadOption, match="1 to 6 pixels"):
        energy(MAP, MASK)
    with pytest.raises(BadOption, match="one for each map"):
        energy(MAP, MASK[0])


def test_small_memory_changes_nothing():
    maps, masks = noise(4, 3, 5), noise(4, 12, 20, seed=1) > 0.5
    with budget(1):
        alone = energy(maps, masks, k=10)
    assert torch.equal(alone["relevance-rank"], energy(maps, masks, k=10)["relevance-rank"])


def test_complexity_of_one_patch_and_of_all():
    one = torch.zeros(1, 4, 5)
    one[0, 2, 2] = -3  # sizes count, not signs
    assert complexity(one)["gini"].item() == pytest.approx(1 - 1 / 20) and complexity(one)[
        "entropy"
    ].item() == pytest.approx(0)
    flat = complexity(torch.full((1, 4, 5), 0.3))
    assert flat["gini"].item() == pytest.approx(0, abs=1e-12) and flat[
        "entropy"
    ].item() == pytest.approx(math.log(20))
    assert complexity(torch.zeros(1, 4, 5))["gini"].isnan().all()


def test_gini_equals_the_mean_difference_of_pairs():
    maps = noise(3, 4, 5)
    for i in range(3):
        assert complexity(maps)["gini"][i].item() == pytest.approx(
            reference.gini(maps[i].flatten().tolist()), abs=1e-12
        )
