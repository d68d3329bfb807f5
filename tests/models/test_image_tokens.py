"""Grids of image tokens: where each token lies, and what has no place."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.testing import assert_close

from seecause.models.image_tokens import Grid, ImageTokens, image_tokens

NAN = [float("nan")] * 4


def test_every_token_has_the_box_of_its_row_and_column():
    tokens = ImageTokens(
        (Grid(1, 2, box=None), Grid(3, 2, newline=True), Grid(1, 1, (0, 0.5, 1, 1)))
    )
    third = [[[r / 3, c / 2, (r + 1) / 3, (c + 1) / 2] for c in range(2)] + [NAN] for r in range(3)]
    expected = [NAN, NAN, *(box for row in third for box in row), [0, 0.5, 1, 1]]
    boxes = tokens.boxes()
    assert tokens.count == len(boxes) == 12 and boxes.dtype == torch.float64
    exact = torch.tensor(expected, dtype=torch.float64)
    assert_close(boxes, exact, atol=1e-15, rtol=0, equal_nan=True)
    assert str(tokens) == "1 x 2 + 3 x 2 with newlines + 1 x 1"


def test_maps_leave_out_newlines_and_what_has_no_place():
    tokens = ImageTokens((Grid(1, 2, box=None), Grid(2, 2, newline=True), Grid(1, 3)))
    (first, upper), (second, lower) = tokens.maps(torch.arange(22).view(2, 11))
    assert (first, second) == tokens.parts[1:]
    assert upper.tolist() == [[[2, 3], [5, 6]], [[13, 14], [16, 17]]]
    assert lower.tolist() == [[[8, 9, 10]], [[19, 20, 21]]]


def test_one_grid_a_picture_and_a_class_token_without_a_place():
    config = SimpleNamespace(vision_config=SimpleNamespace(image_size=(32, 64), patch_size=[16]))

    def parts(count: int) -> tuple[Grid, ...]:
        return image_tokens(config, {}, torch.ones(count, dtype=torch.bool)).parts

    assert parts(4) == (Grid(2, 2),)
    assert parts(5) == (Grid(1, 1, box=None), Grid(2, 2))
    assert parts(12) == tuple(Grid(2, 2, image=i) for i in range(3))


def test_pictures_and_frames_keep_the_order_of_the_sequence():
    vision = SimpleNamespace(spatial_merge_size=1)
    config = SimpleNamespace(vision_config=vision, image_token_id=1, video_token_id=2)
    inputs = {
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 2]]),
        "video_grid_thw": torch.tensor([[1, 2, 4]]),
        "input_ids": torch.tensor([[1] * 4 + [2] * 8 + [1] * 8]),
    }
    parts = image_tokens(config, inputs, torch.ones(20, dtype=torch.bool)).parts
    assert parts == (Grid(2, 2), Grid(2, 4, image=1), Grid(4, 2, image=2))


def test_merged_patches_are_one_token_and_rows_of_two_pictures_are_not_joined():
    vision = SimpleNamespace(patch_size=8)
    config = SimpleNamespace(vision_config=vision, spatial_merge_size=2)
    flat = {"image_sizes": torch.tensor([[16, 64], [16, 64]])}
    places = torch.tensor([True] * 4 + [False] + [True] * 4)
    mark = Grid(1, 1, box=None)
    assert image_tokens(config, flat, places).parts == (Grid(1, 4), mark, Grid(1, 4, image=1))
    high = {"image_sizes": torch.tensor([[48, 32]])}
    rows = torch.tensor([True, True, False] * 2 + [True, True])
    upper, last = image_tokens(config, high, rows).parts
    assert (upper.rows, upper.columns, upper.newline) == (2, 2, True)
    assert (last.rows, last.columns, last.newline) == (1, 2, False)
    assert_close(upper.box, (0.0, 0.0, 2 / 3, 1.0))
    assert_close(last.box, (2 / 3, 0.0, 1.0, 1.0))


def test_rows_that_are_cut_lie_where_they_lay():
    upper, lower = Grid(4, 3, (0.2, 0.1, 1.0, 0.9), image=2).cut(1)
    assert (upper.rows, lower.rows) == (1, 3) and upper.image == lower.image == 2
    assert upper.box == (0.2, 0.1, 0.4, 0.9) and lower.box == (0.4, 0.1, 1.0, 0.9)
    assert Grid(4, 3, box=None).cut(3) == (Grid(3, 3, box=None), Grid(1, 3, box=None))
