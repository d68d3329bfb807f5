"""Pages about the background show the numbers they were given, each in its place."""

from types import SimpleNamespace

import pytest
import torch

import seecause as sc
from seecause.background import HeadScores
from seecause.background.heads import Curve, Outcome
from seecause.background.repair import Candidate
from seecause.metrics.statistics import group_accuracy
from seecause.report import background as pages
from tests.tiny import tiny


def outcome(accuracy: float, removed=()) -> Outcome:
    return Outcome(list(removed), {"accuracy": accuracy, "worst group": 0.25})


def test_curves_have_the_chosen_heads_and_the_band_of_random_ones():
    random = [[outcome(0.5), outcome(0.5)], [outcome(0.2), outcome(0.6)]]
    section = pages.curves_section(Curve([0, 3], [outcome(0.5), outcome(0.75)], random), by="cigma")
    assert section.body.count("<figure") == 2 and "accuracy" in section.body
    assert "chosen by cigma" in section.body and "as many random heads" in section.body
    assert "worst group" in section.body and "NLL" not in section.body


def test_groups_have_names_where_they_are_known():
    groups = group_accuracy(torch.tensor([True, False]), [(0, 1), (2, 0)])
    audit, model = SimpleNamespace(groups=groups), SimpleNamespace(classes=("ant", "bee"))
    (section,) = pages.groups_section(model, audit, ("dunes", "lagoon"))
    assert "ant on lagoon" in section.body and "2 on dunes" in section.body


def test_every_column_of_scores_has_its_own_numbers():
    value = torch.tensor([[0.5, -0.25], [0.75, torch.nan]])
    scores = HeadScores(value, value + 1, after={"accuracy": value + 2, "response": value})
    rows = pages.scores_rows(scores)
    assert list(rows[0]) == ["layer", "head", "score", "standard error", "accuracy without it"]
    assert [list(row.values()) for row in rows[:3]] == [
        [1, 0, 0.75, 1.75, 2.75], [0, 0, 0.5, 1.5, 2.5], [0, 1, -0.25, 0.75, 1.75],
    ]  # fmt: skip


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


def test_remedies_are_listed_with_the_chosen_one_shaded():
    taken = {"transplant-worst": 0.8}
    tried = [
        Candidate("a", "fitted", validation=taken, test={"flips": 0.25}),
        Candidate("c", "", test={"loss": 0.03, "loss low": 0.02, "loss high": 0.04}),
        Candidate("b", "", failed="no masks"),
    ]
    result = SimpleNamespace(
        candidates={c.name: c for c in tried},
        remedy="a",
        chosen_by="transplant-worst",
        record={"max loss": 0.01},
    )
    section = pages.remedies_section(result)
    assert section.body.count('class="best"') == 1 and "no masks" in section.body
    assert "0.800" in section.body and "0.250" in section.body and "worst group" not in section.body
    assert '<strong class="over">+3.0% (+2.0% to +4.0%)</strong>' in section.body
    result.candidates["nothing"], result.remedy = Candidate("nothing", ""), "nothing"
    assert "None was taken" in pages.remedies_section(result).note


def test_examples_of_a_kind_are_nine_images_at_most_each_once():
    images = torch.arange(12.0).view(12, 1, 1, 1).expand(12, 3, 16, 16) / 12
    model = SimpleNamespace(
        patch=(4, 4), layout=SimpleNamespace(grid=(4, 4)),
        preprocess=SimpleNamespace(raw=lambda image: image),
    )  # fmt: skip
    result = SimpleNamespace(model=model, data=SimpleNamespace(images=images))
    tokens = [[place // 2, 5] for place in range(24)]
    sheet = pages.example_sheet(result, SimpleNamespace(tokens=torch.tensor(tokens)))
    assert sheet.shape == (3, 40, 40)  # three by three: a patch, its neighbours and a line
    torch.testing.assert_close(sheet[0, 7::13, 7::13].flatten(), torch.arange(9.0) / 12)
    one = pages.example_sheet(result, SimpleNamespace(tokens=torch.tensor([[3, 0]])))
    assert one.shape[0] == 3
