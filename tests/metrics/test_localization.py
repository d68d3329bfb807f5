"""Maps against annotations: average precision is scikit-learn's, the pointing game points where it
says, overlap of masks by hand, key points by the normal equations; what has no score is said."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score

import seecause as sc
from seecause.data import IGNORE, Sample
from seecause.errors import BadOption
from seecause.metrics.annotations import (
    Located,
    Marks,
    Overlap,
    foreground,
    keypoint_error,
    localization,
    located,
    marks_of,
    overlap,
    part_agreement,
    part_centers,
)
from seecause.metrics.pixels import to_pixels
from seecause.models.preprocess import Preprocess
from tests.helpers import near, noise

SIZE = (12, 20)


def masks(batch: int = 5, seed: int = 3) -> torch.Tensor:
    return noise(batch, *SIZE, seed=seed) > 0.5


@pytest.mark.parametrize("levels", [None, 8, 2])  # few levels: many ties
def test_both_precisions_equal_scikit_learn(levels):
    maps = noise(5, *SIZE)
    maps = maps if levels is None else (maps * levels / 4).round()
    result = localization(maps, masks())
    for i, mask in enumerate(masks()):
        on, values = mask.flatten().numpy(), maps[i].flatten().numpy()
        assert result["aupr1"][i].item() == pytest.approx(
            average_precision_score(on, values), abs=1e-12
        )
        assert result["aupr0"][i].item() == pytest.approx(
            average_precision_score(~on, -values), abs=1e-12
        )


def test_ignored_pixels_count_nowhere():
    maps, on, ignored = noise(4, *SIZE), masks(4), noise(4, *SIZE, seed=9) > 0.8
    ids = on.int().masked_fill(ignored, 255)
    result = localization(maps, ids)
    for i in range(4):
        kept = ~ignored[i]
        inside, values = on[i][kept].numpy(), maps[i][kept].numpy()
        assert result["aupr1"][i].item() == pytest.approx(
            average_precision_score(inside, values), abs=1e-12
        )
        assert result["aupr0"][i].item() == pytest.approx(
            average_precision_score(~inside, -values), abs=1e-12
        )
        assert result["pointing"][i] == on[i][kept][maps[i][kept].argmax()]


@pytest.mark.parametrize("size", [(12, 20), (17, 23), (2, 3)])
def test_upsampling_is_torchs_but_flat_regions_stay_flat(size):
    maps = noise(2, 3, 5)
    near(
        to_pixels(maps, size), F.interpolate(maps[:, None], size=size, mode="bilinear")[:, 0], 1e-14
    )
    assert (to_pixels(torch.full((1, 3, 5), 0.1), size) == torch.tensor(0.1).double()).all()


def test_the_first_maximum_counts():
    maps = torch.zeros(1, *SIZE)
    maps[0, 2, 3] = maps[0, 9, 9] = 1
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[0, 9, 9] = True
    assert localization(maps, mask)["pointing"].item() == 0


def test_images_that_cannot_be_scored_stay_as_holes():
    ids = masks(4).int()
    ids[1], ids[2], ids[3] = 0, 1, 255
    ids[0, 2], ids[0, :, 3] = 255, 255  # some of a picture is still a picture
    ids[0, 4], ids[0, 5], ids[0, :, 5], ids[0, :, 6] = 0, 1, 0, 1
    result = localization(noise(4, 3, 5), ids)
    assert result["reasons"] == (
        "",
        "no object in the frame",
        "no background in the frame",
        "every pixel is ignored",
    )
    for scores in (result["aupr1"], result["aupr0"], result["pointing"]):
        assert scores.isnan().tolist() == [False, True, True, True]
    assert sc.metrics.summarise(result["aupr1"]).skipped == 3


@pytest.mark.parametrize(
    ("maps", "mask", "message"),
    [
        (torch.full((2, 3, 5), np.nan), masks(2), "finite"),
        (noise(2, 3, 5), masks(3), "one for each map"),
        (noise(3, 5), masks(3), r"\[B, gh, gw\]"),
    ],
)
def test_what_cannot_be_compared_is_refused(maps, mask, message):
    with pytest.raises(BadOption, match=message):
        localization(maps, mask)


@pytest.mark.parametrize("corner", [(0, 0), (0, -1), (-1, 0), (-1, -1)])
def test_a_map_of_one_patch_points_into_its_corner(corner):
    maps, inside = torch.zeros(1, 3, 5), torch.zeros(1, 3, 5, dtype=torch.bool)
    maps[(0, *corner)], inside[(0, *corner)] = 1, True
    mask = inside.repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)  # [1, 12, 20]
    assert localization(maps, mask)["pointing"].item() == 1
    assert localization(maps, ~mask)["pointing"].item() == 0


def test_maps_of_a_film_lie_one_below_the_other():
    film, mask = noise(3, 2, 2, 3), masks(3)  # [B, t, gh, gw]
    result, plain = localization(film, mask), localization(film.flatten(1, 2), mask)
    for column in ("pointing", "aupr1"):
        assert torch.equal(result[column], plain[column])


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


def test_ignored_pixels_are_in_no_overlap():
    everything = torch.ones_like(MASKS)
    assert overlap(everything[1:2], TRUTH[1:2]).iou == 1
    assert overlap(everything[1:2], TRUTH[1:2] == 1).iou == 3 / 4


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
