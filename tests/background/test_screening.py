"""A screen guesses all scores and measures the likeliest exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from seecause.background import HeadScores, LabelledImages, penalised, score, screen
from seecause.background.scoring import guessed, saturated
from seecause.engine.chunks import budget
from seecause.errors import BadOption
from tests.background.toys import masked_case as case
from tests.reference import cigma as reference

HEADS, WIDTH = 3, 8


def test_the_guess_is_that_of_the_slow_twin():
    native, model, data = case(batch=3)
    images, masks = data.images, data.masks.hard
    guess = guessed(model, data, seed=5)
    turned = guessed(model, LabelledImages(images, masks=~masks), seed=5, response="fig")
    assert_close(turned.value, guess.value, atol=1e-12, rtol=0)
    chance = torch.Generator().manual_seed(5)
    signs = torch.randint(0, 2, (3, model.n_classes), generator=chance) * 2.0 - 1
    slow = [
        reference.second_order(native.forward, native.blocks, HEADS, WIDTH, *one)
        for one in zip(images, masks, signs.double(), strict=True)
    ]
    assert_close(guess.value, torch.stack(slow).mean(dim=0), atol=1e-10, rtol=0)
    with pytest.raises(BadOption, match="big or fig"):
        guessed(model, data, response="logit")


@pytest.mark.parametrize("operator", ["zero", "mean", "resample"])
def test_a_guess_takes_operators_and_chunks(operator):
    _, model, data = case(batch=4)
    whole = guessed(model, data, operator=operator, response="fig")
    with budget(1):
        parts = guessed(model, data, operator=operator, response="fig")
    assert_close(whole.value, parts.value, atol=1e-12, rtol=0)


def test_no_guess_of_a_divergence_leaves_its_range_and_small_ones_are_the_quadratic_form():
    at, slope, spread = torch.tensor([0.0, 1e-6, 0.3, math.log(2)], dtype=torch.float64), 0.2, 4.0
    for sign in (-1, 1):
        guess = saturated(at, torch.full_like(at, sign * slope), torch.full_like(at, spread))
        assert bool((guess >= 0).all()) and bool((guess <= math.log(2)).all())
    small = saturated(at[1:2], at[1:2] / 4, at[1:2] / 2)
    assert small.item() == pytest.approx(1e-6 * (1 - 1 / 4 + 0.6 / 16), rel=1e-4)


def test_a_screen_measures_the_likeliest_exactly():
    _, model, data = case()
    exact, result = score(model, data), screen(model, data, top=2, verify=4)
    guess = HeadScores(result.after["guess"])
    assert result.value.isfinite().sum() == 4
    for head in guess.order(positive=False)[:4]:
        assert result.value[head].item() == pytest.approx(exact.value[head].item(), abs=1e-12)
    assert screen(model, data, top=1).value.isfinite().sum() == 3  # three for each
    assert penalised(result).value.isfinite().sum() == 4


def test_a_screen_guesses_with_the_options_that_it_measures_with():
    _, model, data = case(batch=4)
    options = {"temperature": 2.0, "fill": "mean", "operator": "resample", "seed": 3}
    result = screen(model, data, **options)
    assert_close(result.after["guess"], guessed(model, data, **options).value)
    (head, *_) = HeadScores(result.after["guess"]).order(positive=False)
    assert_close(result.value[head], score(model, data, **options).value[head])


def test_impossible_screens_are_refused():
    _, model, data = case()
    for options, message in (
        ({"top": 13}, "1 to 12"),
        ({"top": 2, "verify": 1}, "at least as many"),
        ({"by": "luck"}, "option 'by' of screen"),
    ):
        with pytest.raises(BadOption, match=message):
            screen(model, data, **options)
