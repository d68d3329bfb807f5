"""Audits by transplants: verdicts that heed their interval, and clear refusals."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import seecause as sc
from seecause.background import Pictures
from seecause.background.audit import BackgroundAudit, verdict_of
from seecause.background.objects import EyeMasks
from seecause.background.versions import (
    JudgedAnswers,
    PairVersions,
    VersionedPictures,
    VersionLogits,
)
from seecause.data import Sample, to_pil
from seecause.errors import BadOption
from tests.background.repair_toys import fitted, scenes


def shares(values, count):
    return torch.tensor(values, dtype=torch.float64).repeat(count)


@pytest.mark.parametrize(
    ("extra", "options", "word"),
    [
        (shares([0.9, 1.0], 20), {}, "yes"),
        (shares([0.9, 1.0], 20), {"own": True}, "perhaps"),
        (shares([0.0, 0.02], 20), {}, "no"),
        (shares([0.0, 0.0, 0.0, 0.5], 9), {}, "cannot tell"),  # 0.125, from few
        (shares([0.9, 1.0], 20), {"control": 0.7}, "cannot tell"),
        (shares([0.9], 19), {}, "too few"),
    ],
)
def test_the_verdict_heeds_its_interval(extra, options, word):
    assert verdict_of(extra, **options) == word


def test_a_clean_model_is_rarely_called_biased():
    """A hundred draws of 34 right answers of which 3 % flip more than the control."""
    draw = torch.Generator().manual_seed(0)
    pool = torch.zeros(300, dtype=torch.float64)
    pool[:30] += 0.5
    pool[30:45] -= 0.4
    alarms = 0
    for _ in range(100):
        rows = torch.randint(300, (34,), generator=draw)
        alarms += verdict_of(pool[rows]) in ("yes", "perhaps")
    assert alarms <= 5


def answered(*classes):
    """Logits [n, 2] of these answers."""
    return torch.eye(2, dtype=torch.float64)[list(classes)]


def versions(source, labels, donors):
    parts = (torch.tensor(part) for part in (labels, donors, source))
    return PairVersions(torch.zeros(len(source), 3, 2, 2), *parts)


def test_numbers_are_those_of_the_answers_written_out():
    """Of three pictures the last is answered wrong and has no control."""
    labels = torch.tensor([0, 1, 1])
    pictures = Pictures(
        "c", tuple("abc"), torch.zeros(3, 3, 2, 2), labels, groups=((0, 0), (1, 0), (1, 1))
    )
    moved = versions([0, 0, 1, 2], [0, 0, 1, 1], [1, 1, 0, 0])
    control = versions([0, 1], [0, 1], [0, 1])
    logits = VersionLogits(answered(0, 1, 0), answered(0, 1, 0, 0), answered(0, 0))
    judged = JudgedAnswers(VersionedPictures(pictures, moved, control), logits)
    masks = EyeMasks(torch.ones(3, 2, 2, dtype=torch.bool), torch.ones(3), "x", "network")
    result = BackgroundAudit(judged, masks)
    assert judged.flips_of().tolist() == [0.5, 1, 0] and judged.pulled().tolist() == [0.5, 1, 1]
    assert judged.right_by_picture().tolist() == pytest.approx([2 / 3, 0, 0])
    assert result.counted.tolist() == [True, True, False]
    assert result.extra_flips.tolist() == [0.5, 0]  # less those of the control
    assert (result.flips, result.control_flips) == (0.75, 0.5)
    assert result.worst(3)[:2] == [(1, 2), (0, 1)]
    numbers = result.numbers()
    low, high = result.interval
    assert numbers == pytest.approx({
        "accuracy": 2 / 3, "flips": 0.5, "flips, control": 0.5, "transplants": 1 / 4,
        "transplant-worst": 2 / 6, "worst group": 0.0, "extra flips": 0.25, "low 95%": low,
        "high 95%": high, "right answers": 2,
    })  # fmt: skip
    alone = dataclasses.replace(
        judged,
        versioned=VersionedPictures(pictures, moved),
        logits=dataclasses.replace(logits, control=None),
    )
    assert BackgroundAudit(alone, masks).extra_flips.tolist() == [0.5, 1]  # drawn to the donor
    turned = dataclasses.replace(logits, control=answered(0, 1))
    mark = dataclasses.replace(judged, logits=dataclasses.replace(turned, plain=answered(0, 0, 0)))
    assert BackgroundAudit(mark, None).counted.tolist() == [True, True, False]  # in either version


@pytest.fixture(scope="module")
def models():
    return {"biased": fitted(scenes(64)), "fair": fitted(scenes(128, usual=0.5, seed=3))}


def test_a_shortcut_is_found_also_where_backgrounds_tell_nothing_of_the_class(models):
    for usual in (0.95, 0.5):
        found = sc.audit(models["biased"], scenes(80, usual=usual, seed=2))
        assert found.verdict == "yes" and found.flips > 0.5
    numbers = found.numbers()
    assert numbers["worst group"] < 0.5 and numbers["BIR"] > 0.1
    assert numbers["FIG"] == float(found.gains.fig.mean())
    assert numbers["BIG"] == float(found.gains.big.mean())
    picture, version = found.worst(3)[0]
    assert found.judged.right[picture]
    assert int(found.judged.versioned.moved.source_index[version]) == picture


def test_a_fair_model_is_not_accused(models):
    assert sc.audit(models["fair"], scenes(80, usual=0.95, seed=2)).verdict in ("no", "cannot tell")


def test_own_masks_say_perhaps_at_most(models):
    found = sc.audit(models["biased"], scenes(80, seed=2), eye="own")
    assert found.verdict != "yes"


def test_pairs_are_audited_without_an_eye(models):
    cases = scenes(48, usual=1.0, seed=4)
    swapped = cases.images.clone()
    swapped[:, :2] = cases.images[:, [1, 0]]  # green for red
    pairs = dataclasses.replace(cases, truth=None, swapped=sc.background.Swapped(swapped))
    result = sc.audit(models["biased"], pairs)
    assert result.verdict == "yes" and result.masks is None and result.gains is None
    # the other way round every answer is wrong as it is, and just these are turned by the mark
    turned = dataclasses.replace(pairs, images=swapped, swapped=sc.background.Swapped(cases.images))
    other = sc.audit(models["biased"], turned)
    assert other.verdict == "yes" and other.flips == result.flips > 0.5


def test_bad_input_is_one_clear_line(models):
    model, cases = models["biased"], scenes(20)
    with pytest.raises(BadOption, match="neither masks nor"):
        sc.audit(model, dataclasses.replace(cases, truth=None))
    with pytest.raises(BadOption, match="one class only"):
        sc.audit(model, cases.take(torch.arange(0, 20, 2)))
    with pytest.raises(BadOption, match="labels"):
        sc.audit(model, dataclasses.replace(cases, labels=None))
    with pytest.raises(BadOption, match="masks"):
        sc.audit(model, cases, eye=torch.zeros(20, 5, 5, dtype=torch.bool))
    empty = dataclasses.replace(cases, truth=torch.zeros_like(cases.truth))
    with pytest.raises(BadOption, match="0 of 20 with an object"):
        sc.audit(model, empty)


def test_data_may_be_named_and_results_print_one_line(tmp_path, models, caplog):
    for place, image in enumerate(scenes(24, seed=4).images):
        folder = tmp_path / ("light" if place % 2 else "dark")
        folder.mkdir(exist_ok=True)
        to_pil((image / 2 + 0.5).clamp(0, 1)).save(folder / f"{place}.png")
    result = sc.audit(models["biased"], f"folder:{tmp_path}", eye="own", per_picture=1)
    assert len(result.pictures) == 24
    assert "\n" not in repr(result) and repr(result).startswith(f"BackgroundAudit({result.verdict}")
    mended = sc.repair(
        models["biased"], f"folder:{tmp_path}", eye="own", per_picture=1, remedies=("directions",)
    )
    assert repr(mended) == f"Repair({mended.sentence})"
    findings = sc.discover(
        models["biased"], f"folder:{tmp_path}", kinds=2, trials=2, layers=[1], method="caap"
    )
    assert "\n" not in repr(findings) and "in 24 pictures of folder:" in repr(findings)
    (tmp_path / "dark" / "bad.png").write_text("no picture")
    (hole,) = sc.background.read_pictures(models["biased"], f"folder:{tmp_path}").holes
    assert hole.name == "dark/bad.png" and "left out" in caplog.text
    with pytest.raises(BadOption, match="folder:"):
        sc.audit(models["biased"], str(tmp_path))


class Nameless:
    """Data whose samples have no ids, as people write it first."""

    name, classes, fingerprint = "nameless", ("dark", "light"), "1"

    def __init__(self, pictures, model):
        raw = model.preprocess.raw(pictures.images)
        self.samples = [
            Sample(image.clamp(0, 1), int(label), mask=mask)
            for image, label, mask in zip(raw, pictures.labels, pictures.truth, strict=True)
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def test_pictures_without_ids_are_not_taken_for_one(models):
    model = models["biased"]
    data = Nameless(scenes(60), model)
    assert sc.audit(model, data, per_picture=1).transplant_worst == 0
    mended = sc.repair(model, data, per_picture=2, remedies=("last-layer",))
    assert mended.after.transplant_worst > mended.before.transplant_worst


def test_pictures_read_for_another_precision_are_taken_along(models):
    """Read once, and audited with a model of another type."""
    model, usual = models["biased"], scenes(40)
    module = copy.deepcopy(model.module).double()
    wide = sc.wrap(module, mean=(0.5,) * 3, std=(0.5,) * 3, classes=("dark", "light"))
    assert sc.audit(wide, usual, per_picture=1).verdict == sc.audit(model, usual).verdict
    assert sc.background.heads_audit(wide, usual, masks="oracle").logits.dtype == torch.float64


def test_the_worst_pictures_are_answered_right(models):
    """However many are asked for."""
    result = sc.audit(models["biased"], scenes(20, usual=0.5, seed=3), per_picture=1)
    places = [place for place, _ in result.worst(20)]
    assert 0 < len(places) < 20 and bool(result.counted[places].all())
