"""Every option of every metric reaches the arithmetic; what a metric does not have is refused."""

from dataclasses import replace

import pytest
import torch

from seecause.data.dataset import IGNORE
from seecause.errors import BadOption, UnknownName
from seecause.metrics import MetricInputs, measure, metrics
from seecause.options import keyword_options
from tests.helpers import noise
from tests.linear import GRID, PATCH, SIZE, contributions, linear_model, patch_sums

OTHERS = {  # values under which a number must change
    **{"steps": 3, "order": "patch", "fill": 0.5, "score": "logit", "seed": 1, "groups": 3},
    **{"share": 0.6, "subsets": 7, "cells": 2},
}
DRAWN = {"parameter-randomisation", "parts"}  # need a copy of a network, and pictures drawn again


@pytest.fixture(scope="module")
def inputs():
    model, images = linear_model(), noise(2, 3, *SIZE, seed=5)
    masks = (noise(2, *SIZE, seed=6) > 0.3).to(torch.uint8)
    masks[:, :3] = IGNORE
    maps = noise(2, *GRID, seed=7).round()  # with ties

    def explain(pictures, target):
        return contributions(model, pictures.abs(), torch.as_tensor(target))

    return MetricInputs(model, images, maps, torch.tensor([2, 3]), masks=masks, explain=explain)


def cases():
    return [
        pytest.param(name, option, id=f"{name}-{option}")
        for name, entry in metrics().items()
        if name not in DRAWN and entry.run.__module__.startswith("seecause.")
        for option in keyword_options(entry.run)
    ]


@pytest.mark.parametrize(("name", "option"), cases())
def test_every_option_reaches_the_arithmetic(inputs, name, option):
    known = keyword_options(metrics()[name].run)
    value = OTHERS[option]
    if option == "score" and known["score"] == "logit":
        value = "prob"
    first, second = measure(name, inputs), measure(name, inputs, **{option: value})
    assert any(not torch.equal(first[column], second[column]) for column in first)


@pytest.mark.parametrize("name", sorted(set(metrics()) - DRAWN))
def test_what_a_metric_does_not_have_is_refused_in_words(inputs, name):
    with pytest.raises(BadOption, match="option colour="):
        measure(name, inputs, colour="red")


BY_MEANING = {  # columns that a map and its opposite share, or that explain again
    **{"random-logit": "lower", "random-logit-abs": "lower", "mprt": "lower", "mprt-abs": "lower"},
    **{"part-correctness": "higher", "part-contrastivity": "higher"},
    "background-independence": "higher",
}


@pytest.mark.parametrize("name", sorted(metrics()))
def test_columns_are_better_the_way_they_say(inputs, name):
    """The exact map of a linear model beats its opposite."""
    entry = metrics()[name]
    if "maps" not in entry.takes:
        assert {column: entry.columns[column].better for column in entry.columns} == {
            column: BY_MEANING[column] for column in entry.columns
        }
        return
    exact = patch_sums(contributions(inputs.model, inputs.images, inputs.target))  # [B, gh, gw]
    masks = (exact > 0).repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
    good, bad = (measure(name, replace(inputs, maps=maps, masks=masks)) for maps in (exact, -exact))
    for column, known in entry.columns.items():
        gap = float((good[column] - bad[column]).mean())
        expected = BY_MEANING.get(column, "higher" if gap > 0 else "lower")
        assert known.better == expected and (gap == 0) == (column in BY_MEANING)


def test_needs_are_told_and_missing_ones_are_named(inputs):
    needs = {"localization": ("masks",), "saco": ("model",), "random-logit": ("model", "explain")}
    assert {name: metrics()[name].needs for name in needs} == needs
    with pytest.raises(BadOption, match="localization needs it"):
        measure("localization", MetricInputs(maps=noise(1, 2, 2)))
    with pytest.raises(UnknownName, match="idsds"):
        measure("idsd", MetricInputs())
