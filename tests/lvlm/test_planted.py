"""Planted truth: where only some heads may read the picture, head attribution finds those, and the
others do exactly nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import seecause as sc
from seecause.models.decoder import restrict
from tests.lvlm import toy
from tests.tiny import scramble
from tools.critters.llava_model import build_llava, make_processor, make_words

READERS = ((0, 1), (1, 3), (2, 0))
RECIPE = replace(toy.RECIPE, readers=READERS)


@pytest.fixture(scope="module")
def engine():
    words = make_words()
    module = restrict(scramble(build_llava(RECIPE, words)).double().eval())
    lvlm = sc.lvlm.wrap(module, make_processor(words, RECIPE.preprocess, patch=RECIPE.patch))
    first, *others = toy.pictures(9)
    bank = sc.lvlm.make_bank(lvlm, others)
    return sc.lvlm.MaskEngine(lvlm, first, toy.QUESTION, bank, floor=None)


def test_heads_that_may_not_read_do_exactly_nothing(engine):
    everything = torch.ones(1, 12)
    for head in range(12):
        mask = everything.clone()
        mask[0, head] = 0
        moved = (engine.evaluate(heads=mask) - engine.evaluate(heads=everything)).abs().item()
        assert moved > 1e-3 if divmod(head, 4) in READERS else moved < 1e-12


def test_head_attribution_finds_the_readers_and_no_other(engine):
    """Untrained readers may speak against the answer, so the size of a coefficient counts."""
    size = sc.lvlm.attribute_heads(engine, how="fit", masks=4096).coefficients.abs().flatten()
    order = size.argsort(descending=True)
    assert {divmod(int(head), 4) for head in order[: len(READERS)]} == set(READERS)
    assert size[order[len(READERS)]] < 0.25 * size[order[len(READERS) - 1]]


def test_the_derivative_of_any_other_head_is_exactly_zero(engine):
    """So few masks find the readers, where a fit of as many could not be made."""
    size = sc.lvlm.attribute_heads(engine, masks=8).coefficients.abs()
    others = torch.ones(3, 4, dtype=torch.bool)
    for place in READERS:
        others[place] = False
    assert size[others].max() < 1e-12 < 1e-3 < size[~others].min()
