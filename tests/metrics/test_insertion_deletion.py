"""Curves equal a loop that changes one pixel at a time; their ends are plain forwards; ties and
steps follow the stated rules."""

import pytest
import torch
from torch.testing import assert_close

from seecause.metrics.faithfulness import insertion_deletion
from seecause.metrics.pixels import blurred, importance_ranks, thresholds
from tests.helpers import near, noise, view
from tests.reference import insertion_deletion as reference
from tests.tiny import pictures, tiny

SIZE, GRID = (32, 48), (4, 6)
CLASSES = [2, 5]


@pytest.fixture(scope="module")
def setting():
    native = tiny("timm_deit3")
    return native, view(native, check=False), pictures(native)


def answer(native, label):
    return lambda image: torch.softmax(native.forward(image[None]), dim=-1)[0, label].item()


@pytest.mark.parametrize("order", ["pixel", "patch"])
def test_curves_equal_the_loop(setting, order):
    native, model, images = setting
    maps = noise(2, *(SIZE if order == "pixel" else GRID)).round(decimals=1)  # with ties
    steps, each = (4, 384) if order == "pixel" else (8, 3 * 64)
    result = insertion_deletion(model, images, maps, CLASSES, order=order, steps=steps)
    for i, label in enumerate(CLASSES):
        places = (
            reference.pixel_order(maps[i])
            if order == "pixel"
            else reference.patch_order(maps[i], SIZE)
        )
        ask, soft = answer(native, label), reference.blur(images[i])
        deletion = reference.curve(ask, images[i], torch.zeros_like(images[i]), places, each)
        insertion = reference.curve(ask, soft, images[i], places, each)
        near(result["deletion curve"][i], torch.tensor(deletion, dtype=torch.float64), 1e-10)
        near(result["insertion curve"][i], torch.tensor(insertion, dtype=torch.float64), 1e-10)
        assert result["deletion"][i].item() == pytest.approx(reference.area(deletion), abs=1e-10)
        assert result["ins-del"][i].item() == pytest.approx(
            reference.area(insertion) - reference.area(deletion), abs=1e-10
        )


def test_the_ends_are_plain_forwards(setting):
    native, model, images = setting
    result = insertion_deletion(model, images, noise(2, *GRID), CLASSES, fill=0.25, score="logit")
    plain, soft, flat = (
        native.forward(x)[range(2), CLASSES]
        for x in (images, blurred(images), torch.full_like(images, 0.25))
    )
    for curve, ends in (
        (result["deletion curve"], (plain, flat)),
        (result["insertion curve"], (soft, plain)),
    ):
        assert_close(curve[:, 0], ends[0], atol=1e-10, rtol=0)
        assert_close(curve[:, -1], ends[1], atol=1e-10, rtol=0)


def test_the_predicted_class_is_the_default_and_is_recorded(setting):
    native, model, images = setting
    maps, predicted = noise(2, *GRID), native.forward(images).argmax(dim=-1)
    result, named = (
        insertion_deletion(model, images, maps),
        insertion_deletion(model, images, maps, predicted),
    )
    assert torch.equal(result["deletion curve"], named["deletion curve"])
    assert result.protocol["target"]["class"] == predicted.tolist()
    assert [result.protocol[k] for k in ("steps", "order", "score")] == ["rise", "pixel", "prob"]


def test_rise_takes_eight_rows_a_step():
    taken = thresholds(224 * 224, (224, 224), (14, 14))
    assert len(taken) == 29 and (taken.diff() == 8 * 224).all()
    short = thresholds(100 * 100, (100, 100), (10, 10))
    assert short[-1] - short[-2] == 400 and short[1] == 800  # the last step is short
    assert thresholds(196, (224, 224), (14, 14)).diff().unique().tolist() == [
        7
    ]  # patch order: the same share of the picture
    assert thresholds(196, (224, 224), (14, 14), "patch").tolist() == list(range(197))


def test_a_number_of_steps_is_kept():
    taken = thresholds(196, (224, 224), (14, 14), 16)
    assert len(taken) == 17 and taken[-1] == 196 and set(taken.diff().tolist()) == {12, 13}


def test_a_pixel_map_is_averaged_for_patch_order():
    coarse = noise(1, *GRID)
    fine = coarse.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2) + 1e-3 * noise(1, *SIZE)
    one, count = importance_ranks(fine, SIZE, GRID, order="patch")
    other, _ = importance_ranks(coarse, SIZE, GRID, order="patch")
    assert count == 24 and torch.equal(one, other) and one.shape == (1, *SIZE)


def test_blur_pads_with_zeros_and_keeps_the_dtype():
    soft = blurred(torch.ones(1, 3, 24, 24, dtype=torch.bfloat16))
    assert soft.dtype == torch.bfloat16 and soft[0, 0, 12, 12] == 1
    assert 0.2 < soft[0, 0, 0, 0] < 0.4  # three quarters of the window lie outside
