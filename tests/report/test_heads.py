"""The grid of heads tells each head's score, error and cost; tables and charts survive what is missing."""

from __future__ import annotations

import torch

from seecause.heads import HeadScores
from seecause.heads.audit import Audit
from seecause.heads.cases import Cases
from seecause.heads.studies import Found
from seecause.metrics import group_accuracy
from seecause.report.heads import ScoreGrid, groups_section, rows_csv, scores_csv, scores_section, study_section

VALUE = torch.tensor([[0.02, -0.01, torch.nan], [0.0, -torch.inf, 0.004]], dtype=torch.float64)
SCORES = HeadScores(VALUE, torch.full((2, 3), 0.003, dtype=torch.float64), after={"accuracy": torch.full((2, 3), 0.75), "response": VALUE})


def test_the_grid_shows_errors_costs_and_what_must_stay():
    rows = ScoreGrid("scores", SCORES, [(0, 0)]).rows()
    assert rows[0][0].said == "layer 0, head 0: 0.02 ± 0.003; without it: accuracy 0.75" and rows[0][0].chosen and rows[0][0].sign == "for"
    assert rows[0][0].strength == 90 and rows[0][1].strength == 45 and rows[0][1].sign == "against"
    assert "no such head" in rows[0][2].said and rows[0][2].text == ""
    assert rows[1][1].text == "stays" and "must stay" in rows[1][1].said


def test_numbers_in_the_grid_name_their_unit():
    grid = ScoreGrid("scores", SCORES)
    assert grid.rows()[0][0].text == ".20" and grid.unit == "numbers are in units of 1e-1"
    assert "units of 1e-1" in scores_section(SCORES, by="cigma").note
    large = ScoreGrid("scores", HeadScores(torch.tensor([[3.0, 12.5]])))
    assert large.unit == "" and large.rows()[0][1].text == "12.50"


def test_a_grid_of_nothing_is_drawn():
    assert "head-grid" in scores_section(HeadScores(torch.zeros(2, 2)), by="cigma").body
    assert "head-grid" in scores_section(HeadScores(torch.full((2, 2), torch.nan)), by="cigma").body


def test_the_csv_has_the_best_first_and_what_must_stay_last():
    lines = scores_csv(SCORES).splitlines()
    assert lines[0] == "layer,head,score,standard error,accuracy without it"
    assert [line.split(",")[:2] for line in lines[1:]] == [["0", "0"], ["1", "2"], ["1", "0"], ["0", "1"], ["1", "1"]]


def test_rows_may_lack_columns():
    assert rows_csv([{"a": 1}, {"b": 2.5}]) == "a,b\n1,\n,2.5\n"


def test_a_study_is_drawn_along_its_axis_or_row_by_row():
    rows = [{"K": k, "accuracy": 0.5 + k / 10, "accuracy, random": 0.4, "accuracy, random sd": 0.1} for k in (0, 2)]
    along = study_section(Found("k", "How many?", rows, "K")).body
    assert along.count("<polyline") == 2 and along.count("<polygon") == 1
    assert "random sd" not in along
    rows = [{"blocks": name, "accuracy": value} for name, value in (("none", 0.5), ("all", 0.75), ("some", 0.25))]
    dots = study_section(Found("layers", "Where?", rows)).body
    assert dots.count("<circle") == 2 and "all: +0.25" in dots and "difference to none" in dots


def test_the_note_says_what_the_selector_scores():
    assert "background" in scores_section(SCORES, by="cigma").note
    found = scores_section(SCORES, by="weight-norm", title="Which heads go first?")
    assert found.title == "Which heads go first?" and "hang on the background" not in found.note and found.note.startswith("weight-norm: ")
    assert "±" not in ScoreGrid("scores", HeadScores(VALUE, torch.full((2, 3), torch.nan))).rows()[0][0].said


def test_groups_have_the_names_of_the_data():
    groups = ((0, 0), (0, 1), (1, 0), (1, 1))
    cases = Cases("c", tuple("abcd"), torch.zeros(4, 3, 2, 2), groups=groups, objects=("landbird", "waterbird"), places=("land", "water"))
    found = Audit(cases, torch.zeros(4, 2), {}, {}, groups=group_accuracy(torch.tensor([True, False, True, True]), groups))
    (section,) = groups_section(found)
    assert all(name in section.body for name in ("landbird", "waterbird", "land", "water"))
