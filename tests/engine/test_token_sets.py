"""Token sets: what follows from a selection is worked out once, and follows it when it changes."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from seecause.engine.token_sets import TokenSets, interpolate, selection, token_sets
from seecause.errors import BadOption
from seecause.models.layout import TokenLayout
from tests.helpers import view
from tests.tiny import tiny

LAYOUT = TokenLayout(grid=(2, 3), prefix=3, class_index=0, registers=(1, 2))
CHOSEN = torch.tensor([[1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]]).bool()


def sets(special: tuple[int, ...] = (0,)) -> TokenSets:
    return TokenSets(CHOSEN, LAYOUT, special, torch.device("cpu"))


def test_rows_are_packed_set_by_set_special_tokens_first():
    rows = sets((0, 2)).grouped_rows
    assert rows.tokens.tolist() == [0, 2, 3, 6, 0, 2, 8, 0, 2]
    assert rows.groups.sizes.tolist() == [4, 3, 2]
    assert rows.special_rows.tolist() == [0, 1, 4, 5, 7, 8]
    # the donor's tokens, and behind all nine of them the special rows
    assert sets((0, 2)).origin.tolist() == [9, 10, 3, 6, 11, 12, 8, 13, 14]
    assert sets((0, 2)).class_rows.tokens.tolist() == [0, 2] * 3


def test_every_row_sees_the_context_or_the_donor_and_no_special_token():
    chosen = sets((0, 2))
    context, donor = chosen.context_mask.keep[0, 0], chosen.donor_mask.keep[0, 0]
    assert not (context & donor).any() and torch.equal(
        context | donor, chosen.whole_mask.keep[0, 0]
    )
    assert donor[:2].nonzero()[:, 1].tolist() == [3, 6, 3, 6]
    assert chosen.whole_mask.keep[0, 0].sum(dim=1).tolist() == [7] * 6
    outside = chosen.outside_mask.keep[0, 0]
    assert outside.sum(dim=1).tolist() == [5] * 4 + [6] * 3 + [7] * 2
    assert torch.equal(outside[chosen.grouped_rows.special_rows],
                       chosen.special_outside_mask.keep[0, 0])  # fmt: skip


def test_rows_behind_the_special_ones_are_seen_where_there_are_any():
    chosen = sets()
    rows, groups = chosen.seen_rows(chosen.grouped_rows, 1)
    assert rows.tolist() == [1, 2, 4] and groups.sizes.tolist() == [2, 1, 0]
    every, _ = chosen.seen_rows(chosen.grouped_rows, 0)
    assert every.tolist() == list(range(6))
    assert chosen.seen_rows(chosen.class_rows, 1) is None
    both = sets((0, 2))  # two special tokens a set
    rows, groups = both.seen_rows(both.grouped_rows, 2)
    assert rows.tolist() == [2, 3, 6] and groups.sizes.tolist() == [2, 1, 0]
    assert both.seen_rows(both.class_rows, 2) is None


def test_sets_of_a_selection_are_known_until_it_changes():
    model, chosen = view(tiny("timm_deit3"), check=False), torch.zeros(2, 24, dtype=torch.bool)
    first = token_sets(model, chosen, model.layout, (0,))
    assert token_sets(model, chosen, model.layout, (0,)) is first
    assert token_sets(model, chosen, model.layout, ()) is not first
    assert token_sets(model, chosen.clone(), model.layout, (0,)) is not first
    chosen[0, 3] = True
    again = token_sets(model, chosen, model.layout, (0,))
    assert again is not first and again.sets[0].nonzero().tolist() == [[4]]
    others = [chosen.clone() for _ in range(7)]
    for other in others:
        token_sets(model, other, model.layout, (0,))
    assert token_sets(model, chosen, model.layout, (0,)) is again  # eight are kept
    assert len(model.memo["token sets"]) == 8


def test_a_selection_is_one_object_so_that_what_follows_is_known():
    for select in ("none", "box1", "manhattan1"):
        for stride in (1, 2):
            assert selection((3, 4), select, stride=stride) is selection(
                (3, 4), select, stride=stride
            )
    assert selection((3, 4)) is not selection((4, 3))


def test_neighbours_are_those_within_the_border():
    def chosen(select: str, patch: int, **options: int) -> list[int]:
        return selection((3, 4), select, **options)[patch].nonzero()[:, 0].tolist()

    assert chosen("none", 5) == [5]
    assert chosen("manhattan1", 5) == [1, 4, 5, 6, 9] and chosen("manhattan1", 3) == [2, 3, 7]
    assert chosen("box1", 5) == [0, 1, 2, 4, 5, 6, 8, 9, 10] and chosen("box1", 11) == [
        6,
        7,
        10,
        11,
    ]
    assert chosen("box2", 8) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    # every second patch, as far from one border as from the other: rows 0 and 2, columns 0 and 2
    assert [chosen("none", i, stride=2) for i in range(4)] == [[0], [2], [8], [10]]
    film = selection((2, 2, 2), "manhattan1")
    assert film[0].nonzero()[:, 0].tolist() == [0, 1, 2, 4]


def test_any_matrix_may_be_a_selection_and_nothing_else_is():
    mine = torch.zeros(12, 12)
    mine[8, 3], mine[2, 0] = 0.25, -1
    assert selection((3, 4), mine).nonzero().tolist() == [[2, 0], [8, 3]]
    assert selection((3, 4), mine, stride=2).nonzero().tolist() == [[1, 0], [2, 3]]
    for wrong, words in ((mine[:3], r"\[12, 12\] for a 3 x 4 grid"), ("box3", "box1, box2")):
        with pytest.raises(BadOption, match=words):
            selection((3, 4), wrong)
    for stride in (0, 4):
        with pytest.raises(BadOption, match="from 1 to 3"):
            selection((3, 4), stride=stride)
    third = selection((3, 4), "none", stride=3)  # row 1, columns 0 and 3
    assert third.nonzero().tolist() == [[0, 4], [1, 7]]


def test_between_computed_patches_values_are_linear_and_beyond_them_the_nearest():
    places = selection((3, 5), "none", stride=2).nonzero()[:, 1]  # rows 0, 2; columns 0, 2, 4
    assert places.tolist() == [0, 2, 4, 10, 12, 14]
    plane = (10 * torch.arange(3.0)[:, None] + torch.arange(5.0)).flatten()
    filled = interpolate(plane[places][None, :, None], (3, 5), 2)
    assert_close(filled[0, :, 0], plane)
    line = interpolate(torch.tensor([[1.0, 3.0]]), (1, 4), 2)  # columns 0 and 2
    assert line.tolist() == [[1, 2, 3, 3]]
