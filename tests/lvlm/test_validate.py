"""Rankings of heads and their curves: against the native model with keys and values replaced, and
the rules of the counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from seecause.errors import BadOption
from seecause.lvlm import (
    HeadAttribution,
    RankingCurves,
    analysis,
    attention_scores,
    attribute_heads,
    causal_scores,
    essential_heads,
    first_crossing,
    random_orders,
    scan,
    threshold_study,
)
from seecause.lvlm.analysis import curve_counts
from seecause.lvlm.attribute import ratio_study
from tests.lvlm.scenes import GRID, QUESTION, scene
from tests.reference import hear


def shares(here, masks: torch.Tensor) -> torch.Tensor:
    """F of masks [M, P] by the plain way: every mask runs its whole sequence."""
    means = hear.average_picture(
        here.lvlm.module, [dict(here.lvlm.prompt(p, QUESTION).inputs) for p in here.pictures]
    )
    ends = torch.stack([torch.zeros(16), torch.ones(16)]).bool()
    states = hear.blinded_batch(
        here.lvlm.module,
        dict(here.engine.prompt.inputs),
        means,
        torch.cat([ends, masks]).view(-1, *GRID),
    )
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
    assert curves.enough().tolist() == [
        2,
        5,
    ]  # the second never crosses: all heads; k = 0 does not count
    assert curves.needed().tolist() == [2, 5]
    assert curves.enough(0.25).tolist() == [1, 3]
    assert_close(
        threshold_study(curves, [0.5, 0.9])[:, 0],
        torch.tensor([(2 + 5) / 2, (5 + 5) / 2], dtype=torch.float64),
    )
    assert float(threshold_study(curves, [0.8])[0, 1]) == (2 + 5) / 2  # until a fifth is left
    for level in (0.0, 1.0):
        for count in (curves.enough, curves.needed):
            with pytest.raises(BadOption, match="level"):
                count(level)


def test_the_thresholds_are_the_papers_and_a_tie_is_no_crossing():
    line = torch.tensor([[0.0, 0.8, 0.81, 1.0]], dtype=torch.float64)
    curves = RankingCurves(line, torch.tensor([[1.0, 0.2, 0.5, 0.19]], dtype=torch.float64))
    assert (curves.enough().item(), curves.needed().item()) == (2, 3)
    assert analysis.LEVELS == (0.5, 0.6, 0.7, 0.8, 0.9)
    assert analysis.RATIOS == (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
    table = threshold_study(curves)
    assert table.tolist() == [[1, 1], [1, 1], [1, 1], [2, 3], [3, 3]]


def test_crossings_are_searched_for_a_few_heads_at_a_time():
    """An engine whose heads bring a fifth each."""
    asked = []

    def evaluate(heads):
        asked.append(heads.sum(dim=1).tolist())
        return heads.sum(dim=1).double() / 5

    engine, order = SimpleNamespace(evaluate=evaluate), torch.tensor([3, 0, 4, 1, 2])
    assert first_crossing(engine, order) == 5  # 4 bring 0.8, which is not more
    assert asked == [[1, 2, 3, 4, 5]]
    asked.clear()
    assert first_crossing(engine, order, level=0.4, chunk=2) == 3
    assert asked == [[1, 2], [3, 4]]
    asked.clear()
    assert first_crossing(engine, order, level=0.4, completeness=True, chunk=2) == 4
    assert asked == [[4, 3], [2, 1]]
    weak = SimpleNamespace(evaluate=lambda heads: torch.zeros(len(heads)))
    assert first_crossing(weak, order) == 5  # never: all of them


def test_essential_heads_are_counted_at_the_level_asked_for():
    heads = HeadAttribution(
        torch.tensor([[0.1, 0.4], [0.3, 0.2]]), 0.0, 1.0, 1.0, 10, 1.0, torch.zeros(2, 2)
    )
    line = torch.tensor([[0.0, 0.3, 0.6, 0.85, 1.0]])
    curves = RankingCurves(line, 1 - line)
    assert essential_heads(heads, curves).tolist() == [False, True, True, True]
    assert essential_heads(heads, curves, 0.5).tolist() == [False, True, True, False]


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunked_counts_are_those_of_the_full_scan(chunk):
    engine = scene("llava").engine
    for order in random_orders(engine, 3, seed=1):
        curves = scan(engine, order)
        for level in (0.3, 0.8):
            assert first_crossing(engine, order, level=level, chunk=chunk) == int(
                curves.enough(level)
            )
            assert first_crossing(
                engine, order, level=level, completeness=True, chunk=chunk
            ) == int(curves.needed(level))


def test_a_crossing_has_a_level_between_nothing_and_everything():
    for level in (0.0, 1.0):
        with pytest.raises(BadOption, match="level"):
            first_crossing(scene("llava").engine, torch.arange(16), level=level)


def test_essential_heads_bring_what_they_promise_and_one_fewer_does_not():
    engine = scene("llava").engine
    result = attribute_heads(engine, masks=200)
    chosen = essential_heads(result, scan(engine, result.order()))
    assert float(engine.evaluate(chosen[None])) > 0.8
    fewer = result.mask(int(chosen.sum()) - 1)
    assert float(engine.evaluate(fewer[None])) <= 0.8


def test_attention_scores_are_the_attention_rows_of_every_head():
    engine = scene("internvl").engine
    seen, scores = engine.activations(), attention_scores(engine)
    assert_close(scores[2, 1], seen.attention(2, 1).sum(dim=1).mean(), atol=1e-12, rtol=0)
    assert scores.shape == GRID and bool(((scores > 0) & (scores < 1)).all())


def test_random_orders_are_orders():
    orders = random_orders(scene("llava").engine, 4, seed=2)
    assert torch.equal(orders.sort(dim=1).values, torch.arange(16).expand(4, -1))
    assert len(torch.unique(orders, dim=0)) == 4
    assert torch.equal(orders, random_orders(scene("llava").engine, 4, seed=2))
    assert not torch.equal(orders, random_orders(scene("llava").engine, 4, seed=3))


def test_the_ratio_study_ablates_what_it_says():
    engine = scene("llava").engine
    result = ratio_study(engine, [0.25, 0.75], masks=100, seed=5)
    assert [traced.heads.protocol["sampling"]["p"] for traced in result] == [0.25, 0.75]
    assert {traced.heads.protocol["sampling"]["how"] for traced in result} == {"fit"}
    seeds = [traced.heads.protocol["sampling"]["seed"] for traced in result]
    assert seeds == [5, 6]  # the same lots would be nested
    (quick,) = ratio_study(engine, [0.5], how="derivative", masks=8)
    sampling = quick.heads.protocol["sampling"]
    assert (sampling["how"], sampling["masks"], sampling["seed"]) == ("derivative", 8, 0)
    for traced in result:
        curves = scan(engine, traced.heads.order())
        assert (traced.enough, traced.needed) == (int(curves.enough()), int(curves.needed()))


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
    assert curve_counts(16, 2) == [0, 16] and curve_counts(3, 3) == [0, 1, 3]
    assert len(curve_counts(1024, 128)) < 128
    with pytest.raises(BadOption, match="points"):
        scan(engine, orders, points=1)


@pytest.mark.parametrize("order", [torch.arange(5), torch.zeros(16).long(), torch.arange(16) + 1])
def test_an_order_has_every_head_once(order):
    with pytest.raises(BadOption, match="each of them once"):
        scan(scene("llava").engine, order)
