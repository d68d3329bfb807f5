"""Grids of image tokens: where each token lies, and what has no place."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from seecause.errors import UnsupportedModel
from seecause.models.decoder import Grid, ImageTokens, image_tokens


def test_maps_leave_out_newlines_and_what_has_no_place():
    tokens = ImageTokens((Grid(1, 2, box=None), Grid(2, 2, newline=True), Grid(1, 3)))
    (first, upper), (second, lower) = tokens.maps(torch.arange(22).view(2, 11))
    assert (first, second) == tokens.parts[1:]
    assert upper.tolist() == [[[2, 3], [5, 6]], [[13, 14], [16, 17]]]
    assert lower.tolist() == [[[8, 9, 10]], [[19, 20, 21]]]


def test_one_grid_and_a_class_token_without_a_place():
    vision = SimpleNamespace(image_size=(32, 64), patch_size=[16, 16])
    config = SimpleNamespace(vision_config=vision)

    def parts(count: int) -> tuple[Grid, ...]:
        return image_tokens(config, {}, torch.ones(count, dtype=torch.bool)).parts

    assert parts(4) == (Grid(2, 2),)
    assert parts(5) == (Grid(1, 1, box=None), Grid(2, 2))


def test_merged_patches_are_one_token_and_breaks_are_newlines():
    vision = SimpleNamespace(patch_size=8)
    config = SimpleNamespace(vision_config=vision, spatial_merge_size=2)
    flat = {"image_sizes": torch.tensor([[16, 64]])}
    assert image_tokens(config, flat, torch.ones(4, dtype=torch.bool)).parts == (Grid(1, 4),)
    high = {"image_sizes": torch.tensor([[48, 32]])}
    rows = torch.tensor([True, True, False] * 2 + [True, True])
    upper, last = image_tokens(config, high, rows).parts
    assert (upper.rows, upper.columns, upper.newline) == (2, 2, True)
    assert (last.rows, last.columns, last.newline) == (1, 2, False)
    assert_close(upper.box, (0.0, 0.0, 2 / 3, 1.0))
    assert_close(last.box, (2 / 3, 0.0, 1.0, 1.0))


def test_several_images_and_videos_are_refused():
    vision = SimpleNamespace(spatial_merge_size=1)
    config = SimpleNamespace(vision_config=vision)
    inputs = {"image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 2]])}
    with pytest.raises(UnsupportedModel, match="give one image"):
        image_tokens(config, inputs, torch.ones(12, dtype=torch.bool))
