"""Slopes of mixtures in pieces that fit, and models without a gradient, which are refused by the
part that loses it, once for each of their states."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.engine.blanks import blank_image
from seecause.engine.mixture import (
    Mixture,
    class_slopes,
    mask_bytes,
    need_gradients,
    reaches,
    slopes,
    special_rows,
)
from seecause.engine.trace import record
from seecause.errors import NotDefined
from seecause.models.block import Block
from tests.helpers import view
from tests.tiny import pictures, tiny


def losing(block: Block, part: str) -> Block:
    """The block, one part of which gives values without a gradient."""
    if part == "MLP":
        return replace(block, feed=lambda x: block.feed(x).detach())
    if part == "output":
        return replace(block, mix=lambda x: block.mix(x).detach())
    place = ("queries", "keys", "values").index(part)

    def project(x):
        rows = list(block.project(x))
        rows[place] = rows[place].detach()
        return tuple(rows)

    return replace(block, project=project)


@pytest.mark.parametrize("part", ["queries", "keys", "values", "output", "MLP"])
def test_a_part_without_a_gradient_is_named_where_it_counts(part):
    model = view(tiny("timm_deit3"), check=False)
    need_gradients(model, "mosaic")
    wrong = replace(model, memo={}, blocks=[losing(model.blocks[0], part), *model.blocks[1:]])
    need_gradients(wrong, "mosaic", start=1)  # what comes before is not differentiated
    with pytest.raises(NotDefined, match=f"mosaic .* the {part} of blocks.0.*method='caap'"):
        need_gradients(wrong, "mosaic")
    with pytest.raises(NotDefined, match=f"slopes .* the {part} of blocks.0.*Take another"):
        need_gradients(wrong, "slopes", remedy="Take another")


def test_a_part_that_adds_nothing_loses_nothing():
    model = view(tiny("timm_deit3"), check=False)
    model.blocks = [replace(block, feed=torch.zeros_like) for block in model.blocks]
    need_gradients(model, "mosaic")


def test_a_readout_without_a_gradient_is_refused_and_a_changed_model_is_looked_at_again():
    model = view(tiny("timm_deit3"), check=False)
    need_gradients(model, "mosaic")
    head = model.readout.head
    model.readout = replace(model.readout, head=lambda pooled: head(pooled).detach())
    need_gradients(model, "mosaic", start=2)  # known of these weights
    with torch.no_grad():
        model.module.head.bias.add_(1)
    with pytest.raises(NotDefined, match="readout"):
        need_gradients(model, "mosaic", start=2)


def test_a_gradient_reaches_what_its_result_is_made_of():
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert reaches(2 * leaf, leaf)
    assert not reaches(2 * other, leaf) and not reaches(2 * leaf.detach(), leaf)


@pytest.fixture
def run():
    native = tiny("timm_registers")
    model = view(native, check=False)
    both = blank_image(model, native.size), pictures(native)
    blank, picture = (record(model, x, states={0}, kv=range(model.n_layers)) for x in both)
    return Mixture(model, blank, picture)


def test_running_out_of_memory_takes_fewer_masks_and_fewer_classes(run, monkeypatch):
    masks = torch.rand(4, 24, generator=torch.Generator().manual_seed(0)).double()
    weights = torch.tensor([1.0, 2, 3, 4]).double()
    one_by_one = [
        torch.einsum("n,bnp->bp", weights, slopes(run, masks, lambda x, c=c: x[..., c], together=3))
        for c in range(3)
    ]
    logits, grad = Mixture.logits, torch.autograd.grad

    def narrow(mixture, masks):
        if masks.shape[1] > 1:
            raise torch.cuda.OutOfMemoryError("masks")
        return logits(mixture, masks)

    def few(out, leaf, unit=None, **options):
        if unit is not None and len(unit) > 1:
            raise torch.cuda.OutOfMemoryError("classes")
        return grad(out, leaf, unit, **options)

    def together():
        return class_slopes(run, masks, weights, lambda x: x[..., :3], bytes_each=1)

    assert_close(together(), torch.stack(one_by_one, dim=-1), atol=1e-12, rtol=0)
    monkeypatch.setattr(Mixture, "logits", narrow)
    monkeypatch.setattr(torch.autograd, "grad", few)
    with sc.budget() as held:
        assert_close(together(), torch.stack(one_by_one, dim=-1), atol=1e-12, rtol=0)
    assert held.halvings == ["masks: 2", "masks: 1", *["classes: 1"] * 4]
    with sc.budget() as held:
        slopes(run, masks, lambda x: x[..., 0], together=4)
    assert held.halvings == ["masks: 2", "masks: 1"]


def test_rows_that_are_computed_for_a_mask_and_what_they_take():
    model = view(tiny("timm_registers"), check=False)  # four blocks, three heads of eight
    layout = model.layout
    assert special_rows(model, layout) == range(4)
    pooled = replace(model, readout=replace(model.readout, kind="mean"))
    assert special_rows(pooled, layout) == range(0)
    over = replace(model, readout=replace(model.readout, kind="mean", over_prefix=True))
    assert special_rows(over, layout) == range(4)
    row = 24 * 8 * 24 + 3 * 24 * 2 * 8 * 5  # activations, and scores of two banks
    assert mask_bytes(model, layout, "source") == 4 * 4 * row
    assert mask_bytes(pooled, layout, "source") == 4 * row
    assert mask_bytes(model, layout, "all") == 5 * model.forward_bytes(layout)
