"""The screen, the regression and greedy removal."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import spearmanr
from torch.testing import assert_close

import seecause as sc
from seecause.background import (
    LabelledImages,
    first_order,
    greedy,
    penalised,
    score,
    screen,
    screening,
    second_order,
)
from seecause.background.screening import _half_twin, _judge, saturated
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


@torch.no_grad()
def test_the_guess_is_the_slope_of_scaled_weights():
    native, model, data = case()
    images, masks = data.images, data.masks.hard
    result = first_order(model, data)
    step = 1e-5
    for layer, head in [(0, 1), (2, 0), (3, 2)]:
        weight = reference.projection(native.blocks[layer]).weight[
            :, head * WIDTH : (head + 1) * WIDTH
        ]
        kept, values = weight.clone(), []
        for factor in (1 + step, 1 - step):
            weight.copy_(kept * factor)
            values.append(
                sum(
                    reference.gains(native.forward, x, m)[1]
                    for x, m in zip(images, masks, strict=True)
                )
                / 2
            )
        weight.copy_(kept)
        assert result.value[layer, head].item() == pytest.approx(
            (values[0] - values[1]) / (2 * step), abs=1e-8
        )


def test_the_guess_is_exact_where_the_response_is_linear():
    """A head of the last block of a mean-pooled model without final norm moves one logit linearly;
    its MLP does not, so it is taken out."""
    native = tiny("timm_mean")
    block, module = native.blocks[-1], native.module
    with torch.no_grad():
        block.mlp.fc2.weight.zero_()
    module.norm = torch.nn.Identity()
    module.fc_norm = torch.nn.Identity()
    model, images = view(native, check=False), pictures(native)
    guess, exact = (
        make(model, images, response="logit", target=3).value for make in (first_order, score)
    )
    assert_close(guess[-1], exact[-1], atol=1e-10, rtol=0)
    assert (guess[0] - exact[0]).abs().max() > 1e-4


def test_the_bent_guess_is_that_of_the_slow_twin():
    native, model, data = case(batch=3)
    images, masks = data.images, data.masks.hard
    guess = second_order(model, data, seed=5)
    turned = second_order(model, LabelledImages(images, masks=~masks), seed=5, response="fig")
    assert_close(turned.value, guess.value, atol=1e-12, rtol=0)
    assert guess.protocol["estimator"] == "second order" and guess.protocol["operator"] == "zero"
    chance = torch.Generator().manual_seed(5)
    signs = torch.randint(0, 2, (3, model.n_classes), generator=chance) * 2.0 - 1
    slow = [
        reference.second_order(native.forward, native.blocks, HEADS, WIDTH, *one)
        for one in zip(images, masks, signs.double(), strict=True)
    ]
    assert_close(guess.value, torch.stack(slow).mean(dim=0), atol=1e-10, rtol=0)
    assert (guess.value - first_order(model, data).value).abs().max() > 1e-4


def test_a_guess_knows_operators_and_chunks():
    _, model, data = case(batch=4)
    for operator in ("zero", "mean", "resample"):
        whole = first_order(model, data, operator=operator, response="fig")
        with budget(1):
            parts = first_order(model, data, operator=operator, response="fig")
        assert_close(whole.value, parts.value, atol=1e-12, rtol=0)


def test_heads_that_are_not_there_have_no_guess():
    _, model, data = case()
    smaller = sc.background.prune_heads(model, [(1, 0), (1, 2)])
    for guess in (first_order, second_order):
        result = guess(smaller, data)
        assert result.effects is not None
        assert result.effects.isnan().all(dim=0).nonzero().tolist() == [[1, 1], [1, 2]]
        assert result.value.isnan().nonzero().tolist() == [[1, 1], [1, 2]]


def test_no_guess_of_a_divergence_leaves_its_range_and_small_ones_are_the_quadratic_form():
    at, slope, spread = torch.tensor([0.0, 1e-6, 0.3, math.log(2)], dtype=torch.float64), 0.2, 4.0
    for sign in (-1, 1):
        guess = saturated(at, torch.full_like(at, sign * slope), torch.full_like(at, spread))
        assert bool((guess >= 0).all()) and bool((guess <= math.log(2)).all())
    small = saturated(at[1:2], at[1:2] / 4, at[1:2] / 2)
    assert small.item() == pytest.approx(1e-6 * (1 - 1 / 4 + 0.6 / 16), rel=1e-4)
    with pytest.raises(BadOption, match="big or fig"):
        second_order(*case()[1:], response="logit")


def test_a_screen_measures_the_likeliest_exactly():
    _, model, data = case()
    exact = score(model, data)
    result = screen(model, data, top=2, verify=4, audit=0.2)
    assert (
        len(result.verified) == 4
        and len(result.audited) == 3
        and not set(result.verified) & set(result.audited)
    )
    measured = [*result.verified, *result.audited]
    for head in ALL:
        assert (head in measured) == (not math.isnan(result.scores.value[head]))
    for head in measured:
        assert result.scores.value[head].item() == pytest.approx(
            exact.value[head].item(), abs=1e-12
        )
    best = result.guess.order(positive=False)[:4]
    assert result.verified == best and -1 <= result.agreement <= 1
    exactly, guessed = ([s.value[head] for head in measured] for s in (exact, result.guess))
    assert result.agreement == pytest.approx(spearmanr(exactly, guessed).statistic)
    assert len(screen(model, data, top=1, audit=0.01).verified) == 3  # for each, three
    others = {tuple(screen(model, data, audit=0.2, top=1, seed=s).audited) for s in (1, 2)}
    assert len(others) == 2
    assert "4 verified + 3 audited of 12 heads;" in repr(result)
    assert "fig_drop" in result.scores.after
    assert penalised(result.scores).value.isfinite().sum() == 7


def test_a_screen_that_measures_all_misses_none_and_a_blind_one_is_told_off():
    _, model, data = case()
    whole = screen(model, data, top=2, verify=12)
    assert whole.recall == 1 and whole.missed == 0 and whole.audited == []
    exact = score(model, data)
    worst = screen(model, data, top=1, verify=1, audit=1.0)
    beaten = sum(float(exact.value[head]) > float(exact.value[worst.verified[0]]) for head in ALL)
    assert worst.missed == pytest.approx(beaten / 11) and worst.recall == max(0, 1 - beaten)
    assert math.isnan(screen(model, data, top=2, verify=4, audit=0.0).recall)


def test_a_screen_guesses_with_the_options_that_it_measures_with(monkeypatch):
    _, model, data = case(batch=4)
    images = data.images
    options = {"temperature": 2.0, "fill": "mean", "operator": "resample", "seed": 3}
    result = screen(model, data, **options)
    guess = second_order(model, data, **options)
    assert_close(result.guess.value, guess.value)
    assert_close(result.guess.error, guess.effects.std(dim=0) / 4**0.5)
    exact = score(model, data, **options)
    assert_close(result.scores.value[result.verified[0]], exact.value[result.verified[0]])
    first = screen(model, images, response="logit", target=3)
    assert_close(first.guess.value, first_order(model, images, response="logit", target=3).value)
    twin = view(tiny("timm_registers", seed=1), check=False)  # as if in half precision
    monkeypatch.setattr(screening, "_half_twin", lambda model: twin)
    for half, measured in ((False, model), (True, twin)):
        result = screen(model, data, half=half)
        head = result.verified[0]
        assert_close(result.guess.value, second_order(twin, data).value)
        assert result.scores.value[head] == score(measured, data).value[head]
        assert result.scores.protocol["model_fingerprint"] == model.fingerprint()


def test_impossible_screens_are_refused():
    _, model, data = case()
    for options, message in (
        ({"top": 13}, "1 to 12"),
        ({"top": 2, "verify": 1}, "at least as many"),
        ({"audit": 1.5}, "between 0 and 1"),
        ({"by": "luck"}, "option 'by' of screen"),
    ):
        with pytest.raises(BadOption, match=message):
            screen(model, data, **options)


def test_greedy_scores_again_after_each_removal():
    native, model, data = case()
    images, masks = data.images, data.masks.hard
    result = greedy(model, data, top=2, guard=False)
    first = score(model, data, guard=False)
    assert result.heads[0] == first.order()[0] and result.gains[0] == float(
        first.value[result.heads[0]]
    )
    layer, head = result.heads[0]
    with torch.no_grad(), reference.without(native.blocks[layer], head, WIDTH):
        expected = reference.head_effects(
            2,
            native.blocks,
            HEADS,
            WIDTH,
            lambda i: reference.gains(native.forward, images[i], masks[i])[1],
        )
    assert_close(result.rounds[1].value, expected.mean(dim=0), atol=1e-10, rtol=0)
    assert model.gates is None
    assert greedy(model, data, guard=False).heads[:2] == result.heads
    with pytest.raises(BadOption, match="at least 1"):
        greedy(model, data, top=0)
    with sc.background.ablate(model, [head for head in ALL if first.value[head] > 0]):
        assert (
            len(
                greedy(
                    model,
                    data,
                    top=12,
                    rule=lambda s: penalised(s, alpha=1e6),
                ).heads
            )
            < 12
        )


def test_only_a_float32_model_on_a_gpu_is_guessed_in_half_precision():
    _, model, _ = case()
    assert _half_twin(model) is model


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_screen_in_half_precision_measures_what_float32_measures_and_follows_the_model():
    model = sc.load("builtin:critters-biased", device="cuda")
    data = list(sc.data.open_data("critters:certified:train", limit=32))
    images, _, masks = sc.data.to_batch(model, data)
    exact = score(model, LabelledImages(images, masks=masks == 1), guard=False)
    screened = screen(
        model, LabelledImages(images, masks=masks == 1), guard=False, half=True, audit=0.1
    )
    measured = screened.scores.value.isfinite()
    off = (screened.scores.value - exact.value)[measured].abs()
    assert float(off.max()) < 0.2 * float(exact.error[measured].max())
    assert screened.scores.protocol["model_fingerprint"] == model.fingerprint()
    twin = _half_twin(model)
    assert twin.dtype == torch.bfloat16 and _half_twin(model) is twin
    with sc.background.ablate(model, [(5, 3)]):
        assert _half_twin(model) is not twin and _half_twin(model).gates is model.gates
    with torch.no_grad():
        model.blocks[0].native.attn.proj.weight.mul_(2)
    changed = _half_twin(model).blocks[0].native.attn.proj.weight
    assert torch.equal(changed, model.blocks[0].native.attn.proj.weight.bfloat16())


def test_recall_counts_what_was_neither_verified_nor_audited():
    """Of two audited heads one beats the second of the top; so would five of the ten left. As good
    as the third is not better."""
    exact = torch.tensor([[4.0, 3.0, 2.0, 3.5, 2.0, *[math.nan] * 8]], dtype=torch.float64)
    guess = torch.arange(13, 0, -1, dtype=torch.float64)[None]
    verified, audited = [(0, 0), (0, 1), (0, 2)], [(0, 3), (0, 4)]
    scores, guesses = sc.background.HeadScores(exact), sc.background.HeadScores(guess)
    judged = _judge(scores, guesses, verified, audited, top=2, rest=10)
    assert judged.missed == 0.5 and judged.recall == 0.0
    assert _judge(scores, guesses, verified, audited, top=3, rest=3).recall == 0.5
