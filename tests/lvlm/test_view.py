"""The view itself: its fingerprint notices a removed head, and its own answer ends where the model
ends it."""

from __future__ import annotations

import pytest
import torch

import seecause as sc
from seecause.critters.train.llava_model import RECIPES, build_llava, make_words
from seecause.errors import BadOption, BadPrompt, WeakAnswer
from seecause.lvlm import LVLM, AnswerEngine, MaskEngine, make_bank, wrap
from seecause.models.decoder import restrict
from tests.families.lvlm import photo, tiny_lvlm
from tests.lvlm.scenes import QUESTION, TOKEN, scene
from tests.lvlm.toy import pictures, toy_engine


def test_removing_any_head_changes_the_fingerprint():
    recipe = RECIPES["critters-llava"]
    lvlm = wrap(build_llava(recipe, make_words()), check=False)
    whole, width = lvlm.fingerprint(), recipe.width // recipe.heads
    for block in lvlm.blocks[::5]:  # the first and the last
        attention = block.native.self_attn
        for head in range(recipe.heads):
            own = slice(head * width, (head + 1) * width)
            for weight in (attention.o_proj.weight[:, own], attention.v_proj.weight[own]):
                kept = weight.clone()
                weight.zero_()
                assert lvlm.fingerprint() != whole, (block.name, head)
                weight.copy_(kept)
    assert lvlm.fingerprint() == whole


def test_a_word_past_the_end_of_the_models_own_answer_is_refused():
    native = tiny_lvlm("llava")
    lvlm = wrap(native.module, native.processor)
    picture, bank = photo(native.size), make_bank(lvlm, [photo(native.size, 1)])
    message = lvlm.speak(lvlm.prompt(picture, QUESTION), 4)
    assert len(message) == 4
    lvlm.module.generation_config.eos_token_id = [message[2]]  # now the answer ends before it
    length = message.index(message[2])
    assert lvlm.speak(lvlm.prompt(picture, QUESTION), 4) == message[:length]
    with pytest.raises(BadOption, match=f"position=3 .*below {length}"):
        MaskEngine(lvlm, picture, QUESTION, bank, position=3, floor=None)


def test_an_answer_in_unknown_words_is_refused():
    engine = toy_engine()
    with pytest.raises(BadPrompt, match=r"'banana'.*does not know"):
        engine.lvlm.answer_ids(pictures(1)[0], "What colour is the tail?", "banana")


def test_a_planted_model_refuses_a_picture_in_another_place():
    native = tiny_lvlm("llava")
    native.module.config.text_config.image_readers = [[1, 2]]
    image = scene("llava").engine.prompt.image
    native.module.config.text_config.image_span = [image.start, image.stop]
    lvlm = wrap(restrict(native.module), native.processor)
    assert lvlm.prompt(photo(native.size), QUESTION).image == image
    lvlm.template = "USER : USER : {image} {question} ASSISTANT :"
    with pytest.raises(BadPrompt, match=f"expects {image.start} to {image.stop}"):
        lvlm.prompt(photo(native.size), QUESTION)


def test_planted_heads_alone_have_attention_on_the_picture():
    native = tiny_lvlm("llava")
    image = scene("llava").engine.prompt.image
    native.module.config.text_config.image_readers, native.module.config.text_config.image_span = (
        [[1, 2]],
        [image.start, image.stop],
    )
    lvlm = wrap(restrict(native.module), native.processor)
    engine = MaskEngine(
        lvlm,
        photo(native.size),
        QUESTION,
        make_bank(lvlm, [photo(native.size, 1)]),
        answer=[7],
        floor=None,
    )
    seen = engine.activations()
    for layer in range(2):
        for head in range(4):
            rows = seen.attention(layer, head)
            torch.testing.assert_close(
                rows.sum(dim=1), seen.mass[layer, :, head], atol=1e-12, rtol=0
            )
            assert bool((rows > 0).any()) == ((layer, head) == (1, 2))


def test_an_answer_without_numbers_is_refused(monkeypatch):
    here = scene("llava")
    nothing = torch.full_like(here.engine.readout, torch.nan)
    monkeypatch.setattr(LVLM, "readout", lambda *_: nothing)
    with pytest.raises(WeakAnswer):
        MaskEngine(here.lvlm, here.engine.prompt, None, here.bank, answer=[TOKEN], floor=None)


def test_a_protocol_says_what_was_asked_of_which_model():
    here = scene("llava")
    picture = photo(here.native.size)
    options = {"answer": [3, TOKEN], "position": 1, "floor": None, "vocabulary": 30}
    engine = MaskEngine(here.lvlm, picture, QUESTION, here.bank, **options)
    own = engine.protocol()
    expected = {
        "model": here.lvlm.name, "fingerprint": here.lvlm.fingerprint(), "question": QUESTION,
        "answer": here.lvlm.pieces(torch.tensor([TOKEN]))[0], "target": TOKEN, "position": 1,
        "bank": {"mode": "shape", "pictures": 3, "size": None}, "image_tokens": "4 x 4",
        "text": list(engine.prompt.pieces), "vocabulary": 30, "floor": None,
        "intact": engine.intact, "ablated": engine.ablated, "dtype": "float64", "device": "cpu",
        "seecause": sc.__version__, "torch": torch.__version__,
    }  # fmt: skip
    assert own == expected
    ends = engine.adjusted(torch.tensor([[0.0], [1.0]]).expand(2, 16)).tolist()
    assert [engine.ablated, engine.intact] == ends


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_without_an_answer_the_models_own_words_are_explained(family):
    here, picture = scene(family), photo(scene(family).native.size)
    own = here.lvlm.module(**here.lvlm.prompt(picture, QUESTION).inputs).logits[0, -1].argmax()
    for image, question in ((picture, QUESTION), (here.lvlm.prompt(picture, QUESTION), None)):
        engine = MaskEngine(here.lvlm, image, question, here.bank, floor=None)
        assert engine.target == int(own) and engine.answer == here.lvlm.pieces(own[None])[0]
    spoken = here.lvlm.speak(here.lvlm.prompt(picture, QUESTION), 3)
    later = MaskEngine(here.lvlm, picture, QUESTION, here.bank, position=2, floor=None)
    assert later.target == spoken[2] and later.prompt.ids[-2:].tolist() == spoken[:2]
    assert AnswerEngine(here.lvlm, picture, QUESTION, here.bank, length=3).targets == spoken
