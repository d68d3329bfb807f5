"""Sweeps where special tokens are pooled, too, or live in another order than theirs: no family
of ours does it by default."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.testing import assert_close

from seecause.engine.mixture import Mixture
from seecause.engine.sweep import Sweep, SweepPlan
from seecause.engine.trace import record
from tests.families.native import HALF, SIZE, Native
from tests.helpers import view
from tests.reference import caap as reference
from tests.tiny import pictures, scramble

SETS = [[0, 1, 7], [], [23], [5, 6, 11, 12, 13]]


@pytest.fixture(scope="module", params=["avg", "map", "token"])
def pooled(request):
    """A class token and two registers, read together with the patches or (class token) alone."""
    module = VisionTransformer(
        img_size=SIZE, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=7,
        reg_tokens=2, global_pool=request.param, pool_include_prefix=request.param != "token",
    )  # fmt: skip
    scramble(module).double().requires_grad_(False)
    native = Native(module, module.blocks, module, HALF)
    model, images = view(native), pictures(native, batch=4)
    assert model.readout.over_prefix == (request.param != "token") and model.layout.prefix == 3
    states = range(model.n_layers + 1)
    runs = [record(model, part, states=states, kv=states[:-1]) for part in images.split(2)]
    chosen = torch.zeros(len(SETS), 24, dtype=torch.bool)
    for row, patches in zip(chosen, SETS, strict=True):
        row[patches] = True
    return native, model, images.split(2), runs, chosen


@pytest.mark.parametrize("tail", ["patched", "source", "blank", "all"])
@pytest.mark.parametrize(("live", "stop"), [((0,), 1), ((2, 0), 1), ((0,), 3)])
@torch.no_grad()
def test_a_sweep_equals_the_slow_twin_where_special_tokens_are_pooled(pooled, tail, live, stop):
    native, model, (contexts, donors), runs, chosen = pooled
    fast = Sweep(model, *runs, SweepPlan(tail, 1, stop, live)).logits(chosen)
    slow = [
        reference.caap(
            native.forward, native.blocks, context[None], donor[None], SETS,
            tail=tail, first=1, last=stop, prefix=3, live=live, together=4,
        )
        for context, donor in zip(contexts, donors, strict=True)
    ]  # fmt: skip
    assert_close(fast, torch.stack(slow), atol=1e-10, rtol=0)
    assert (fast[:, 0] - fast[:, 1]).abs().max() > 1e-3


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("tail", ["source", "all"])
@torch.no_grad()
def test_masks_of_zeros_and_ones_are_token_sets_from_any_layer_on(pooled, tail, start):
    _, model, _, (blank, picture), chosen = pooled
    sweep = Sweep(model, blank, picture, SweepPlan(tail, start, start, (0, 1, 2)))
    masks = chosen.double().expand(2, -1, -1)
    mixed = Mixture(model, blank, picture, tail, start).logits(masks)
    assert_close(mixed, sweep.logits(chosen), atol=1e-10, rtol=0)
