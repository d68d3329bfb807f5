"""Mosaic on convolutional networks: corners are CAAP's cell sets, slopes the native run's."""

import pytest
import torch
import torch.nn.functional as F

import seecause as sc
from seecause.attribution.caap import sweep_features
from seecause.attribution.mosaic import MaskPlan, draw_masks, largest_weights, mixtures
from seecause.engine.chunks import budget
from seecause.engine.trace import blank_image
from tests.families.conv import CONV_FAMILIES, tiny_conv
from tests.helpers import near, view
from tests.tiny import pictures

GRID = (3, 5)


def setting(family="timm_resnet"):
    native = tiny_conv(family)
    model, images = view(native, check=False), pictures(native)
    return model, images, blank_image(model, (images.shape[-2], images.shape[-1]))


@pytest.mark.parametrize("family", CONV_FAMILIES)
@torch.no_grad()
def test_binary_masks_are_the_cell_sets_of_caap(family):
    model, images, blank = setting(family)
    sets = torch.rand(4, *GRID, generator=torch.Generator().manual_seed(0)) > 0.5
    for stage in [stage.name for stage in model.stages]:
        expected = sweep_features(model, images, blank, sets.flatten(1), stage).interventions
        ends = model.run_to(stage, blank), model.run_to(stage, images)
        mixed = mixtures(sets.double().expand(2, -1, -1, -1), *ends)
        logits = model.run_from(stage, mixed).unflatten(0, (2, 4))
        near(logits, expected, 1e-10)


@pytest.mark.parametrize("family", CONV_FAMILIES)
def test_maps_are_mean_slopes_of_the_native_network(family):
    model, images, blank = setting(family)
    plan = MaskPlan(masks=3, cells=2, seed=5)
    masks = draw_masks(plan, GRID)
    with torch.no_grad():
        ends = model.run_to(model.cells, blank), model.run_to(model.cells, images)
    slopes = []
    for mask in masks:
        leaf = mask.clone().requires_grad_()
        share = leaf.view(1, 1, *GRID)
        logits = model.run_from(model.cells, ends[0] + share * (ends[1][1:] - ends[0]))
        slopes.append(torch.autograd.grad(logits.softmax(dim=-1)[0, 2], leaf)[0])
    maps = sc.attribute(model, images, 2, "mosaic", masks=3, cells=2, seed=5)
    near(maps.maps[1].flatten(), torch.stack(slopes).mean(dim=0), 1e-10)
    expected = torch.stack(slopes).std(dim=0) / 3**0.5
    near(maps.errors[1].flatten(), expected, 1e-10)


@pytest.mark.parametrize("size", [(3, 5), (1, 2), (2, 3), (4, 7), (6, 10)])
def test_features_have_the_largest_weight_and_equal_cells_share_its_slope(size):
    masks = torch.rand(2, 3, *GRID, generator=torch.Generator().manual_seed(0)).double()
    assert torch.equal(largest_weights(masks, size), F.adaptive_max_pool2d(masks, size))
    ties = torch.full((1, 1, *GRID), 0.5, dtype=torch.float64, requires_grad=True)
    expected = torch.zeros(GRID, dtype=torch.float64)
    for i in range(size[0]):
        for j in range(size[1]):
            cells = [
                (y, x)
                for y in range(GRID[0])
                for x in range(GRID[1])
                if y * size[0] < (i + 1) * GRID[0] and (y + 1) * size[0] > i * GRID[0]
                if x * size[1] < (j + 1) * GRID[1] and (x + 1) * size[1] > j * GRID[1]
            ]
            for y, x in cells:
                expected[y, x] += 1 / len(cells)
    slopes = torch.autograd.grad(largest_weights(ties, size).sum(), ties)[0]
    near(slopes[0, 0], expected)


def test_a_blank_for_each_picture_is_the_blank_of_each():
    model, images, _ = setting()
    blanks = images.flip(0, 3) * 0.5
    options = {"method": "mosaic", "masks": 3}
    singles = [
        sc.attribute(model, images[i : i + 1], 1, blank=blanks[i : i + 1], **options).maps[0]
        for i in range(len(images))
    ]
    maps = sc.attribute(model, images, 1, blank=blanks, **options).maps
    near(maps, torch.stack(singles), 1e-10)
    with budget(1):
        again = sc.attribute(model, images, 1, blank=blanks, **options).maps
    near(again, maps, 1e-10)
