"""The mask engine against the native model with keys and values literally replaced, and the
identities of the definition."""

import pytest
import torch
from torch.testing import assert_close

from seecause.errors import BadInput, BadOption
from seecause.lvlm import LVLM, MaskEngine, cache, make_bank, wrap
from seecause.models.decoder import restrict
from tests.families.lvlm import FAMILIES, PREFIX_FAMILIES, photo, tiny_lvlm
from tests.lvlm.scenes import GRID, QUESTION, TOKEN, scene, some
from tests.reference import hear


def twin_of(lvlm: LVLM, engine: MaskEngine, pictures) -> hear.Blinded:
    means = hear.average_picture(
        lvlm.module, [dict(lvlm.prompt(p, QUESTION).inputs) for p in pictures]
    )
    return hear.Blinded(lvlm.module, dict(engine.prompt.inputs), means)


def adjusted(logits: torch.Tensor) -> torch.Tensor:
    return logits[TOKEN] - logits.mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_equals_the_slow_twin(family):
    here = scene(family)
    engine, twin = here.engine, twin_of(here.lvlm, here.engine, here.pictures)
    heads, text, image = (
        some(3, 16),
        some(3, engine.n_text, seed=1),
        some(3, engine.n_image, seed=2),
    )
    plain, mixed = engine.adjusted(heads), engine.adjusted(heads, text, image)
    assert_close(plain[0], adjusted(twin.logits(heads[0].view(GRID))), atol=1e-10, rtol=0)
    assert_close(
        mixed[1], adjusted(twin.logits(heads[1].view(GRID), text[1], image[1])), atol=1e-10, rtol=0
    )
    everyday = hear.blinded_batch(
        here.lvlm.module, dict(engine.prompt.inputs), twin.means, heads.view(3, *GRID)
    )
    assert_close(
        plain, everyday @ engine.readouts[0], atol=1e-10, rtol=0
    )  # what benchmarks/lvlm.py races against


@pytest.mark.parametrize("family", ["llava", "llava_grouped", "qwen2_vl"])
def test_the_careful_plain_way_has_the_same_numbers(family):
    """The other rival of benchmarks/lvlm.py: a prefix that is computed once."""
    here, heads = scene(family), some(3, 16)
    module, inputs = here.lvlm.module, dict(here.engine.prompt.inputs)
    given = hear.arriving(module, inputs)
    means = twin_of(here.lvlm, here.engine, here.pictures).means
    prefix = hear.remembered(module, inputs, means, given)
    careful = hear.cached_batch(module, inputs, prefix, heads.view(3, *GRID), given)
    plain = here.engine.adjusted(heads)
    assert_close(plain, careful @ here.engine.readouts[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", [*FAMILIES, *PREFIX_FAMILIES])
def test_identities_of_the_definition(family):
    here = scene(family)
    engine = here.engine
    on, off = torch.ones(1, 16), torch.zeros(1, 16)
    native = here.lvlm.module(**engine.prompt.inputs).logits[0, -1]
    assert_close(engine.adjusted(on)[0], adjusted(native), atol=1e-10, rtol=0)
    blind = engine.adjusted(off)
    assert_close(engine.adjusted(on, text=torch.zeros(1, engine.n_text)), blind, atol=1e-10, rtol=0)
    assert_close(
        engine.adjusted(on, image=torch.zeros(1, engine.n_image)), blind, atol=1e-10, rtol=0
    )
    other = MaskEngine(
        here.lvlm, photo(here.native.size, seed=9), QUESTION, here.bank, answer=[TOKEN], floor=None
    )
    assert_close(other.adjusted(off), blind, atol=1e-10, rtol=0)  # x = 0 does not know the picture
    assert abs(float(other.adjusted(on) - engine.adjusted(on))) > 1e-4
    assert_close(
        engine.evaluate(torch.cat([off, on])), torch.tensor([0.0, 1.0], dtype=torch.float64)
    )


def test_a_mask_counts_alone():
    """Whatever its company, its place and the size of the block."""
    here = scene("llava_grouped")
    heads, text, image = (
        some(21, 16, share=0.3),
        some(21, here.engine.n_text),
        some(21, here.engine.n_image),
    )
    small = MaskEngine(here.lvlm, here.engine.prompt, None, here.bank, answer=[TOKEN], floor=None)
    small.block_size = 4
    order = torch.randperm(21)
    for given in ((heads,), (heads, text), (heads, text, image), (None, None, image)):
        whole = here.engine.evaluate(*given)
        shuffled = [None if mask is None else mask[order] for mask in given]
        assert_close(small.evaluate(*shuffled), whole[order], atol=1e-10, rtol=0)
        alone = [None if mask is None else mask[5:6] for mask in given]
        assert_close(here.engine.evaluate(*alone), whole[5:6], atol=1e-10, rtol=0)


def test_rows_that_run_once_are_those_of_the_masks_at_hand():
    """Another first row that sees is another cache."""
    here = scene("llava_grouped")
    twin = twin_of(here.lvlm, here.engine, here.pictures)
    everything = torch.ones(GRID, dtype=torch.bool)
    for first in (-2, -4, -2, -1):
        text = torch.zeros(1, here.engine.n_text, dtype=torch.bool)
        text[:, first] = True
        fast = here.engine.adjusted(text=text)[0]
        assert_close(fast, adjusted(twin.logits(everything, text[0])), atol=1e-10, rtol=0)
        assert here.engine._cache_for(text).start == here.engine.n_text + first


def test_heads_that_may_not_read_the_picture_do_nothing():
    native = tiny_lvlm("llava")
    start, stop = (
        scene("llava").engine.prompt.image.start,
        scene("llava").engine.prompt.image.stop,
    )
    native.module.config.text_config.image_readers = [[1, 2], [3, 0]]
    native.module.config.text_config.image_span = [start, stop]
    lvlm = wrap(restrict(native.module), native.processor)
    engine = MaskEngine(
        lvlm,
        photo(native.size),
        QUESTION,
        make_bank(lvlm, [photo(native.size, s) for s in (1, 2)]),
        answer=[TOKEN],
        floor=None,
    )
    effects = (engine.evaluate(~torch.eye(16, dtype=torch.bool)) - 1).abs().view(GRID)
    assert (effects > 1e-9).nonzero().tolist() == [[1, 2], [3, 0]]
    tokens = engine.evaluate(text=some(2, engine.n_text), image=some(2, engine.n_image))
    assert torch.isfinite(tokens).all() and engine.activations().attention[1, 1].max() == 0
    late = torch.zeros(1, engine.n_text, dtype=torch.bool)  # rows before run once, as restricted
    late[:, -2:] = True
    beside_all = engine.adjusted(text=torch.cat([late, torch.ones_like(late)]))[:1]
    assert_close(engine.adjusted(text=late), beside_all, atol=1e-10, rtol=0)


def test_bad_masks_and_weak_answers_are_refused():
    here = scene("llava")
    for wrong in (
        {"heads": torch.ones(2, 15)},
        {"text": torch.ones(16)},
        {"heads": torch.ones(2, 16), "image": torch.ones(3, 16)},
        {"heads": torch.ones(0, 16)},
    ):
        with pytest.raises(BadOption):
            here.engine.evaluate(**wrong)
    with pytest.raises(BadInput, match="floor=1000"):
        MaskEngine(here.lvlm, photo(here.native.size), QUESTION, here.bank, floor=1000)
    signs = [
        MaskEngine(here.lvlm, here.engine.prompt, None, here.bank, answer=[token], floor=None).span
        > 0
        for token in range(8)
    ]
    assert 0 < sum(signs) < 8
    against = signs.index(False)
    for floor in (0, -1000):
        with pytest.raises(BadInput):  # the picture speaks against it
            MaskEngine(
                here.lvlm, here.engine.prompt, None, here.bank, answer=[against], floor=floor
            )
    asked = (here.lvlm, photo(here.native.size), QUESTION, here.bank)
    for position, expected in ((1, "below 1, the number"), (-1, "at least 0")):
        with pytest.raises(BadOption, match=f"position={position} .*{expected}"):
            MaskEngine(*asked, answer="cat", position=position)
    seeing = [here.lvlm, here.engine.prompt, None, here.bank]
    span = MaskEngine(*seeing, answer=[signs.index(True)], floor=0).span
    assert MaskEngine(*seeing, answer=[signs.index(True)], floor=span).span == span  # not less
    for wrong in ([7, 8], "cat"):
        with pytest.raises(BadOption, match="one token id with a Prompt"):
            MaskEngine(here.lvlm, here.engine.prompt, None, here.bank, answer=wrong)
    with pytest.raises(BadOption, match="question"):
        MaskEngine(here.lvlm, photo(here.native.size), None, here.bank)


@pytest.mark.parametrize("family", ["llava_grouped", "qwen2_vl"])
def test_without_a_fused_kernel_the_answers_are_the_same(family, monkeypatch):
    engine = scene(family).engine
    heads, text = some(5, 16), some(5, engine.n_text, seed=1)
    expected = engine.adjusted(heads), engine.adjusted(heads, text)
    monkeypatch.setattr(cache, "has_fused_read", lambda q: False)
    assert_close(engine.adjusted(heads), expected[0], atol=1e-10, rtol=0)
    assert_close(engine.adjusted(heads, text), expected[1], atol=1e-10, rtol=0)
    q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    some_rows, whole = (
        cache.read_own(q[:, :, 2:], k, v, scale=0.3),
        cache.read_own(q, k, v, scale=0.3),
    )
    assert_close(some_rows[0], whole[0][:, 2:])  # the last rows of a text, whatever came before
    assert_close(some_rows[1], whole[1][:, 2:])


def test_running_out_of_memory_halves_the_block_and_goes_on(monkeypatch):
    here = scene("llava")
    engine = MaskEngine(here.lvlm, here.engine.prompt, None, here.bank, answer=[TOKEN], floor=None)
    engine.block_size = 16
    heads = some(40, 16)
    expected, inner, widths = engine.adjusted(heads), engine._run, []

    def scarce(masks, *rest):
        widths.append(len(masks))
        if len(masks) > 4:
            raise torch.cuda.OutOfMemoryError
        return inner(masks, *rest)

    monkeypatch.setattr(engine, "_run", scarce)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert_close(engine.adjusted(heads[:39]), expected[:39], atol=1e-10, rtol=0)
    assert widths == [16, 8, *[4] * 9, 3]
