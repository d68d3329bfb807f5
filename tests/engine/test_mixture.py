"""Slopes of mixtures in pieces that fit, and models without a gradient, which are refused by the
part that loses it, once for each of their states."""

from dataclasses import replace

import pytest
import torch

from seecause.engine.trace import need_gradients
from seecause.errors import NotDefined
from seecause.models.block import Block
from tests.helpers import view
from tests.tiny import tiny


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
    with pytest.raises(NotDefined, match=f"mosaic .* the {part} of blocks.0.*method='caap'"):
        need_gradients(wrong, "mosaic")


def test_a_part_that_adds_nothing_loses_nothing():
    model = view(tiny("timm_deit3"), check=False)
    model.blocks = [replace(block, feed=torch.zeros_like) for block in model.blocks]
    need_gradients(model, "mosaic")


def test_a_readout_without_a_gradient_is_refused_and_a_changed_model_is_looked_at_again():
    model = view(tiny("timm_deit3"), check=False)
    need_gradients(model, "mosaic")
    head = model.readout.head
    model.readout = replace(model.readout, head=lambda pooled: head(pooled).detach())
    need_gradients(model, "mosaic")  # known of these weights
    with torch.no_grad():
        model.module.head.bias.add_(1)
    with pytest.raises(NotDefined, match="readout"):
        need_gradients(model, "mosaic")
