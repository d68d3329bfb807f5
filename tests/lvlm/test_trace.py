"""One answer traced in full, what heads would say, and where image tokens lie."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.testing import assert_close

from seecause.errors import BadOption
from seecause.lvlm import (
    AnswerEngine,
    HeadAttribution,
    MaskEngine,
    attribute_heads,
    compare_wordings,
    coverage,
    head_words,
    make_bank,
    object_share,
    picture_map,
    random_orders,
    scan,
    seen_mask,
    seen_picture,
    sufficiency,
    text_effects,
    trace_answer,
    trace_heads,
    trace_tokens,
    trace_words,
    weighted_attention,
    words,
)
from seecause.lvlm.fit import correlation
from seecause.lvlm.trace import AnswerTrace, check_masks_suffice, concerns, masked_runs, rows_of
from seecause.models.decoder import Grid, ImageTokens
from tests.lvlm.scenes import scene
from tests.lvlm.toy import QUESTION, pictures, toy_engine


@pytest.fixture(scope="module")
def traced():
    return trace_heads(toy_engine(), masks=300, seed=4)


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
        assert_close(
            traced.curves[name].faithfulness[0, 1], engine.evaluate(best)[0], atol=1e-10, rtol=0
        )
    assert len(traced.curves["random"].faithfulness) == 5
    lots = traced.curves["random"]
    means = [float(counts.double().mean()) for counts in (lots.enough(), lots.needed())]
    assert list(traced.counts()["random"]) == means
    enough, needed = traced.counts()["hear"]
    assert enough == int(traced.chosen.sum()) and 1 <= needed <= 12


def test_tokens_follow_from_the_chosen_heads(traced):
    engine = toy_engine()
    result = trace_tokens(engine, traced.heads.coefficients, traced.chosen, masks=100)
    assert torch.equal(result.effects.deltas, text_effects(engine, traced.chosen).deltas)
    assert (
        result.tokens.protocol["heads"] == int(traced.chosen.sum())
        and result.tokens.protocol["text"] == result.text.int().tolist()
    )
    assert -1 <= result.agreement <= 1 and result.weighted.shape == (16,)
    assert result.agreement == pytest.approx(
        correlation(result.tokens.coefficients, result.weighted)
    )
    rows = torch.zeros(engine.n_text, dtype=torch.bool)
    rows[-2:] = True
    own = trace_tokens(engine, traced.heads.coefficients, traced.chosen, text=rows, masks=100)
    assert torch.equal(own.text, rows)
    assert own.sufficiency == pytest.approx(sufficiency(engine, traced.chosen, rows))
    given = (traced.heads.coefficients, traced.chosen, own.effects, rows)
    assert_close(own.weighted, weighted_attention(engine, *given))
    assert not torch.equal(own.weighted, result.weighted)


def test_what_is_asked_for_reaches_every_part_of_a_trace(tmp_path):
    engine, options = toy_engine(), {"how": "corrected", "p": 0.6, "seed": 3}
    trace = trace_answer(engine, masks=24, token_masks=20, **options)
    heads, tokens = trace.heads, trace.tokens
    for masks, sampling in (
        (24, heads.heads.protocol["sampling"]),
        (20, tokens.tokens.protocol["sampling"]),
    ):
        assert {name: sampling[name] for name in options} == options
        assert sampling["masks"] == masks
    trace.save(tmp_path)
    saved = load_file(tmp_path / "trace.safetensors")
    for name, value in {
        "attention": heads.attention,
        "causal": heads.causal,
        "chosen": heads.chosen,
        **{f"faithfulness.{name}": c.faithfulness for name, c in heads.curves.items()},
        **{f"completeness.{name}": c.completeness for name, c in heads.curves.items()},
    }.items():
        assert torch.equal(saved.pop(name), value), name
    assert not saved and len(heads.curves) == 4
    read = HeadAttribution.load(tmp_path / "heads")
    assert torch.equal(read.coefficients, heads.heads.coefficients)
    saved = load_file(tmp_path / "tokens.safetensors")
    for name, value in {
        "coefficients": tokens.tokens.coefficients,
        "standard_error": tokens.tokens.standard_error,
        "weighted": tokens.weighted,
        "deltas": tokens.effects.deltas,
        "text": tokens.text,
    }.items():
        assert torch.equal(saved[name], value), name
    lots = scan(engine, random_orders(engine, 5, seed=3), points=128)
    assert torch.equal(heads.curves["random"].faithfulness, lots.faithfulness)
    assert not torch.equal(lots.faithfulness, scan(engine, random_orders(engine, 5)).faithfulness)
    coarse = trace_heads(engine, masks=24, level=0.3, **options)
    assert int(coarse.chosen.sum()) == int(heads.curves["hear"].enough(0.3)) < heads.chosen.sum()
    adaptive = trace_heads(engine, how="fit", masks=400, adaptive=True)
    assert adaptive.heads.protocol["sampling"]["adaptive"]
    parts = []
    usual = trace_answer(engine, masks=8, token_masks=None, advance=parts.append)
    assert usual.heads.heads.masks == 8 and usual.tokens.tokens.masks == 64 and parts == [1, 1]
    parts.clear()
    assert trace_answer(engine, masks=8, advance=parts.append).tokens is None and parts == [1]
    own = [(each.layer, each.head) for each in usual.words]
    assert own == usual.heads.heads.top(5)


def test_every_masked_run_is_heard_of():
    engine, heard = toy_engine(), list[int]()
    engine.progress = heard.append
    try:
        for how, token_masks in (("derivative", 8), ("corrected", 0), ("fit", 40)):
            heard.clear()
            trace_answer(engine, how=how, masks=40, token_masks=token_masks)
            assert sum(heard) == masked_runs(engine, how=how, masks=40, token_masks=token_masks)
        with_tokens = masked_runs(engine, masks=9, token_masks=None)  # the usual 64, back and forth
        assert with_tokens - masked_runs(engine, masks=9) == engine.n_text + 4 + 2 * 64
        answer = AnswerEngine(engine.lvlm, pictures(1)[0], QUESTION, answer_bank(), answer=[7, 8])
        answer.progress = heard.append
        heard.clear()
        trace_words(answer, masks=5)
        assert sum(heard) == words.masked_runs(answer, masks=5) == 20
    finally:
        engine.progress = lambda done: None


def test_too_few_masks_are_refused_before_any_are_asked():
    engine = toy_engine()  # 12 heads, 16 image tokens
    check_masks_suffice(engine, 16, 21, how="fit")
    check_masks_suffice(engine, None, how="fit")
    check_masks_suffice(engine, 4, 4)
    for masks, tokens, message in ((15, 0, "the 12 coefficients"), (16, 20, "the 16 coefficients")):
        with pytest.raises(BadOption, match=message):
            check_masks_suffice(engine, masks, tokens, how="fit")
    with pytest.raises(BadOption, match="seed=-1"):
        check_masks_suffice(engine, 8, seed=-1)


def test_concerns_are_said_of_heads_and_of_image_tokens():
    many = {"pictures": 20}
    engine = SimpleNamespace(lvlm=toy_engine().lvlm, question="What is the tail?", bank=many)

    def lines(heads, tokens):
        parts = [SimpleNamespace(r2=r2, agreement=agreement) for r2, agreement in (heads, tokens)]
        own = SimpleNamespace(heads=parts[0]), [], SimpleNamespace(tokens=parts[1])
        return concerns(AnswerTrace(engine, *own))

    assert lines((0.5, 0.8), (0.5, 0.8)) == []
    low, few = lines((0.49, 0.9), (0.9, 0.79))
    assert low.startswith("coefficients of heads foretell masked answers badly (R2 0.49)")
    assert few == "two halves of the masks agree by 0.79 about image tokens: ask more masks"
    assert len(lines((float("nan"), float("nan")), (0.9, 0.9))) == 2
    engine.bank, engine.question = {"pictures": 19}, "What is the banana kiwi banana ?"
    assert lines((0.9, 0.9), (0.9, 0.9)) == [
        "the model has no token for banana, kiwi: it reads them as one word",
        "19 calibration pictures make the average picture: about a hundred are better",
    ]


def answer_bank():
    return make_bank(toy_engine().lvlm, pictures(3, start=7))


def test_some_row_is_always_kept():
    assert rows_of(torch.tensor([0.01, 0.2, 0.06])).tolist() == [False, True, True]
    assert rows_of(torch.tensor([0.01, -0.2, 0.04])).tolist() == [False, False, True]


def test_heads_say_the_words_of_their_largest_logits(traced):
    engine = toy_engine()
    top_words = head_words(engine, traced.heads, heads=2, words=3)
    assert [(one.layer, one.head) for one in top_words] == traced.heads.top(2)
    seen, best = engine.activations(), traced.heads.top(1)[0]
    for options in ({"row": 0}, {"image_only": True}, {"row": 1, "image_only": True}):
        (own,) = head_words(engine, traced.heads, heads=1, words=5, **options)
        ids = seen.lens(*best, **options).topk(5).indices
        assert own.words == tuple(piece.strip() for piece in engine.lvlm.pieces(ids))
        assert own.words != head_words(engine, traced.heads, heads=1, words=5)[0].words
    logits = seen.lens(*best)
    first = engine.lvlm.pieces(logits.argmax()[None])[0].strip()
    assert (
        top_words[0].words[0] == first
        and top_words[0].says(first.upper())
        and not top_words[0].says("nothing")
    )


def test_coverage_and_shares():
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, :4] = True
    one = ImageTokens((Grid(2, 2),))
    assert coverage(one, mask).tolist() == [1, 0, 0, 0]
    result = object_share(torch.tensor([3.0, 1.0, -5.0, 0.0]), one, mask)
    assert (result.share, result.area, result.hit) == (0.75, 0.25, True)
    lines = ImageTokens(
        (Grid(1, 1, box=None), Grid(2, 2, newline=True), Grid(1, 1, box=(0.5, 0.0, 1.0, 1.0)))
    )
    assert coverage(lines, mask).nan_to_num(-1).tolist() == [-1, 1, 0, -1, 0, 0, -1, 0]
    assert object_share(torch.ones(8), lines, mask).share == pytest.approx(
        1 / 5
    )  # newlines and class tokens lie nowhere
    with pytest.raises(BadOption, match="mask"):
        coverage(one, mask[None])


def test_a_token_that_the_object_hardly_covers_is_no_hit():
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:2, :2] = True  # a quarter of the first token
    tokens = ImageTokens((Grid(2, 2),))
    assert object_share(torch.tensor([1.0, 0.5, 0.0, 0.0]), tokens, mask).hit is False
    mask[:4, :2] = True
    assert object_share(torch.tensor([1.0, 0.5, 0.0, 0.0]), tokens, mask).hit is True


def test_pixels_that_are_neither_do_not_count():
    one = ImageTokens((Grid(2, 2),))
    mask = torch.zeros(8, 8, dtype=torch.uint8)
    mask[:4, :4] = 1
    mask[2:, :4] = 255  # half of the object, and all of the box below it
    assert coverage(one, mask).nan_to_num(-1).tolist() == [1, 0, -1, 0]
    assert object_share(torch.ones(4), one, mask).share == pytest.approx(1 / 3)
    assert (
        object_share(torch.tensor([-1.0, 0.0, 5.0, 0.0]), one, mask) is None
    )  # nothing positive whose place is known


def test_a_mask_goes_the_way_of_its_picture():
    """Resized and cropped with it: what is white in the picture is on in the mask."""
    lvlm = toy_engine().lvlm
    mask = torch.zeros(64, 128, dtype=torch.uint8)
    mask[16:48, 40:72], mask[:, :20] = 1, 255  # the left edge is cropped away
    photo = Image.fromarray((mask == 1).byte().numpy() * 255).convert("RGB")
    prompt = lvlm.prompt(photo, QUESTION)
    seen = seen_mask(lvlm, prompt, mask)
    assert seen.shape == (32, 32) and set(seen.unique().tolist()) == {0, 1}
    assert ((seen_picture(lvlm, prompt, photo)[0] > 0.5) != (seen == 1)).double().mean() < 0.05
    assert seen_mask(lvlm, prompt, mask == 1).dtype == torch.bool
    assert object_share(torch.ones(16), prompt.tokens, seen).area == pytest.approx(
        0.25, abs=0.03
    )  # a quarter of the middle, an eighth of all
    square = photo.resize((64, 64))  # as a bank may have it
    prompt = lvlm.prompt(square, QUESTION)
    seen, shown = seen_mask(lvlm, prompt, mask), seen_picture(lvlm, prompt, square)
    assert ((shown[0] > 0.5) != (seen == 1)).double().mean() < 0.05
    assert float(shown.min()) >= 0 and float(shown.max()) <= 1
    here = scene("qwen2_vl")
    assert seen_mask(here.lvlm, here.engine.prompt, mask) is mask  # patches of the whole picture


def test_several_grids_make_one_map():
    values = torch.arange(4.0)
    assert_close(picture_map(ImageTokens((Grid(2, 2),)), values), values.double().view(2, 2))
    two = ImageTokens((Grid(1, 1), Grid(2, 2, newline=True)))
    assert_close(
        picture_map(two, torch.tensor([4.0, 1, 2, 9, 3, 4, 9])),
        torch.tensor([[2.0, 3], [4, 5]], dtype=torch.float64),
    )
    tiles = ImageTokens(
        (Grid(1, 1, box=(0.0, 0.0, 1.0, 0.5)), Grid(1, 1, box=(0.0, 0.5, 1.0, 1.0)))
    )
    assert_close(
        picture_map(tiles, torch.tensor([1.0, 2])), torch.tensor([[1.0, 2]], dtype=torch.float64)
    )
    with pytest.raises(BadOption, match="tokens"):
        picture_map(ImageTokens((Grid(1, 1, box=None),)), torch.ones(1))


def test_the_picture_is_shown_as_the_model_gets_it():
    engine = toy_engine()
    shown = pictures(1)[0]
    raw = torch.from_numpy(np.array(shown)).permute(2, 0, 1) / 255
    assert_close(
        seen_picture(engine.lvlm, engine.prompt, shown), raw, atol=1e-5, rtol=0
    )  # 32 pixels: nothing to resize or crop
    here = scene("qwen2_vl")
    photo = here.pictures[0]
    assert seen_picture(here.lvlm, here.engine.prompt, photo).shape == (
        3,
        photo.height,
        photo.width,
    )  # its patches are no picture


def test_wordings_are_compared_on_one_answer_and_with_their_ceiling():
    engine = toy_engine()
    bank = make_bank(engine.lvlm, pictures(4, start=20))
    result = compare_wordings(
        engine.lvlm,
        pictures(1)[0],
        ["What colour is the tail?", "Tell me the colour of the tail."],
        bank,
        masks=100,
        floor=None,
        seed=5,
    )
    first, second = result.attributions
    assert (
        first.protocol["target"] == second.protocol["target"]
        and second.protocol["question"] == "Tell me the colour of the tail."
    )
    product = float(
        (first.coefficients * second.coefficients).sum()
        / first.coefficients.norm()
        / second.coefficients.norm()
    )
    assert (
        float(result.cosines) == pytest.approx(product) and 0.3 < result.ceiling < 0.9999
    )  # fresh masks: close, not the same
    shown, questions = pictures(1)[0], list(result.questions)
    again = attribute_heads(
        MaskEngine(engine.lvlm, shown, questions[0], bank, floor=None), masks=100, seed=5 + 2
    ).coefficients
    product = (first.coefficients * again).sum() / first.coefficients.norm() / again.norm()
    assert result.ceiling == pytest.approx(float(product))
    options = {"answer": [7], "how": "fit", "masks": 40, "p": 0.6, "floor": None}
    other = compare_wordings(engine.lvlm, shown, questions, bank, **options)
    assert [own.protocol["target"] for own in other.attributions] == [7, 7]
    sampling = other.attributions[1].protocol["sampling"]
    assert (sampling["how"], sampling["masks"], sampling["p"]) == ("fit", 40, 0.6)
    with pytest.raises(BadOption, match="questions"):
        compare_wordings(engine.lvlm, pictures(1)[0], ["Who?"], bank)
