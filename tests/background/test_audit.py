"""Audits: verdicts that follow from their interval, numbers, limits, and clear refusals."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import seecause as sc
from seecause.background.audit import BackgroundAudit, missed_limits
from seecause.background.gains import information_gains
from seecause.data import to_pil
from seecause.errors import BadInput, BadOption
from tests.background.repair_toys import fitted, scenes


def shares(values, count):
    return torch.tensor(values, dtype=torch.float64).repeat(count)


def verdict_of(extra, control=0.0, masks="given"):
    data = SimpleNamespace(masks=SimpleNamespace(kind=masks))
    judged = SimpleNamespace(control_flips=control, versions=SimpleNamespace(data=data))
    audit = BackgroundAudit(judged)
    audit.__dict__["extra_flips"] = extra
    return audit.verdict


@pytest.mark.parametrize(
    ("extra", "options", "word"),
    [
        (shares([0.9, 1.0], 20), {}, "yes"),
        (shares([0.9, 1.0], 20), {"masks": "network"}, "yes"),
        (shares([0.9, 1.0], 20), {"masks": "own"}, "cannot tell"),
        (shares([0.0, 0.02], 20), {"masks": "own"}, "cannot tell"),  # nor do they clear a model
        (shares([0.0, 0.02], 20), {"masks": "discovered"}, "cannot tell"),
        (shares([0.0, 0.02], 20), {}, "no"),
        (shares([0.0, 0.0, 0.0, 0.5], 9), {}, "cannot tell"),  # 0.125, from few
        (shares([0.9, 1.0], 20), {"control": 0.7}, "cannot tell"),
        (shares([0.9], 19), {}, "too few"),
    ],
)
def test_the_verdict_follows_from_its_interval(extra, options, word):
    assert verdict_of(extra, **options) == word


def test_a_clean_model_is_rarely_called_biased():
    """A hundred draws of 34 correct predictions of which 3 % flip more than the control."""
    draw = torch.Generator().manual_seed(0)
    pool = torch.zeros(300, dtype=torch.float64)
    pool[:30] += 0.5
    pool[30:45] -= 0.4
    alarms = 0
    for _ in range(100):
        rows = torch.randint(300, (34,), generator=draw)
        alarms += verdict_of(pool[rows]) == "yes"
    assert alarms <= 5


@pytest.fixture(scope="module")
def models():
    return {"biased": fitted(scenes(64)), "fair": fitted(scenes(128, usual=0.5, seed=3))}


@pytest.fixture(scope="module")
def found(models):
    return sc.audit(models["biased"], scenes(80, usual=0.5, seed=2), fills=("grey", "mean"))


def test_a_shortcut_is_found_also_where_backgrounds_tell_nothing_of_the_class(models, found):
    usual = sc.audit(models["biased"], scenes(80, usual=0.95, seed=2))
    assert usual.verdict == found.verdict == "yes" and min(usual.flips, found.flips) > 0.5
    numbers = found.numbers()
    assert numbers["worst group"] < 0.5 and numbers["BIR"] > 0.1
    image, version = found.worst(3)[0]
    assert found.judged.correct[image]
    assert int(found.judged.versions.source[version]) == image
    places = [place for place, _ in found.worst(80)]  # however many are asked for
    assert 0 < len(places) < 80 and bool(found.judged.counted[places].all())
    assert sc.audit(models["fair"], scenes(80, usual=0.95, seed=2)).verdict in ("no", "cannot tell")


def test_gains_are_those_of_correct_predictions_by_every_fill(models, found):
    data = found.data.take(found.judged.correct)
    for fill in ("grey", "mean"):
        expected = information_gains(models["biased"], data, fill=fill)
        assert torch.equal(found.erasures[f"true masks, {fill}"].big, expected.big)
    assert found.gains is found.erasures["true masks, grey"]
    numbers = found.numbers()
    assert numbers["FIG"] == float(found.gains.fig.mean())
    mean = found.erasures["true masks, mean"]
    assert numbers["BIR, true masks, mean"] == mean.bir_ratio_of_means
    assert list(found.rows()) == [numbers]


def with_data(found, **changes):
    """The audit of other data with the same predictions."""
    versions = found.judged.versions
    versions = dataclasses.replace(versions, data=dataclasses.replace(versions.data, **changes))
    judged = dataclasses.replace(found.judged, versions=versions)
    return dataclasses.replace(found, judged=judged)


def test_pairs_need_no_masks(models):
    cases = scenes(48, usual=1.0, seed=4)
    swapped = cases.images.clone()
    swapped[:, :2] = cases.images[:, [1, 0]]  # green for red
    pairs = dataclasses.replace(cases, truth=None, other_background=swapped)
    result = sc.audit(models["biased"], pairs)
    assert result.verdict == "yes" and result.masks is None and result.gains is None
    # the other way round every prediction is wrong as it is, and just these are turned by the mark
    turned = dataclasses.replace(pairs, images=swapped, other_background=cases.images)
    other = sc.audit(models["biased"], turned)
    assert other.verdict == "yes" and other.flips == result.flips > 0.5


def test_limits_are_met_by_whole_intervals(found):
    assert missed_limits(found, min_accuracy=0.2, max_bir=1.0) == []
    reasons = missed_limits(found, max_flips=0.1, min_accuracy=1.0, min_worst_group=0.9)
    assert [reason.split()[0] for reason in reasons] == ["flips", "accuracy", "worst"]
    assert all("(95 %)" in reason for reason in reasons)
    own = with_data(found, masks=dataclasses.replace(found.masks, kind="own"))
    assert "masks of the model's own" in missed_limits(own, max_flips=1.0)[0]
    random = dataclasses.replace(found, protocol={"random_weights": True})
    assert "random weights" in missed_limits(random, min_accuracy=0.0)[0]
    never = found.extra_flips * 0
    still = BackgroundAudit(found.judged, found.erasures)
    still.__dict__["extra_flips"] = never  # an interval without spread is wider than it looks
    high = 3.0 / len(never)
    assert missed_limits(still, max_flips=high / 2) and not missed_limits(still, max_flips=2 * high)
    for options in ({"max_bir": 0.1}, {"min_worst_group": 0.5}):
        bare = dataclasses.replace(with_data(found, groups=()), erasures={})
        with pytest.raises(BadOption, match="no limit"):
            missed_limits(bare, **options)
    with pytest.raises(BadOption, match="from 0 to 1"):
        missed_limits(found, max_flips=1.5)


def test_bad_input_is_refused(models):
    model, cases = models["biased"], scenes(20)
    for data, options, message in (
        (dataclasses.replace(cases, truth=None), {}, "neither masks nor"),
        (cases.take(torch.arange(0, 20, 2)), {}, "one class only"),
        (dataclasses.replace(cases, labels=None), {}, "labels"),
        (cases, {"masks": torch.zeros(20, 5, 5, dtype=torch.bool)}, "masks"),
        (cases, {"masks": torch.zeros(20, 32, 32)}, "0 of 20 with an object"),
        (cases, {"per_image": 0}, "at least 1"),
        (cases, {"fills": ("white",)}, "fills"),
    ):
        with pytest.raises(BadOption, match=message):
            sc.audit(model, data, **options)
    wrong = dataclasses.replace(cases, labels=1 - model(cases.images).argmax(dim=1))
    with pytest.raises(BadInput, match="none of 20 images correctly"):
        sc.audit(model, wrong)


def test_data_may_be_a_name_and_results_print_one_line(tmp_path, models):
    for place, image in enumerate(scenes(24, seed=4).images):
        folder = tmp_path / ("light" if place % 2 else "dark")
        folder.mkdir(exist_ok=True)
        to_pil((image / 2 + 0.5).clamp(0, 1)).save(folder / f"{place}.png")
    (tmp_path / "dark" / "bad.png").write_text("no image")
    result = sc.audit(models["biased"], f"folder:{tmp_path}", masks="own", per_image=1)
    assert len(result.data) == 24 and result.data.skipped[0].name == "dark/bad.png"
    assert "\n" not in repr(result) and repr(result).startswith(f"BackgroundAudit({result.verdict}")
    with pytest.raises(BadOption, match="folder:"):
        sc.audit(models["biased"], str(tmp_path))
