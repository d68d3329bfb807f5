"""Prefix language models (PaliGemma): image tokens read the question, so averages belong to it; the
rest is as in every family."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from seecause.errors import BadInput, UnsupportedModel, ViewMismatch
from seecause.lvlm import MaskEngine, MeanBank, classifier, make_bank, wrap
from seecause.lvlm.bank import bank_of_prompts
from seecause.lvlm.model import verify
from seecause.models.decoder import causal
from tests.families.lvlm import PREFIX_FAMILIES, paligemma2, photo, tiny_lvlm
from tests.lvlm.scenes import GRID, QUESTION, TOKEN, calibration, scene, some
from tests.reference import prefix_hear

ANSWER = [TOKEN, 3, 11]


def twin_average(here, prompt):
    """Of the calibration pictures, each asked what `prompt` asks."""
    inputs = []
    for picture in calibration(here.native.size):
        pixels = here.lvlm.prompt(picture, "what ?").inputs["pixel_values"]
        inputs.append({**prompt.inputs, "pixel_values": pixels})
    return prefix_hear.average_keys(here.lvlm.module, inputs)


def adjusted(logits: torch.Tensor) -> torch.Tensor:
    return logits[TOKEN] - logits.mean()


@pytest.mark.parametrize("family", PREFIX_FAMILIES)
def test_a_view_of_question_and_answer_equals_the_native_model(family):
    lvlm = scene(family).lvlm
    assert max(probe.worst for probe in verify(lvlm)) < 1e-12
    prompt = lvlm.prompt(photo((40, 56)), QUESTION, "cat dog")
    assert (prompt.image, prompt.prefix, prompt.n_text) == (slice(0, 16), 21, 7)
    assert lvlm.pieces(prompt.ids[-2:]) == ("cat", "dog")
    assert prompt.inputs["token_type_ids"][0].tolist() == [0] * 21 + [1, 1]
    assert max(probe.worst for probe in verify(lvlm, prompt)) < 1e-12
    block = lvlm.blocks[1]
    lvlm.blocks[1] = replace(block, additive=causal)
    try:
        with pytest.raises(ViewMismatch):
            verify(lvlm)
    finally:
        lvlm.blocks[1] = block


@pytest.mark.parametrize("family", PREFIX_FAMILIES)
@pytest.mark.parametrize("start", [[], [TOKEN, 3]])
def test_masked_runs_equal_the_slow_twin(family, start):
    here = scene(family)
    picture, answer = photo(here.native.size), [*start, TOKEN]
    engine = MaskEngine(
        here.lvlm, picture, QUESTION, here.bank, answer=answer, position=len(start), floor=None
    )
    inputs, average = dict(engine.prompt.inputs), twin_average(here, engine.prompt)
    heads, image = some(3, 16), some(3, engine.n_image, seed=2)
    text = some(3, engine.n_text, seed=1)
    text[2] = torch.arange(engine.n_text) > 2  # the first rows are blind, and read later ones
    fast = engine.adjusted(heads, text, image)
    for row in (0, 2):
        masks = (heads[row].view(GRID), text[row], image[row])
        slow = prefix_hear.blinded(here.lvlm.module, inputs, average, *masks)
        assert_close(fast[row], adjusted(slow[-1]), atol=1e-10, rtol=0)
    alone = engine.adjusted(heads, text[2:])  # masks whose first rows could have been shared
    slow = prefix_hear.blinded(here.lvlm.module, inputs, average, heads[0].view(GRID), text[2])
    assert_close(alone[0], adjusted(slow[-1]), atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", PREFIX_FAMILIES)
def test_only_rows_of_the_answer_may_see(family):
    """Then the whole question is the same in every mask, and runs once."""
    here = scene(family)
    given = (here.lvlm, photo(here.native.size), QUESTION, here.bank)
    engine = MaskEngine(*given, answer=ANSWER, position=2, floor=None)
    text = torch.arange(engine.n_text)[None] >= engine.n_text - 2
    assert engine._cache_for(text).start == engine.n_text - 2
    fast = engine.adjusted(some(2, 16), text)
    average = twin_average(here, engine.prompt)
    masks = (some(2, 16)[1].view(GRID), text[0])
    slow = prefix_hear.blinded(here.lvlm.module, dict(engine.prompt.inputs), average, *masks)
    logits = slow[-1]
    assert_close(fast[1], logits[ANSWER[2]] - logits.mean(), atol=1e-10, rtol=0)


def test_a_bank_has_an_average_for_each_question_and_keeps_it(tmp_path):
    here = scene("paligemma")
    bank = make_bank(here.lvlm, here.pictures)
    picture = photo(here.native.size)
    ask = [here.lvlm.prompt(picture, question) for question in (QUESTION, "a red cat")]
    first, second = (bank.means(here.lvlm, prompt)[0] for prompt in ask)
    assert len(bank.sums) == 2
    assert float((first - second).abs().max()) > 1e-6  # also where places are the same
    read = MeanBank.load(bank.save(tmp_path))
    assert_close(read.means(here.lvlm, ask[1])[0], second, atol=0, rtol=0)
    with pytest.raises(BadInput, match="read the question"):
        read.means(here.lvlm, here.lvlm.prompt(picture, "what is in the picture ?"))
    inside = here.pictures[0]  # left out of its own average
    prompt = here.lvlm.prompt(inside, QUESTION)
    others = make_bank(here.lvlm, here.pictures[1:]).means(here.lvlm, prompt)
    assert_close(bank.means(here.lvlm, prompt, inside), others, atol=1e-12, rtol=0)


def test_what_such_a_model_cannot_be_asked_is_refused_in_words():
    here = scene("paligemma")
    lvlm, picture = here.lvlm, photo(here.native.size)
    inputs = dict(lvlm.prompt(picture, QUESTION).inputs)
    untold = {name: value for name, value in inputs.items() if name != "token_type_ids"}
    with pytest.raises(BadInput, match="token_type_ids"):
        lvlm.read(untold)
    with pytest.raises(BadInput, match="image must come first"):
        wrap(here.native.module, here.native.processor, template="what {image} {question}")
    with pytest.raises(UnsupportedModel, match="tiled or packed"):
        classifier(lvlm, ["cat", "dog"])
    asked = [lvlm.prompt(picture, question) for question in (QUESTION, "a red cat")]
    with pytest.raises(BadInput, match="one question"):
        bank_of_prompts(lvlm, asked)


def test_capped_scores_are_refused_and_windows_cut_answers_only():
    native = tiny_lvlm("paligemma2")
    lvlm = wrap(native.module, native.processor)
    picture = photo(native.size)
    whole = lvlm.prompt(picture, "what is this ? what is this ? a red cat")  # longer than a window
    assert whole.prefix == len(whole.ids) == 28 and lvlm.decoder.window == 24
    assert max(probe.worst for probe in verify(lvlm, whole)) < 1e-12
    with pytest.raises(BadInput, match="sliding window holds 24"):
        lvlm.prompt(picture, "what is this ? what is this ? a red cat", [TOKEN])
    capped = paligemma2(cap=50.0)
    capped.module.set_attn_implementation({"text_config": "eager"})  # as 5.18 and newer choose
    with pytest.raises(UnsupportedModel, match="caps attention scores"):
        wrap(capped.module, capped.processor)


def test_several_pictures_stand_before_the_question():
    """Native inputs, and a bank of prompts: no processor is asked."""
    here = scene("paligemma")
    lvlm = here.lvlm

    def inputs(*seeds):
        asked = [lvlm.prompt(photo(here.native.size, seed), QUESTION).inputs for seed in seeds]
        many = {"pixel_values": torch.cat([each["pixel_values"] for each in asked])}
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            row = asked[0][name]
            many[name] = torch.cat([row[:, :16]] * (len(seeds) - 1) + [row], dim=1)
        return many

    others = [inputs(1, 2), inputs(3, 4)]
    prompt = lvlm.read(inputs(0, 9))
    assert str(prompt.tokens) == "4 x 4 + 4 x 4" and prompt.prefix == len(prompt.ids) == 37
    bank = bank_of_prompts(lvlm, [lvlm.read(each) for each in others])
    engine = MaskEngine(lvlm, prompt, None, bank, answer=[TOKEN], floor=None)
    average = prefix_hear.average_keys(lvlm.module, others)
    heads, image = some(2, 16), some(2, 32, seed=2)
    masks = (heads[1].view(GRID), None, image[1])
    slow = prefix_hear.blinded(lvlm.module, inputs(0, 9), average, *masks)
    assert_close(engine.adjusted(heads, image=image)[1], adjusted(slow[-1]), atol=1e-10, rtol=0)
    with pytest.raises(BadInput, match="make the prompt from the image itself"):
        MaskEngine(lvlm, prompt, None, make_bank(lvlm, here.pictures), answer=[TOKEN])
