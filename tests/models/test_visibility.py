"""Keys hidden by flags that travel with tokens: exact for every family, head by head, and wherever
the keys go."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from seecause.engine.attend import Bank, attend
from seecause.models.block import fused
from seecause.models.visibility import flagged, hiding
from tests.helpers import noise, view
from tests.tiny import FAMILIES, tiny

EXACT = {"atol": 1e-10, "rtol": 0}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_hidden_keys_are_not_there(family):
    model = view(tiny(family), check=False)
    block, at, tokens = model.blocks[1], model.layout.at(), model.layout.tokens
    width = block.heads * block.head_dim
    h = noise(2, tokens, width)
    hidden = noise(2, tokens, block.heads, seed=1) > 0.5  # other tokens for each head
    gate = noise(block.heads, seed=2)
    seeing = hiding(block, width, block.heads)
    state = flagged(h, hidden)
    out = seeing(state, at, gate)

    q, k, v = block.qkv(h, at)
    expected = block.finish(
        h, fused(q, k, v, block.scale, ~hidden.transpose(1, 2)[:, :, None]), gate
    )
    assert_close(out[..., :width], expected, **EXACT)
    assert torch.equal(out[..., width:], state[..., width:])
    assert not torch.allclose(expected, block(h, at, gate))


@torch.no_grad()
def test_visibility_goes_with_the_keys_into_another_run():
    model = view(tiny("timm_eva_registers"), check=False)
    block, at, tokens = model.blocks[0], model.layout.at(), model.layout.tokens
    mine, other = noise(1, tokens, 24), noise(1, tokens, 24, seed=1)
    hidden = noise(1, tokens, 1, seed=2) > 0
    seeing = hiding(block, 24, 1)
    q, _, _ = seeing.qkv(flagged(mine, torch.zeros_like(hidden)), at)
    _, k, v = seeing.qkv(flagged(other, hidden), at)
    o, _ = attend(q, [Bank(k, v)], scale=block.scale)

    seen = ~hidden[0, :, 0]
    q, _, _ = block.qkv(mine, at)
    _, k, v = block.qkv(other, at)
    assert_close(
        o[..., : block.head_dim], fused(q, k[:, :, seen], v[:, :, seen], block.scale), **EXACT
    )


@torch.no_grad()
def test_one_flag_can_mean_different_things_to_different_blocks():
    """Two flags a token: the first hides it from all heads of one block, the second from one head
    of another."""
    model = view(tiny("timm_registers"), check=False)
    block, at, tokens = model.blocks[0], model.layout.at(), model.layout.tokens
    h, flags = noise(2, tokens, 24), noise(2, tokens, 2, seed=1) > 0.3
    q, k, v = block.qkv(h, at)

    first = hiding(block, 24, 2, lambda f: f[..., :1])
    assert_close(
        first(flagged(h, flags), at)[..., :24],
        block.finish(h, fused(q, k, v, block.scale, ~flags[..., 0][:, None, None])),
        **EXACT,
    )

    of_one_head = torch.zeros(2, tokens, 3, dtype=torch.bool)
    of_one_head[..., 1] = flags[..., 1]
    second = hiding(
        block, 24, 2, lambda f: torch.nn.functional.one_hot(torch.tensor(1), 3).bool() & f[..., 1:]
    )
    assert_close(
        second(flagged(h, flags), at)[..., :24],
        block.finish(h, fused(q, k, v, block.scale, ~of_one_head.transpose(1, 2)[:, :, None])),
        **EXACT,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.no_grad()
def test_hidden_keys_weigh_exactly_nothing_in_any_precision(dtype):
    model = view(tiny("timm_registers", dtype=dtype), check=False)
    block, at, tokens = model.blocks[0], model.layout.at(), model.layout.tokens
    h = noise(1, tokens, 24).to(dtype)
    hidden = noise(1, tokens, 1, seed=1) > 0
    seeing, elsewhere = (
        hiding(block, 24, 1),
        torch.where(hidden, noise(1, tokens, 24, seed=2).to(dtype), h),
    )
    out, changed = (seeing(flagged(x, hidden), at) for x in (h, elsewhere))
    seen = ~hidden[0, :, 0]
    assert torch.equal(out[:, seen], changed[:, seen]) and not torch.equal(out, changed)
