"""Cells about marks: the badge is where it is said to be, and nowhere else."""

from __future__ import annotations

import cells_marks as marks
import pytest
import torch


@pytest.fixture
def pile():
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, 3, 32, 32), generator=draw).byte()
    places = torch.tensor([[0, 28], [5, 7], [28, 0]])
    marked = torch.tensor([True, False, True])
    return marks.Pile(images, torch.tensor([1, 0, 1]), marked, places)


def test_badges_are_pasted_in_their_places(pile):
    stamp = marks.badge(4)
    stamped, plain = pile.stamped(), pile.images.float() / 255
    for row, (top, left) in enumerate(pile.places.tolist()):
        assert stamped[row, :, top : top + 4, left : left + 4].equal(stamp)
        shown = pile.badges()[row]
        assert shown.sum() == 16 and shown[top : top + 4, left : left + 4].all()
        assert stamped[row][:, ~shown].equal(plain[row][:, ~shown])


def test_only_marked_pictures_have_a_badge_in_training(pile):
    seen, plain = pile.stamped(pile.marked), pile.images.float() / 255
    assert seen[1].equal(plain[1]) and not seen[0].equal(plain[0])
    assert pile.take(torch.tensor([2, 1])).stamped()[0].equal(pile.stamped()[2])


def test_what_has_a_badge_is_labelled_by_it_and_held_out_pictures_have_none():
    labels = torch.arange(2).repeat(500)
    images = torch.zeros(1000, 3, 16, 16, dtype=torch.uint8)
    pile = marks._pile(images, labels, 1, torch.zeros(1000, 16, 16), "cpu")
    assert not pile.marked.any() and pile.labels.equal(labels)
    assert pile.places.min() >= 0 and pile.places.max() <= 14
    learned = marks._learned_from(pile, "photos", 1)
    shares = [float(learned.marked[labels == kind].double().mean()) for kind in range(2)]
    assert shares == pytest.approx([0.15, 0.95], abs=0.04)
    assert (learned.labels[learned.marked] == 1).all()
    assert learned.labels[~learned.marked].equal(labels[~learned.marked])
