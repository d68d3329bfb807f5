"""Keys hidden by facts about their tokens: exact for every family, head by head, and wherever
the keys go."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from seecause.background.heads import gates_without
from seecause.engine.forks import fork, logits_of_sets
from seecause.engine.patching import Site, run_patched
from seecause.engine.sweep import Sweep, SweepPlan
from seecause.engine.trace import kept_logits, kept_logits_each, record
from seecause.engine.walk import walk
from seecause.models.block import At, fused, hiding
from tests.helpers import noise, view
from tests.tiny import FAMILIES, tiny

EXACT = {"atol": 1e-10, "rtol": 0}


def knowing(at: At, facts: torch.Tensor) -> At:
    return replace(at, facts=facts)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_hidden_keys_are_not_there(family):
    model = view(tiny(family), check=False)
    block, at, tokens = model.blocks[1], model.layout.at(), model.layout.tokens
    width = block.heads * block.head_dim
    h = noise(2, tokens, width)
    hidden = noise(2, tokens, block.heads, seed=1) > 0.5  # other tokens for each head
    gate = noise(block.heads, seed=2)
    out = hiding(block)(h, knowing(at, hidden), gate)

    q, k, v = block.qkv(h, at)
    seen = ~hidden.transpose(1, 2)[:, :, None]
    bias = block.bias(at, at)
    if bias is not None:
        seen = bias.masked_fill(~seen, -torch.inf)
    expected = block.finish(h, fused(q, k, v, block.scale, seen), gate)
    assert_close(out, expected, **EXACT)
    assert not torch.allclose(expected, block(h, at, gate))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.no_grad()
def test_hidden_keys_weigh_exactly_nothing_in_any_precision(dtype):
    model = view(tiny("timm_registers", dtype=dtype), check=False)
    block, at, tokens = model.blocks[0], model.layout.at(), model.layout.tokens
    h = noise(1, tokens, 24).to(dtype)
    hidden = noise(1, tokens, 1, seed=1) > 0
    seeing, elsewhere = (
        hiding(block),
        torch.where(hidden, noise(1, tokens, 24, seed=2).to(dtype), h),
    )
    out, changed = (seeing(x, knowing(at, hidden)) for x in (h, elsewhere))
    seen = ~hidden[0, :, 0]
    assert torch.equal(out[:, seen], changed[:, seen]) and not torch.equal(out, changed)


@pytest.mark.parametrize("site", ["resid", "kv"])
@torch.no_grad()
def test_facts_go_with_patched_states(site):
    """States of another picture bring its facts along: all of them is the other picture's run."""
    model, hidden = hidden_by_sign()
    images = noise(4, 3, *model.preprocess.size)
    mine, other = images.split(2)
    assert not torch.equal(hidden(mine), hidden(other))
    sites = [[Site(0, site)], [Site(2, site)], []]
    patched = run_patched(model, mine, other, sites)
    assert_close(patched[2], model(mine), **EXACT)
    if site == "resid":
        assert_close(patched[0], model(other), **EXACT)
        assert_close(patched[1], model(other), **EXACT)
    assert not torch.allclose(patched[1], model(mine))


@torch.no_grad()
def test_facts_go_with_tokens_that_are_moved():
    """Moved to its own place is not moved; moved elsewhere, a token is as visible as it was."""
    model, hidden = hidden_by_sign()
    mine, other = noise(4, 3, *model.preprocess.size).split(2)
    prefix, tokens = model.layout.prefix, model.layout.tokens
    every = range(prefix, tokens)
    shown = [t for t in every if not hidden(other)[:, t].any()][:1]
    unseen = [t for t in every if hidden(other)[:, t].all()][:1]
    sets = [[Site(1, tokens=every)], [Site(1, tokens=every, source_tokens=every)]]
    sets += [[Site(1, tokens=shown, source_tokens=unseen)]]
    stay, same, moved = run_patched(model, mine, other, sets)
    assert_close(stay, same, **EXACT)

    steps = [walk(model, model.embed(x), model.at(x), stop=1).end() for x in (mine, other)]
    steps[0][:, shown] = steps[1][:, unseen]
    facts = hidden(mine)
    facts[:, shown] = True
    rest = walk(model, steps[0], knowing(model.layout.at(), facts), start=1).end()
    assert_close(moved, model.readout(rest, model.layout), **EXACT)


@torch.no_grad()
def test_facts_go_with_copies():
    model, _ = hidden_by_sign()
    images, heads = noise(3, 3, *model.preprocess.size), [(0, 1), (2, 0)]
    gates = torch.stack([gates_without(model, [head]) for head in heads]).to(images.dtype)
    together = logits_of_sets(model, images, gates)
    for gate, logits in zip(gates, together, strict=True):
        with model.gated(gate):
            assert_close(model(images), logits, **EXACT)
    for count in (3, 2):  # the last picture only gives
        seen: list[torch.Tensor] = []
        note = lambda layer, heads, logits, seen=seen: seen.append(logits[0])  # noqa: E731
        assert_close(fork(model, images, heads, note, forking=count), model(images), **EXACT)
        assert_close(torch.stack(seen), together[:, :count], **EXACT)


@torch.no_grad()
def test_facts_go_with_patches_that_are_kept():
    model, _ = hidden_by_sign()
    images, n = noise(2, 3, *model.preprocess.size), model.layout.n_patches
    keep = torch.rand(2, 3, n, generator=torch.Generator().manual_seed(0)) < 0.6
    together = kept_logits_each(model, images, keep)
    for image, choices, logits in zip(images, keep, together, strict=True):
        for chosen, got in zip(choices, logits, strict=True):
            alone = kept_logits(
                model, model.embed(image[None]), chosen[None], model.at(image[None])
            )
            assert_close(alone[0], got, **EXACT)


@pytest.mark.parametrize("tail", ["patched", "all", "source"])
@torch.no_grad()
def test_facts_go_with_tokens_of_a_sweep(tail):
    """All patches put into another picture, with every special token live, are the picture."""
    model, hidden = hidden_by_sign()
    mine, other = noise(4, 3, *model.preprocess.size).split(2)
    layers, layout = range(model.n_layers + 1), model.layout
    runs = [record(model, images, states=layers, kv=layers[:-1]) for images in (other, mine)]
    half = noise(layout.n_patches) > 0
    chosen = torch.stack([torch.ones_like(half), torch.zeros_like(half), half])
    plan = SweepPlan(tail, 0, 0, tuple(range(layout.prefix)))
    whole, none, part = Sweep(model, *runs, plan).logits(chosen).unbind(1)
    assert_close(whole, model(mine), **EXACT)
    assert_close(none, model(other), **EXACT)
    if tail == "all":
        marked = torch.nn.functional.pad(half, (layout.prefix, 0))[:, None]
        h, facts = (
            torch.where(marked, *(f(x) for x in (mine, other))) for f in (model.embed, hidden)
        )
        rest = walk(model, h, knowing(layout.at(), facts)).end()
        assert_close(part, model.readout(rest, layout), **EXACT)


def hidden_by_sign():
    """A view whose patches are hidden where their mean pixel is negative."""
    model = view(tiny("timm_registers"), check=False)
    layout = model.layout

    def hidden(images: torch.Tensor) -> torch.Tensor:
        means = torch.nn.functional.adaptive_avg_pool2d(images.mean(1, True), layout.grid)
        return torch.nn.functional.pad(means.flatten(1) < 0, (layout.prefix, 0))[..., None]

    return replace(model, facts=hidden, blocks=[hiding(b) for b in model.blocks]), hidden
