"""What choosing and removing heads does where little is asked of it, and how far it is."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from seecause.background import (
    AnswerSampling,
    Background,
    Pictures,
    Screening,
    answered_right,
    discover_masks,
    prune_and_test,
    score_heads,
    select,
)
from seecause.background._outcomes import Curve, Outcome
from seecause.background.prune import _checked_top
from seecause.errors import BadOption

ALL = AnswerSampling(share=1.0, cap=None)


@pytest.fixture(scope="module")
def right(model, cases) -> Pictures:
    """Six pictures, each answered right."""
    return replace(cases, labels=model(cases.images).argmax(dim=1), name="right")


def test_two_fifths_of_right_answers_are_taken_if_nothing_is_said(model, right):
    scored = score_heads(model, right, selector="taylor", seed=1)
    assert len(scored.pictures) == 2 and scored.record["pictures"] == 2
    assert scored.pictures.ids == answered_right(model, right, seed=1).ids


def test_what_a_search_costs_is_no_mistake_where_the_data_has_masks(model, right):
    around = {"selector": "attention-mass", "sampling": ALL}
    cost = Background(search={"steps": 3, "cache": None})
    scored = score_heads(model, right, background=cost, **around)
    assert torch.equal(scored.erasure.masks.hard, right.truth == 1)
    assert scored.record["masks"] == "oracle" and "mask options" not in scored.record


def test_any_selector_with_masks_may_search_them(model, right):
    search = {"steps": 1, "grid": 4, "rho": 0.2}
    background = Background("discovered", search=search)
    scored = score_heads(
        model, right, selector="attention-mass", sampling=ALL, background=background
    )
    masks = discover_masks(model, right.images, **search)
    expected = select("attention-mass", model, right.images, right.labels, masks=masks)
    assert_close(scored.scores.value, expected.value)
    assert scored.record["masks"] == "discovered"
    assert scored.record["mask options"] == {"grid": 4, "rho": 0.2}
    with pytest.raises(BadOption, match="attention-mass fills no background"):
        score_heads(model, right, selector="attention-mass", background=Background(fill="mean"))


def test_labels_are_needed_also_where_masks_are(model, right):
    with pytest.raises(BadOption, match="contrastive-gating needs them"):
        score_heads(model, replace(right, labels=None), selector="contrastive-gating")


def test_all_heads_may_go(model):
    for top in (12, 1.0):
        assert _checked_top(model, top, None) == 12
    assert _checked_top(model, 0.5, Screening(top=6, verify=12)) == 6
    with pytest.raises(BadOption, match="6 or more"):
        _checked_top(model, 0.5, Screening(top=5, verify=12))


def test_a_curve_ends_where_no_more_heads_were_measured(model, right):
    options = {"screen": Screening(top=2, verify=3, audit=0.0), "guard": "none"}
    result = prune_and_test(model, right, right, options=options, top=2, draws=1, sampling=ALL)
    assert int(result.scored.scores.value.isfinite().sum()) == 3
    assert result.curve.ks == [0, 1, 2] and len(result.heads) == 2


def test_a_removal_tells_how_far_it_is_and_what_moved(model, right):
    done = []

    @contextmanager
    def progress(what, total):
        yield lambda count: done.append((what, count))

    result = prune_and_test(
        model, right, right, selector="weight-norm", draws=1, sampling=ALL, progress=progress
    )
    assert len(result.heads) == 1  # a tenth of twelve
    assert sum(count for what, count in done if what == "measuring") == 6
    whole, rest = (Outcome([], right, torch.nan, 1.0, 0.1, torch.nan) for right in (0.5, 0.75))
    moved = replace(result, curve=Curve([0, 1], [whole, rest], [[], []]))
    assert repr(moved) == f"PruneResult(without {result.heads}, accuracy 0.500 -> 0.750)"
