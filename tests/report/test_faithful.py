"""What a page of parts promises."""

from __future__ import annotations

import pytest
import torch

from seecause.faithful import Evaluation, Intervention
from seecause.faithful.evaluation import PartExamples
from seecause.faithful.parts import IFAMOutput
from seecause.report.faithful import (
    NOTE,
    css_colours,
    evaluation_table,
    note_of,
    part_cards,
    part_lines,
    seen_pixels,
)
from tests.faithful.nets import SIZE, tiny_net


def test_a_promise_is_made_for_a_fixed_mask_only():
    assert (
        note_of(tiny_net()) == NOTE
        and "with this mask" in NOTE
        and "sees the whole image when it chooses the mask" in NOTE
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [({"stages": 1}, "have seen the whole image"), ({"gradient": "soft"}, "read a little")],
)
def test_networks_that_see_everything_promise_nothing(options, why):
    assert "promises nothing" in note_of(tiny_net(**options)) and why in note_of(
        tiny_net(**options)
    )


def answered(classes, owners) -> IFAMOutput:
    """Two pictures that are answered so; patches [2] belong to these parts, 3 is the background."""
    logits = 2 * torch.eye(4)[classes]
    maps = torch.eye(4)[torch.tensor(owners)].permute(0, 2, 1)[:, :, None]  # [2, 4, 1, 2]
    none = torch.empty(0)
    mask = maps[:, :-1].amax(dim=1) > 0
    return IFAMOutput(logits, maps, mask, none, none, none, none, none)


def made_examples() -> PartExamples:
    """Part 0 is in both pictures, part 1 in the first, part 2 in none. Without part 0 the second
    is called otherwise, without part 1 the first."""
    output = answered([1, 2], [[0, 1], [0, 3]])
    without = {
        0: answered([1, 3], [[3, 1], [3, 3]]),
        1: answered([0, 2], [[0, 3], [0, 3]]),
        2: answered([1, 2], [[0, 1], [0, 3]]),
    }
    net = tiny_net(classes=("ant", "bee", "cat", "dog"))
    return PartExamples(net, torch.zeros(2, 3, *SIZE), output, without, ["one", "two"])


def test_lines_count_the_pictures_of_a_part_and_the_answers_it_changes():
    assert part_lines("zoo", made_examples()) == [
        "2 images of zoo, 3 parts",
        "part 0: in 2 images; predictions changed without it: 1",
        "part 1: in 1 images; predictions changed without it: 1",
        "part 2: in 0 images; predictions changed without it: 0",
    ]


def test_a_card_tells_the_answer_with_and_without_each_part():
    first, second = part_cards(made_examples())
    assert (first.title, first.caption) == ("one", "prediction: bee; changes without part 1")
    assert (second.title, second.caption) == ("two", "prediction: cat; changes without part 0")
    gone = ["without part 0", "without part 1", "part 2 is not in it"]
    assert [shot.title for shot in first.shots] == ["image", "parts", "stage 2 sees 100%", *gone]
    gone[1] = "part 1 is not in it"
    assert [shot.title for shot in second.shots[2:]] == ["stage 2 sees 50%", *gone]
    assert [shot.changed for shot in first.shots[3:]] == [False, True, False]
    assert [shot.changed for shot in second.shots[3:]] == [True, False, False]
    answers = [shot.answers[0][1] for shot in second.shots[2:4]]
    assert [two[0].name for two in answers] == ["cat", "dog"] and answers[0][0].explained
    best = torch.tensor([2.0, 0, 0, 0]).softmax(dim=0)[0].item()
    assert answers[0][0].probability == pytest.approx(best) and len(answers[0]) == 2
    assert not answers[0][1].explained and not second.warnings


def test_pixels_that_are_not_read_are_grey():
    seen = seen_pixels(torch.ones(3, 4, 8), torch.tensor([[True, False]]))
    assert (seen[..., :4] == 1).all() and (seen[..., 4:] == 0.5).all()
    assert css_colours(2) == ["#0072b2", "#e69f00"]


def test_a_table_shows_plain_and_changed_numbers_with_their_digits():
    plain = {"average": 0.75, "worst": 0.5, "keypoints": 7.123, "empty": 2.0}
    changed = {"average": 0.875, "worst": 0.25, "empty": 3.0}
    by = Intervention((0, 2), 0.9, "dot")
    titles, rows, notes = evaluation_table(Evaluation("zoo", 8, plain, changed, by))
    assert titles[1:] == ["plain", "without part 0, 2 and tokens beyond 0.9 by dot product"]
    numbers = {row[0]: row[1:] for row in rows}
    assert numbers["AA"] == ["0.7500", "0.8750"] and numbers["WGA"] == ["0.5000", "0.2500"]
    assert numbers["Kp"] == ["7.12", "-"] and numbers["empty"] == ["2", "3"]
    assert "AUC" not in numbers and len(notes) == 1 and "lower is better" in notes[0]
    titles, _, _ = evaluation_table(Evaluation("zoo", 8, plain, plain, Intervention()))
    assert titles[2] == "no change: best on validation"
