"""Key points: centres by hand, the regression against the normal equations, and the whole way from
photos through the model's frame."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from seecause.data import Sample
from seecause.errors import BadOption
from seecause.metrics.annotations import (
    Located,
    Marks,
    keypoint_error,
    located,
    marks_of,
    part_agreement,
    part_centers,
)
from seecause.models.preprocess import Preprocess
from tests.helpers import noise


def test_centres_by_hand():
    maps = torch.zeros(1, 3, 4, 8)
    maps[0, 0, 1, 2], maps[0, 0, 1, 6] = 0.3, 0.1  # mass at columns 2 and 6
    maps[0, 1, 3, 7] = 0.9
    centers, active = part_centers(maps, (40, 160))
    assert centers[0].tolist() == [
        [pytest.approx(20 * 3), 10.0],
        [140.0, 30.0],
    ]  # a cell is 20 x 10 pixels
    assert (
        active.tolist() == [[False, True]] and part_centers(0 * maps, (40, 160))[0].abs().sum() == 0
    )


def test_marks_on_the_edges_of_a_frame():
    """The upper left ones are in it, the lower right ones are beyond the last pixel."""
    frame = Preprocess(size=(4, 8), mean=(0.5,) * 3, std=(0.5,) * 3)
    places = [[0, 0, 1], [7.5, 3.5, 1], [8, 2, 1], [2, 4, 1], [-0.5, 1, 1], [1, -0.5, 1], [3, 2, 0]]
    points = torch.tensor(places, dtype=torch.float32)
    sample = Sample(torch.zeros(3, 4, 8), 0, box=(1.0, 0.5, 4.1, 2.0), points=points)
    marks = marks_of(frame, [sample, sample])
    assert marks.visible.tolist() == [[True, True] + [False] * 5] * 2
    assert torch.equal(marks.points, points[None, :, :2].double().expand(2, -1, -1))
    assert marks.boxes.dtype == torch.float64
    assert marks.boxes[1].tolist() == pytest.approx([1, 0.5, 4.1, 2], abs=1e-12)


def random_located(count: int, seed: int, *, parts: int = 3, points: int = 2) -> Located:
    visible = noise(count, points, seed=seed + 1) > -0.5
    active = noise(count, parts, seed=seed + 2) > -1
    return Located(
        noise(count, parts, 2, seed=seed),
        active,
        noise(count, points, 2, seed=seed + 3),
        visible,
        torch.zeros(count, points).long(),
    )


def slow_error(fit: Located, test: Located) -> float:
    """The definition with plain numpy, one key point after the other."""
    total = seen = 0.0
    for point in range(fit.points.shape[1]):
        a, b = (located.visible[:, point].numpy() for located in (fit, test))
        x, y = fit.centers.flatten(1).numpy()[a], fit.points[:, point].numpy()[a]
        (xm, xs), (ym, ys) = (x.mean(0), x.std(0)), (y.mean(0), y.std(0))
        on, on_test = (np.repeat(located.active.numpy(), 2, axis=1) for located in (fit, test))
        weights = np.linalg.lstsq((x - xm) / xs * on[a], (y - ym) / ys, rcond=None)[0]
        predicted = (
            (test.centers.flatten(1).numpy()[b] - xm) / xs * on_test[b]
        ) @ weights * ys + ym
        total += np.linalg.norm(predicted - test.points[:, point].numpy()[b], axis=1).sum()
        seen += b.sum()
    return 100 * total / seen


# from photos to places


def test_the_regression_is_its_definition():
    fit, test = random_located(40, 0), random_located(25, 50)
    assert keypoint_error(fit, test) == pytest.approx(slow_error(fit, test), abs=1e-9)


def test_a_key_point_that_is_nowhere_visible_weighs_nothing():
    fit, test = random_located(40, 0), random_located(25, 50)
    only = [s._replace(points=s.points[:, :1], visible=s.visible[:, :1]) for s in (fit, test)]
    first = torch.tensor([True, False])
    for case in (
        (fit, test._replace(visible=test.visible & first)),
        (fit._replace(visible=fit.visible & first), test),
    ):  # not as if it were found exactly
        assert keypoint_error(*case) == pytest.approx(keypoint_error(*only))
    assert np.isnan(keypoint_error(fit, test._replace(visible=test.visible & False)))


def test_agreement_is_one_for_the_same_partition_under_other_names():
    places = random_located(30, 0, points=3)
    names = torch.tensor([2, 0, 1]).expand(30, 3)
    assert part_agreement(places._replace(winners=names)) == (pytest.approx(1), pytest.approx(1))
    assert part_agreement(places) == (0, 0)  # everything the same part


def test_places_are_in_units_of_the_box():
    """One part map is a white square; two key points lie in it, and one outside."""
    maps = torch.zeros(1, 2, 32, 48, dtype=torch.float64)
    maps[0, 0, 4:16, 8:20] = 1
    maps[0, 1] = 1 - maps[0, 0]
    points = torch.tensor([[[10.0, 6.0], [18.0, 14.0], [30.0, 20.0]]], dtype=torch.float64)
    box = torch.tensor([[8.0, 4.0, 12.0, 12.0]], dtype=torch.float64)
    found = located(maps, Marks(box, points, torch.ones(1, 3, dtype=torch.bool)), (32, 48))
    expected = torch.tensor([[1 / 6] * 2, [5 / 6] * 2], dtype=torch.float64)
    assert torch.allclose(found.points[0, :2], expected)
    middle = 0.5 - 0.5 / 12  # of twelve pixels, each standing at its corner
    assert torch.allclose(found.centers, torch.tensor(middle, dtype=torch.float64))
    assert found.winners.tolist() == [[0, 0, 1]] and found.active.all()


def test_images_without_a_box_are_refused():
    frame = Preprocess(size=(4, 8), mean=(0.5,) * 3, std=(0.5,) * 3)
    with pytest.raises(BadOption, match="bird 0"):
        marks_of(frame, [Sample(torch.zeros(3, 4, 8), 0, points=torch.zeros(1, 3), id="bird 0")])
