"""A screen guesses all scores and measures the likeliest exactly."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import spearmanr
from torch.testing import assert_close

import seecause as sc
from seecause.background import HeadScores, LabelledImages, penalised, score, screen
from seecause.background.scoring import _screen_record, guessed, saturated
from seecause.engine.chunks import budget
from seecause.errors import BadOption
from tests.helpers import view
from tests.reference import cigma as reference
from tests.tiny import pictures, tiny

HEADS, WIDTH = 3, 8
ALL = [(layer, head) for layer in range(4) for head in range(HEADS)]


def case(family="timm_registers", batch=2):
    native = tiny(family)
    masks = torch.rand(batch, *native.size, generator=torch.Generator().manual_seed(3)) < 0.4
    data = LabelledImages(pictures(native, batch), masks=masks)
    return native, view(native, check=False), data


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


def test_heads_that_are_not_there_have_no_guess():
    _, model, data = case()
    smaller = sc.background.prune_heads(model, [(1, 0), (1, 2)])
    result = guessed(smaller, data)
    assert result.effects.isnan().all(dim=0).nonzero().tolist() == [[1, 1], [1, 2]]
    assert result.value.isnan().nonzero().tolist() == [[1, 1], [1, 2]]


def test_no_guess_of_a_divergence_leaves_its_range_and_small_ones_are_the_quadratic_form():
    at, slope, spread = torch.tensor([0.0, 1e-6, 0.3, math.log(2)], dtype=torch.float64), 0.2, 4.0
    for sign in (-1, 1):
        guess = saturated(at, torch.full_like(at, sign * slope), torch.full_like(at, spread))
        assert bool((guess >= 0).all()) and bool((guess <= math.log(2)).all())
    small = saturated(at[1:2], at[1:2] / 4, at[1:2] / 2)
    assert small.item() == pytest.approx(1e-6 * (1 - 1 / 4 + 0.6 / 16), rel=1e-4)


def test_a_screen_measures_the_likeliest_exactly():
    _, model, data = case()
    exact = score(model, data)
    result = screen(model, data, top=2, verify=4, audit=0.2)
    about, guess = result.protocol["screen"], result.after["guess"]
    assert len(about["verified"]) == 4 and len(about["audited"]) == 3
    measured = [*about["verified"], *about["audited"]]
    assert len(set(measured)) == 7
    for head in ALL:
        assert (head in measured) == (not math.isnan(result.value[head]))
    for head in measured:
        assert result.value[head].item() == pytest.approx(exact.value[head].item(), abs=1e-12)
    assert about["verified"] == HeadScores(guess).order(positive=False)[:4]
    exactly, guesses = ([values[head] for head in measured] for values in (exact.value, guess))
    assert about["agreement"] == pytest.approx(spearmanr(exactly, guesses).statistic)
    few = screen(model, data, top=1, audit=0.01).protocol["screen"]
    assert len(few["verified"]) == 3  # three for each
    seeds = [screen(model, data, audit=0.2, top=1, seed=s).protocol["screen"] for s in (1, 2)]
    assert seeds[0]["audited"] != seeds[1]["audited"]
    assert penalised(result).value.isfinite().sum() == 7


def test_a_screen_that_measures_all_misses_none_and_a_blind_one_says_so():
    _, model, data = case()
    assert screen(model, data, top=2, verify=12).protocol["screen"]["recall"] == 1
    exact = score(model, data)
    worst = screen(model, data, top=1, verify=1, audit=1.0).protocol["screen"]
    best = exact.value[worst["verified"][0]]
    beaten = sum(float(exact.value[head]) > float(best) for head in ALL)
    assert worst["recall"] == max(0, 1 - beaten)
    blind = screen(model, data, top=2, verify=4, audit=0.0)
    assert math.isnan(blind.protocol["screen"]["recall"])


def test_a_screen_guesses_with_the_options_that_it_measures_with():
    _, model, data = case(batch=4)
    options = {"temperature": 2.0, "fill": "mean", "operator": "resample", "seed": 3}
    result = screen(model, data, **options)
    assert_close(result.after["guess"], guessed(model, data, **options).value)
    head = result.protocol["screen"]["verified"][0]
    assert_close(result.value[head], score(model, data, **options).value[head])


def test_impossible_screens_are_refused():
    _, model, data = case()
    for options, message in (
        ({"top": 13}, "1 to 12"),
        ({"top": 2, "verify": 1}, "at least as many"),
        ({"audit": 1.5}, "from 0 to 1"),
        ({"by": "luck"}, "option 'by' of screen"),
    ):
        with pytest.raises(BadOption, match=message):
            screen(model, data, **options)


def test_recall_counts_what_was_neither_verified_nor_audited():
    """Of two audited heads one beats the second of the top; so would five of the ten left. As good
    as the third is not better."""
    exact = torch.tensor([[4.0, 3.0, 2.0, 3.5, 2.0, *[math.nan] * 8]], dtype=torch.float64)
    guess = torch.arange(13, 0, -1, dtype=torch.float64)[None]
    verified, audited = [(0, 0), (0, 1), (0, 2)], [(0, 3), (0, 4)]
    scores = HeadScores(exact, after={"guess": guess})
    assert _screen_record(scores, verified, audited, top=2, rest=10)["recall"] == 0.0
    assert _screen_record(scores, verified, audited, top=3, rest=3)["recall"] == 0.5
