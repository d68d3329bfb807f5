"""Limits on an audit: which end of an interval decides, and what is never shown."""

from __future__ import annotations

import dataclasses

import pytest

import seecause as sc
from seecause.background._gate import Check
from seecause.errors import BadOption
from tests.background.repair_toys import fitted, scenes


def check(bound, limit, interval, doubt=""):
    return Check("flips", "meaning", bound, limit, sum(interval) / 2, interval, doubt)


@pytest.mark.parametrize(
    ("bound", "limit", "interval", "outcome", "end"),
    [
        ("at most", 0.1, (0.02, 0.10), "pass", "upper"),
        ("at most", 0.1, (0.02, 0.11), "not shown", "upper"),
        ("at most", 0.1, (0.11, 0.20), "missed", "upper"),
        ("at least", 0.9, (0.90, 0.95), "pass", "lower"),
        ("at least", 0.9, (0.89, 0.95), "not shown", "lower"),
        ("at least", 0.9, (0.70, 0.89), "missed", "lower"),
        ("at most", 0.1, (float("nan"), float("nan")), "not shown", "upper"),
    ],
)
def test_the_end_that_is_hard_to_meet_decides(bound, limit, interval, outcome, end):
    result = check(bound, limit, interval)
    assert (result.outcome, result.end) == (outcome, end)
    assert end in result.sentence or outcome == "missed"


@pytest.mark.parametrize("interval", [(0.0, 0.01), (0.5, 0.6)])
def test_what_cannot_be_told_is_never_shown(interval):
    result = check("at most", 0.1, interval, doubt="bad masks")
    assert result.outcome == "not shown" and "bad masks" in result.sentence


@pytest.fixture(scope="module")
def audits():
    biased, fair = fitted(scenes(64)), fitted(scenes(128, usual=0.5, seed=3))
    held = scenes(80, usual=0.9, seed=2)
    return {
        "biased": sc.audit(biased, held),
        "fair": sc.audit(fair, held),
        "own": sc.audit(biased, held, eye="own"),
    }


def test_a_shortcut_misses_its_limit_and_a_lenient_one_is_met(audits):
    strict = sc.background.gate(audits["biased"], max_flips=0.1, max_bir=0.05)
    assert not strict.passed and strict.sentence == "Fail: missed: flips, BIR."
    lenient = sc.background.gate(audits["biased"], max_flips=1.0, max_bir=1.0, min_accuracy=0.0)
    assert lenient.passed and lenient.sentence == "Pass: 3 of 3 limits are met."
    flips = strict.checks[0]
    assert flips.interval == audits["biased"].interval


def test_groups_are_held_to_their_lowest_ends(audits):
    audit = audits["fair"]
    (worst,) = sc.background.gate(audit, min_worst_group=0.01).checks
    assert worst.interval[0] <= worst.value <= 1 and worst.value == audit.groups.worst
    assert worst.interval[0] == float(audit.groups.intervals()[:, 0].min())


def test_no_spread_is_not_certainty(audits):
    """Thirty pictures without one flip do not show that fewer than a tenth would."""
    judged = audits["fair"].judged
    still = dataclasses.replace(
        judged.logits,
        moved=judged.logits.plain[judged.versioned.moved.source_index],
        control=judged.logits.plain[judged.versioned.control.source_index],
    )
    audit = dataclasses.replace(audits["fair"], judged=dataclasses.replace(judged, logits=still))
    count = len(audit.extra_flips)
    (flips,) = sc.background.gate(audit, max_flips=3 / count).checks
    assert audit.interval == (0.0, 0.0) and flips.interval == (0.0, 3 / count)
    assert flips.outcome == "pass"
    assert not sc.background.gate(audit, max_flips=2.9 / count).passed


def test_own_masks_and_few_answers_are_not_evidence(audits):
    (flips,) = sc.background.gate(audits["own"], max_flips=1.0).checks
    assert flips.outcome == "not shown" and "model's own" in flips.sentence
    few = sc.audit(fitted(scenes(64)), scenes(16, seed=5))
    (flips,) = sc.background.gate(few, max_flips=1.0).checks
    assert flips.outcome == "not shown" and "fewer than 20" in flips.sentence


def test_random_weights_pass_nothing(audits):
    protocol = audits["fair"].protocol | {"random_weights": True}
    audit = dataclasses.replace(audits["fair"], protocol=protocol)
    assert not sc.background.gate(audit, min_accuracy=0.0).passed


def test_limits_that_make_no_sense_are_refused(audits):
    with pytest.raises(BadOption, match="one at least"):
        sc.background.gate(audits["fair"])
    with pytest.raises(BadOption, match="between 0 and 1"):
        sc.background.gate(audits["fair"], max_flips=10)
    pairs = dataclasses.replace(audits["fair"], gains=None)
    with pytest.raises(BadOption, match="needs masks"):
        sc.background.gate(pairs, max_bir=0.2)
    plain = dataclasses.replace(audits["fair"].pictures, groups=())
    part = dataclasses.replace(audits["fair"].judged.versioned, pictures=plain)
    judged = dataclasses.replace(audits["fair"].judged, versioned=part)
    with pytest.raises(BadOption, match="no groups"):
        sc.background.gate(dataclasses.replace(audits["fair"], judged=judged), min_worst_group=0.5)
