"""Average precision is scikit-learn's, the pointing game points where it says, and what cannot be
scored is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score

import seecause as sc
from seecause.errors import BadOption
from seecause.metrics.annotations import localization
from seecause.metrics.pixels import to_pixels
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
