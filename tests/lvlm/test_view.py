"""The view itself: its fingerprint notices a removed head, and its own answer ends where the model
ends it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from seecause.errors import BadInput, BadOption, UnknownName
from seecause.lvlm import AnswerEngine, MaskEngine, make_bank, model, wrap
from seecause.models.decoder import restrict
from tests.families.lvlm import photo, tiny_lvlm
from tests.lvlm.scenes import QUESTION, TOKEN, scene
from tests.lvlm.toy import pictures, toy_engine
from tools.critters.llava_model import RECIPES, build_llava, make_words


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


def test_what_a_tokenizer_puts_before_every_text_is_no_unknown_word():
    class Words:
        unk_token_id = 0  # which also begins a text, as in GPT-2's kin

        def __call__(self, text, add_special_tokens=True):
            ids = [{"cat": 1, "dog": 2}.get(word, 0) for word in text.split()]
            return {"input_ids": [0, *ids] if add_special_tokens else ids}

    lvlm = replace(scene("llava").lvlm, processor=SimpleNamespace(tokenizer=Words()))
    assert lvlm.unknown_words("cat zebra dog") == ["zebra"]


def test_a_view_says_what_it_is_and_pieces_are_numbers_without_a_tokenizer():
    native = tiny_lvlm("llava")
    bare, named = (
        wrap(native.module, processor, check=False, **names)
        for processor, names in ((None, {}), (native.processor, {"name": "mine"}))
    )
    family = "transformers.LlavaForConditionalGeneration, 4 blocks x 4 heads, cpu, float64"
    assert repr(bare) == f"LVLM('LlavaForConditionalGeneration', {family})"
    assert repr(named) == f"LVLM('mine', {family})"
    ids = torch.tensor([16, 7])
    assert bare.pieces(ids) == ("16", "7") and bare.unknown_words("what is zebra") == []
    assert named.pieces(ids) == ("cat", "ASSISTANT")
    assert named.unknown_words("what zebra is lion zebra") == ["zebra", "lion"]
    with pytest.raises(BadInput, match="without a processor"):
        bare.answer_ids(photo(native.size), QUESTION, "cat")


def test_answers_are_token_ids_however_they_are_given():
    here = scene("llava")
    asked = (photo(here.native.size), QUESTION)
    assert here.lvlm.answer_ids(*asked, torch.tensor([7, 11])) == [7, 11]
    assert here.lvlm.answer_ids(*asked, (39, 0)) == [39, 0]
    assert here.lvlm.answer_ids(*asked, "red cat") == [19, 16]
    own = here.lvlm.speak(here.lvlm.prompt(*asked), 3)
    assert here.lvlm.answer_ids(*asked, None, 3) == own
    assert here.lvlm.answer_ids(*asked, None) == own[:1]  # one word
    spoken = here.lvlm.prompt(*asked, [7, 11]).ids[-2:]
    assert spoken.tolist() == [7, 11] and here.lvlm.prompt(*asked, "red cat").ids[-1] == 16


def test_what_cannot_be_loaded_as_asked_for_is_refused(monkeypatch):
    config = SimpleNamespace(quantization_config={})
    monkeypatch.setattr(model, "_open", lambda where: (SimpleNamespace(config=config), None))
    for options, match in (
        ({"dtype": "float32"}, "quantised and stays as stored"),
        ({"dtype": "float65"}, "float32, bfloat16"),
        ({"dtype": "Tensor"}, "float32, bfloat16"),
        ({"device": "nowhere"}, r"device='nowhere'.*expected cpu"),
    ):
        with pytest.raises(BadOption, match=match):
            model.load("hf:packed", **options)
    for spec in ("hf:", "elsewhere:x", "builtin:nonsense"):
        with pytest.raises(UnknownName, match="hf:NAME"):
            model.load(spec)


def test_a_word_past_the_end_of_the_models_own_answer_is_refused():
    native = tiny_lvlm("llava")
    lvlm = wrap(native.module, native.processor)
    picture, bank = photo(native.size), make_bank(lvlm, [photo(native.size, 1)])
    message = lvlm.speak(lvlm.prompt(picture, QUESTION), 4)
    assert len(message) == 4
    ends = [39, message[2]]  # one of two; now the answer ends before it
    lvlm.module.generation_config.eos_token_id = ends
    length = message.index(message[2])
    assert lvlm.speak(lvlm.prompt(picture, QUESTION), 4) == message[:length]
    with pytest.raises(BadOption, match="generates no token"):
        MaskEngine(lvlm, picture, QUESTION, bank, position=3, floor=None)


def test_an_answer_in_unknown_words_is_refused():
    engine = toy_engine()
    with pytest.raises(BadInput, match=r"'banana'.*does not know"):
        engine.lvlm.answer_ids(pictures(1)[0], "What colour is the tail?", "banana")
    other = scene("llava")  # in the question they are no hindrance
    assert other.lvlm.answer_ids(photo(other.native.size), "what is zebra ?", "cat") == [16]


def test_pictures_are_sent_in_the_models_dtype_and_labels_stay_behind():
    lvlm = scene("llava").lvlm
    pixels, ids = torch.ones(1, 3, 2, 2, dtype=torch.float32), torch.tensor([[1, 2]])
    given = {"pixel_values": pixels, "input_ids": ids, "labels": ids, "names": ["a"]}
    sent = lvlm.send(given)
    assert list(sent) == ["pixel_values", "input_ids", "names"] and "labels" in given
    assert sent["pixel_values"].dtype == torch.float64 and sent["input_ids"].dtype == torch.int64


def test_a_planted_model_refuses_a_picture_in_another_place():
    native = tiny_lvlm("llava")
    native.module.config.text_config.image_readers = [[1, 2]]
    image = scene("llava").engine.prompt.image
    native.module.config.text_config.image_span = [image.start, image.stop]
    lvlm = wrap(restrict(native.module), native.processor)
    assert lvlm.prompt(photo(native.size), QUESTION).image == image
    lvlm.template = "USER : USER : {image} {question} ASSISTANT :"
    with pytest.raises(BadInput, match=f"expects {image.start} to {image.stop}"):
        lvlm.prompt(photo(native.size), QUESTION)


def test_a_protocol_says_what_was_asked_of_which_model():
    here = scene("llava")
    options = {"answer": [3, TOKEN], "position": 1, "floor": None}
    engine = MaskEngine(here.lvlm, photo(here.native.size), QUESTION, here.bank, **options)
    expected = {
        "fingerprint": here.lvlm.fingerprint(), "question": QUESTION, "target": TOKEN,
        "position": 1, "bank": {"images": 3}, "text": list(engine.prompt.pieces), "floor": None,
        "intact": engine.intact, "ablated": engine.ablated, "dtype": "float64",
    }  # fmt: skip
    assert expected.items() <= engine.protocol().items()


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
