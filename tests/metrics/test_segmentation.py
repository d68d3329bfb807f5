"""Overlap of masks by hand, and ImageNet-9 with classes that belong to none of the nine."""

from __future__ import annotations

import math

import pytest
import torch

from seecause.data import IGNORE
from seecause.errors import BadOption
from seecause.metrics.annotations import Overlap, foreground, overlap
from seecause.metrics.statistics import in9_right

MASKS = torch.tensor([[[1, 1, 0, 0]], [[1, 0, 0, 0]], [[0, 0, 0, 0]]]).bool()
TRUTH = torch.tensor([[[1, 0, 0, 0]], [[1, 1, 1, IGNORE]], [[0, 0, IGNORE, 0]]])


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


def test_iou_is_of_all_images_together():
    found = overlap(MASKS, TRUTH)
    assert found == Overlap(2, 5) and found.iou == 2 / 5  # not the mean of the images
    each = [overlap(MASKS[i : i + 1], TRUTH[i : i + 1]) for i in range(3)]
    assert sum(each, Overlap()) == found
    assert math.isnan(Overlap().iou)


def test_ignored_pixels_count_nowhere():
    everything = torch.ones_like(MASKS)
    assert overlap(everything[1:2], TRUTH[1:2]).iou == 1
    assert overlap(everything[1:2], TRUTH[1:2] == 1).iou == 3 / 4


def test_a_class_that_belongs_to_none_of_the_nine_is_wrong():
    mapping, labels = torch.tensor([3, -1, 3, 0]), torch.tensor([3, 3, 3, 0])
    assert in9_right(torch.eye(4), labels, mapping).tolist() == [True, False, True, True]
    assert in9_right(torch.eye(9), torch.arange(9)).all()
    with pytest.raises(BadOption, match=r"\[N, 9\]"):
        in9_right(torch.zeros(2, 1000), labels[:2])
