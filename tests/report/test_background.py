"""Pages about the background show the numbers they were given, each in its place."""

from __future__ import annotations

import csv

import pytest
import torch

import seecause as sc
from seecause.background import HeadScores
from seecause.background.images import LabelledImages
from seecause.background.prune import Curve, Outcome
from seecause.report import background as pages
from tests.tiny import tiny


def outcome(accuracy: float, removed=()) -> Outcome:
    return Outcome(list(removed), accuracy, 0.25, 1.0, 0.1, torch.nan)


def test_curves_have_the_chosen_heads_and_the_band_of_random_ones():
    random = [[outcome(0.5), outcome(0.5)], [outcome(0.2), outcome(0.6)]]
    section = pages.curves_section(Curve([0, 3], [outcome(0.5), outcome(0.75)], random), by="cigma")
    assert section.body.count("<figure") == 1 and "accuracy ↑" in section.body
    assert "chosen by cigma" in section.body and "as many random heads" in section.body
    assert "nothing moves it: worst group stays at 0.25." in section.note


def test_removed_heads_are_named_and_small_groups_are_mentioned():
    cases = LabelledImages(torch.zeros(2, 3, 2, 2), name="test", groups=((0, 0), (0, 1)))
    after = outcome(0.75, [(2, 1), (0, 3)])
    section = pages.change_section(outcome(0.5), after, cases, gaps=(0.3, 0.1))
    assert section.note.startswith("Heads removed (layer, head): (2, 1), (0, 3). 2 images of test")
    assert "The smallest group has 1 image," in section.note
    assert "-0.200" in section.body and "BG-gap" in section.terms and "+0.000" not in section.body


def test_every_column_of_scores_has_its_own_numbers():
    value = torch.tensor([[0.5, -0.25], [0.75, -torch.inf]])
    scores = HeadScores(value, value + 1, after={"accuracy": value + 2, "response": value})
    rows = list(csv.DictReader(pages.scores_csv(scores).splitlines()))
    assert list(rows[0]) == ["layer", "head", "score", "standard error", "accuracy without it"]
    assert [[float(number) for number in row.values()] for row in rows[:3]] == [
        [1, 0, 0.75, 1.75, 2.75], [0, 0, 0.5, 1.5, 2.5], [0, 1, -0.25, 0.75, 1.75],
    ]  # fmt: skip
    assert rows[3]["score"] == "-inf"  # must stay: the last


def test_an_effect_that_is_none_is_told_with_its_error_and_images():
    about = {"mediated": {}, "effect": 0.01, "effect error": 0.02, "images": [5, 3, 16, 16]}
    told = pages.no_effect(HeadScores(torch.zeros(1, 1), protocol=about))
    assert "other versions of 5 images move predictions by 0.01 ± 0.02 nats" in told
    assert pages.no_effect(HeadScores(torch.zeros(1, 1), protocol={"mediated": {1: 0.5}})) == ""


def test_the_likeliest_classes_come_first_with_their_probabilities():
    """Of classes that answer independently, not shares of a whole."""
    native = tiny("timm_deit3")
    logits = torch.zeros(sc.wrap(native.module, **native.options).n_classes)
    logits[1], logits[2] = 2.0, 1.0
    for sigmoid, chances in ((False, logits.softmax(0)), (True, logits.sigmoid())):
        model = sc.wrap(native.module, **native.options, sigmoid=sigmoid)
        ((word, answers),) = pages.shot_answers(model, [logits], model.class_name(2), ["now"])
        assert word == "now" and [a.explained for a in answers] == [False, True]
        assert [a.name for a in answers] == [model.class_name(1), model.class_name(2)]
        assert [a.probability for a in answers] == pytest.approx(chances[1:3].tolist())
