"""The grid of heads tells each head's score, error and cost; tables and charts survive what is
missing."""

from __future__ import annotations

import csv
import re
from dataclasses import replace

import pytest
import torch

import seecause as sc
from seecause.background import HeadScores
from seecause.background._heads_audit import Audit
from seecause.background._outcomes import Outcome
from seecause.background.erase import Erasure, Masks
from seecause.background.gains import Gains
from seecause.background.images import Pictures
from seecause.metrics import group_accuracy
from seecause.report.folder import rows_csv
from seecause.report.heads import (
    change_section,
    score_grid,
    scores_csv,
    scores_section,
    shot_answers,
    spelled,
)
from seecause.report.heads_audit import (
    audit_csv,
    groups_section,
    verdict,
    verdict_section,
)
from tests.tiny import tiny

VALUE = torch.tensor([[0.02, -0.01, torch.nan], [0.0, -torch.inf, 0.004]], dtype=torch.float64)
SCORES = HeadScores(
    VALUE,
    torch.full((2, 3), 0.003, dtype=torch.float64),
    after={"accuracy": torch.full((2, 3), 0.75), "response": VALUE},
)


def test_the_grid_shows_errors_costs_and_what_must_stay():
    rows = score_grid(SCORES, chosen=[(0, 0)]).cells
    assert (
        rows[0][0].title == "layer 0, head 0: 0.02 ± 0.003; without it: accuracy 0.75"
        and rows[0][0].chosen
        and rows[0][0].sign == "for"
    )
    assert rows[0][0].strength == 90 and rows[0][1].strength == 45 and rows[0][1].sign == "against"
    assert "no such head" in rows[0][2].title and rows[0][2].text == ""
    assert rows[1][1].text == "stays" and "must stay" in rows[1][1].title


def test_numbers_in_the_grid_name_their_unit():
    grid = score_grid(SCORES)
    assert (
        grid.cells[0][0].text == "20"
        and grid.cells[0][1].text == "-10"
        and grid.key == "numbers are multiples of 0.001"
    )
    assert (
        "multiples of 0.001" in scores_section(SCORES, by="cigma").body
        and "hatched: not measured" in scores_section(SCORES, by="cigma").body
    )
    assert (
        score_grid(HeadScores(torch.tensor([[0.09999, -1e-9]]))).cells[0][1].text == "0"
    )  # not -0
    large = score_grid(HeadScores(torch.tensor([[3.0, 12.5]])))
    assert large.key == "" and large.cells[0][1].text == "12"


def test_a_grid_of_nothing_is_drawn():
    assert "head-grid" in scores_section(HeadScores(torch.zeros(2, 2)), by="cigma").body
    assert "head-grid" in scores_section(HeadScores(torch.full((2, 2), torch.nan)), by="cigma").body


def test_the_csv_has_the_best_first_and_what_must_stay_last():
    lines = scores_csv(SCORES).splitlines()
    assert lines[0] == "layer,head,score,standard error,accuracy without it"
    assert [line.split(",")[:2] for line in lines[1:]] == [
        ["0", "0"],
        ["1", "2"],
        ["1", "0"],
        ["0", "1"],
        ["1", "1"],
    ]


def test_rows_may_lack_columns():
    assert rows_csv([{"a": 1}, {"b": 2.5}]) == "a,b\n1,\n,2.5\n"


def test_the_note_says_what_the_selector_scores():
    assert "background" in scores_section(SCORES, by="cigma").note
    result = scores_section(SCORES, by="weight-norm")
    assert (
        result.title == "Which heads go first?"
        and "hang on the background" not in result.note
        and result.note.startswith("weight-norm: ")
    )
    assert "±" not in score_grid(HeadScores(VALUE, torch.full((2, 3), torch.nan))).cells[0][0].title


def test_groups_have_the_names_of_the_data():
    groups = ((0, 0), (0, 1), (1, 0), (1, 1))
    cases = Pictures(
        "c",
        tuple("abcd"),
        torch.zeros(4, 3, 2, 2),
        groups=groups,
        objects=("landbird", "waterbird"),
        places=("land", "water"),
    )
    result = Audit(
        cases,
        torch.zeros(4, 2),
        {},
        {},
        groups=group_accuracy(torch.tensor([True, False, True, True]), groups),
    )
    (section,) = groups_section(result)
    assert (
        all(name in section.body for name in ("landbird", "waterbird", "land", "water"))
        and "0 of 1" in section.body
    )
    assert "1 picture each: too few" in section.note and "worst group" not in section.note
    many = Audit(
        cases,
        torch.zeros(4, 2),
        {},
        {},
        groups=group_accuracy(torch.arange(24) % 3 > 0, groups * 6),
    )
    assert (
        "worst group 0.667" in groups_section(many)[0].note
        and "too few" not in groups_section(many)[0].note
    )


def seen(name: str, source: str, gains: Gains) -> Audit:
    """An audit by one look at some pictures."""
    count = len(gains.big)
    look = Erasure(Masks(torch.ones(count, 2, 2), protocol={"source": source}), "grey")
    return Audit(
        Pictures("c", tuple(map(str, range(count))), torch.zeros(count, 3, 2, 2)),
        torch.zeros(count, 2),
        {name: look},
        {name: gains},
    )


def test_an_audit_explains_the_masks_it_used_and_no_others():
    gains = Gains(torch.rand(8).double(), torch.rand(8).double(), 0.0)
    true, result = (
        verdict_section(seen(f"{name}, grey", source, gains))
        for name, source in (("true masks", "oracle"), ("discovered masks", "discovered"))
    )
    assert "true masks" in true.terms and "grey" in true.terms and "mean" not in true.terms
    assert (
        "discovered" not in f"{true.body}{true.note}{true.terms}".lower()
        and "discovered masks" in result.terms
    )


@pytest.mark.parametrize(
    ("big", "message"),
    [
        ([0.0] * 8, "below 0.001"),
        ([0.5] * 8, "no spread over 8 pictures"),
        ([0.5, 0.4], "too few for an interval (2)"),
        ([0.5, 0.1] * 4, " to "),
    ],
)
def test_an_interval_without_width_is_not_shown_as_one(big, message):
    gains = Gains(torch.full((len(big),), 0.5).double(), torch.tensor(big).double(), 0.0)
    body = verdict_section(seen("true masks, grey", "oracle", gains)).body.replace("\u00a0", " ")
    assert (
        message in body
        and not re.search(r"(0\.\d+) to \1\b", body)
        and not re.search(r"interval 0\.00[, ]", body)
    )


def test_what_was_measured_is_folded_where_the_page_is_to_be_brief():
    gains = Gains(torch.rand(8).double(), torch.rand(8).double(), 0.0)
    audit = seen("true masks, grey", "oracle", gains)
    for brief in (False, True):
        body = verdict_section(audit, brief=brief).body
        assert ("<summary>What was measured</summary>" in body) == brief and "<table" in body


def test_eight_pictures_that_lose_nothing_are_not_too_few():
    result = seen(
        "true masks, grey", "oracle", Gains(torch.zeros(8).double(), torch.zeros(8).double(), 0.0)
    )
    body = verdict_section(result).body
    assert (
        "95 % interval not defined, true masks" in body
        and "too few" not in body
        and "nan" not in body
    )


def test_every_column_of_an_audit_has_its_own_numbers():
    gains = Gains(torch.tensor([0.1, 0.2]).double(), torch.tensor([0.3, 0.6]).double(), 0.0)
    audit = seen("true masks, grey", "oracle", gains)
    audit = replace(
        audit,
        logits=torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
        flips=torch.tensor([True, False]),
        pictures=replace(audit.pictures, labels=torch.tensor([0, 1])),
    )
    rows = list(csv.DictReader(audit_csv(audit, ["cat", "dog"]).splitlines()))
    assert [(row["answer"], row["label"], row["flips"]) for row in rows] == [
        ("dog", "cat", "1"), ("cat", "dog", "0"),
    ]  # fmt: skip
    for name, values in (("FIG", gains.fig), ("BIG", gains.big), ("BIR", gains.bir)):
        assert [float(row[f"{name}, true masks, grey"]) for row in rows] == values.tolist()


def test_the_verdict_tells_the_worst_group():
    gains = Gains(torch.ones(12).double(), torch.ones(12).double(), 0.0)
    right = group_accuracy(torch.arange(12) % 3 > 0, ((0,), (1,)) * 6)
    lines = verdict(replace(seen("true masks, grey", "oracle", gains), groups=right))
    assert lines[-1] == "Accuracy 0.67 on average; 0.67 in the worst of 2 groups (6 pictures)."


def test_before_and_after_are_told_in_words():
    gains = {"exact swap": Gains(torch.ones(4), torch.ones(4), 0.0)}
    before, after = (Outcome([], accuracy, 0.0, 1.0, 0.1, 0.5, gains) for accuracy in (0.5, 0.75))
    cases = Pictures(
        "test", tuple("abcd"), torch.zeros(4, 3, 2, 2), groups=((0, 0), (0, 1), (1, 0), (1, 1))
    )
    section = change_section(before, after, cases)
    assert (
        "4 pictures of test" in section.note and "The smallest group has 1 picture:" in section.note
    )
    assert (
        "accuracy in the worst group ↑" in section.body
        and "+0.250" in section.body
        and "+0.000" not in section.body
    )
    assert re.search(r"accuracy ↑</t[hd]>\s*<td>0.500</td>\s*<td>0.750</td>", section.body)
    assert {"NLL", "ECE", "flips", "FIG", "BIG", "BIR", "exact swap"} == set(section.terms)
    assert (
        spelled("worst of groups (0, 1) and (1, 0)")
        == "accuracy in the worst of groups (0, 1) and (1, 0) ↑"
        and spelled("BIR, grey") == "BIR, grey ↓"
    )


def test_the_likeliest_answers_come_first_with_their_probabilities():
    """Of classes that answer independently, not shares of a whole."""
    native = tiny("timm_deit3")
    logits = torch.zeros(sc.wrap(native.module, **native.options).n_classes)
    logits[1], logits[2] = 2.0, 1.0
    for sigmoid, chances in ((False, logits.softmax(0)), (True, logits.sigmoid())):
        model = sc.wrap(native.module, **native.options, sigmoid=sigmoid)
        ((word, answers),) = shot_answers(model, [logits], model.class_name(2), ["now"])
        assert word == "now" and [a.explained for a in answers] == [False, True]
        assert [a.name for a in answers] == [model.class_name(1), model.class_name(2)]
        assert [a.probability for a in answers] == pytest.approx(chances[1:3].tolist())
