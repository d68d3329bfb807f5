"""What a page of parts promises."""

import pytest
import torch

from seecause.faithful.evaluation import PartExamples
from seecause.faithful.parts import IFAMOutput
from seecause.report.background import (
    css_colours,
    known_rows,
    note_of,
    part_sentences,
    parts_section,
    seen_pixels,
)
from tests.faithful.nets import SIZE, tiny_net


def test_a_promise_is_made_for_a_fixed_mask_only():
    assert "with this mask" in note_of(tiny_net())
    assert "sees the whole image when it chooses the mask" in note_of(tiny_net())


@pytest.mark.parametrize(
    ("options", "why"),
    [({"stages": 1}, "have seen the whole image"), ({"gradient": "soft"}, "read a little")],
)
def test_networks_that_see_everything_promise_nothing(options, why):
    note = note_of(tiny_net(**options))
    assert "promises nothing" in note and why in note


def answered(classes, owners) -> IFAMOutput:
    """Two images with these predictions; patches [2] belong to these parts, 3 is the background."""
    logits = 2 * torch.eye(4)[classes]
    maps = torch.eye(4)[torch.tensor(owners)].permute(0, 2, 1)[:, :, None]  # [2, 4, 1, 2]
    none = torch.empty(0)
    mask = maps[:, :-1].amax(dim=1) > 0
    return IFAMOutput(logits, maps, mask, none, none, none, none, none)


def made_examples() -> PartExamples:
    """Part 0 is in both images, part 1 in the first, part 2 in none. Without part 0 the second
    is called otherwise, without part 1 the first."""
    output = answered([1, 2], [[0, 1], [0, 3]])
    without = {
        0: answered([1, 3], [[3, 1], [3, 3]]),
        1: answered([0, 2], [[0, 3], [0, 3]]),
        2: answered([1, 2], [[0, 1], [0, 3]]),
    }
    net = tiny_net(classes=("ant", "bee", "cat", "dog"))
    return PartExamples(net, torch.zeros(2, 3, *SIZE), output, without, ["one", "two"])


def test_predictions_that_change_without_a_part_are_counted():
    assert part_sentences(made_examples()) == [
        "part 0: 1 of 2 predictions change without it",
        "part 1: 1 of 2 predictions change without it",
        "part 2: 0 of 2 predictions change without it",
    ]


def test_a_card_tells_the_prediction_with_and_without_each_part():
    body = parts_section(made_examples()).body
    first, second = body.split("<article")[1:]
    assert "prediction: bee; changes without part 1" in first
    assert "prediction: cat; changes without part 0" in second
    assert "<b>without part 1 ≠</b>" in first and "<b>without part 0 ≠</b>" not in first
    assert "selected: 100%" in first and "selected: 50%" in second
    best = torch.tensor([2.0, 0, 0, 0]).softmax(dim=0)[0].item()
    assert f"{best:.2f}" in second and "no patch is selected" not in body


def test_pixels_that_are_not_read_are_grey():
    seen = seen_pixels(torch.ones(3, 4, 8), torch.tensor([[True, False]]))
    assert (seen[..., :4] == 1).all() and (seen[..., 4:] == 0.5).all()
    assert css_colours(2) == ["#0072b2", "#e69f00"]


def test_numbers_that_only_one_column_has_are_dashes_in_the_other():
    rows = known_rows({"plain": {"average": 0.75, "keypoints": 7.1}, "changed": {"average": 0.5}})
    assert rows == [["average", "0.7500", "0.5000"], ["keypoints", "7.1000", "-"]]
