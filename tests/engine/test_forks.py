"""Many sets of heads at once, against one run of the ablated model for each."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from seecause.engine.forks import gated_logits, logits_of_sets
from seecause.heads import ablate
from seecause.heads.scores import gates_without
from tests.helpers import hooks, view
from tests.tiny import FAMILIES, pictures, tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_sets_of_heads_are_what_ablated_models_answer_also_inside_an_ablated_one(family):
    native = tiny(family)
    model, images = view(native, check=False), pictures(native)
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
    native = tiny("timm_deit3")
    model, images = view(native, check=False), pictures(native)
    gates = torch.ones(2, model.n_layers, model.n_heads, dtype=images.dtype)
    gates[1, layer, 0] = 0.5
    with torch.no_grad():
        expected = [gated_logits(model, images, gate.expand(len(images), -1, -1)) for gate in gates]
        logits = logits_of_sets(model, images, gates)
    assert_close(logits, torch.stack(expected), atol=1e-10, rtol=0)
    assert float((logits[1] - logits[0]).abs().max()) > 1e-4


def test_sets_that_begin_at_different_blocks_keep_their_answers():
    """Gates above 1 sort behind those below: sets are not in the order of their first blocks."""
    native = tiny("timm_deit3")
    model, images = view(native, check=False), pictures(native)
    gates = torch.ones(4, model.n_layers, model.n_heads, dtype=images.dtype)
    gates[0, 1, 0], gates[1, 0, 1], gates[2, 1, 1] = 0, 2, 2
    with torch.no_grad():
        expected = [gated_logits(model, images, gate.expand(len(images), -1, -1)) for gate in gates]
        logits = logits_of_sets(model, images, gates)
    assert_close(logits, torch.stack(expected), atol=1e-10, rtol=0)
