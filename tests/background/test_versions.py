"""Versions of pictures, their audits and limits on them, by answers that are written out."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import seecause as sc
from seecause.background import Pictures, Swapped, versions
from seecause.background.audit import (
    BackgroundAudit,
    _gains,
    audit_part,
    material_of,
    missed_limits,
    verdict_of,
)
from seecause.background.gains import Gains
from seecause.background.objects import EyeMasks
from seecause.background.versions import (
    JudgedAnswers,
    Material,
    PairVersions,
    VersionedPictures,
    VersionLogits,
    split_rows,
    worst_cell,
)
from seecause.errors import BadInput, BadOption
from seecause.metrics.accuracy import clopper_pearson
from tests.background.repair_toys import fitted, scenes

auditing = importlib.import_module("seecause.background.audit")
LABELS = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])


def material(fine=None):
    images = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    masks = torch.zeros(8, 4, 4, dtype=torch.bool)
    masks[:, 1:3, 1] = True
    ids = tuple(f"p{place}" for place in range(8))
    sure, overlap = torch.arange(8.0) / 8, torch.arange(8.0)
    eye = EyeMasks(masks, sure, "x", "network", fine, overlap)
    return Material(Pictures("p", ids, images, LABELS), eye)


def answer(monkeypatch, *classes):
    logits = torch.eye(8)[list(classes)]
    monkeypatch.setattr(versions, "logits_of", lambda *_: logits)


@pytest.mark.parametrize(
    ("answers", "kinds", "control"),
    [
        ([0, 0, 0, 0, 2, 2, 2, 2], [0, 0, 0, 0, 2, 2, 2, 2], True),
        ([0, 0, 0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, 0, 0, 2], True),  # 2 has no other
        ([5] * 8, LABELS.tolist(), True),  # one answer tells no donors apart: labels do
        (list(range(8)), list(range(8)), False),  # nobody shares an answer
    ],
)
def test_backgrounds_are_told_apart_by_answers_and_versions_by_labels(
    monkeypatch, answers, kinds, control
):
    data = material()
    answer(monkeypatch, *answers)
    part = data.test(None, 3, seed=5)
    given = (data.pictures.images, data.masks.masks, torch.tensor(kinds))
    for made, donors in ((part.moved, "other-class"), (part.control, "same-class")):
        if donors == "same-class" and not control:
            assert made is None
            continue
        expected = sc.transplant(*given, per_picture=3, donors=donors, seed=5)
        assert made.donor_index.equal(expected.donor_index) and made[:].equal(expected[:])
        assert made.labels.equal(LABELS[expected.source_index])
        assert made.donor_labels.equal(LABELS[expected.donor_index])


def test_a_lesson_has_any_background_and_cuts_by_the_finest_masks():
    fine = torch.zeros(8, 8, 8, dtype=torch.bool)
    fine[:, 2:5, 3:6] = True
    data = material(fine)
    made = data.lesson(3, seed=5).moved
    expected = sc.transplant(data.pictures.images, fine, LABELS, per_picture=3, seed=5)
    assert made.donor_index.equal(expected.donor_index) and made.shapes is fine
    assert made[:].equal(expected[:])


def test_some_of_the_material_is_these_pictures_and_their_own_masks():
    fine = torch.rand(8, 8, 8, generator=torch.Generator().manual_seed(1)) < 0.5
    data, rows = material(fine), torch.tensor([6, 1])
    data.masks.masks[6, 0] = True
    some = data.take(rows)
    assert some.pictures.ids == ("p6", "p1")
    for name in ("masks", "confidence", "fine", "overlap"):
        assert getattr(some.masks, name).equal(getattr(data.masks, name)[rows]), name


def test_pairs_are_learned_from_both_versions_and_judged_by_the_other():
    images = torch.arange(3.0)[:, None, None, None].expand(3, 3, 2, 2)
    pictures = Pictures("p", tuple("abc"), images, LABELS[:3], swapped=Swapped(images + 10))
    pairs = Material(pictures, None)

    def facts(made):
        return [made[:][:, 0, 0, 0].tolist(), *(getattr(made, name).tolist() for name in (
            "labels", "donor_labels", "source_index"))]  # fmt: skip

    lesson, test = pairs.lesson(8, seed=0), pairs.test(None, 8, seed=0)
    both = [[0, 1, 2, 10, 11, 12], [0, 1, 0] * 2, [0] * 3 + [1] * 3, [0, 1, 2] * 2]
    assert facts(lesson.moved) == both and lesson.control is None
    assert facts(test.moved) == [[10, 11, 12], [0, 1, 0], [1] * 3, [0, 1, 2]]
    assert facts(test.control) == [[0, 1, 2], [0, 1, 0], [0] * 3, [0, 1, 2]]


def test_what_runs_over_versions_comes_back_sorted_and_is_kept_for_one_model(monkeypatch):
    monkeypatch.setattr(versions, "AT_ONCE", 2)
    images = torch.arange(3.0)[:, None, None, None].expand(3, 3, 2, 2)
    pictures = Pictures("p", tuple("abc"), images, LABELS[:3])
    moved = PairVersions(torch.cat([images, images]) + 10, *[torch.arange(6)] * 3)
    control = PairVersions(images[:1] + 20, *[torch.arange(1)] * 3)
    sizes = []

    def features(model, images):
        sizes.append(len(images))
        return {"features": model.factor * images[:, 0, 0, :1]}

    monkeypatch.setattr(versions, "_features_piece", features)
    models = [SimpleNamespace(factor=n, fingerprint=lambda n=n: str(n)) for n in (1, 2)]
    part = VersionedPictures(pictures, moved, control)
    for model in (models[0], models[0], models[1]):
        rows = part.features(model)
        factor = model.factor
        assert rows.plain[:, 0].tolist() == [0, factor, 2 * factor]
        assert rows.moved[:, 0].tolist() == [factor * n for n in [10, 11, 12] * 2]
        assert rows.control[:, 0].tolist() == [20 * factor]
    assert sizes == [2, 1, 2, 2, 2, 1] * 2  # once for each model
    under = rows.under(lambda values: values + 1)
    assert under.moved.equal(rows.moved + 1) and under.control.equal(rows.control + 1)
    alone = VersionedPictures(pictures, moved).features(models[0])
    assert alone.control is None and len(alone.moved) == 6
    assert alone.under(lambda values: values).control is None


def test_small_cells_of_a_class_are_pooled_first_and_those_of_small_classes_together():
    labels = torch.tensor([0] * 14 + [1] * 2 + [2] * 2)
    donors = torch.tensor([0] * 10 + [1] * 2 + [2] * 2 + [0] * 4)
    right, each = torch.ones(18, dtype=torch.bool), torch.arange(18)
    right[10:13] = False  # of the four in small cells one is right
    assert worst_cell(right, labels, donors, each, fewest=4) == 0.25
    right[10:13] = True
    right[14:17] = False  # of the four in small classes one is right
    assert worst_cell(right, labels, donors, each, fewest=4) == 0.25


def test_parts_are_dealt_by_lot():
    labels = torch.tensor([0] * 30 + [1] * 30)
    parts = [split_rows(labels, (0.5, 0.5), seed=seed)[0] for seed in (0, 1)]
    assert not parts[0].equal(parts[1])
    assert all(0 < int((rows >= 15).sum()) < 30 for rows in parts)  # not the first of each class


@pytest.mark.parametrize(
    ("interval", "control", "word"),
    [
        ((0.11, 0.2), 0.0, "yes"),
        ((0.1, 0.2), 0.0, "cannot tell"),
        ((0.0, 0.1), 0.0, "cannot tell"),
        ((-0.1, 0.09), 0.5, "no"),
        ((0.11, 0.2), 0.5, "yes"),
        ((0.11, 0.2), 0.51, "cannot tell"),
        ((-0.1, 0.09), 0.51, "cannot tell"),
    ],
)
def test_a_verdict_hangs_on_both_ends_and_on_the_control(interval, control, word):
    extra = torch.zeros(20, dtype=torch.float64)
    assert verdict_of(extra, control=control, interval=interval) == word
    assert verdict_of(extra[1:], control=control, interval=interval) == "too few"


def audit_of(plain, moved, control, *, groups=(), kind="network", **facts):
    """Of pictures of class 0, each with one version of a kind, answered as written out; -1 where a
    picture has no control."""
    count = len(plain)
    labels, logits = torch.zeros(count, dtype=torch.long), torch.eye(2, dtype=torch.float64)
    images = torch.zeros(count, 3, 2, 2)
    pictures = Pictures("p", tuple(map(str, range(count))), images, labels, groups=groups)

    def version(places, donor):
        own = torch.zeros(len(places), dtype=torch.long)
        return PairVersions(images[places], own, own + donor, torch.tensor(places))

    rows = [place for place in range(count) if control[place] >= 0]
    part = VersionedPictures(pictures, version(list(range(count)), 1), version(rows, 0))
    answers = (logits[plain], logits[moved], logits[[control[row] for row in rows]])
    masks = EyeMasks(torch.ones(count, 2, 2, dtype=torch.bool), torch.ones(count), "x", kind)
    return BackgroundAudit(JudgedAnswers(part, VersionLogits(*answers)), masks, **facts)


def test_only_right_answers_with_both_kinds_of_versions_count():
    result = audit_of([0, 0, 0, 1], [1, 0, 1, 0], [0, 0, -1, 0])
    assert result.counted.tolist() == [True, True, True, False]  # the last is right elsewhere
    assert result.extra_flips.tolist() == [1, 0]
    assert result.flips == pytest.approx(2 / 3) and result.control_flips == 0
    assert result.worst(9) == [(0, 0), (2, 2), (1, 1)]
    assert replace(result, masks=None).counted.all()  # of pairs, right in either version
    judged = result.judged
    few = PairVersions(*(part[:2] for part in vars(judged.versioned.moved).values()))
    logits = replace(judged.logits, moved=judged.logits.moved[:2], control=None)
    alone = JudgedAnswers(VersionedPictures(result.pictures, few), logits)
    assert replace(result, judged=alone).extra_flips.tolist() == [1, 0]  # the third has no version


@pytest.fixture(scope="module")
def thirty_of_forty():
    """Thirty of forty images are right: all of one group, ten of the twenty of the other."""
    gains = Gains(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 0.0]), 0.0)
    groups = ((0, 0),) * 20 + ((0, 1),) * 20
    plain, moved = [0] * 30 + [1] * 10, [1] * 6 + [0] * 34
    return audit_of(plain, moved, [0] * 40, groups=groups, gains=gains)


@pytest.mark.parametrize("name", ["max_flips", "max_bir", "min_accuracy", "min_worst_group"])
def test_a_limit_is_met_if_the_end_of_the_interval_that_is_hard_to_meet_meets_it(
    thirty_of_forty, name
):
    whole = clopper_pearson(torch.tensor([30]), torch.tensor([40]))[0]
    worse = clopper_pearson(torch.tensor([10]), torch.tensor([20]))[0]
    ends = {
        "max_flips": thirty_of_forty.interval[1], "max_bir": thirty_of_forty.gains.interval[1],
        "min_accuracy": float(whole[0]), "min_worst_group": float(worse[0]),
    }  # fmt: skip
    if ends[name] != ends[name]:  # BIR of three images has no bounds
        assert len(missed_limits(thirty_of_forty, **{name: 1.0})) == 1
        return
    sign = 1 if name.startswith("max") else -1
    assert not missed_limits(thirty_of_forty, **{name: ends[name] + sign * 1e-6})
    assert len(missed_limits(thirty_of_forty, **{name: ends[name] - sign * 1e-6})) == 1
    random = replace(thirty_of_forty, protocol={"random_weights": True})
    assert "random weights" in missed_limits(random, **{name: 0.5})[0]


def test_an_audit_that_cannot_tell_meets_no_limit_on_the_background(thirty_of_forty):
    own = replace(thirty_of_forty, masks=replace(thirty_of_forty.masks, kind="own"))
    cut = audit_of([0] * 40, [1] * 40, [1] * 21 + [0] * 19)
    few = audit_of([0] * 19 + [1] * 21, [0] * 40, [0] * 40)
    for audit, reason in ((own, "own maps"), (cut, "cutting alone"), (few, "fewer than 20")):
        assert reason in missed_limits(audit, max_flips=1.0)[0]
        assert not missed_limits(audit, min_accuracy=0.1)


def test_forty_images_without_a_flip_do_not_show_that_fewer_than_a_twentieth_would():
    still = audit_of([0] * 40, [0] * 40, [0] * 40)
    assert still.interval == (0.0, 0.0)
    assert missed_limits(still, max_flips=0.05) and not missed_limits(still, max_flips=3 / 40)


def test_limits_need_what_they_are_about(thirty_of_forty):
    with pytest.raises(BadOption, match="object masks"):
        missed_limits(replace(thirty_of_forty, gains=None), max_bir=0.2)
    with pytest.raises(BadOption, match="data with groups"):
        missed_limits(audit_of([0], [0], [0]), min_worst_group=0.5)


def test_gains_are_of_right_answers_by_the_finest_masks_and_grey(monkeypatch):
    seen = []
    monkeypatch.setattr(
        auditing, "information_gains", lambda *given, **how: seen.append((given, how))
    )
    fine = torch.rand(8, 8, 8, generator=torch.Generator().manual_seed(2)) < 0.5
    data, right = material(fine), torch.arange(8) % 3 == 0
    part, model = data.lesson(1, seed=0), SimpleNamespace(sigmoid=False)
    _gains(model, part, data.masks, right)
    (_, images, region), how = seen.pop()
    assert how == {"baseline": "grey"} and images.equal(data.pictures.images[[0, 3, 6]])
    assert region.hard.equal(fine[[0, 3, 6]])
    for masks, answers, sigmoid in (
        (None, right, False), (data.masks, right & False, False), (data.masks, right, True)
    ):  # fmt: skip
        assert _gains(SimpleNamespace(sigmoid=sigmoid), part, masks, answers) is None
    assert not seen


def test_an_audit_draws_what_is_asked_for_and_needs_right_answers():
    model, cases = fitted(scenes(64)), scenes(24, usual=0.7, seed=1)
    result = sc.audit(model, cases, per_picture=2, seed=7)
    answers = model(cases.images).argmax(dim=1)
    options = {"per_picture": 2, "donors": "other-class", "seed": 7}
    expected = sc.transplant(cases.images, cases.truth, answers, **options)
    assert result.judged.versioned.moved.donor_index.equal(expected.donor_index)
    part, masks = result.judged.versioned, result.masks
    quick = audit_part(model, part, masks, judged=result.judged, with_gains=False)
    assert quick.gains is None and result.gains is not None
    assert result.protocol["options"] == {"versions": len(expected), "eye": "given masks"}
    with pytest.raises(BadInput, match="none of 24"):
        sc.audit(model, replace(cases, labels=1 - answers))


def test_known_masks_or_an_eye_count_before_pairs():
    cases, model = scenes(8), fitted(scenes(32))
    paired = replace(cases, swapped=Swapped(cases.images.flip(-1)))
    blind = replace(paired, truth=None)
    for data, eye, source in (
        (paired, None, "given masks"), (blind, cases.truth, "given masks"), (blind, None, None)
    ):  # fmt: skip
        masks = material_of(model, data, eye, sc.heads.pictures.no_progress).masks
        assert (masks and masks.source) == source
