"""What heads do, rankings of heads and their curves: against the native attention and the native
model with keys and values replaced."""

import pytest
import torch
from torch.testing import assert_close

from seecause.lvlm import HeadAttribution
from seecause.lvlm.attribute import (
    RankingCurves,
    attention_scores,
    causal_scores,
    curve_counts,
    head_words,
    random_orders,
    scan,
)
from tests.lvlm.scenes import GRID, QUESTION, scene
from tests.lvlm.toy import toy_engine
from tests.reference import hear


@pytest.mark.parametrize("family", ["llava_grouped", "qwen3_vl", "paligemma"])
def test_attention_on_the_image_is_that_of_the_native_model(family):
    here = scene(family)
    engine, prompt = here.engine, here.engine.prompt
    here.lvlm.module.set_attn_implementation({"text_config": "eager"})
    native = here.lvlm.module(**prompt.inputs, output_attentions=True).attentions
    here.lvlm.module.set_attn_implementation({"text_config": "sdpa"})
    seen, scores = engine.activations(), attention_scores(engine)
    assert seen.attention.shape == (*GRID, engine.n_text, engine.n_image) and scores.shape == GRID
    for layer, weights in enumerate(native):  # the native softmax is in float32
        rows = weights[0, :, prompt.text, prompt.image].double()  # [H, T, N]
        assert_close(seen.attention[layer], rows, atol=5e-6, rtol=0)
        assert_close(scores[layer], rows.sum(dim=-1).mean(dim=-1), atol=5e-6, rtol=0)


def test_the_lens_reads_a_head_through_the_final_norm_and_the_vocabulary():
    here = scene("llava")
    heard = []
    projection = here.lvlm.module.get_decoder().layers[2].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda _, given: heard.append(given[0]))
    here.lvlm.next_logits(here.engine.prompt)
    handle.remove()
    outputs = heard[0][0, -1].unflatten(0, (4, -1))  # [H, dh]
    alone = torch.zeros_like(outputs)
    alone[3] = outputs[3]
    decoder = here.lvlm.decoder
    expected = decoder.head(decoder.norm(projection(alone.flatten()[None])))[0]
    assert_close(here.engine.activations().lens(2, 3), expected, atol=1e-10, rtol=0)


def test_the_heads_that_bring_most_are_named_with_the_words_they_would_say():
    engine = toy_engine()
    coefficients = torch.arange(12.0).sin().double().reshape(3, 4)
    heads = HeadAttribution(coefficients, 0.0, 1.0, 1.0, 8, 1.0, coefficients.abs())
    found = head_words(engine, heads)
    best = [(2, 0), (0, 2), (0, 1), (1, 3), (2, 1)]
    assert [(each.layer, each.head) for each in found] == best == heads.top(5)
    assert [each.coefficient for each in found] == [float(coefficients[place]) for place in best]
    ids = engine.activations().lens(2, 0).topk(10).indices
    assert found[0].words == tuple(piece.strip() for piece in engine.lvlm.pieces(ids))


def shares(here, masks: torch.Tensor) -> torch.Tensor:
    """F of masks [M, P] by the plain way: every mask runs its whole sequence."""
    prompts = [dict(here.lvlm.prompt(p, QUESTION).inputs) for p in here.pictures]
    means = hear.average_picture(here.lvlm.module, prompts)
    ends = torch.stack([torch.zeros(16), torch.ones(16)]).bool()
    inputs = dict(here.engine.prompt.inputs)
    every = torch.cat([ends, masks]).view(-1, *GRID)
    states = hear.blinded_batch(here.lvlm.module, inputs, means, every)
    low, high, *result = states @ here.engine.readouts[0]
    return (torch.stack(result) - low) / (high - low)


@pytest.mark.parametrize("family", ["llava_grouped", "qwen2_vl"])
def test_curves_and_single_heads_equal_the_slow_twin(family):
    here = scene(family)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    on = torch.zeros(17, 16, dtype=torch.bool)
    for k in range(17):
        on[k, order[:k]] = True
    slow = shares(here, torch.cat([on, ~on, ~torch.eye(16, dtype=torch.bool)]))
    curves = scan(here.engine, order)
    both = scan(here.engine, torch.stack([order.flip(0), order])).rows(slice(1, 2))
    assert_close(both.faithfulness, curves.faithfulness, atol=1e-10, rtol=0)
    assert_close(both.completeness, curves.completeness, atol=1e-10, rtol=0)
    assert_close(curves.faithfulness[0], slow[:17], atol=1e-9, rtol=0)
    assert_close(curves.completeness[0], slow[17:34], atol=1e-9, rtol=0)
    assert_close(causal_scores(here.engine).flatten(), 1 - slow[34:], atol=1e-9, rtol=0)


def test_counts_are_first_crossings_from_one_head_on():
    falling = torch.tensor([[0.0, 0.3, 0.85, 0.5, 0.9, 1.0], [0.9, 0.1, 0.2, 0.3, 0.4, 0.5]])
    curves = RankingCurves(falling, 1 - falling)
    # the second never crosses: all heads; k = 0 does not count
    assert curves.enough().tolist() == curves.needed().tolist() == [2, 5]
    assert curves.enough(0.25).tolist() == [1, 3]


def test_the_thresholds_are_the_papers_and_a_tie_is_no_crossing():
    line = torch.tensor([[0.0, 0.8, 0.81, 1.0]], dtype=torch.float64)
    curves = RankingCurves(line, torch.tensor([[1.0, 0.2, 0.5, 0.19]], dtype=torch.float64))
    assert (curves.enough().item(), curves.needed().item()) == (2, 3)
    assert (curves.enough(0.9).item(), curves.needed(0.1).item()) == (3, 3)


def test_random_orders_are_orders():
    orders = random_orders(scene("llava").engine, 4, seed=2)
    assert torch.equal(orders.sort(dim=1).values, torch.arange(16).expand(4, -1))
    assert len(torch.unique(orders, dim=0)) == 4
    assert not torch.equal(orders, random_orders(scene("llava").engine, 4, seed=3))


def test_coarse_curves_are_the_full_ones_at_their_counts_and_straight_between():
    engine = scene("llava").engine
    orders = random_orders(engine, 2, seed=5)
    full, coarse = scan(engine, orders), scan(engine, orders, points=6)
    counts = curve_counts(16, 6)
    assert counts == [0, 1, 3, 6, 10, 16]
    for name in ("faithfulness", "completeness"):
        true, drawn = getattr(full, name), getattr(coarse, name)
        assert drawn.shape == true.shape
        assert_close(drawn[:, counts], true[:, counts], atol=1e-12, rtol=0)
        assert_close(drawn[:, 8], (true[:, 6] + true[:, 10]) / 2, atol=1e-12, rtol=0)
    assert curve_counts(16, 17) == curve_counts(16) == list(range(17))
    assert len(curve_counts(1024, 128)) < 128
