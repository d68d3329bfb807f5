"""What heads do and would say, against the native attention, and what is said when they are
blind."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from seecause.errors import BadOption
from seecause.lvlm import HeadAttribution, edited_heads, head_words, speak_blind
from seecause.lvlm.edit import heads_mask
from seecause.lvlm.trace import HeadWords
from tests.families.lvlm import photo
from tests.lvlm.scenes import QUESTION, scene, some
from tests.lvlm.toy import toy_engine


@pytest.mark.parametrize("family", ["llava_grouped", "qwen3_vl"])
def test_attention_on_the_picture_by_log_sum_exp(family):
    here = scene(family)
    engine, prompt = here.engine, here.engine.prompt
    here.lvlm.module.set_attn_implementation({"text_config": "eager"})
    native = here.lvlm.module(
        **prompt.inputs, output_attentions=True
    ).attentions  # its softmax is in float32
    here.lvlm.module.set_attn_implementation({"text_config": "sdpa"})
    seen = engine.activations()
    for layer, weights in enumerate(native):
        rows = weights[0, :, prompt.text, prompt.image].double()  # [H, T, N]
        assert_close(seen.mass[layer].T, rows.sum(dim=-1), atol=1e-6, rtol=0)
        assert_close(seen.image_attention()[layer], rows.sum(-1).mean(-1), atol=1e-6, rtol=0)
        values = engine.cache.picture[layer][1][0, :, engine.cache.image]  # [Hkv, N, dh]
        for head in range(4):
            attention = seen.attention(layer, head)
            assert_close(attention, rows[head], atol=1e-6, rtol=0)
            part = attention @ values[head // 2]
            assert_close(seen.from_image[layer, :, head], part, atol=1e-10, rtol=0)
    for head in (4, -1):
        with pytest.raises(BadOption, match="0 to 3"):
            seen.attention(0, head)


@pytest.mark.parametrize("row", [-1, 2])
def test_what_heads_write_adds_up_to_the_block(row):
    here = scene("llava_grouped")
    mask = some(16)
    seen = here.engine.activations(mask)
    assert seen.states.shape[:2] == (5, here.engine.n_text)
    for layer, block in enumerate(here.lvlm.blocks):
        h = seen.states[layer, row]
        bias = block.mix(torch.zeros(1, 1, 32, dtype=h.dtype))[0, 0]
        middle = h + seen.written(row=row)[layer].sum(dim=0) + bias
        after = seen.states[layer + 1, row]
        assert_close(middle + block.feed(middle[None])[0], after, atol=1e-10, rtol=0)
    final = here.lvlm.decoder.norm(seen.states[-1][-1])
    expected = here.engine.adjusted(mask[None])[0]
    assert_close(final @ here.engine.readouts[0], expected, atol=1e-10, rtol=0)


def test_the_lens_reads_a_head_through_the_final_norm_and_the_vocabulary():
    here = scene("llava")
    seen, decoder = here.engine.activations(), here.lvlm.decoder
    sources = ((False, seen.heads), (True, seen.from_image))
    for image_only, source in sources:
        for row in (-1, 1):
            alone = torch.zeros(1, *source.shape[2:], dtype=source.dtype)  # [1, H, dh]
            alone[0, 3] = source[2, row, 3]
            written = here.lvlm.module.get_decoder().layers[2].self_attn.o_proj(alone.flatten(1))
            assert_close(
                seen.written(row=row, image_only=image_only)[2, 3], written[0], atol=1e-10, rtol=0
            )
            expected = decoder.head(decoder.norm(written))[0]
            got = seen.lens(2, 3, row=row, image_only=image_only)
            assert_close(got, expected, atol=1e-10, rtol=0)


def test_the_heads_that_bring_most_are_named_with_what_they_bring():
    engine = toy_engine()
    coefficients = torch.arange(12.0).sin().double().reshape(3, 4)
    heads = HeadAttribution(coefficients, 0.0, 1.0, 1.0, 8, 1.0, coefficients.abs())
    best = [(2, 0), (0, 2), (0, 1), (1, 3), (2, 1), (0, 3)]
    assert heads.top(6) == best
    usual = head_words(engine, heads)
    assert [(each.layer, each.head) for each in usual] == best[:5]
    assert {len(each.words) for each in usual} == {10}
    assert [each.coefficient for each in usual] == [
        float(coefficients[place]) for place in best[:5]
    ]
    everything = head_words(engine, heads, heads=99, words=10**6)
    words = len(engine.lvlm.decoder.head.weight)
    assert len(everything) == 12 and {len(each.words) for each in everything} == {words}
    message = HeadWords(0, 1, 0.5, (" Jade", "tail"))
    assert message.says("jade ") and message.says("TAIL") and not message.says("jad")


def test_heads_are_places_in_the_grid():
    lvlm = toy_engine().lvlm
    assert heads_mask(lvlm, [(0, 3), (2, 1)]).nonzero().tolist() == [[0, 3], [2, 1]]
    for wrong in ((3, 0), (0, 4), (-1, 0), (0, -1)):
        with pytest.raises(BadOption, match=r"up to \(2, 3\)") as refusal:
            heads_mask(lvlm, [(0, 0), wrong])
        assert str(wrong) in str(refusal.value)


def test_blind_heads_say_what_the_native_model_says_with_them_blind(monkeypatch):
    here, heads = scene("llava"), [(0, 1), (1, 2), (1, 3), (3, 0)]
    settings, picture = here.lvlm.module.generation_config, photo(here.native.size)
    monkeypatch.setattr(settings, "eos_token_id", None)
    prompt = here.lvlm.prompt(picture, QUESTION)
    asked = (here.lvlm, picture, QUESTION, here.bank)
    with edited_heads(here.lvlm, heads, blind=here.bank):
        ids = here.lvlm.speak(prompt, 5)
    assert speak_blind(*asked, heads, length=5) == ids
    assert speak_blind(*asked, length=5) == here.lvlm.speak(prompt, 5) != ids
    for ends in (ids[2], [999, ids[2]]):
        monkeypatch.setattr(settings, "eos_token_id", ends)
        assert speak_blind(*asked, heads, length=5) == ids[: ids.index(ids[2])]
