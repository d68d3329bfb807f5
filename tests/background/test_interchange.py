"""Heads exchanged between versions of a picture, and what passes through them."""

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.background import LabelledImages, interchange, mediated, select
from seecause.engine.chunks import budget
from seecause.errors import BadOption, NotDefined
from tests.helpers import noise, view
from tests.reference import cigma as reference
from tests.tiny import pictures, tiny

HEADS, WIDTH = 3, 8
ALL = [(layer, head) for layer in range(4) for head in range(HEADS)]


def pair(images, others):
    return LabelledImages(images, other_background=others)


def case(family="timm_registers", batch=2):
    native = tiny(family)
    return native, view(native, check=False), pictures(native, batch)


@pytest.mark.parametrize("family", ["timm_registers", "timm_clip", "hf_vit"])
def test_exchanged_heads_are_what_hooks_put_there(family):
    native, model, images = case(family)
    data = pair(images, images + noise(*images.shape, seed=5))
    others, done = data.other_background, []
    result = interchange(model, data, progress=done.append)
    expected = torch.zeros(2, 4, HEADS, dtype=torch.float64)
    for i, layer, head in torch.cartesian_prod(*map(torch.arange, (2, 4, HEADS))).tolist():
        block, part = native.blocks[layer], slice(head * WIDTH, (head + 1) * WIDTH)
        carried = reference.carried(native.forward, block, others[i])[:, part]
        with reference.carrying(block, head, WIDTH, carried):
            changed = reference.answer(native.forward, images[i])
        expected[i, layer, head] = reference.js(
            reference.answer(native.forward, images[i]), changed
        )
    assert_close(result.value, expected.mean(dim=0), atol=1e-10, rtol=0)
    assert_close(result.error, expected.std(dim=0) / 2**0.5, atol=1e-10, rtol=0)
    whole = [
        reference.js(*(reference.answer(native.forward, x[i]) for x in (images, others)))
        for i in range(2)
    ]
    assert result.protocol["effect"] == pytest.approx(sum(whole) / 2) and sum(done) == 2
    with budget(1):
        assert_close(interchange(model, data).value, result.value, atol=1e-12, rtol=0)


def test_all_heads_together_carry_everything_to_a_class_token():
    _, model, images = case("hf_vit")
    others = images + noise(*images.shape, seed=5)
    assert mediated(model, pair(images, others), ALL) == pytest.approx(1)
    assert mediated(model, pair(images, others), []) == pytest.approx(0, abs=1e-12)
    single = interchange(model, pair(images, others))
    assert mediated(model, pair(images, others), [(1, 0)]) == pytest.approx(
        float(single.value[1, 0]) / single.protocol["effect"]
    )
    model.sigmoid = True
    with pytest.raises(NotDefined, match="interchange"):
        interchange(model, pair(images, others))


def test_interchange_scores_are_shares_of_what_the_other_versions_change():
    _, model, images = case(batch=3)
    others = pictures(tiny("timm_registers"), 3, seed=10)
    scores = select("interchange", model, pair(images, others))
    effects = interchange(model, pair(images, others))
    assert_close(scores.value, effects.value / effects.protocol["effect"])
    assert_close(scores.error, effects.error / effects.protocol["effect"])
    done = []
    again = select("interchange", model, pair(images, others), progress=done.append)
    together = mediated(model, pair(images, others), again.top(2))
    assert again.protocol["mediated"][2] == pytest.approx(together) and sum(done) == 3 * 12
    assert again.protocol["effect"] == effects.protocol["effect"]
    assert list(again.protocol["mediated"]) == [1, 2, 4, 8]
    (best,) = scores.top(1)
    shares = scores.protocol["mediated"]
    assert shares[1] == pytest.approx(float(scores.value[best]))
    assert shares[4] == pytest.approx(mediated(model, pair(images, others), scores.top(4)))
    small = sc.background.prune_heads(
        model, [(0, 0), (1, 1), (2, 1), (3, 2)]
    )  # eight are left: all of them
    whole = select("interchange", small, pair(images, others))
    assert whole.protocol["mediated"][8] == pytest.approx(1)
    with pytest.raises(BadOption, match="pairs:WITH:WITHOUT"):
        select("interchange", model, LabelledImages(images))
    with pytest.raises(BadOption, match="the same predictions already"):
        select("interchange", model, pair(images, images))


def test_an_effect_within_its_error_is_not_shared_out():
    """A share of what cannot be told from nothing was told as 90,000 %: heads keep their effects in
    nats."""
    _, model, images = case(batch=3)
    others = images.clone()
    others[0] = others[0].flip(-1)  # one pair of three moves: a mean as large as its error
    for count in (3, 1):  # of one pair there is no error
        data = pair(images[:count], others[:count])
        effects = interchange(model, data)
        scores = select("interchange", model, data)
        assert_close(scores.value, effects.value)
        assert_close(scores.error, effects.error, equal_nan=True)
        assert scores.protocol["mediated"] == {}
        assert scores.protocol["effect"] == effects.protocol["effect"] > 0
        error = scores.protocol["effect error"]
        assert error == pytest.approx(effects.protocol["effect"]) if count == 3 else error is None
    everything = pair(images, pictures(tiny("timm_registers"), 3, seed=10))
    assert select("interchange", model, everything).protocol["mediated"]
