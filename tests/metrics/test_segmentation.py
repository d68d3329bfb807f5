"""Overlap of masks by hand, and the gap of backgrounds with classes that belong to none of the
nine."""

from __future__ import annotations

import math

import pytest
import torch

from seecause.data import IGNORE
from seecause.errors import BadOption
from seecause.metrics import (
    Overlap,
    background_gap,
    box_mask,
    foreground,
    in9_predictions,
    iou,
    overlap,
)
from seecause.metrics.accuracy import in9_right

MASKS = torch.tensor([[[1, 1, 0, 0]], [[1, 0, 0, 0]], [[0, 0, 0, 0]]]).bool()
TRUTH = torch.tensor([[[1, 0, 0, 0]], [[1, 1, 1, IGNORE]], [[0, 0, IGNORE, 0]]])


def test_iou_of_each_image_and_of_all():
    assert iou(MASKS, TRUTH)[:2].tolist() == [1 / 2, 1 / 3] and iou(MASKS, TRUTH)[2].isnan()
    assert (
        overlap(MASKS, TRUTH) == Overlap(2, 5) and overlap(MASKS, TRUTH).iou == 2 / 5
    )  # not the mean of the images
    assert sum(
        (overlap(MASKS[i : i + 1], TRUTH[i : i + 1]) for i in range(3)), Overlap()
    ) == Overlap(2, 5)
    assert math.isnan(Overlap().iou)


def test_ignored_pixels_count_nowhere():
    everything = torch.ones_like(MASKS)
    assert (
        iou(everything, TRUTH)[1] == 1
        and iou(everything, TRUTH, ignore=None)[1] == 1
        and iou(everything, TRUTH == 1)[1] == 3 / 4
    )
    with pytest.raises(BadOption, match="masks"):
        iou(MASKS, TRUTH[:, :, :3])


def test_the_foreground_is_where_a_part_beats_the_background():
    maps = torch.zeros(1, 3, 2, 2)
    maps[0, :, 0, 0] = torch.tensor([0.5, 0.1, 0.4])
    maps[0, :, 0, 1] = torch.tensor(
        [0.3, 0.3, 0.4]
    )  # both parts together would win; each alone does not
    maps[0, :, 1] = torch.tensor([0.0, 0.0, 1.0])[:, None]
    assert foreground(maps, (2, 2)).tolist() == [[[True, False], [False, False]]]
    wide = foreground(maps, (3, 3))  # corners aligned: the corners keep their values
    assert wide[0, 0, 0] and not wide[0, 0, 2] and not wide[0, 2].any()
    with pytest.raises(BadOption, match="background last"):
        foreground(maps[:, :1], (2, 2))


def test_a_box_holds_the_pixels_whose_centre_it_holds():
    assert box_mask((1, 0, 2, 1), (2, 4)).int().tolist() == [[0, 1, 1, 0], [0, 0, 0, 0]]
    assert box_mask((0.4, 0.6, 1.0, 9.0), (2, 2)).int().tolist() == [[0, 0], [1, 0]]


def test_a_class_that_belongs_to_none_of_the_nine_is_wrong():
    mapping = torch.tensor([3, -1, 3, 0])
    logits = torch.eye(4)
    assert in9_predictions(logits, mapping).tolist() == [3, -1, 3, 0]
    assert in9_right(logits, torch.tensor([3, 3, 3, 0]), mapping).tolist() == [
        True,
        False,
        True,
        True,
    ]
    assert in9_right(torch.eye(9), torch.arange(9)).all()
    with pytest.raises(BadOption, match=r"\[N, 9\]"):
        in9_predictions(torch.zeros(2, 1000))


def test_the_gap_is_what_another_background_costs():
    same, random = torch.tensor([1, 1, 1, 0]).bool(), torch.tensor([1, 0]).bool()
    assert background_gap(same, random) == pytest.approx(0.25)
    with pytest.raises(BadOption, match="both"):
        background_gap(same, random[:0])
