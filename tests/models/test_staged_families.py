"""Swin and ConvNeXt as networks of stages: equal to the native model, CAAP and mosaic equal to
hooks on it, refused when changed."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import seecause as sc
from seecause.attribution.mosaic import MaskPlan, draw_masks
from seecause.engine.trace import blank_image
from seecause.engine.verify import verify
from seecause.errors import ViewMismatch
from seecause.loading import wrap
from seecause.models.staged import StagedModel
from tests.families.staged import SIZE, STAGED_FAMILIES, place, tiny_staged
from tests.helpers import hooks, view
from tests.reference.caap import box
from tests.reference.caap_cnn import caap_cnn, features, mosaic_cnn
from tests.tiny import pictures

EXACT = {"atol": 1e-10, "rtol": 0}


@cache
def ready(family):
    """A native network and its verified view. Tests do not change them."""
    native = tiny_staged(family)
    model = view(native)
    assert isinstance(model, StagedModel) and hooks(native.module) == 0
    return native, model, pictures(native)


@pytest.mark.parametrize("family", STAGED_FAMILIES)
@torch.no_grad()
def test_a_view_is_the_native_model_and_its_stages_are_the_native_features(family):
    native, model, images = ready(family)
    assert_close(model(images), native.forward(images), **EXACT)
    assert model.layout.grid == native.grid
    assert [stage.name for stage in model.stages][native.cells] == model.cells
    outputs = model.stage_outputs(images)
    assert len(outputs) == len(native.blocks)
    for number, (name, got) in enumerate(outputs.items()):
        stride, at = native.strides[number], place(native, number)
        assert got.shape[-2:] == (native.size[0] // stride, native.size[1] // stride)
        theirs = features(native.forward, native.blocks[number], images)
        for row, column in ((0, 0), (1, got.shape[-1] - 1), (got.shape[-2] - 1, 1)):
            assert_close(got[:, :, row, column], theirs[at(row, column)], **EXACT)
        assert_close(model.run_from(name, got), native.forward(images), **EXACT)
    assert hooks(native.module) == 0


@pytest.mark.parametrize("family", STAGED_FAMILIES)
@torch.no_grad()
def test_caap_equals_hooks_on_the_native_model(family):
    native, model, images = ready(family)
    blank = blank_image(model, native.size)
    columns = native.grid[1]
    sets = [[divmod(cell, columns) for cell in cells] for cells in box(native.grid, 1)]
    block, at = native.blocks[native.cells], place(native, native.cells)
    expected = caap_cnn(native.forward, block, blank, images[1:], sets, at)
    assert (expected.amax(dim=0) - expected.amin(dim=0)).max() > 1e-3  # it means something
    maps = sc.attribute(model, images, 3, score="logit").maps[1]
    assert_close(maps.flatten(), expected[:, 3], **EXACT)


@pytest.mark.parametrize("family", STAGED_FAMILIES)
def test_mosaic_equals_hooks_on_the_native_model(family):
    native, model, images = ready(family)
    masks = draw_masks(MaskPlan(masks=2, cells=2, seed=5), native.grid).double()
    expected = mosaic_cnn(
        native.forward,
        native.blocks[native.cells],
        blank_image(model, native.size),
        images[1:],
        list(masks.unflatten(1, native.grid)),
        lambda logits: logits[0, 2],
        place(native, native.cells),
    )
    options = {"score": "logit", "masks": 2, "cells": 2, "seed": 5}
    maps = sc.attribute(model, images, 2, "mosaic", **options).maps[1]
    assert expected.abs().max() > 1e-3
    assert_close(maps, expected.mean(dim=0), atol=1e-10, rtol=1e-10)


class TestChangedModels:
    """A model that is not what its class says gives no map."""

    @pytest.mark.parametrize("family", ["timm_swin", "timm_convnext"])
    def test_a_changed_forward(self, family):
        native = tiny_staged(family)
        kind = type(native.module)

        class Changed(kind):
            def forward(self, images, **options):
                return super().forward(images.flip(-1), **options)

        native.module.__class__ = Changed
        with pytest.raises(ViewMismatch):
            view(native)

    @pytest.mark.parametrize("family", ["timm_swin", "timm_swin_v2"])
    def test_rows_and_columns_exchanged(self, family):
        """Both the native features and what is made of them pass; their place does not."""
        model = view(tiny_staged(family), check=False)
        index = [stage.name for stage in model.stages].index(model.cells)
        ours, after = model.stages[index], model.stages[index + 1]

        def turned(x: Tensor) -> Tensor:
            return x.flip(-1, -2)

        model.stages[index] = replace(ours, leave=lambda x: turned(ours.leave(x)))
        model.stages[index + 1] = replace(after, enter=lambda x: after.enter(turned(x)))
        with pytest.raises(ViewMismatch, match="'locality' failed at stage3"):
            verify(model)

    def test_a_norm_left_out_of_the_rest(self):
        native = tiny_staged("timm_swin")
        model = view(native, check=False)
        model.rest = lambda x: native.module.forward_head(x.movedim(1, -1))
        with pytest.raises(ViewMismatch, match="'resume' failed at stage4"):
            verify(model)


def test_the_size_that_a_network_was_built_for_is_taken():
    native = tiny_staged("timm_swin")
    assert wrap(native.module, **{**native.options, "size": None}).preprocess.size == SIZE


def test_a_network_without_classifier_takes_a_head():
    native = tiny_staged("timm_swin")
    native.module.reset_classifier(0)
    matrix = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).double()
    model = wrap(native.module, **native.options, head=matrix)
    images = pictures(native)
    assert_close(model(images), native.module(images) @ matrix.T, **EXACT)
