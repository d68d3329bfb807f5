"""One answer traced in full: text rows, image tokens, what is saved, and where image tokens lie."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from seecause.errors import BadInput, BadOption
from seecause.lvlm import (
    AnswerEngine,
    AnswerTrace,
    attribute_heads,
    attribute_tokens,
    image_map,
    make_bank,
    seen_image,
    trace_answer,
    trace_words,
    words,
)
from seecause.lvlm.attribute import (
    correlation,
    draw_masks,
    fit,
    kept_rows,
    masked_runs,
    random_orders,
    scan,
    sufficiency,
    text_effects,
    weighted_attention,
)
from seecause.models.decoder import Grid, ImageTokens
from tests.lvlm.scenes import scene
from tests.lvlm.toy import QUESTION, pictures, toy_engine


def test_effects_of_text_rows_follow_equation_11():
    engine = scene("internvl").engine
    heads = torch.ones(16, dtype=torch.bool)
    heads[::3] = False
    deltas = text_effects(engine, heads)
    whole = float(engine.evaluate(heads[None]))
    without = torch.ones(1, engine.n_text)
    without[0, 2] = 0
    assert_close(float(deltas[2]), 1 - float(engine.evaluate(heads[None], without)) / whole)
    kept = deltas > 0.01
    assert sufficiency(engine, heads, torch.ones(engine.n_text)) == pytest.approx(1)
    part = float(engine.evaluate(heads[None], kept[None]))
    assert sufficiency(engine, heads, kept) == pytest.approx(part / whole)
    with pytest.raises(BadInput):  # heads that carry nothing
        text_effects(engine, torch.zeros(16, dtype=torch.bool))


def test_rows_are_kept_whose_blocking_costs_more_than_a_twentieth():
    assert kept_rows(torch.tensor([0.05, 0.051, -0.3, 0.4])).tolist() == [False, True, False, True]
    assert kept_rows(torch.tensor([0.01, -0.2, 0.04])).tolist() == [False, False, True]  # some row


def test_image_tokens_share_out_what_the_chosen_heads_and_rows_bring():
    """Equation 12: the response is divided by F(x*, u*), whatever that is."""
    engine = scene("llava").engine
    text, masks = torch.arange(engine.n_text) > 0, draw_masks(16, 16, p=0.5)
    responses = engine.evaluate(masks, text[None])
    chosen = int((responses - 0.5).abs().argmin())  # far from the whole effect, and from none
    heads, whole = masks[chosen], float(responses[chosen])
    assert whole > 0.05 and abs(whole - 1) > 0.05
    image = draw_masks(100, engine.n_image, seed=2)
    expected = fit(image, engine.evaluate(heads[None], text[None], image) / whole, seed=2)
    tokens = attribute_tokens(engine, heads, text, how="fit", masks=100, seed=2)
    assert_close(tokens.coefficients, expected.coefficients, atol=1e-9, rtol=0)
    assert_close(tokens.standard_error, expected.standard_error, atol=1e-9, rtol=0)
    for name in ("intercept", "r2", "pearson", "agreement"):
        assert getattr(tokens, name) == pytest.approx(getattr(expected, name), abs=1e-9), name
    quick = attribute_tokens(engine, heads, text, masks=6, p=0.4, seed=3)
    image = draw_masks(6, engine.n_image, p=0.4, seed=3)
    slopes = engine.slopes(heads[None], text[None], image, of="image")[1] / whole
    assert_close(quick.coefficients, slopes.mean(dim=0), atol=1e-10, rtol=0)
    assert quick.protocol["heads"] == int(heads.sum())
    assert quick.protocol["text"] == text.int().tolist()
    drawn = image_map(engine.prompt.tokens, quick.coefficients)
    assert torch.equal(drawn.flatten(), quick.coefficients)
    with pytest.raises(BadInput, match="moves its logit"):
        attribute_tokens(engine, None, torch.zeros(engine.n_text))


def test_weighted_attention_follows_equation_13():
    engine = scene("qwen2_vl").engine
    deltas = text_effects(engine)
    scores = attribute_heads(engine, masks=200)
    rows = torch.arange(engine.n_text) % 2 == 0
    got = weighted_attention(engine, scores.coefficients, scores.mask(3), deltas, rows)
    attention, slow = engine.activations().attention, torch.zeros(engine.n_image).double()
    for layer, head in scores.top(3):
        for row in rows.nonzero()[:, 0]:
            weight = scores.coefficients[layer, head] * deltas[row]
            slow += weight * attention[layer, head, row]
    assert_close(got, slow, atol=1e-12, rtol=0)


@pytest.fixture(scope="module")
def traced() -> AnswerTrace:
    return trace_answer(toy_engine(), masks=300, seed=4)


def test_every_ranking_is_scanned_in_its_own_order(traced):
    engine = toy_engine()
    assert set(traced.curves) == {"hear", "causal", "attention", "random"}
    for name, scores in (
        ("hear", traced.heads.coefficients),
        ("causal", traced.causal),
        ("attention", traced.attention),
    ):
        best = torch.zeros(1, 12)
        best[0, scores.flatten().argmax()] = 1
        first = traced.curves[name].faithfulness[0, 1]
        assert_close(first, engine.evaluate(best)[0], atol=1e-10, rtol=0)
    lots = scan(engine, random_orders(engine, 5, seed=4), points=128)
    assert torch.equal(traced.curves["random"].faithfulness, lots.faithfulness)
    means = [float(counts.double().mean()) for counts in (lots.enough(), lots.needed())]
    assert list(traced.counts()["random"]) == means
    enough, needed = traced.counts()["hear"]
    assert enough == int(traced.chosen.sum()) and 1 <= needed <= 12
    assert traced.left() == float(traced.curves["hear"].completeness[0, int(enough)])
    numbers = traced.numbers()
    assert numbers["hear_enough"] == enough and numbers["span"] == engine.span
    assert len(traced.rows()) == 12 and sum(row["enough"] for row in traced.rows()) == enough


def test_tokens_follow_from_the_chosen_heads(traced):
    engine, tokens = toy_engine(), traced.tokens
    assert torch.equal(tokens.deltas, text_effects(engine, traced.chosen))
    assert torch.equal(tokens.rows, kept_rows(tokens.deltas))
    found = attribute_tokens(engine, traced.chosen, tokens.rows, masks=300, seed=4)
    assert torch.equal(found.coefficients, tokens.attribution.coefficients)
    assert tokens.sufficiency == sufficiency(engine, traced.chosen, tokens.rows)
    given = (traced.heads.coefficients, traced.chosen, tokens.deltas, tokens.rows)
    assert_close(tokens.weighted, weighted_attention(engine, *given))
    agreement = correlation(tokens.attribution.coefficients, tokens.weighted)
    assert tokens.agreement == pytest.approx(agreement)


def test_a_trace_is_saved_with_what_was_asked(traced, tmp_path):
    engine, options = toy_engine(), {"how": "fit", "p": 0.6, "seed": 3, "masks": 40}
    trace = trace_answer(engine, **options)
    for found in (trace.heads, trace.tokens.attribution):
        sampling = found.protocol["sampling"]
        assert {name: sampling[name] for name in options} == options
    folder = trace.save(tmp_path / "new" / "trace")
    saved = load_file(folder / "trace.safetensors")
    expected = {"coefficients": trace.heads.coefficients, "attention": trace.attention}
    expected |= {"causal": trace.causal, "chosen": trace.chosen}
    expected |= {"standard_error": trace.heads.standard_error, "unseen": trace.heads.unseen}
    expected |= {f"faithfulness.{name}": c.faithfulness for name, c in trace.curves.items()}
    expected |= {f"completeness.{name}": c.completeness for name, c in trace.curves.items()}
    tokens = trace.tokens
    expected |= {f"tokens.{n}": getattr(tokens, n) for n in ("deltas", "rows", "weighted")}
    for name in ("coefficients", "standard_error", "unseen"):
        expected[f"tokens.{name}"] = getattr(tokens.attribution, name)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    card = json.loads((folder / "trace.json").read_text())
    assert card["numbers"] == trace.numbers() and card["protocol"]["question"] == QUESTION
    alone = trace_answer(engine, masks=8, tokens=False)
    assert alone.tokens is None and alone.heads.masks == 8
    with pytest.raises(BadOption, match="outnumber the 16"):  # before any mask has run
        trace_answer(engine, how="fit", masks=18)


def test_progress_is_told_of_every_masked_run():
    engine, told = toy_engine(), list[int]()
    engine.progress = told.append
    try:
        for options in ({}, {"tokens": False}, {"how": "fit"}):
            told.clear()
            trace_answer(engine, masks=40, **options)
            assert sum(told) == masked_runs(engine, masks=40, **options)
        bank = make_bank(engine.lvlm, pictures(3, start=7))
        answer = AnswerEngine(engine.lvlm, pictures(1)[0], QUESTION, bank, answer=[7, 8])
        answer.progress = told.append
        told.clear()
        trace_words(answer, masks=5)
        assert sum(told) == words.masked_runs(answer, masks=5) == 20
    finally:
        engine.progress = lambda done: None


def test_several_grids_make_one_map():
    values = torch.arange(4.0)
    assert_close(image_map(ImageTokens((Grid(2, 2),)), values), values.double().view(2, 2))
    two = ImageTokens((Grid(1, 1), Grid(2, 2, newline=True)))
    both = image_map(two, torch.tensor([4.0, 1, 2, 9, 3, 4, 9]))
    assert_close(both, torch.tensor([[2.0, 3], [4, 5]], dtype=torch.float64))
    left, right = (0.0, 0.0, 1.0, 0.5), (0.0, 0.5, 1.0, 1.0)
    tiles = ImageTokens((Grid(1, 1, box=left), Grid(1, 1, box=right)))
    assert image_map(tiles, torch.tensor([1.0, 2])).tolist() == [[1, 2]]


def test_the_image_is_shown_as_the_model_gets_it():
    engine, shown = toy_engine(), pictures(1)[0]
    raw = torch.from_numpy(np.array(shown)).permute(2, 0, 1) / 255
    got = seen_image(engine.lvlm, engine.prompt, shown)
    assert_close(got, raw, atol=1e-5, rtol=0)  # 32 pixels: nothing to resize or crop
    here = scene("qwen2_vl")
    photo = here.pictures[0]  # its patches are no image
    shape = seen_image(here.lvlm, here.engine.prompt, photo).shape
    assert shape == (3, photo.height, photo.width)
