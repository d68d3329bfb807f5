"""The average image: what it is of, leaving one out, and what does not fit."""

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from seecause import critters
from seecause.critters.rendering import STYLES
from seecause.data.dataset import to_pil
from seecause.errors import BadInput, BadOption, DataMissing
from seecause.lvlm import MaskEngine, MeanBank, calibration_critters, make_bank
from seecause.lvlm.bank import bank_of_prompts, image_digest
from seecause.lvlm.cache import run_prefix
from tests.families.lvlm import photo
from tests.lvlm.scenes import QUESTION, TOKEN, scene
from tests.reference import hear


@pytest.mark.parametrize("family", ["llava_next", "qwen3_vl"])
def test_means_equal_what_the_native_model_makes(family):
    here = scene(family)
    means = hear.average_picture(
        here.lvlm.module, [dict(here.lvlm.prompt(p, QUESTION).inputs) for p in here.pictures]
    )
    keys, values = here.bank.means(here.lvlm, here.engine.prompt)
    for layer, (k, v) in enumerate(means):
        assert_close(keys[layer], k, atol=1e-12, rtol=0)
        assert_close(values[layer], v, atol=1e-12, rtol=0)
    same = bank_of_prompts(here.lvlm, [here.lvlm.prompt(p, QUESTION) for p in here.pictures])
    assert_close(same.means(here.lvlm, here.engine.prompt), torch.stack([keys, values]))


def test_a_picture_is_left_out_as_often_as_it_is_in():
    here = scene("llava")
    first, *others = here.pictures
    twice, none = make_bank(here.lvlm, [first, *others, first]), make_bank(here.lvlm, others)
    prompt = here.lvlm.prompt(first, QUESTION)
    assert_close(
        twice.means(here.lvlm, prompt, first), none.means(here.lvlm, prompt), atol=1e-10, rtol=0
    )
    with pytest.raises(BadInput, match="leaves nothing"):
        make_bank(here.lvlm, [first, first]).means(here.lvlm, prompt, first)


def test_pictures_are_resized_to_that_of_the_prompt_which_must_be_known():
    here = scene("qwen2_vl")
    bank = make_bank(here.lvlm, [photo((64, 64), 1)])
    wide = photo((64, 64), 1).resize((56, 40), Image.Resampling.BICUBIC)
    own = here.lvlm.prompt(wide, QUESTION)
    prompt = here.lvlm.prompt(photo((40, 56)), QUESTION)
    prefix = run_prefix(here.lvlm.decoder, own)
    for layer, keys in enumerate(bank.means(here.lvlm, prompt)[0]):
        assert_close(keys, prefix[layer][0][0, :, own.image], atol=1e-12, rtol=0)
    with pytest.raises(BadInput, match="make the prompt from the image itself"):
        fresh = make_bank(here.lvlm, [photo((64, 64), 1)])
        fresh.means(here.lvlm, here.lvlm.read(dict(prompt.inputs)))


def test_a_picture_that_has_the_right_tokens_is_not_resized():
    here = scene("llava")  # whose pictures all have 4 x 4 tokens
    pictures = [photo((40, 56), 1), photo((64, 48), 2)]
    bank = make_bank(here.lvlm, pictures)
    prompts = [dict(here.lvlm.prompt(picture, QUESTION).inputs) for picture in pictures]
    means = hear.average_picture(here.lvlm.module, prompts)
    keys, values = bank.means(here.lvlm, here.engine.prompt)
    for layer, (k, v) in enumerate(means):
        assert_close(keys[layer], k, atol=1e-12, rtol=0)
        assert_close(values[layer], v, atol=1e-12, rtol=0)


def test_pictures_are_told_apart_by_their_shape_too():
    shapes = [Image.new("RGB", size) for size in ((4, 6), (6, 4), (4, 6))]
    first, second, again = map(image_digest, shapes)
    assert first == again != second


def test_calibration_critters_come_in_every_style():
    few = calibration_critters(7)
    assert [len(calibration_critters(n)) for n in (1, 2, 4)] == [1, 2, 4]
    latents = critters.draw("balanced", "train", 7, start=1 << 30)  # no model is trained on these
    for place, style in zip((0, 3, 6), STYLES, strict=True):
        shown = critters.render(latents[place : place + 1], style=style).image
        assert few[place] == to_pil(shown[0]) and len(few) == 7


def test_prompts_of_a_bank_may_have_the_picture_at_different_places():
    here = scene("llava")
    question = [here.lvlm.prompt(photo(here.native.size, seed), QUESTION) for seed in (1, 2)]
    inputs = dict(question[1].inputs)
    for name in ("input_ids", "attention_mask"):  # a word more before the picture
        inputs[name] = torch.cat([inputs[name][:, :1], inputs[name]], dim=1)
    moved = here.lvlm.read(inputs)
    assert moved.image.start == question[0].image.start + 1
    both = bank_of_prompts(here.lvlm, [question[0], moved]).means(here.lvlm, moved)
    each = [bank_of_prompts(here.lvlm, [p]).means(here.lvlm, moved) for p in (question[0], moved)]
    for mean, first, second in zip(both, *each, strict=True):
        assert_close(mean, (first + second) / 2, atol=1e-12, rtol=0)


def test_banks_are_saved_and_loaded(tmp_path):
    here = scene("llava_next")
    read = MeanBank.load(here.bank.save(tmp_path / "new" / "bank"))
    assert_close(
        read.means(here.lvlm, here.engine.prompt), here.bank.means(here.lvlm, here.engine.prompt)
    )
    assert (read.model, read.digests) == (here.bank.model, here.bank.digests)
    assert repr(read) == "MeanBank(3 images, image tokens 4 x 4 + 6 x 8 with newlines)"
    with pytest.raises(BadInput, match=r"without its calibration.*this image has.*4 x 4 \+ 8 x 8"):
        MaskEngine(here.lvlm, photo((70, 70)), QUESTION, read, answer=[TOKEN], floor=None)
    with pytest.raises(DataMissing):
        MeanBank.load(tmp_path / "nowhere")
    file = tmp_path / "new" / "bank" / "bank.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataMissing, match=r"cannot be read.*`seecause lvlm bank`"):
        MeanBank.load(file.parent)


def test_a_bank_is_prepared_for_the_sizes_asked_for(tmp_path):
    here = scene("qwen2_vl")
    empty = make_bank(here.lvlm, here.pictures)
    assert repr(empty) == "MeanBank(3 images, image tokens none yet)"
    bank = make_bank(here.lvlm, here.pictures, sizes=[(40, 56), (64, 64)])
    read = MeanBank.load(bank.save(tmp_path))
    assert read.sums.keys() == bank.sums.keys() and len(read.sums) == 2
    assert all(torch.equal(read.sums[key], sums) for key, sums in bank.sums.items())


def test_what_does_not_fit_is_refused():
    here, other = scene("llava"), scene("llava_grouped")
    with pytest.raises(BadInput, match="another model"):
        MaskEngine(other.lvlm, photo((40, 56)), QUESTION, here.bank)
    with pytest.raises(BadOption, match="at least one calibration image"):
        make_bank(here.lvlm, [])
