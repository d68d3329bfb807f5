"""Soft masks and their derivatives against the native model with soft gates, and what they tell of
heads whose worth is known."""

import pytest
import torch
from torch.testing import assert_close

from seecause.errors import BadOption, NotDefined
from seecause.lvlm import MaskEngine, attribute_heads
from tests.families.lvlm import FAMILIES, PREFIX_FAMILIES
from tests.lvlm.scenes import GRID, QUESTION, TOKEN, scene, some
from tests.reference import hear

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


@pytest.mark.parametrize("family", PREFIX_FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_equal_finite_differences(kind, family):
    engine, step = scene(family).engine, 1e-5
    masks = {name: 0.1 + 0.8 * mask for name, mask in soft_masks(engine).items()}
    slopes = engine.slopes(**masks, of=kind)[1][0]
    for entry in range(0, len(slopes), 3):
        ends = []
        for side in (step, -step):
            moved = {name: mask[:1].clone() for name, mask in masks.items()}
            moved[kind][0, entry] += side
            ends.append(engine.slopes(**moved)[0][0])
        assert_close((ends[0] - ends[1]) / (2 * step), slopes[entry], atol=1e-8, rtol=0)


@pytest.mark.parametrize("family", [*FAMILIES, *PREFIX_FAMILIES])
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


def test_slopes_are_possible_in_inference_mode():
    engine = scene("llava").engine
    expected = engine.slopes(some(2, 16))[1]
    with torch.inference_mode():
        assert_close(engine.slopes(some(2, 16))[1], expected)
    assert not any(p.requires_grad for p in engine.lvlm.module.parameters())


def test_a_layer_that_loses_gradients_is_named_though_others_carry_some_around_it():
    """Slopes would be wrong without a word. The fit needs answers only."""
    engine = scene("llava").engine
    engine.lvlm.memo.pop("passes gradients", None)
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
        (lambda e: e.slopes(some(2, 16), of="words"), "of='words'"),
    ],
)
def test_bad_soft_masks_are_refused(ask, match):
    with pytest.raises(BadOption, match=match):
        ask(scene("llava").engine)


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
