"""Many sets of heads at once, against one run of the ablated model for each."""

import pytest
import torch
from torch.testing import assert_close

from seecause.background import ablate
from seecause.background.heads import gates_without
from seecause.engine.chunks import budget
from seecause.engine.forks import (
    carried_logits,
    fork,
    gated_logits,
    inert,
    logits_of_sets,
    mean_carried,
)
from seecause.engine.walk import walk
from seecause.models.block import zero_heads
from tests.helpers import hooks, ready, view
from tests.tiny import FAMILIES, pictures, tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_sets_of_heads_are_what_ablated_models_answer_also_inside_an_ablated_one(family):
    native, model, images = ready(family)
    last = model.n_layers - 1
    sets = [[], [(0, 0)], [(last, 0)], [(0, 1), (last, 1)], [(0, 0)]]
    gates = torch.stack([gates_without(model, heads) for heads in sets])
    with torch.no_grad(), ablate(model, [(0, 1)]):  # gates that were there before still count
        expected = []
        for heads in sets:
            with ablate(model, heads):
                expected.append(model(images))
        assert_close(
            logits_of_sets(model, images, gates), torch.stack(expected), atol=1e-10, rtol=0
        )
    with torch.no_grad():
        assert_close(
            logits_of_sets(model, images, gates)[0], native.forward(images), atol=1e-10, rtol=0
        )
    assert model.gates is None and hooks(native.module) == 0


@pytest.mark.parametrize("layer", [0, 1])
def test_a_gate_may_be_half_open(layer):
    _, model, images = ready("timm_deit3")
    gates = torch.ones(2, model.n_layers, model.n_heads, dtype=images.dtype)
    gates[1, layer, 0] = 0.5
    with torch.no_grad():
        expected = [gated_logits(model, images, gate.expand(len(images), -1, -1)) for gate in gates]
        logits = logits_of_sets(model, images, gates)
    assert_close(logits, torch.stack(expected), atol=1e-10, rtol=0)
    assert float((logits[1] - logits[0]).abs().max()) > 1e-4


def test_sets_that_begin_at_different_blocks_keep_their_answers():
    """Gates above 1 sort behind those below: sets are not in the order of their first blocks."""
    _, model, images = ready("timm_deit3")
    gates = torch.ones(4, model.n_layers, model.n_heads, dtype=images.dtype)
    gates[0, 1, 0], gates[1, 0, 1], gates[2, 1, 1] = 0, 2, 2
    with torch.no_grad():
        expected = [gated_logits(model, images, gate.expand(len(images), -1, -1)) for gate in gates]
        logits = logits_of_sets(model, images, gates)
    assert_close(logits, torch.stack(expected), atol=1e-10, rtol=0)


def from_the_last(layer, carried, tokens):
    """Of three pictures."""
    return carried[2:]


@torch.no_grad()
def test_gates_of_each_picture_mix_its_heads_with_those_of_another():
    _, model, images = ready("timm_registers", 3)
    gates = torch.rand(2, model.n_layers, 3, generator=torch.Generator().manual_seed(0)).double()
    logits = gated_logits(model, images, gates, content=from_the_last)
    donor = [s.carried for s in walk(model, model.embed(images[2:]), model.at(images[2:]))]
    steps = walk(model, model.embed(images[:2]), model.at(images[:2]))
    for step in steps:
        share = gates[:, step.index, None, :, None]
        step.carried = share * step.carried + (1 - share) * donor[step.index]
    assert_close(logits, model.readout(steps.h, model.layout), atol=1e-12, rtol=0)


@pytest.mark.parametrize("limit", [None, 1])
@torch.no_grad()
def test_replaced_heads_carry_what_another_picture_carries(limit):
    """Some pictures are forked, the last one only gives; in chunks or not, plain answers stay."""
    _, model, images = ready("timm_registers", 3)
    heads, seen = [(2, 1), (0, 0), (2, 0), (2, 2), (3, 2)], {}

    def each(layer, chosen, logits):
        seen.update({(layer, head): row for head, row in zip(chosen, logits, strict=True)})

    model.gates = 0.5 + torch.rand(model.n_layers, 3, generator=torch.Generator().manual_seed(0))
    with budget(limit):
        plain = fork(model, images, heads, each, content=from_the_last, forking=2)
    assert_close(plain, model(images), atol=1e-12, rtol=0)
    assert sorted(seen) == sorted(heads)
    donor = [s.carried for s in walk(model, model.embed(images[2:]), model.at(images[2:]))]
    for (layer, head), logits in seen.items():
        steps = walk(model, model.embed(images[:2]), model.at(images[:2]))
        for step in steps:
            if step.index == layer:
                carried = step.carried.clone()
                carried[:, :, head] = donor[layer][:, :, head]
                step.carried = carried
        expected = model.readout(steps.h, model.layout)
        assert_close(logits, expected, atol=1e-12, rtol=0)
        assert (expected - plain[:2]).abs().max() > 1e-4


def test_logits_hang_on_what_heads_carried_and_on_nothing_before():
    native = tiny("timm_deit3")
    model, images = view(native, check=False), pictures(native).requires_grad_()
    logits, carried = carried_logits(model, images)
    assert_close(logits, model(images), atol=1e-12, rtol=0)
    assert [x.shape[1] for x, _ in carried] == [25, 25, 25, 1]  # rows that are read, at the end
    assert [tokens.tolist() for _, tokens in carried][2:] == [list(range(25)), [0]]
    slopes = torch.autograd.grad(logits[:, 2].sum(), [x for x, _ in carried])
    assert all(slope.abs().max() > 0 for slope in slopes)
    assert not carried[0][0].grad_fn  # a leaf
    leaf = carried[0][0].detach().requires_grad_()
    steps = walk(model, model.embed(images), model.at(images))
    for step in steps:
        step.carried = leaf if step.index == 0 else step.carried
    read = model.readout(steps.h, model.layout)
    (through_all,) = torch.autograd.grad(read[:, 2].sum(), leaf)
    assert_close(slopes[0], through_all, atol=1e-12, rtol=0)


@torch.no_grad()
def test_the_mean_of_what_heads_carry_does_not_hang_on_chunks():
    _, model, images = ready("timm_deit3", 3)
    steps = walk(model, model.embed(images), model.at(images))
    expected = [step.carried.mean(dim=0) for step in steps]
    for limit in (None, 1):
        with budget(limit):
            assert_close(mean_carried(model, images), expected, atol=1e-12, rtol=0)
    half = mean_carried(view(tiny("timm_deit3", torch.bfloat16), check=False), images.bfloat16())
    assert {x.dtype for x in half} == {torch.bfloat16}


def test_heads_that_cannot_matter_are_known_without_a_run():
    model = view(tiny("timm_deit3", torch.float32), check=False)
    projection = model.blocks[1].owner.attn.proj
    projection.bias.fill_(1000)
    projection.weight[:, :8] = 1e-5  # less than the rounding of the bias, and no zeros
    assert inert(model) == set()
    zero_heads(model.blocks[1].owner, [2], of=3)
    gates = torch.ones(model.n_layers, model.n_heads)
    gates[0, 1], gates[3, 0] = 0, 0.5
    with model.gated(gates):
        assert inert(model) == {(0, 1), (1, 2)}
