"""Into which words, from which image tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from seecause.errors import BadInput, BadOption
from seecause.lvlm import (
    attribute_heads,
    attribute_tokens,
    draw_masks,
    sufficiency,
    text_effects,
    text_slopes,
    weighted_attention,
)
from seecause.lvlm.attribute import TextEffects, _substantial
from seecause.lvlm.fit import regress
from seecause.lvlm.masks import MaskSampling
from tests.lvlm.scenes import scene


def test_effects_of_text_rows_follow_equation_11():
    engine = scene("internvl").engine
    heads = torch.ones(16, dtype=torch.bool)
    heads[::3] = False
    effects = text_effects(engine, heads)
    whole = float(engine.evaluate(heads[None]))
    without = torch.ones(1, engine.n_text)
    without[0, 2] = 0
    assert_close(float(effects.deltas[2]), 1 - float(engine.evaluate(heads[None], without)) / whole)
    assert effects.pieces == engine.prompt.pieces and effects.response == pytest.approx(whole)
    kept = effects.kept(0.01)
    assert torch.equal(kept, effects.deltas > 0.01)
    assert sufficiency(engine, heads, torch.ones(engine.n_text)) == pytest.approx(1)
    assert sufficiency(engine, heads, kept) == pytest.approx(
        float(engine.evaluate(heads[None], kept[None])) / whole
    )


def test_image_tokens_of_a_model():
    engine = scene("llava_grouped").engine
    text = torch.arange(engine.n_text) >= engine.n_text - 2
    result = attribute_tokens(engine, None, text, how="fit", masks=200, seed=1)
    assert result.coefficients.shape == (16,) and result.r2 > 0.5
    ((_, drawn),) = result.maps()
    assert torch.equal(drawn.flatten(), result.coefficients)
    assert result.protocol["text"] == text.int().tolist() and result.protocol["heads"] is None
    total = result.coefficients.sum() + result.intercept
    assert abs(float(total) - 1) < 0.3  # all tokens on is the whole effect
    with pytest.raises(BadOption):
        attribute_tokens(engine, None, torch.zeros(engine.n_text), masks=200)


def test_image_tokens_share_out_what_the_chosen_heads_and_rows_bring():
    """Equation 12: the response is divided by F(x*, u*), whatever that is."""
    engine = scene("llava").engine
    text, masks = torch.arange(engine.n_text) > 0, draw_masks(16, 16, p=0.5)
    responses = engine.evaluate(masks, text[None])
    chosen = int((responses - 0.5).abs().argmin())  # far from the whole effect, and from none
    heads, whole = masks[chosen], float(responses[chosen])
    assert whole > 0.05 and abs(whole - 1) > 0.05
    expected = regress(
        lambda image: engine.evaluate(heads[None], text[None], image) / whole,
        engine.n_image,
        MaskSampling(masks=100, seed=2),
    )
    tokens = attribute_tokens(engine, heads, text, how="fit", masks=100, seed=2)
    assert_close(tokens.coefficients, expected.coefficients, atol=1e-9, rtol=0)
    assert tokens.intercept == pytest.approx(expected.intercept, abs=1e-9)
    for name in ("r2", "pearson", "agreement"):
        assert getattr(tokens, name) == pytest.approx(getattr(expected, name), abs=1e-9), name
    assert_close(tokens.standard_error, expected.standard_error, atol=1e-9, rtol=0)
    quick = attribute_tokens(engine, heads, text, masks=6, p=0.4, seed=3)
    image = draw_masks(6, engine.n_image, p=0.4, seed=3)
    slopes = engine.slopes(heads[None], text[None], image, of="image")[1] / whole
    assert_close(quick.coefficients, slopes.mean(dim=0), atol=1e-10, rtol=0)
    answers = engine.evaluate(heads[None], text[None], image) / whole
    line = image.double().mean(dim=0) @ quick.coefficients
    assert quick.intercept == pytest.approx(float(answers.mean() - line))
    assert quick.protocol["heads"] == int(heads.sum()) and quick.tokens == engine.prompt.tokens


def test_text_rows_share_out_what_the_chosen_heads_bring():
    engine = scene("llava").engine
    heads = torch.ones(16, dtype=torch.bool)
    heads[[1, 6, 11]] = False
    whole = float(engine.evaluate(heads[None]))
    assert abs(whole - 1) > 0.01
    rows = text_slopes(engine, heads, masks=6, p=0.4, seed=2)
    masks = draw_masks(6, engine.n_text, p=0.4, seed=2)
    slopes = engine.slopes(heads[None], masks, of="text")[1] / whole
    assert rows.response == pytest.approx(whole) and rows.pieces == engine.prompt.pieces
    assert_close(rows.deltas, slopes.mean(dim=0), atol=1e-10, rtol=0)


def test_rows_are_kept_whose_blocking_costs_more_than_a_twentieth():
    deltas = torch.tensor([0.05, 0.051, -0.3, 0.4], dtype=torch.float64)
    effects = TextEffects(deltas, tuple("abcd"), 1.0)
    assert effects.kept().tolist() == [False, True, False, True]


def test_shares_of_less_than_a_twentieth_of_the_effect_are_noise():
    engine = SimpleNamespace(answer="jade", span=4.0)
    assert _substantial(engine, 0.05) == 0.05
    with pytest.raises(BadInput, match=r"by 0\.16 only; expected at least floor=0\.2"):
        _substantial(engine, 0.04)


def test_weighted_attention_follows_equation_13():
    engine = scene("qwen2_vl").engine
    effects = text_effects(engine)
    scores = attribute_heads(engine, masks=200)
    heads = scores.mask(3)
    text = torch.arange(engine.n_text) % 2 == 0
    got = weighted_attention(engine, scores.coefficients, heads, effects, text)
    seen = engine.activations()
    slow = torch.zeros(engine.n_image, dtype=torch.float64)
    for layer, head in scores.top(3):
        for row in range(engine.n_text):
            if text[row]:
                slow += (
                    scores.coefficients[layer, head]
                    * effects.deltas[row]
                    * seen.attention(layer, head)[row]
                )
    assert_close(got, slow, atol=1e-12, rtol=0)
    own = weighted_attention(engine, scores.coefficients, heads, effects)
    kept = weighted_attention(engine, scores.coefficients, heads, effects, effects.deltas > 0.05)
    assert torch.equal(own, kept) and not torch.equal(own, got)


def test_heads_that_carry_nothing_cannot_be_shared_out():
    engine = scene("llava").engine
    with pytest.raises(BadInput):
        text_effects(engine, torch.zeros(16, dtype=torch.bool))


def test_weighted_attention_wants_every_head():
    engine = scene("llava").engine
    effects = text_effects(engine)
    with pytest.raises(BadOption, match="one value a head"):
        weighted_attention(engine, torch.ones(4, 4), torch.ones(15), effects)
