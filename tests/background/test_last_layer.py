"""Last layers and directions against slow twins, and what they must not do."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from seecause.background.last_layer import (
    MOST,
    Directions,
    LastLayer,
    change_directions,
    class_weights,
    group_dro,
    new_layer,
    random_directions,
)
from seecause.errors import BadOption
from tests.background.repair_toys import numbers
from tests.reference import last_layer as twin


def uneven(classes: int = 3):
    """Features of classes that are not equally frequent."""
    labels = torch.tensor([0] * 20 + [1] * 8 + [2] * 5)[:33]
    centres = 1.5 * numbers(1, classes, 6)
    return numbers(0, 33, 6) * torch.linspace(0.3, 2, 6).double() + centres[labels] + 4, labels


@pytest.mark.parametrize("strength", [0.01, 1.0])
def test_a_logistic_layer_is_newtons(strength):
    x, labels = uneven()
    fast = new_layer(x, labels, classes=3, strength=strength)(x)
    slow = twin.ridge_logistic(x, labels, 3, strength)
    assert_close(fast - fast.mean(dim=1, keepdim=True), slow, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("strength", [0.01, 1.0])
def test_a_closed_form_is_least_squares(strength):
    x, labels = uneven()
    fast = new_layer(x, labels, classes=3, strength=strength, form="squares")(x)
    assert_close(fast, twin.ridge_squares(x, labels, 3, strength), atol=1e-10, rtol=1e-10)


def test_every_class_weighs_the_same():
    weights = class_weights(torch.tensor([0, 0, 0, 2]), 3)
    assert_close(weights.sum(), torch.tensor(4.0).double())
    assert_close(weights[:3].sum(), weights[3:].sum())


@pytest.mark.parametrize("form", ["logistic", "squares"])
def test_an_anchored_layer_keeps_the_rows_of_classes_without_pictures(form):
    x, labels = uneven()
    old = LastLayer(numbers(2, 5, 6), numbers(3, 5))
    new = new_layer(x, labels, classes=5, anchor=old, form=form)
    assert_close(new(x)[:, 3:], old(x)[:, 3:], atol=1e-10, rtol=1e-10)
    assert not torch.allclose(new(x)[:, :3], old(x)[:, :3])
    tight = new_layer(x, labels, classes=5, anchor=old, strength=1e-9, form=form)
    assert_close(tight.weight, old.weight, atol=1e-4, rtol=1e-4)  # the ridge holds it


def test_missing_classes_are_refused_without_an_anchor():
    x, labels = uneven()
    with pytest.raises(BadOption, match="3 of 5 classes"):
        new_layer(x, labels, classes=5)
    with pytest.raises(BadOption, match="one class only"):
        new_layer(x[:20], labels[:20], classes=3)


@pytest.mark.parametrize("rank", [1, 3])
def test_folding_into_the_layer_is_taking_out_of_features(rank):
    versions, pictures = numbers(0, 24, 6), torch.arange(8).repeat_interleave(3)
    layer, x = LastLayer(numbers(1, 4, 6), numbers(2, 4)), numbers(3, 7, 6)
    fast = change_directions(versions, pictures).fold(layer, rank)(x)
    slow = twin.without_directions(x, versions, pictures, rank, layer.weight, layer.bias)
    assert_close(fast, slow, atol=1e-10, rtol=1e-10)


def test_the_rank_is_read_off_the_spectrum_and_what_stays_is_untouched():
    moving = torch.linalg.qr(numbers(0, 10, 3)).Q.T  # three directions of ten
    still, pictures = numbers(1, 40, 10), torch.arange(40).repeat_interleave(4)
    versions = still.repeat_interleave(4, dim=0) + 5 * numbers(2, 160, 3) @ moving
    versions = versions + 1e-3 * numbers(3, 160, 10)
    directions = change_directions(versions, pictures)
    assert directions.rank == 3
    overlap = (directions.vectors[:3] @ moving.T).square().sum()
    assert overlap > 2.999
    layer = LastLayer(numbers(4, 2, 10), numbers(5, 2))
    blind = directions.fold(layer, 3)
    moved = blind(versions).unflatten(0, (40, 4))
    assert (moved - moved.mean(dim=1, keepdim=True)).abs().max() < 0.05
    assert_close(blind(versions).mean(dim=0), layer(versions).mean(dim=0))  # the mean stays


@pytest.mark.parametrize(("last", "rank"), [(1, 1), (MOST, MOST), (MOST + 1, 1)])
def test_the_largest_drop_of_the_first_directions_is_the_rank(last, rank):
    """Also the drop behind the last of them, but none that is later."""
    values = torch.linspace(2, 1.9, 12).double()
    values[1:] *= 0.9  # a small drop behind the first
    values[last:] /= 100
    assert Directions(torch.eye(12).double(), values, torch.zeros(12).double()).rank == rank


def test_random_directions_are_orthonormal_and_reproducible():
    lot = random_directions(3, 9, seed=4)
    assert_close(lot @ lot.T, torch.eye(3).double())
    assert torch.equal(lot, random_directions(3, 9, seed=4))
    assert not torch.allclose(lot, random_directions(3, 9, seed=5))


def test_group_dro_looks_after_the_small_group():
    """The second feature gives the label away but in the small group; the first always does."""
    draw, labels = numbers(0, 400, 2), torch.arange(400) % 2
    rare = torch.arange(400) < 20
    sign = 2.0 * labels - 1
    shortcut = torch.where(rare, -sign, sign)
    x = torch.stack([0.8 * sign + draw[:, 0], 3 * shortcut + 0.3 * draw[:, 1]], dim=1)
    groups = torch.stack([labels, rare.long()], dim=1)

    def worst(layer):
        right = layer(x).argmax(dim=1) == labels
        return min(right[rare].double().mean(), right[~rare].double().mean())

    plain = new_layer(x, labels, classes=2, strength=1.0)
    robust = group_dro(x, labels, groups, classes=2, strength=1.0)
    assert worst(plain) < 0.2 < 0.6 < worst(robust)
