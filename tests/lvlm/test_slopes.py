"""Soft masks and their derivatives against the native model with soft gates, and what they tell of
heads whose worth is known."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import r2_score
from torch.testing import assert_close

from seecause.errors import BadOption, NotDefined
from seecause.lvlm import (
    HeadAttribution,
    MaskEngine,
    attribute_heads,
    attribute_tokens,
    draw_masks,
    text_effects,
    text_slopes,
)
from seecause.lvlm.fit import corrected, correlation, estimate, mean_derivative
from seecause.lvlm.masks import MaskSampling
from tests.families.lvlm import FAMILIES
from tests.helpers import noise
from tests.lvlm.scenes import GRID, QUESTION, TOKEN, scene, some
from tests.reference import hear, ridge

KINDS = ("heads", "text", "image")


def soft(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def soft_masks(engine: MaskEngine) -> dict[str, torch.Tensor]:
    """Two masks of each kind, with entries at both ends and between."""
    sizes = {"heads": 16, "text": engine.n_text, "image": engine.n_image}
    masks = {}
    for seed, (kind, size) in enumerate(sizes.items()):
        between = soft(2, size, seed=seed)
        masks[kind] = torch.where(between < 0.2, 0.0, torch.where(between > 0.8, 1.0, between))
    return masks


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_derivatives_equal_the_slow_twin(family):
    here = scene(family)
    engine, masks = here.engine, soft_masks(here.engine)
    inputs = dict(engine.prompt.inputs)
    prompts = [dict(here.lvlm.prompt(p, QUESTION).inputs) for p in here.pictures]
    means = hear.average_picture(here.lvlm.module, prompts)
    slow = [masks[kind][1].clone().requires_grad_() for kind in KINDS]
    logits = hear.softly_blinded(
        here.lvlm.module, inputs, means, slow[0].view(GRID), slow[1], slow[2]
    )
    answer = logits[TOKEN] - logits.mean()
    expected = (answer.detach() - engine.ablated) / engine.span
    gradients = torch.autograd.grad(answer, slow)
    for kind, gradient in zip(KINDS, gradients, strict=True):
        responses, slopes = engine.slopes(**masks, of=kind)
        assert_close(responses[1], expected, atol=1e-10, rtol=0)
        assert_close(slopes[1], gradient / engine.span, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_equal_finite_differences(kind):
    engine, step = scene("llava_grouped").engine, 1e-5
    masks = {name: 0.1 + 0.8 * mask for name, mask in soft_masks(engine).items()}
    slopes = engine.slopes(**masks, of=kind)[1][0]
    for entry in range(0, len(slopes), 3):
        ends = []
        for side in (step, -step):
            moved = {name: mask[:1].clone() for name, mask in masks.items()}
            moved[kind][0, entry] += side
            ends.append(engine.slopes(**moved)[0][0])
        assert_close((ends[0] - ends[1]) / (2 * step), slopes[entry], atol=1e-8, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_at_the_ends_soft_masks_are_masks(family):
    engine = scene(family).engine
    masks = (some(5, 16), some(5, engine.n_text, seed=1), some(5, engine.n_image, seed=2))
    for given in (masks[:1], masks[:2], masks, (None, None, masks[2])):
        expected = engine.evaluate(*given)
        for kind in KINDS:
            assert_close(engine.slopes(*given, of=kind)[0], expected, atol=1e-10, rtol=0)


def test_blocks_of_masks_and_later_rows_change_nothing(monkeypatch):
    engine = scene("qwen2_vl").engine
    heads, image = some(7, 16), some(7, engine.n_image, seed=2)
    text = torch.zeros(1, engine.n_text)
    text[:, -2:] = 1
    whole = engine.slopes(heads, text, image, of="image")[1]
    monkeypatch.setattr(engine, "block_size", 3)
    assert_close(engine.slopes(heads, text, image, of="image")[1], whole, atol=1e-10, rtol=0)
    monkeypatch.setattr(engine, "_cache_for", lambda text: engine.cache)  # all rows run
    assert_close(engine.slopes(heads, text, image, of="image")[1], whole, atol=1e-10, rtol=0)


def test_slopes_are_possible_in_inference_mode_and_refused_where_there_are_none(monkeypatch):
    engine = scene("llava").engine
    expected = engine.slopes(some(2, 16))[1]
    with torch.inference_mode():
        assert_close(engine.slopes(some(2, 16))[1], expected)
    assert not any(p.requires_grad for p in engine.lvlm.module.parameters())
    with torch.inference_mode():
        frozen = engine.readouts.clone()
    monkeypatch.setattr(engine, "readouts", frozen)
    with pytest.raises(NotDefined, match="how='fit'"):
        engine.slopes(some(2, 16))
    monkeypatch.undo()
    inner = engine._run
    monkeypatch.setattr(engine, "_run", lambda *given: inner(*given).detach())  # as int8 layers do
    with pytest.raises(NotDefined, match="quantised"):
        attribute_heads(engine, masks=8)


def test_a_layer_that_loses_gradients_is_named_though_others_carry_some_around_it():
    """Slopes would be wrong without a word. The fit needs answers only."""
    engine = scene("llava").engine
    engine._differentiable = False
    layer = engine.lvlm.blocks[1].native.mlp.down_proj
    handle = layer.register_forward_hook(lambda module, args, out: out.detach())
    try:
        with pytest.raises(NotDefined, match=r"MLP of .*1, as in quantised layers.*how='fit'"):
            attribute_heads(engine, masks=8)
        assert attribute_heads(engine, how="fit", masks=64).coefficients.isfinite().all()
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda e: e.evaluate(torch.full((2, 16), 0.5)), "engine.slopes"),
        (lambda e: e.slopes(torch.full((2, 16), 1.5)), "from 0 to 1"),
        (lambda e: e.slopes(torch.full((2, 16), torch.nan)), "from 0 to 1"),
        (lambda e: e.slopes(some(2, 16), of="words"), "heads, text or image"),
        (lambda e: attribute_heads(e, how="guess", masks=8), "derivative, corrected or fit"),
        (lambda e: attribute_heads(e, masks=3), "at least 4"),
        (lambda e: attribute_heads(e, masks=0), "at least 4"),
        (lambda e: attribute_heads(e, masks=2**70), "at most"),
        (lambda e: attribute_heads(e, masks="many"), "masks"),
        (lambda e: attribute_heads(e, masks=8, l1_ratio=1.5), "from 0 to 1"),
        (lambda e: attribute_tokens(e, masks=8, alpha=-1.0), "from 0 on"),
        (lambda e: attribute_tokens(e, masks=8, step=0), "at least 10"),
        (lambda e: attribute_tokens(e, masks=8, agreement=1.0), "between 0 and 1"),
        (lambda e: attribute_heads(e, how="fit", masks=60, split=0.98), "at least 7"),
        (lambda e: attribute_heads(e, adaptive=True), "how='fit'"),
        (lambda e: attribute_heads(e, how="fit", masks=15), "how='derivative' needs fewer"),
        (lambda e: text_slopes(e, masks=2), "at least 4"),
    ],
)
def test_slips_are_refused_in_words(ask, match):
    with pytest.raises(BadOption, match=match):
        ask(scene("llava").engine)


def bent(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.tanh(1.5 * (x.double() @ weights))


def slopes_of(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (1 - bent(x, weights).square())[:, None] * 1.5 * weights


def test_an_additive_response_has_one_derivative():
    truth, x = noise(30), draw_masks(8, 30)
    for made in (
        mean_derivative(x, x.double() @ truth + 0.5, truth.expand(8, 30)),
        corrected(x, x.double() @ truth + 0.5, truth.expand(8, 30)),
    ):
        assert_close(made.coefficients, truth, atol=1e-10, rtol=0)
        assert_close(made.intercept, 0.5, atol=1e-10, rtol=0)
        assert made.r2 > 1 - 1e-12 and made.agreement > 1 - 1e-12 and made.masks == 8
        assert float(made.standard_error.max()) < 1e-10


def test_a_response_has_no_part_in_what_is_foretold_of_it():
    x, weights = draw_masks(60, 10), noise(10)
    slopes = slopes_of(x, weights)[:20]
    first = bent(x, weights) + 0.1 * noise(60, seed=2)
    second = first.clone()
    second[3] += 1e-4
    before, after = (corrected(x, responses, slopes).unseen for responses in (first, second))
    assert_close(before[:, 0], first)
    moved = (after[:, 1] - before[:, 1]).abs()
    assert float(moved[3]) < 1e-10 < 1e-8 < float(moved.max())


@pytest.mark.parametrize(("count", "size"), [(15, 5), (8, 12)])  # fewer masks than entries, too
def test_a_corrected_derivative_equals_the_slow_twin(count, size):
    x, weights = draw_masks(count, size, p=0.5, seed=3), noise(size)
    responses = bent(x, weights) + 0.1 * noise(count, seed=2)
    slopes = slopes_of(x, weights)[:6]
    penalties = torch.logspace(-4, 4, 33, dtype=torch.float64)
    twin, *halves = (
        ridge.LeftOutRidge(x[rows].double(), responses[rows], slopes[rows], penalties)
        for rows in (slice(None), slice(0, None, 2), slice(1, None, 2))
    )
    fast = corrected(x, responses, slopes)
    assert_close(fast.coefficients, twin.coefficients, atol=1e-9, rtol=0)
    assert_close(fast.standard_error, twin.standard_error(), atol=1e-9, rtol=0)
    foretold = torch.stack([responses, responses - twin.left_out], dim=1)
    assert_close(fast.unseen, foretold, atol=1e-9, rtol=0)
    intercept = responses.mean() - x.double().mean(dim=0) @ twin.coefficients
    assert fast.intercept == pytest.approx(float(intercept))
    assert fast.agreement == pytest.approx(correlation(*(half.coefficients for half in halves)))
    assert fast.r2 == pytest.approx(r2_score(*foretold.T.numpy())) and fast.masks == count


def test_a_mean_derivative_foretells_one_half_by_the_other():
    x, weights = draw_masks(11, 5, p=0.5, seed=3).double(), noise(5)
    responses, slopes = bent(x, weights), slopes_of(x, weights)[:7]
    fast = mean_derivative(x, responses, slopes)
    even, odd = slice(0, 7, 2), slice(1, 7, 2)
    for mine, others in (
        (even, range(1, 7, 2)),
        (odd, range(0, 7, 2)),
        (slice(0, 7), range(7, 11)),
    ):
        for k in others:
            line = (x[k] - x[mine].mean(dim=0)) @ slopes[mine].mean(dim=0)
            assert float(fast.unseen[k, 1]) == pytest.approx(float(responses[mine].mean() + line))
    assert_close(fast.unseen[:, 0], responses)
    assert_close(fast.coefficients, slopes.mean(dim=0))
    intercept = responses.mean() - x.mean(dim=0) @ slopes.mean(dim=0)
    assert fast.intercept == pytest.approx(float(intercept)) and fast.masks == 11
    assert_close(fast.standard_error, slopes.std(dim=0) / 7**0.5)
    halves = (slopes[rows].mean(dim=0) for rows in (even, odd))
    assert fast.agreement == pytest.approx(correlation(*halves))


def test_where_the_response_bends_the_correction_finds_what_the_derivative_misses():
    """The truth is the mean effect of an entry in random company, over many masks."""
    weights = noise(40) / 2
    x = draw_masks(40_000, 40, seed=9)
    each = torch.eye(40, dtype=torch.bool)
    truth = torch.stack([(bent(x | on, weights) - bent(x & ~on, weights)).mean() for on in each])

    def error(how: str, masks: int) -> float:
        sampling = MaskSampling(masks, how=how)
        made = estimate(lambda x: bent(x, weights), lambda x: slopes_of(x, weights), 40, sampling)
        return float((made.coefficients - truth).square().mean().sqrt())

    fine = error("derivative", 4000)  # what is left is bias
    assert error("corrected", 20_000) < 0.5 * fine
    assert error("corrected", 60) < 0.5 * error("fit", 60)


@pytest.mark.slow  # formulas are compared exactly above; this asks whether they mean what they say
@pytest.mark.parametrize(("how", "masks"), [("derivative", 64), ("corrected", 300), ("fit", 400)])
def test_the_standard_error_is_the_spread_over_seeds(how, masks):
    engine = scene("llava").engine
    made = [attribute_heads(engine, how=how, masks=masks, seed=seed) for seed in range(10)]
    spread = torch.stack([one.coefficients for one in made]).std(dim=0).square().mean().sqrt()
    told = torch.stack([one.standard_error for one in made]).square().mean().sqrt()
    assert 0.6 < float(told / spread) < 1.6


def test_heads_of_a_model_by_derivatives(tmp_path):
    engine = scene("llava").engine
    fit = attribute_heads(engine, how="fit", masks=2000).coefficients
    plain = attribute_heads(engine, masks=64, seed=1)
    slopes = engine.slopes(0.1 + 0.8 * draw_masks(64, 16, seed=1).double())[1]
    assert_close(plain.coefficients, slopes.mean(dim=0).view(GRID), atol=1e-12, rtol=0)
    assert plain.masks == 64 and plain.protocol["sampling"]["how"] == "derivative"
    mended = attribute_heads(engine, how="corrected", masks=300, seed=1)  # one head bends much
    assert correlation(fit.flatten(), mended.coefficients.flatten()) > 0.97
    assert mended.r2 > plain.r2
    read = HeadAttribution.load(plain.save(tmp_path))
    assert torch.equal(read.standard_error, plain.standard_error)


def test_image_tokens_and_text_rows_by_derivatives():
    engine = scene("llava").engine
    fit = attribute_tokens(engine, how="fit", masks=2000)
    few = attribute_tokens(engine, masks=64, seed=1)
    assert correlation(fit.coefficients, few.coefficients) > 0.9
    assert few.standard_error.shape == (engine.n_image,)
    rows = text_slopes(engine, masks=32)
    assert rows.standard_error is not None and rows.standard_error.shape == (engine.n_text,)
    one = text_slopes(engine, masks=4, p=1e-9)  # every row sees: the derivative at the whole answer
    expected = engine.slopes(text=torch.ones(1, engine.n_text), of="text")[1][0]
    assert_close(one.deltas, expected.double(), atol=1e-10, rtol=0)
    assert text_effects(engine).standard_error is None


def test_a_model_in_training_mode_is_refused():
    """Dropout would make every response random."""
    here = scene("llava")
    here.lvlm.module.train()
    try:
        for ask in (here.engine.evaluate, here.engine.slopes):
            with pytest.raises(BadOption, match=r"module\.eval"):
                ask(some(2, 16))
    finally:
        here.lvlm.module.eval()


def test_the_error_of_a_text_row_is_that_of_a_mean():
    engine = scene("llava").engine
    rows = text_slopes(engine, masks=8, seed=3)
    masks = draw_masks(8, engine.n_text, seed=3)
    slopes = engine.slopes(None, masks, of="text")[1].double() / rows.response
    assert_close(rows.deltas, slopes.mean(dim=0))
    assert_close(rows.standard_error, slopes.std(dim=0) / 8**0.5)
