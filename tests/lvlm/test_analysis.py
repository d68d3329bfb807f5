"""Numbers over many samples, on made-up coefficients whose truth is known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import silhouette_score
from torch.testing import assert_close

from seecause.errors import BadOption
from seecause.lvlm import embed, group_heads, grouping, importance_map
from seecause.lvlm.analysis import correlations, cosines, depth_of_use

# coefficients of eight heads in two samples, and their groups by average linkage
PLACES = [
    *([1.4, 0.2], [0.2, 0.2], [1.0, 0.4], [0.9, 1.2]),
    *([0.6, 0.5], [1.1, 0.8], [0.4, 0.3], [1.1, 1.3]),
]
TOGETHER = [0, 1, 0, 0, 1, 0, 1, 0]


def blobs(each: int = 8, kinds: int = 3, noise: float = 0.05):
    centres = torch.eye(kinds, 12)
    made = centres.repeat_interleave(each, dim=0) + noise * torch.randn(
        each * kinds, 12, generator=torch.Generator().manual_seed(0)
    )
    return made.double(), [f"kind {i}" for i in range(kinds) for _ in range(each)]


def test_groups_are_told_from_chance():
    vectors, labels = blobs()
    own, other = grouping(vectors, labels), grouping(vectors, [i % 4 for i in range(24)])
    assert own.purity == 1 and own.silhouette > 0.8
    assert own.chance == pytest.approx(7 / 23)
    assert abs(other.purity - other.chance) < 0.2 and other.silhouette < 0.1


def test_a_sample_is_not_its_own_neighbour():
    vectors = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
    assert grouping(vectors, ["a", "b", "a", "b"], neighbours=1).purity == 0


def test_neighbours_and_chance_of_uneven_groups():
    points = [0.0, 1.0, 2.1, 3.3, 4.6, 7.0]
    own = grouping(torch.tensor(points)[:, None], ["x", "x", "y", "y", "y", "y"], neighbours=2)
    nearest = [[1, 2], [0, 2], [1, 3], [2, 4], [3, 2], [4, 3]]
    labels = [0, 0, 1, 1, 1, 1]
    shares = [sum(labels[i] == labels[k] for i in two) / 2 for k, two in enumerate(nearest)]
    assert own.purity == pytest.approx(sum(shares) / 6)
    chance = (2 * 1 / 5 + 4 * 3 / 5) / 6  # of the five others
    assert own.chance == pytest.approx(chance)
    assert own.silhouette == pytest.approx(silhouette_score(np.array(points)[:, None], labels))
    for neighbours in (0, 6):
        with pytest.raises(BadOption, match=f"more than neighbours={neighbours}"):
            grouping(torch.tensor(points)[:, None], labels, neighbours=neighbours)
    assert grouping(torch.tensor(points)[:, None], labels).purity == pytest.approx(chance)  # all 5


@pytest.mark.parametrize("labels", [["a"] * 24, list(range(24)), ["a", "b"]])
def test_labels_that_make_no_groups_are_refused(labels):
    with pytest.raises(BadOption, match="labels"):
        grouping(blobs()[0], labels)


def test_the_map_of_samples_keeps_groups_together():
    vectors, labels = blobs()
    points = embed(vectors)
    assert points.shape == (24, 2) and torch.equal(points, embed(vectors))
    assert not torch.equal(points, embed(vectors, perplexity=3))
    assert grouping(points, labels).purity > 0.9
    with pytest.raises(BadOption, match="vectors"):
        embed(vectors[:3])


def test_few_samples_have_a_lower_perplexity(monkeypatch):
    asked = []

    def made(**options):
        asked.append(options)
        return SimpleNamespace(fit_transform=lambda points: points[:, :2])

    monkeypatch.setattr("sklearn.manifold.TSNE", made)
    vectors = torch.arange(400.0).reshape(100, 2, 2)
    assert_close(embed(vectors), vectors[:, 0].double())
    embed(vectors[:4], seed=7)
    usual = {"perplexity": 30, "init": "pca", "random_state": 0}
    assert asked == [usual, {**usual, "perplexity": 1, "random_state": 7}]


def test_heads_fall_into_always_used_and_sometimes_used():
    coefficients = torch.zeros(10, 2, 4)
    coefficients[:, 0, 1] = 0.5
    coefficients[:, 1, 2] = 0.6
    coefficients[::5, 0, 3] = 0.3
    coefficients[1, 1, 0] = 0.2
    coefficients[:, 1, 3] = 0.05  # never strong
    coefficients[3, 0, 3], coefficients[2, 1, 0] = 0.05, -0.05  # here they are not
    result = group_heads(coefficients)
    assert result.heads == ((0, 1), (0, 3), (1, 0), (1, 2))
    assert_close(result.vectors, coefficients.flatten(1).T[[1, 3, 4, 6]].double())
    assert result.groups.tolist() == [0, 1, 1, 0]
    assert_close(result.use(0), torch.ones(2, dtype=torch.float64))
    assert_close(result.use(1), torch.tensor([0.2, 0.1], dtype=torch.float64))
    assert sorted(result.order.tolist()) == [0, 1, 2, 3]
    with pytest.raises(BadOption, match="threshold"):
        group_heads(coefficients, threshold=0.9)
    assert group_heads(coefficients, threshold=0.04).heads[-1] == (1, 3)
    assert sorted(group_heads(coefficients, groups=3).groups.tolist()) == [0, 0, 1, 2]
    with pytest.raises(BadOption, match="more than 4 heads pass; 4 do"):
        group_heads(coefficients, groups=4)


def test_heads_are_clustered_by_the_mean_distance_of_their_members():
    """Nearest, or farthest, members would make other groups."""
    places = torch.tensor(PLACES).T.reshape(2, 2, 4)  # two samples of 2 x 4 heads
    result = group_heads(places)
    assert result.groups.tolist() == TOGETHER
    ordered = result.groups[result.order].tolist()
    assert ordered in (sorted(ordered), sorted(ordered, reverse=True))  # a group lies together


def test_simple_statistics():
    chosen = torch.tensor([[[1, 0], [0, 0], [1, 0]], [[1, 0], [0, 0], [0, 0]]]).bool()
    assert_close(
        importance_map(chosen), torch.tensor([[1, 0], [0, 0], [0.5, 0]], dtype=torch.float64)
    )
    assert depth_of_use(chosen) == pytest.approx(1 / 3)
    assert math.isnan(depth_of_use(chosen[:, :1])) and math.isnan(depth_of_use(chosen & False))
    assert depth_of_use(chosen[:, :2]) == 0 and depth_of_use(chosen[:, :2].flip(1)) == 1
    first = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))
    assert_close(correlations(first, 2 * first + 1), torch.ones(3, dtype=torch.float64))
    assert_close(cosines(first, -3 * first), -torch.ones(3, dtype=torch.float64))
    second = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(2))
    for own, other, r, cosine in zip(
        first, second, correlations(first, second), cosines(first, second), strict=True
    ):
        a, b = (x.flatten().double().numpy() for x in (own, other))
        assert float(r) == pytest.approx(np.corrcoef(a, b)[0, 1])
        assert float(cosine) == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
