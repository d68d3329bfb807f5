"""Every word of an answer in one run: equal to one word at a time, and right about which words come
from the picture."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from seecause.errors import BadOption
from seecause.lvlm import (
    AnswerEngine,
    AnswerWords,
    MaskEngine,
    attribute_heads,
    attribute_tokens,
    make_bank,
    trace_words,
)
from seecause.lvlm.attribute import mean_derivative
from seecause.lvlm.words import word_concerns, word_sampling
from seecause.models.decoder import Grid, ImageTokens
from tests.families.lvlm import FAMILIES, PREFIX_FAMILIES, photo
from tests.lvlm.scenes import GRID, QUESTION, scene, some
from tests.reference import hear

ANSWER = [7, 11, 9]


def engines(family: str, dtype: torch.dtype = torch.float64):
    """The engine of a whole answer, and one for each of its words."""
    here = scene(family, dtype)
    given = (here.lvlm, photo(here.native.size), QUESTION, here.bank)
    each = [MaskEngine(*given, answer=ANSWER, position=i, floor=None) for i in range(len(ANSWER))]
    return AnswerEngine(*given, answer=ANSWER), each


@pytest.mark.parametrize("family", [*FAMILIES, *PREFIX_FAMILIES])
def test_all_words_equal_one_word_at_a_time(family):
    whole, each = engines(family)
    heads, image = some(5, 16), some(5, whole.n_image, seed=2)
    soft = 0.1 + 0.8 * heads.double()
    plain, mixed = whole.adjusted(heads), whole.adjusted(heads, image=image)
    slopes, places = whole.slopes(soft)[1], whole.slopes(soft, image=image, of="image")[1]
    for word, engine in enumerate(each):
        assert_close(plain[:, word], engine.adjusted(heads), atol=1e-10, rtol=0)
        assert_close(mixed[:, word], engine.adjusted(heads, image=image), atol=1e-10, rtol=0)
        own = engine.slopes(soft)[1] * engine.span
        assert_close(slopes[:, word], own, atol=1e-10, rtol=0)
        own = engine.slopes(soft, image=image, of="image")[1] * engine.span
        assert_close(places[:, word], own, atol=1e-10, rtol=0)


def test_text_rows_that_see_may_lie_behind_the_first_word():
    whole, each = engines("llava")
    text = torch.zeros(1, whole.n_text, dtype=torch.bool)
    text[0, -1] = True
    answers = whole.adjusted(text=text)
    for word, engine in enumerate(each):
        own = engine.adjusted(text=text[:, : engine.n_text])
        assert_close(answers[:, word], own, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-10), (torch.float32, 3e-6)])
def test_effects_are_those_of_head_attribution_of_each_word(dtype, near):
    whole, each = engines("llava_grouped", dtype)
    words = trace_words(whole, masks=12, p=0.6, seed=4)
    for word, engine in enumerate(each):
        heads = attribute_heads(engine, masks=12, p=0.6, seed=4)
        tokens = attribute_tokens(engine, masks=12, p=0.6, seed=4)
        assert abs(float(words.spans[word]) - engine.span) < near
        error = heads.standard_error * abs(engine.span)
        assert_close(words.heads[word], heads.coefficients * engine.span, atol=near, rtol=0)
        assert_close(words.heads_error[word], error, atol=near, rtol=0)
        own = tokens.coefficients * engine.span  # through logarithms of weights, which round more
        assert_close(words.image[word], own, atol=near if near < 1e-9 else 6e-5, rtol=0)
        if dtype == torch.float64:
            assert abs(float(words.heads_r2[word]) - heads.r2) < 1e-8
            assert abs(float(words.image_r2[word]) - tokens.r2) < 1e-8
            error = tokens.standard_error * abs(engine.span)
            assert_close(words.image_error[word], error, atol=near, rtol=0)


def test_a_long_answer_is_differentiated_at_the_first_of_its_masks():
    assert [word_sampling(n, "derivative", None, 0.75, 0).slopes for n in (1, 2, 5)] == [64, 32, 16]
    assert word_sampling(5, "derivative", 64, 0.75, 0).slopes == 64
    assert word_sampling(5, "fit", None, 0.75, 0).slopes == 0
    x = some(20, 6).double()
    slopes = torch.randn(20, 6, generator=torch.Generator().manual_seed(1)).double()
    answers = x @ slopes.mean(dim=0)
    few, own = (
        mean_derivative(x, answers, slopes[:8]),
        mean_derivative(x[:8], answers[:8], slopes[:8]),
    )
    assert torch.equal(few.coefficients, own.coefficients) and few.masks == 20
    assert torch.equal(few.standard_error, own.standard_error) and few.agreement == own.agreement
    rest = answers[:8].mean() + (x[8:] - x[:8].mean(dim=0)) @ few.coefficients
    assert_close(few.unseen[8:, 1], rest, atol=1e-12, rtol=0)
    assert_close(few.unseen[:8], own.unseen, atol=1e-12, rtol=0)


def test_a_fit_of_all_words_is_that_of_each():
    whole, each = engines("llava")
    words = trace_words(whole, how="fit", masks=60, seed=1)
    for word, engine in enumerate(each):
        own = attribute_heads(engine, how="fit", masks=60, seed=1).coefficients
        assert_close(words.heads[word], own * engine.span, atol=1e-9, rtol=0)


@pytest.mark.parametrize("how", ["derivative", "fit"])
def test_a_word_that_the_picture_does_not_move_has_no_effects(how):
    whole, _ = engines("llava")
    before = trace_words(whole, how=how, masks=60)
    whole.readouts[1] = 0
    whole.intact[1] = whole.ablated[1] = 0
    words = trace_words(whole, how=how, masks=60)
    assert float(words.heads[1].abs().max()) == float(words.image[1].abs().max()) == 0
    assert_close(words.heads[::2], before.heads[::2], atol=1e-10, rtol=0)


def test_chances_are_the_native_models_and_those_of_a_blinded_one():
    """With the picture: the native logits. Without: every key and value replaced, literally."""
    here = scene("llava")
    whole, each = engines("llava")
    words = trace_words(whole, masks=4)
    pictures = [dict(here.lvlm.prompt(p, QUESTION).inputs) for p in here.pictures]
    means = hear.average_picture(here.lvlm.module, pictures)
    blind = torch.zeros(GRID, dtype=torch.bool)
    for word, engine in enumerate(each):
        inputs = dict(engine.prompt.inputs)
        native = here.lvlm.module(**inputs).logits[0, -1].log_softmax(dim=0)
        other = hear.Blinded(here.lvlm.module, inputs, means).logits(blind).log_softmax(dim=0)
        assert_close(words.log_seen[word], native[ANSWER[word]], atol=1e-10, rtol=0)
        assert_close(words.log_unseen[word], other[ANSWER[word]], atol=1e-10, rtol=0)
        assert words.instead[word] == here.lvlm.pieces(other.argmax()[None])[0]


def made(gains: list[float]) -> AnswerWords:
    count = len(gains)
    seen = torch.full((count,), math.log(0.5), dtype=torch.float64)
    heads, image = torch.arange(count * 6.0).reshape(count, 2, 3).double(), torch.zeros(count, 4)
    numbers = torch.zeros(count, dtype=torch.float64)
    return AnswerWords(
        tuple("abcdef"[:count]), tuple("uvwxyz"[:count]), seen,
        seen - torch.tensor(gains, dtype=torch.float64), numbers, heads, heads + 1, image.double(),
        image.double() + 1, numbers + 1, numbers + 2, ImageTokens((Grid(2, 2),)),
    )  # fmt: skip


def test_words_are_told_apart_by_how_far_the_picture_moves_them(tmp_path):
    words = made([2.0, 0.1, -3.0])
    assert words.sources() == ["image", "without", "against"]
    assert made([0.701, -0.701, 0.69]).sources() == ["image", "against", "without"]
    assert words.top(0, 2) == [(1, 2), (1, 1)]
    assert words.gains().tolist() == pytest.approx([2.0, 0.1, -3.0]) and len(words) == 3
    assert words.top(1, 1) == [(1, 2)] and replace(words, heads=-words.heads).top(1, 1) == [(0, 0)]
    assert words.numbers() == {"words": 3, "words_image": 1, "words_against": 1}
    assert words.rows()[0]["heads"] == "(1, 2), (1, 1), (1, 0)"
    words = replace(words, protocol={"question": "why?"})
    saved = load_file(words.save(tmp_path / "new" / "words") / "words.safetensors")
    tensors = {name: value for name, value in vars(words).items() if torch.is_tensor(value)}
    assert saved.keys() == tensors.keys() and len(saved) == 9
    for name, value in tensors.items():
        assert torch.equal(saved[name], value), name
    assert json.loads((tmp_path / "new" / "words" / "words.json").read_text()) == {
        "pieces": ["a", "b", "c"], "instead": ["u", "v", "w"], "sources": words.sources(),
        "protocol": {"question": "why?"},
    }  # fmt: skip


def test_what_is_asked_for_reaches_every_word():
    whole, _ = engines("llava")
    options = {"how": "fit", "masks": 40, "p": 0.6, "seed": 3}
    protocol = trace_words(whole, **options).protocol
    assert {name: protocol["sampling"][name] for name in options} == options
    assert protocol["targets"] == ANSWER and protocol["question"] == QUESTION
    assert protocol["bank"] == {"images": 3}


def test_words_from_the_picture_whose_effects_foretell_little_are_named():
    engine, words = engines("llava")[0], made([2.0, 2.0, 0.1])
    engine.bank_images = 100
    assert word_concerns(engine, words) == []
    low = torch.tensor([0.9, 0.3, 0.3], dtype=torch.float64)
    for name, what in (("heads_r2", "heads"), ("image_r2", "image tokens")):
        (line,) = word_concerns(engine, replace(words, **{name: low}))
        assert line.startswith(f"coefficients of {what} ") and "for b:" in line
    engine.bank_images = 19
    assert "19 calibration images" in word_concerns(engine, words)[0]


def test_what_is_no_bank_question_answer_or_image_is_refused():
    here = scene("llava")
    image = photo(here.native.size)
    for engine in (MaskEngine, AnswerEngine):
        with pytest.raises(BadOption, match=r"bank is not set; expected .*MeanBank"):
            engine(here.lvlm, image, QUESTION, None)
        with pytest.raises(BadOption, match="question=7"):
            engine(here.lvlm, image, 7, here.bank)
        with pytest.raises(BadOption, match=r"image='cat\.jpg'"):
            engine(here.lvlm, "cat.jpg", QUESTION, here.bank)
        with pytest.raises(BadOption, match="at least one token"):
            engine(here.lvlm, image, QUESTION, here.bank, answer=[])
    with pytest.raises(BadOption, match="length=0"):
        AnswerEngine(here.lvlm, image, QUESTION, here.bank, length=0)
    with pytest.raises(BadOption, match="images="):
        make_bank(here.lvlm, ["cat.jpg"])
