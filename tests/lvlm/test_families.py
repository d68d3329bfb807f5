"""Families whose image tokens stand in other ways: views equal native models, masks equal literal
replacement, edits last; the rest is refused by name."""

from functools import partial

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

from seecause.errors import DataMissing, UnsupportedModel, ViewMismatch
from seecause.lvlm import MaskEngine, edited_heads, load, wrap
from seecause.lvlm.bank import bank_of_prompts
from seecause.lvlm.model import verify
from seecause.models.block import same
from seecause.models.decoder import FAMILIES, REFUSED, find, rotate
from tests.families.lvlm import tiny_lvlm
from tests.families.lvlm_more import MORE, TOWER, bare_lvlm
from tests.lvlm.scenes import some
from tests.reference import hear

TOKEN, GRID = 15, (2, 4)


@pytest.mark.parametrize("family", MORE)
def test_view_masks_and_edits_equal_the_native_model(family):
    bare = bare_lvlm(family)
    inputs = bare.inputs()
    lvlm = wrap(bare.module, inputs=inputs)
    assert type(bare.module).__name__ in FAMILIES
    prompt = lvlm.read(inputs)
    assert str(prompt.tokens) == bare.places and prompt.n_image == len(bare.block)
    assert max(probe.worst for probe in verify(lvlm, prompt)) < 1e-12

    others = [bare.inputs(seed) for seed in (1, 2)]
    bank = bank_of_prompts(lvlm, [lvlm.read(each) for each in others])
    engine = MaskEngine(lvlm, prompt, None, bank, answer=[TOKEN], floor=None)
    twin = hear.Blinded(bare.module, inputs, hear.average_picture(bare.module, others))
    heads = some(2, 8)
    text, image = some(2, engine.n_text, seed=1), some(2, engine.n_image, seed=2)
    slow = twin.logits(heads[0].view(GRID), text[0], image[0])
    fast = engine.adjusted(heads, text, image)[0]
    assert_close(fast, slow[TOKEN] - slow.mean(), atol=1e-10, rtol=0)
    soft = engine.slopes(heads.double())[1]
    assert soft.isfinite().all() and float(soft.abs().max()) > 0

    blind = [divmod(i, 4) for i in (~heads[1]).nonzero()[:, 0].tolist()]
    with edited_heads(lvlm, blind, blind=bank), torch.no_grad():
        native = bare.module(**inputs, use_cache=True).logits[0, -1]
    (proof,) = lvlm.memo["proofs"].values()  # made inside of that forward, through generate
    assert proof.moved > 1e-3 and proof.worst < 1e-10
    own = engine.adjusted(heads[1:])[0]
    assert_close(native[TOKEN] - native.mean(), own, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("family", "part", "instead"),
    [
        ("glm4v", "rotate", lambda x, at: x),
        ("gemma3", "branch", same),
        ("granite_vision", "branch", same),
        ("aya_vision", "parallel", False),
        ("aya_vision", "rotate", partial(rotate, table="rope")),
    ],
)
def test_what_is_new_in_a_family_belongs_to_its_view(family, part, instead):
    bare = bare_lvlm(family)
    lvlm = wrap(bare.module, check=False)
    setattr(lvlm.blocks[1], part, instead)
    with pytest.raises(ViewMismatch) as refusal:
        verify(lvlm, lvlm.read(bare.inputs()))
    assert refusal.value.where in ("layers.1", "the vocabulary")


def test_others_are_refused_by_name_with_the_reason():
    config = hf.Blip2Config(
        vision_config={**TOWER, "num_hidden_layers": 1}, num_query_tokens=2, image_token_index=4,
        qformer_config=dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                            intermediate_size=16, encoder_hidden_size=16),
        text_config=dict(model_type="opt", hidden_size=16, ffn_dim=16, num_hidden_layers=1,
                         num_attention_heads=2, vocab_size=40, word_embed_proj_dim=16),
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match="learned positions, not rotary"):
        wrap(hf.Blip2ForConditionalGeneration(config))
    assert not set(REFUSED) & set(FAMILIES)
    text = hf.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    config = hf.Lfm2VlConfig(vision_config={**TOWER, "num_patches": 16}, text_config=text)
    with torch.device("meta"), pytest.raises(UnsupportedModel, match="convolutions"):
        find(hf.Lfm2VlForConditionalGeneration(config))


def test_weights_elsewhere_are_refused_in_words():
    native = tiny_lvlm("llava", torch.float32)
    native.module.lm_head.to("meta")
    with pytest.raises(UnsupportedModel, match=r"meta and cpu; load all of the plain model"):
        wrap(native.module, native.processor)


def test_quantised_weights_without_their_library_are_refused_in_words(tmp_path):
    native = tiny_lvlm("llava", torch.float32)
    native.module.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    native.module.config.save_pretrained(tmp_path)
    native.processor.save_pretrained(tmp_path)
    del native.module.config.quantization_config
    config = (tmp_path / "config.json").read_text()
    native.module.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(DataMissing):
        load(str(tmp_path))
