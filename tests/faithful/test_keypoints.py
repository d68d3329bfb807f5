"""Key points of birds from the parts of a network: what `faithful evaluate` prints as Kp."""

from __future__ import annotations

import pytest
import torch

import seecause as sc
from seecause.data.registry import open_data
from seecause.faithful import calibrate, intervene
from seecause.faithful.data import batches_of
from seecause.faithful.examine import key_points, keypoint_fit_data
from seecause.metrics import keypoint_error, locate, part_agreement
from tests.faithful.birds import bird_net, tiny_cub


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    return tiny_cub(tmp_path_factory.mktemp("birds") / "CUB_200_2011")


def slow(net, fit, test):
    """By the metric's own loop, one photo after the other, with maps of the whole network."""
    model = sc.wrap(net)
    found = [locate(model, data, lambda images: net(images).maps) for data in (fit, test)]
    return [keypoint_error(*found).mean, *part_agreement(found[1])]


@pytest.mark.parametrize("name", ["cub", "waterbird200"])
def test_key_points_are_those_of_the_metric(birds, name):
    net, test = bird_net(birds), open_data(f"{name}:{birds}")
    fit, seen = open_data(keypoint_fit_data(test.name)), []
    found = key_points(net, fit, test, batch=3, advance=seen.append)
    assert fit.name == f"cub:{birds}:trainval" and len(fit) == 20 and sum(seen) == 20 + len(test)
    assert (
        list(found.values()) == pytest.approx(slow(net, fit, test), abs=1e-9)
        and found["keypoints"] > 1
        and found["nmi"] > 0.01
    )


def test_rejected_tokens_change_them_and_parts_left_out_do_not(birds):
    net, test = bird_net(birds), open_data(f"cub:{birds}")
    fit = open_data(keypoint_fit_data(test.name))
    calibrate(net, (images for images, *_ in batches_of(net, fit)), 0.5)
    plain = key_points(net, fit, test)
    with intervene(net, drop_parts=[0]):
        assert key_points(net, fit, test) == plain
    with intervene(net, quantile=0.5):
        changed = key_points(net, fit, test)
        assert (
            list(changed.values()) == pytest.approx(slow(net, fit, test), abs=1e-9)
            and abs(changed["keypoints"] - plain["keypoints"]) > 0.01
        )


def test_maps_that_follow_the_bird_find_its_points(birds):
    """A net whose first part is what is bright: centres move with the square, so a linear map finds
    every point on it."""
    net, test = bird_net(birds), open_data(f"cub:{birds}")

    def bright(images):
        light = (
            torch.nn.functional.avg_pool2d(net.preprocess.raw(images).mean(dim=1, keepdim=True), 8)
            > 0.5
        )
        return torch.cat([light, 0 * light, 0 * light, ~light], dim=1).to(images.dtype)

    blind = key_points(net, open_data(keypoint_fit_data(test.name)), test)["keypoints"]
    net.maps = bright
    assert key_points(net, open_data(keypoint_fit_data(test.name)), test)["keypoints"] < min(
        15, blind
    )


def test_what_has_none_gets_none(birds, tmp_path):
    assert (
        keypoint_fit_data("waterbirds:x:test") is None
        and keypoint_fit_data("cub:x:val") is None
        and keypoint_fit_data("cub:C:/x:test") == "cub:C:/x:trainval"
    )
    hidden = tiny_cub(tmp_path / "CUB_200_2011", visible=False)
    assert (
        key_points(bird_net(birds), open_data(f"cub:{hidden}:trainval"), open_data(f"cub:{hidden}"))
        == {}
    )
