"""DivPrune's batched choice is the greedy one, and the model answers from the tokens it keeps."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from seecause.background import divprune
from seecause.background.baselines import most_diverse
from seecause.engine.trace import kept_logits
from seecause.errors import BadOption
from tests.helpers import noise, view
from tests.reference import divprune as reference
from tests.tiny import pictures, tiny


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_the_choice_is_the_brute_force_greedy_one(count):
    tokens = noise(4, 9, 5) + 0.5
    kept = most_diverse(tokens, count)
    assert kept.sum(dim=1).tolist() == [count] * 4
    for row, features in zip(kept, tokens, strict=True):
        assert set(row.nonzero().flatten().tolist()) == reference.most_diverse(features, count)


def test_copies_of_a_token_come_last():
    distinct = torch.eye(4, dtype=torch.float64)
    tokens = torch.cat([distinct[:1], distinct[:1], distinct[:1], distinct[1:]])[None]
    kept = most_diverse(tokens, 4)[0]
    assert kept[3:].all() and kept[:3].sum() == 1
    assert most_diverse(tokens[:, :1], 1).tolist() == [[True]]


@pytest.mark.parametrize("family", ["timm_registers", "timm_mean", "hf_siglip", "hf_dinov3"])
@pytest.mark.parametrize("after", [0, 2])
def test_the_answer_is_read_from_the_tokens_that_stay(family, after):
    native = tiny(family)
    model, images = view(native, check=False), pictures(native)
    result = divprune(model, images, keep=0.4, after=after)
    layout = model.layout
    assert result.tokens.sum(dim=1).tolist() == [round(0.4 * layout.n_patches)] * 2
    assert layout.n_patches * 0.4 % 1 > 0.5  # rounded, not cut
    h = model.embed(images)
    for block in model.blocks[:after]:
        h = block(h, layout.at())
    for row, features in zip(result.tokens, h[:, layout.patches], strict=True):
        assert set(row.nonzero().flatten().tolist()) == reference.most_diverse(
            features, int(row.sum())
        )
    assert_close(
        result.logits,
        kept_logits(model, h, result.tokens, layout.at(), start=after),
        atol=1e-10,
        rtol=0,
    )
    assert_close(
        divprune(model, images, keep=1.0, after=after).logits, model(images), atol=1e-10, rtol=0
    )


@pytest.mark.parametrize("options", [{"keep": 0.0}, {"keep": 1.5}, {"after": 4}])
def test_what_cannot_be_kept_is_refused(options):
    native = tiny("hf_vit")
    with pytest.raises(BadOption):
        divprune(view(native, check=False), pictures(native), **options)
