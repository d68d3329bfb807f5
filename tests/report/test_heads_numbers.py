"""Pages about heads show the numbers they were given, each in its place."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
import torch
from markupsafe import Markup

import seecause as sc
from seecause.background import HeadScores, Swapped
from seecause.background._heads_audit import Audit
from seecause.background._outcomes import Curve, Examples, Outcome
from seecause.background.erase import Erasure, Masks
from seecause.background.gains import Gains
from seecause.background.images import Pictures
from seecause.metrics import group_accuracy
from seecause.report import heads, heads_audit
from seecause.report.overlay import thumbnail
from tests.tiny import tiny


@pytest.fixture
def drawn(monkeypatch):
    """What charts, tables and templates are given."""
    given = []

    def keep(*things, **options):
        given.append((*things, options))
        return Markup("")

    for module, name in (
        (heads, "chart"), (heads, "forest"), (heads_audit, "table"), (heads_audit, "fragment"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, keep)
    return given


def outcome(accuracy: float, removed=()) -> Outcome:
    return Outcome(list(removed), accuracy, 0.25, 1.0, 0.1, torch.nan)


def test_curves_have_the_chosen_heads_and_the_band_of_lots(drawn):
    lots = [[outcome(0.5), outcome(0.5)], [outcome(0.2), outcome(0.6)]]
    line = Curve([0, 3], [outcome(0.5), outcome(0.75)], lots)
    section = heads.curves_section(line, by="taylor")
    (((random, chosen), options),) = drawn
    assert (random.name, random.x, random.y) == ("random", [0, 3], pytest.approx((0.5, 0.4)))
    assert random.error == pytest.approx((0.0, 0.2))
    assert (chosen.name, chosen.x, chosen.y) == ("taylor", [0, 3], [0.5, 0.75])
    assert options["title"] == "accuracy ↑" and options["share"]
    assert "nothing moves it: accuracy in the worst group ↑ stays at 0.25." in section.note


def test_the_heads_that_went_are_named_and_outlined():
    cases = Pictures("test", tuple("ab"), torch.zeros(2, 3, 2, 2))
    after = outcome(0.75, [(2, 1), (0, 3)])
    section = heads.change_section(outcome(0.5), after, cases, gaps=(0.3, 0.1))
    assert section.note.startswith("Heads removed (layer, head): (2, 1), (0, 3). 2 pictures")
    assert "-0.200" in section.body and "BG-gap" in section.terms
    assert "(layer, head): none." in heads.change_section(after, outcome(0.5), cases).note
    scores = HeadScores(torch.tensor([[0.5, 0.25]]))
    for chosen in ([], [(0, 1)]):
        body = heads.scores_section(scores, by="cigma", chosen=chosen).body
        assert ("outlined: removed" in body) == bool(chosen)


def test_every_column_of_scores_has_its_own_numbers():
    value = torch.tensor([[0.5, -0.25], [0.75, 0.0]])
    scores = HeadScores(value, value + 1, after={"accuracy": value + 2})
    rows = list(csv.DictReader(heads.scores_csv(scores).splitlines()))
    table = [[float(number) for number in row.values()] for row in rows]
    assert list(rows[0]) == ["layer", "head", "score", "standard error", "accuracy without it"]
    assert table == [
        [1, 0, 0.75, 1.75, 2.75], [0, 0, 0.5, 1.5, 2.5], [1, 1, 0.0, 1.0, 2.0],
        [0, 1, -0.25, 0.75, 1.75],
    ]  # fmt: skip


def test_arrows_point_to_where_numbers_are_better():
    for name, better in (
        ("accuracy", "↑"), ("mean of groups", "↑"), ("groups weighted as in training", "↑"),
        ("NLL", "↓"), ("ECE", "↓"), ("flips", "↓"), ("BIG, grey", "↓"), ("BG-gap", "↓"),
    ):  # fmt: skip
        assert heads.spelled(name).endswith(f" {better}"), name
    assert heads.spelled("FIG, grey") == "FIG, grey"


def test_an_effect_that_is_none_is_told_with_its_error_and_pictures():
    about = {"mediated": {}, "effect": 0.01, "effect error": 0.02, "images": [5, 3, 16, 16]}
    told = heads.no_effect(HeadScores(torch.zeros(1, 1), protocol=about))
    assert "other versions of 5 pictures move answers by 0.01 ± 0.02 nats" in told
    alone = {**about, "effect error": None, "images": [1, 3, 16, 16]}
    told = heads.no_effect(HeadScores(torch.zeros(1, 1), protocol=alone))
    assert "of 1 picture move answers by 0.01 nats" in told
    assert heads.no_effect(HeadScores(torch.zeros(1, 1), protocol={"mediated": {1: 0.5}})) == ""


def test_every_version_has_its_own_picture_and_answers_before_and_after():
    native = tiny("timm_deit3")
    model = sc.wrap(native.module, **native.options)
    images = torch.randn(2, 3, *native.size)
    names = ("picture", "no background", "no object")
    versions = {name: images * (1 - place / 4) for place, name in enumerate(names)}
    eye = torch.eye(model.n_classes) * 5
    logits = {name: eye[torch.tensor([[0, 1], [2, 3]]) + place] for place, name in enumerate(names)}
    masks = Masks.oracle(torch.ones(2, *native.size, dtype=torch.bool))
    cases = Pictures("c", ("a", "b"), images, torch.tensor([0, 3]))
    examples = Examples(cases, Erasure(masks, "blur"), versions, logits)
    shots = heads.version_shots(model, examples, 1, ["before", "after"])
    for place, shot in enumerate(shots):
        raw = model.preprocess.raw(versions[names[place]])
        assert shot.title == names[place] and shot.picture == thumbnail(raw[1])
        answers = {when: likeliest[0].name for when, likeliest in shot.answers}
        expected = (model.class_name(1 + place), model.class_name(3 + place))
        assert answers == dict(zip(("before", "after"), expected, strict=True))
    assert shots[0].answers[1][1][0].explained and not shots[0].answers[0][1][0].explained
    terms = heads.version_terms(versions, examples.erasure)
    assert terms == {"no background, no object": "cut out with true masks and filled (blur)"}


def audited() -> Audit:
    """Three pictures, the last answered wrong, by two erasures."""
    images = torch.zeros(3, 3, 2, 2)
    masks = torch.zeros(3, 2, 2, dtype=torch.bool)
    masks[0, 0, 0] = masks[1, 1, 1] = True
    searched = Masks(masks, protocol={"source": "discovered"})
    zero = torch.zeros(3).double()
    fig, big = torch.tensor([0.1, 0.3, 0.5]).double(), torch.tensor([0.3, 0.2, 0.6]).double()
    groups = ((0, 0), (0, 1), (1, 0))
    right = torch.tensor([True, True, False])
    cases = Pictures("c", tuple("abc"), images, torch.tensor([0, 1, 1]), groups=groups)
    return Audit(
        cases,
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]),
        {"discovered masks, grey": Erasure(searched, "grey"),
         "exact swap": Erasure(None, Swapped(images))},
        {"discovered masks, grey": Gains(zero, zero, 0.002), "exact swap": Gains(fig, big, 0.001)},
        overlap=torch.tensor([0.25, 0.5, 0.3]).double(),
        groups=group_accuracy(right, groups),
        counted=right,
        gap=(0.125, 7, 9),
    )  # fmt: skip


def test_what_was_measured_is_that_of_right_answers_and_the_believed_row_is_marked(drawn):
    section = heads_audit.verdict_section(audited())
    ((rows, options),) = drawn
    assert options["marked"] == [1]
    assert rows[0][:4] == ("discovered masks, grey", "0.000", "0.000", "-")
    assert rows[0][5:] == ("0.500", "2 of 2", "0.002")
    assert rows[1][:4] == ("exact swap", "0.200", "0.250", "0.556")
    assert rows[1][5:] == ("0.575", "0 of 2", "0.001")
    assert section.note.endswith("Means over the 2 of 3 pictures that are answered right.")


def test_the_verdict_tells_overlap_and_gap():
    lines = heads_audit.verdict(audited())
    assert any("hardly meet the object (IoU 0.35)" in line for line in lines)
    assert "BG-gap 0.125:" in lines[-1] and "(7 and 9 pictures)" in lines[-1]
    close = replace(audited(), overlap=torch.tensor([0.5, 0.75]), gap=None)
    assert not any("IoU" in line or "BG-gap" in line for line in heads_audit.verdict(close))


def test_groups_stand_by_object_down_and_background_across(drawn):
    heads_audit.groups_section(audited())
    ((_, options),) = drawn
    assert options["names"] == ["background 0", "background 1"] and options["corner"] == "object"
    cells = {name: [cell.text for cell in row] for name, row in options["rows"]}
    assert cells == {"0": ["1 of 1", "1 of 1"], "1": ["0 of 1", ""]}
    right, wrong = options["rows"][0][1][0], options["rows"][1][1][0]
    assert right.title == "accuracy 1.00, 95 % interval 0.03 to 1.00" and right.strength == 60
    assert wrong.title == "accuracy 0.00, 95 % interval 0.00 to 0.97" and wrong.strength == 0


def test_five_pictures_are_enough_to_tell_a_share():
    codes = ((0,),) * 5 + ((1,),) * 6
    groups = group_accuracy(torch.arange(11) != 0, codes)
    line = heads_audit.verdict(replace(audited(), groups=groups, gap=None))[-1]
    assert line == "Accuracy 0.91 on average; 0.80 in the worst of 2 groups (5 pictures)."
    gains = Gains(torch.ones(5).double(), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]).double(), 0.0)
    swap = {"exact swap": gains}
    told = heads_audit.verdict(replace(audited(), gains=swap, counted=None))
    assert any("95 % interval 0." in line and "exact swap, 5 answers" in line for line in told)


def test_each_picture_of_an_audit_has_its_own_overlap_and_group():
    rows = list(csv.DictReader(heads_audit.audit_csv(audited(), ["cat"]).splitlines()))
    assert [float(row["IoU"]) for row in rows] == pytest.approx([0.25, 0.5, 0.3])
    assert [row["group"] for row in rows] == ["0 0", "0 1", "1 0"]
    assert [row["answer"] for row in rows] == ["cat", "1", "cat"]


def test_the_worst_pictures_are_shown_with_their_own_evidence(drawn, monkeypatch):
    native = tiny("timm_deit3")
    model = sc.wrap(native.module, **native.options)
    audit = audited()
    order = audit.worst(3)
    assert order == [0, 2, 1]
    taken = audit.pictures.take(torch.tensor(order))
    taken = replace(taken, images=torch.rand(3, 3, 2, 2))
    logits = torch.zeros(1, 3, model.n_classes)
    examples = Examples(taken, None, {"picture": taken.images}, {"picture": logits})
    heads_audit.audit_gallery(model, replace(audit, examples=examples))
    ((_, options),) = drawn
    cards = options["cards"]
    assert [card.title for card in cards] == ["a", "c", "b"]
    captions = [card.caption for card in cards]
    assert captions == [f"BIR {share} (exact swap)" for share in ("0.75", "0.55", "0.40")]
    raw = model.preprocess.raw(taken.images)
    hard = audit.erasures["discovered masks, grey"].masks.hard
    for card, place, picture in zip(cards, order, raw, strict=True):
        faded = 0.75 + 0.2 * (picture.mean(dim=0, keepdim=True) - 0.5)
        shown = torch.where(hard[place], picture, faded)  # the evidence alone keeps its colours
        assert card.shots[1].title == "its evidence"
        assert card.shots[1].picture == thumbnail(shown)
