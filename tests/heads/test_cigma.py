"""CIGMA as a selector: its options, its guards and its noise floor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.errors import BadOption
from seecause.heads import (
    Screening,
    above_noise,
    information_gains,
    penalised,
    protected,
    score,
    screen,
    select,
)


@pytest.mark.parametrize("guard", ["penalty", "protect", "none"])
def test_cigma_is_the_guarded_score_above_its_noise_floor(model, cases, guard, monkeypatch):
    real = information_gains
    scores = score(model, cases.images, cases.oracle, target=cases.labels)
    floor = float(scores.value.abs().flatten().median())
    monkeypatch.setattr(
        "seecause.heads.cigma.information_gains",
        lambda *arguments, **options: replace(real(*arguments, **options), noise_floor=floor),
    )
    rule = {"penalty": penalised, "protect": protected, "none": lambda scores: scores}[guard]
    expected = rule(above_noise(scores, floor))
    chosen = select("cigma", model, cases.images, cases.labels, masks=cases.oracle, guard=guard)
    assert_close(chosen.value, expected.value, equal_nan=True)
    assert (above_noise(scores, floor).value == 0).sum() >= 5
    assert chosen.protocol["noise_floor"] == floor and chosen.protocol["guard"] == guard
    assert not torch.equal(chosen.value, rule(scores).value)


def test_the_noise_floor_is_that_of_the_gains(model, cases):
    gains = information_gains(model, cases.images, cases.oracle, baseline="grey")
    chosen = select("cigma", model, cases.images, cases.labels, masks=cases.oracle)
    assert chosen.protocol["noise_floor"] == gains.noise_floor


def test_a_screen_is_an_option_of_cigma(model, cases):
    options = Screening(top=1, verify=3, audit=0.2)
    chosen = select(
        "cigma", model, cases.images, cases.labels, masks=cases.oracle, screen=options, guard="none"
    )
    alone = screen(
        model, cases.images, cases.oracle, top=1, verify=3, audit=0.2, target=cases.labels
    )
    assert_close(chosen.value, alone.scores.value, equal_nan=True)
    assert chosen.protocol["screen"]["verified"] == 3 and chosen.protocol["screen"]["audited"] == 3


def test_cigma_without_other_foregrounds_has_no_guard(model, cases):
    swap = sc.heads.Swapped(cases.swapped.background)
    with pytest.raises(BadOption, match="'none'"):
        select("cigma", model, cases.images, cases.labels, baseline=swap)
    chosen = select("cigma", model, cases.images, cases.labels, baseline=swap, guard="none")
    expected = score(model, cases.images, target=cases.labels, baseline=swap, guard=False)
    assert_close(chosen.value, expected.value)
