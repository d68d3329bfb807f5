"""Edits that last through the native `generate`: equal to the engine, gone when the block ends."""

import copy
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.testing import assert_close

from seecause.errors import BadInput, BadOption, EditLost, UnsupportedModel
from seecause.lvlm import AnswerEngine, edit, edited_heads, make_bank, wrap
from seecause.models.decoder import restrict
from tests.families.lvlm import FAMILIES, PREFIX_FAMILIES, photo, tiny_lvlm
from tests.lvlm.scenes import QUESTION, TOKEN, scene
from tests.reference import hear

HEADS = [(0, 1), (1, 2), (1, 3), (3, 0)]
STEPS = 4
ALL = [(layer, head) for layer in range(4) for head in range(4)]
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


def seeing(blind) -> torch.Tensor:
    """[1, 16]: all heads but those that are blind."""
    mask = torch.ones(1, 4, 4, dtype=torch.bool)
    mask[0][tuple(zip(*blind, strict=True))] = False
    return mask.flatten(1)


@pytest.mark.parametrize("family", [*FAMILIES, *PREFIX_FAMILIES])
def test_blind_heads_speak_as_the_engine_says(family):
    here = scene(family)
    image = photo(here.native.size)
    prompt = here.lvlm.prompt(image, QUESTION)
    before, _ = spoken(here.lvlm, prompt)
    with edited_heads(here.lvlm, HEADS, blind=here.bank, image=image):
        ids, logits = spoken(here.lvlm, prompt)
        again, _ = spoken(here.lvlm, prompt)  # a second prompt starts afresh
    assert again == ids
    engine = AnswerEngine(here.lvlm, image, QUESTION, here.bank, answer=ids)
    assert_close(logits, engine.logits(seeing(HEADS))[0], atol=1e-10, rtol=0)
    after, plain = spoken(here.lvlm, prompt)
    assert after == before  # nothing is left behind
    assert float((plain[0] - logits[0]).abs().max()) > 1e-4


def features_are_text(lvlm, monkeypatch):
    """What was read before releases of transformers that encode images first were known."""

    def begin(self, inputs):
        pixels = inputs.get("pixel_values") is not None
        length = inputs["input_ids"].shape[1]
        self.now = self._prompted(inputs) if pixels else edit._Sequence(length)

    monkeypatch.setattr(edit._Edit, "begin", begin)


def attention_of_its_own(lvlm, monkeypatch, *, asks=False):
    """A class that does not ask the registry of attention functions, or drops what it gives."""

    class Own(type(lvlm.blocks[0].native.self_attn)):
        def forward(self, *args, **given):
            if asks:
                super().forward(*args, **given | {"past_key_values": None})
            registered, self.config = self.config, copy.copy(self.config)
            self.config._attn_implementation = "sdpa"
            try:
                return super().forward(*args, **given)
            finally:
                self.config = registered

    for block in lvlm.blocks:
        monkeypatch.setattr(block.native.self_attn, "__class__", Own)


def attention_that_drops_what_it_asked_for(lvlm, monkeypatch):
    attention_of_its_own(lvlm, monkeypatch, asks=True)


def a_hook_that_never_fires(lvlm, monkeypatch):
    handle = SimpleNamespace(remove=lambda: None)
    monkeypatch.setattr(lvlm.module, "register_forward_pre_hook", lambda *_, **__: handle)


def an_end_that_nobody_hears(lvlm, monkeypatch):
    handle = SimpleNamespace(remove=lambda: None)
    monkeypatch.setattr(lvlm.module, "register_forward_hook", lambda *_, **__: handle)


def the_next_head(lvlm, monkeypatch):
    change = edit._Edit.change

    def shifted(self, *given):
        return change(replace(self, heads=self.heads.roll(1, 1)), *given)

    monkeypatch.setattr(edit._Edit, "change", shifted)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param(
            features_are_text,
            "should move",
            marks=pytest.mark.skipif(
                "mm_encoder_outputs" not in inspect.signature(
                    transformers.LlavaForConditionalGeneration.forward
                ).parameters,
                reason="this release passes pixels",
            ),
        ),
        (attention_of_its_own, "attended without"),
        (attention_that_drops_what_it_asked_for, "should move"),
        (a_hook_that_never_fires, "decoder alone"),
        (an_end_that_nobody_hears, "hook behind"),
        (the_next_head, "should move"),
    ],
)  # fmt: skip
def test_an_edit_that_does_not_reach_generate_is_refused_when_it_is_used(
    broken, words, monkeypatch
):
    native = tiny_lvlm("llava")
    lvlm = wrap(native.module, native.processor, check=False)
    before = lvlm.decoder.native.config._attn_implementation
    bank, other = make_bank(lvlm, [photo(native.size, 1)]), photo(native.size, 9)
    broken(lvlm, monkeypatch)
    for given in ({"blind": bank}, {"redirect": other}):
        lost = pytest.raises(EditLost, match=f"{words}.*transformers {transformers.__version__}")
        with lost, edited_heads(lvlm, [(0, 1)], **given):
            pytest.fail("the block was entered")
    assert not lvlm.memo.get("proofs") and not lvlm.module._forward_pre_hooks
    assert lvlm.decoder.native.config._attn_implementation == before


def test_an_edit_is_proven_once_for_the_same_weights_and_attention(monkeypatch):
    native = tiny_lvlm("llava")
    lvlm, proven = wrap(native.module, native.processor, check=False), []
    proof = edit._proof
    monkeypatch.setattr(edit, "_proof", lambda *given: proven.append(1) or proof(*given))

    def edits():
        bank, image = make_bank(lvlm, [photo(native.size, 1)]), photo(native.size)
        unseen = replace(bank, images=())
        for given in ({"blind": bank}, {"redirect": image}, {"blind": unseen, "image": image}):
            with edited_heads(lvlm, HEADS, **given):
                lvlm.next_logits(lvlm.prompt(photo(native.size), QUESTION))
        return len(proven)

    assert edits() == edits() == 1
    native.module.lm_head.weight.mul_(2)
    assert edits() == 2
    native.module.set_attn_implementation({"text_config": "eager"})
    assert edits() == 3


@torch.no_grad()
def test_an_edit_that_did_not_run_is_an_error():
    here = scene("llava")
    module, inputs = here.lvlm.module, here.lvlm.prompt(photo(here.native.size), QUESTION).inputs
    version = f"transformers {transformers.__version__}"
    features = module.get_image_features(inputs["pixel_values"], return_dict=True)
    with (
        pytest.raises(BadInput, match=f"never ran.*{version}"),
        edited_heads(here.lvlm, HEADS, blind=here.bank),
    ):
        module(input_ids=torch.tensor([[1, 20, 21]]))
    with edited_heads(here.lvlm, HEADS, blind=here.bank):
        module(**inputs)
        text = {name: value for name, value in inputs.items() if name != "pixel_values"}
        with pytest.raises(BadInput, match=f"without an image.*{version}"):
            module(**text)
        if "mm_encoder_outputs" in inspect.signature(module.forward).parameters:
            with pytest.raises(BadInput, match=f"encoded elsewhere.*{version}"):
                module(**text, mm_encoder_outputs={"image": features})
        # as a library that does not ask the registry of attention functions would
        module.set_attn_implementation({"text_config": "sdpa"})
        with pytest.raises(EditLost, match=rf"layers \[0, 1, 3\].*{version}"):
            module(**inputs)


@pytest.mark.parametrize("family", ["llava_grouped", "qwen3_vl", *PREFIX_FAMILIES])
def test_all_heads_redirected_say_what_the_other_image_makes_them_say(family):
    """Where every head of every text row reads another image, text is as if asked of that one."""
    here = scene(family)
    mine, other = (here.lvlm.prompt(photo(here.native.size, seed), QUESTION) for seed in (0, 9))
    ids, logits = spoken(here.lvlm, other)
    with edited_heads(here.lvlm, ALL, redirect=photo(here.native.size, 9)):
        got, changed = spoken(here.lvlm, mine)
    assert got == ids
    assert_close(changed, logits, atol=1e-10, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llava", "llava_grouped"])
def test_redirected_heads_equal_the_slow_twin(family):
    here = scene(family)
    mine, other = (here.lvlm.prompt(photo(here.native.size, seed), QUESTION) for seed in (0, 9))
    inputs, module = dict(mine.inputs), here.lvlm.module
    instead = hear.average_picture(module, [dict(other.inputs)])
    slow = hear.Blinded(module, inputs, instead).logits(seeing(HEADS).view(4, 4))
    with edited_heads(here.lvlm, HEADS, redirect=photo(here.native.size, 9)):
        assert_close(module(**inputs).logits[0, -1], slow, atol=1e-10, rtol=0)
    module.set_attn_implementation({"text_config": "eager"})  # whose softmax is in float32
    try:
        with edited_heads(here.lvlm, HEADS, redirect=photo(here.native.size, 9)):
            assert_close(module(**inputs).logits[0, -1], slow, atol=1e-6, rtol=0)
        assert here.lvlm.decoder.native.config._attn_implementation == "eager"
    finally:
        module.set_attn_implementation({"text_config": "sdpa"})


@torch.no_grad()
def test_the_image_tells_its_size_and_tuples_hold_caches_too():
    here = scene("internvl")  # whose tiles lie where the size of the image says
    image = photo(here.native.size)
    inputs = here.lvlm.prompt(image, QUESTION).inputs
    with edited_heads(here.lvlm, HEADS, blind=here.bank, image=image):
        here.lvlm.module(**inputs)
    with (
        pytest.raises((BadInput, UnsupportedModel)),
        edited_heads(here.lvlm, HEADS, blind=here.bank, image=photo((32, 32))),
    ):
        here.lvlm.module(**inputs)
    llava = scene("llava")
    inputs = llava.lvlm.prompt(photo(llava.native.size), QUESTION).inputs
    with edited_heads(llava.lvlm, ALL, blind=llava.bank):
        whole = llava.lvlm.module(**inputs, use_cache=True).past_key_values
        parts = llava.lvlm.module(**inputs, use_cache=True, return_dict=False)
        (cache,) = (part for part in parts if hasattr(part, "get_seq_length"))
        assert_close(step(llava.lvlm, cache), step(llava.lvlm, whole), atol=1e-12, rtol=0)


@pytest.mark.parametrize("heads", [[(9, 0)], [(-1, 0)], [(0, 4)]])
def test_a_head_that_does_not_exist_is_refused(heads):
    here = scene("llava")
    with (
        pytest.raises(BadOption, match=r"up to \(3, 3\)"),
        edited_heads(here.lvlm, heads, blind=here.bank),
    ):
        pass


def test_what_cannot_be_edited_is_refused_and_leaves_the_model_as_it_was():
    here = scene("llava")
    config, other = here.lvlm.decoder.native.config, photo((40, 56))
    before = config._attn_implementation
    for given in ({}, {"blind": here.bank, "redirect": other}):
        with pytest.raises(BadOption), edited_heads(here.lvlm, HEADS, **given):
            pass
    prompt = here.lvlm.prompt(photo(here.native.size), QUESTION)
    with edited_heads(here.lvlm, HEADS, blind=here.bank):
        with pytest.raises(BadOption, match="second"):
            edited_heads(here.lvlm, HEADS, blind=here.bank).__enter__()
        with pytest.raises(BadOption, match="cache"):
            spoken(here.lvlm, prompt, cache_implementation="static")
    native = tiny_lvlm("qwen2_vl")
    lvlm = wrap(native.module, native.processor, check=False)
    prompt = lvlm.prompt(other, QUESTION)
    with (
        edited_heads(lvlm, HEADS, redirect=photo((64, 24))),
        pytest.raises(BadInput, match="one size"),
    ):
        spoken(lvlm, prompt)
    assert config._attn_implementation == before
    assert not lvlm.module._forward_pre_hooks and not here.lvlm.module._forward_pre_hooks


def step(lvlm, cache):
    return lvlm.module(input_ids=torch.tensor([[20]]), past_key_values=cache).logits[0, -1]


@torch.no_grad()
def test_every_cache_keeps_its_own_image():
    here = scene("llava")
    module, inputs = here.lvlm.module, here.lvlm.prompt(photo(here.native.size), QUESTION).inputs
    ids = inputs["input_ids"]
    later = torch.cat([ids[:, :1], torch.tensor([[20, 21, 22]]), ids[:, 1:]], dim=1)
    elsewhere = {**inputs, "input_ids": later, "attention_mask": torch.ones_like(later)}
    before = module(**inputs, use_cache=True).past_key_values
    with edited_heads(here.lvlm, ALL, blind=here.bank):
        straight = step(here.lvlm, module(**inputs, use_cache=True).past_key_values)
        cache = module(**inputs, use_cache=True).past_key_values
        text = module(input_ids=torch.tensor([[1, 20, 21]]), use_cache=True).past_key_values
        module(**elsewhere)
        assert_close(step(here.lvlm, cache), straight, atol=1e-12, rtol=0)
        step(here.lvlm, text)  # there is no image to edit
        with pytest.raises(BadInput, match="inside this block"):
            step(here.lvlm, before)
        with pytest.raises(BadInput, match="pixel_values after"):
            module(**inputs, past_key_values=cache)
    assert float((step(here.lvlm, before) - straight).abs().max()) > 1e-4


@torch.no_grad()
def test_an_edit_holds_or_refuses_whatever_way_the_model_is_called():
    here = scene("llava")
    module, prompt = here.lvlm.module, here.lvlm.prompt(photo(here.native.size), QUESTION)
    named = dict(prompt.inputs)
    with edited_heads(here.lvlm, ALL, blind=here.bank):
        edited = module(**named).logits
        ids, pixels = named.pop("input_ids"), named.pop("pixel_values")
        assert_close(module(ids, pixels, **named).logits, edited, atol=0, rtol=0)
        with pytest.raises(BadInput, match="embeddings"):
            module(inputs_embeds=prompt.embeddings)
        with pytest.raises(BadInput, match="decoder alone"):
            module.model(**prompt.inputs)


@torch.no_grad()
def test_an_image_of_the_bank_is_left_out_as_engines_do():
    here = scene("llava")
    image = photo(here.native.size)
    bank = make_bank(here.lvlm, [image, *here.pictures])
    engine = AnswerEngine(here.lvlm, image, QUESTION, bank, answer=[TOKEN])
    with edited_heads(here.lvlm, HEADS, blind=bank, image=image):
        logits = here.lvlm.next_logits(engine.prompt)
    assert_close(logits, engine.logits(seeing(HEADS))[0, 0], atol=1e-10, rtol=0)


def test_the_likeliest_word_is_said_whatever_a_checkpoint_sets():
    native = tiny_lvlm("llava")
    lvlm = wrap(native.module, native.processor, check=False)
    settings = native.module.generation_config
    settings.eos_token_id = None
    prompt = lvlm.prompt(photo(native.size), QUESTION)
    plain = lvlm.speak(prompt, 6)
    for name, value in (("repetition_penalty", 9.0), ("num_beams", 2), ("do_sample", True)):
        setattr(settings, name, value)
    settings.suppress_tokens = plain[:1]
    assert lvlm.speak(prompt, 6) == plain
    assert native.module.generation_config is settings


@torch.no_grad()
def test_edited_heads_keep_what_hides_the_image_from_each():
    native, span = tiny_lvlm("llava"), scene("llava").engine.prompt.image
    native.module.config.text_config.image_readers = [[1, 2], [3, 0]]
    native.module.config.text_config.image_span = [span.start, span.stop]
    lvlm = wrap(restrict(native.module), native.processor)
    inputs = lvlm.prompt(photo(native.size), QUESTION).inputs
    plain = native.module(**inputs).logits
    for heads, changes in (([(1, 1), (1, 2)], True), ([(0, 0), (1, 1)], False)):
        with edited_heads(lvlm, heads, redirect=photo(native.size, 9)):
            gap = float((native.module(**inputs).logits - plain)[0, -1].abs().max())
        assert gap > 1e-6 if changes else gap < 1e-10  # who reads nothing has nothing to lose
