"""The verified wrap itself: a view with one ingredient missing must be refused, with the probe and
the block named."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seecause.engine.verify import compare, verify
from seecause.errors import ViewMismatch
from seecause.models.block import Block, same
from seecause.models.view import VisionModel
from tests.helpers import noise, view
from tests.tiny import FAMILIES, tiny

WHERE = 2  # the block that loses something


def _without_bias(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x) - function(torch.zeros_like(x))


def _without_input_bias(block: Block) -> Callable:
    def project(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            full - bias
            for full, bias in zip(block.project(x), block.project(torch.zeros_like(x)), strict=True)
        )

    return project


BLOCK_INGREDIENTS: dict[str, Callable[[Block], dict]] = {
    "norm": lambda block: {"norm": same},
    "input bias": lambda block: {"project": _without_input_bias(block)},
    "query norm": lambda block: {"q_norm": same},
    "key norm": lambda block: {"k_norm": same},
    "rotation": lambda block: {"rotate": None},
    "scale": lambda block: {"scale": block.scale * 1.1},
    "norm of heads": lambda block: {"sub_norm": same},
    "output bias": lambda block: {"mix": _without_bias(block.mix)},
    "LayerScale": lambda block: {"branch": same},
    "MLP": lambda block: {"feed": torch.zeros_like},
}
MODEL_INGREDIENTS = {  # and the probes that may notice
    "final norm": ("logits",),
    "pool scale": ("logits",),
    "special token": ("locality", "logits"),
    "grid order": ("locality", "blocks"),
}


def _drop_from_block(model: VisionModel, ingredient: str) -> bool:
    """Take an ingredient out of one block; False if the block had nothing of the kind."""
    block = model.blocks[WHERE]
    poorer = replace(block, **BLOCK_INGREDIENTS[ingredient](block))
    model.blocks[WHERE] = poorer
    h = noise(1, model.layout.tokens, _width(model))
    return not torch.allclose(poorer(h, model.layout.at()), block(h, model.layout.at()), atol=1e-12)


def _drop_from_model(model: VisionModel, ingredient: str) -> bool:
    """The same for what surrounds the blocks."""
    layout, readout = model.layout, model.readout
    if ingredient == "final norm":
        model.readout = replace(readout, norm=same)
        row = noise(1, 1, _width(model))
        normed = readout.norm(row)
        return normed.shape == row.shape and not torch.equal(
            normed, row
        )  # with a projection in it, dropping it fails anyway
    if ingredient == "pool scale":
        model.readout = replace(
            readout,
            latent=readout.latent and replace(readout.latent, scale=readout.latent.scale * 1.1),
        )
        return readout.latent is not None
    if ingredient == "special token":
        model.layout_at = lambda height, width: replace(
            layout, prefix=layout.prefix - 1, registers=layout.registers[:-1]
        )
        return layout.prefix > 0
    model.layout_at = lambda height, width: replace(layout, grid=layout.grid[::-1])
    return layout.grid[0] != layout.grid[1]


def _width(model: VisionModel) -> int:
    return model.blocks[0].heads * model.blocks[0].head_dim


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_without_one_of_its_ingredients_is_refused(family):
    native = tiny(family)
    for ingredient in BLOCK_INGREDIENTS:
        model = view(native, check=False)
        if not _drop_from_block(model, ingredient):
            continue
        with pytest.raises(ViewMismatch) as refusal:
            verify(model)
        assert (refusal.value.probe, refusal.value.where) == ("blocks", f"blocks.{WHERE}"), (
            ingredient
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_read_wrongly_is_refused(family):
    native = tiny(family)
    for ingredient, probes in MODEL_INGREDIENTS.items():
        model = view(native, check=False)
        if not _drop_from_model(model, ingredient):
            continue
        with pytest.raises(ViewMismatch) as refusal:
            verify(model)
        assert refusal.value.probe in probes, ingredient


def test_rows_that_see_other_keys_when_they_are_alone_are_refused():
    """The whole run is right; only some rows against recorded keys tell."""
    model = view(tiny("timm_deit3"), check=False)

    def additive(rows, keys):
        whole = rows.index.shape == keys.index.shape
        return (0 if whole else 1e-6) * keys.index.double().expand(1, 1, len(rows.index), -1)

    model.blocks[WHERE] = replace(model.blocks[WHERE], additive=additive)
    with pytest.raises(ViewMismatch) as refusal:
        verify(model)
    assert (refusal.value.probe, refusal.value.where) == ("attention", f"blocks.{WHERE}")


def test_a_view_that_gives_no_number_is_refused():
    """No comparison with NaN is true: neither that it is small nor that it is large."""
    native = torch.ones(2, 3)
    for broken in (torch.nan, torch.inf):
        mine = native.clone()
        mine[1, 2] = broken
        with pytest.raises(ViewMismatch, match=r"blocks\.3"):
            compare("blocks", "blocks.3", mine, native, 1e-4, "")
