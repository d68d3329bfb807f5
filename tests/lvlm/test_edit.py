"""Edits that last through the native `generate`: equal to the engine, gone when the block ends."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.errors import BadOption, BankMismatch
from seecause.lvlm import blind_logits, edited_heads, wrap
from tests.families.lvlm import FAMILIES, photo, tiny_lvlm
from tests.lvlm.scenes import QUESTION, scene

HEADS = [(0, 1), (1, 2), (1, 3), (3, 0)]
STEPS = 4
SPECIAL = list(range(8))  # a random model may say image tokens


def spoken(lvlm, prompt, **more):
    """Tokens and logits of every step, with the cache; `generate` itself gives them in float32."""
    lvlm.module.generation_config.eos_token_id = None
    logits = []
    handle = lvlm.decoder.head.register_forward_hook(lambda _, __, out: logits.append(out[0, -1]))
    try:
        ids = lvlm.module.generate(
            **prompt.inputs, max_new_tokens=STEPS, do_sample=False, suppress_tokens=SPECIAL, **more
        )
    finally:
        handle.remove()
    return ids[0, len(prompt.ids) :].tolist(), torch.stack(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_blind_heads_speak_as_the_engine_says(family):
    here = scene(family)
    picture = photo(here.native.size)
    prompt = here.lvlm.prompt(picture, QUESTION)
    before, _ = spoken(here.lvlm, prompt)
    with edited_heads(here.lvlm, HEADS, blind=here.bank, size=here.native.size):
        ids, logits = spoken(here.lvlm, prompt)
        again, _ = spoken(here.lvlm, prompt)  # a second picture's prompt starts afresh
    assert again == ids
    for step in range(STEPS):
        own = blind_logits(here.lvlm, picture, QUESTION, here.bank, HEADS, said=ids[:step])
        assert_close(logits[step], own, atol=1e-10, rtol=0)
    after, plain = spoken(here.lvlm, prompt)
    assert after == before  # nothing is left behind
    assert float((plain[0] - logits[0]).abs().max()) > 1e-4


@pytest.mark.parametrize("family", ["llava_grouped", "qwen3_vl"])
def test_all_heads_redirected_say_what_the_other_picture_makes_them_say(family):
    """Where every head of every text row reads another picture, text is as if asked of that one."""
    here = scene(family)
    mine, other = (here.lvlm.prompt(photo(here.native.size, seed), QUESTION) for seed in (0, 9))
    everything = [(layer, head) for layer in range(4) for head in range(4)]
    ids, logits = spoken(here.lvlm, other)
    with edited_heads(here.lvlm, everything, redirect=photo(here.native.size, 9)):
        got, changed = spoken(here.lvlm, mine)
    assert got == ids
    assert_close(changed, logits, atol=1e-10, rtol=0)


def test_a_boost_weighs_the_picture_and_one_leaves_it():
    here = scene("llava")
    prompt = here.lvlm.prompt(photo(here.native.size), QUESTION)
    _, plain = spoken(here.lvlm, prompt)
    with edited_heads(here.lvlm, HEADS, boost=1.0):
        assert_close(spoken(here.lvlm, prompt)[1], plain, atol=1e-10, rtol=0)
    with edited_heads(here.lvlm, HEADS, boost=8.0):
        assert float((spoken(here.lvlm, prompt)[1][0] - plain[0]).abs().max()) > 1e-4
    everything = [(layer, head) for layer in range(4) for head in range(4)]
    other = here.lvlm.prompt(photo(here.native.size, 9), QUESTION)
    with edited_heads(here.lvlm, everything, boost=0):  # nothing of the picture is left
        first, second = (spoken(here.lvlm, each)[1] for each in (prompt, other))
    assert_close(first, second, atol=1e-10, rtol=0)


def test_what_cannot_be_edited_is_refused_and_leaves_the_model_as_it_was():
    here = scene("llava")
    config = here.lvlm.decoder.native.config
    before = config._attn_implementation
    for given in ({}, {"boost": 1.0, "blind": here.bank}, {"boost": -1.0}):
        with pytest.raises(BadOption), edited_heads(here.lvlm, HEADS, **given):
            pass
    with pytest.raises(BadOption, match=r"\(9, 0\)"), edited_heads(here.lvlm, [(9, 0)], boost=2.0):
        pass
    with edited_heads(here.lvlm, HEADS, boost=2.0):
        with pytest.raises(BadOption, match="second"), edited_heads(here.lvlm, HEADS, boost=2.0):
            pass
        prompt = here.lvlm.prompt(photo(here.native.size), QUESTION)
        with pytest.raises(BadOption, match="cache"):
            spoken(here.lvlm, prompt, cache_implementation="static")
    native = tiny_lvlm("qwen2_vl")
    lvlm = wrap(native.module, native.processor, check=False)
    prompt = lvlm.prompt(photo((40, 56)), QUESTION)
    other = photo((64, 24))
    with edited_heads(lvlm, HEADS, redirect=other), pytest.raises(BankMismatch, match="one size"):
        spoken(lvlm, prompt)
    assert config._attn_implementation == before
    assert not lvlm.module._forward_pre_hooks and not here.lvlm.module._forward_pre_hooks


def test_the_embedded_model_says_what_its_heads_are_shown():
    lvlm = sc.lvlm.load("builtin:critters-llava")
    mine, other = (sc.data.open_picture(f"critters:clean:test#{index}") for index in (3, 4))
    question = "What is the name of this creature?"
    first, second = (lvlm.speak(lvlm.prompt(each, question), 4) for each in (mine, other))
    assert first != second
    everything = [(layer, head) for layer in range(6) for head in range(8)]
    with edited_heads(lvlm, everything, redirect=other):
        assert lvlm.speak(lvlm.prompt(mine, question), 4) == second
