"""Views of detectors and models of pixels: every family equals its native module, and one that
reads the picture in another way than its view does is refused."""

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import seecause as sc
from seecause.engine.verify import verify
from seecause.errors import UnknownName, ViewMismatch
from seecause.models.dense import Places, corners_of, rectangle
from tests.families.dense import DENSE, tiny_dense
from tests.reference.rows import output_of, overwritten
from tests.tiny import pictures


@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_a_view_equals_its_native_model(family):
    native = tiny_dense(family)
    model, images = sc.wrap(native.module, **native.options), 0.3 * pictures(native)
    outputs = model.outputs(images)
    again = model.outputs_from(model.run_to(model.cells, images))
    for name, values in model.reading.compared(outputs).items():
        assert_close(model.reading.compared(again)[name], values, atol=1e-10, rtol=0)
        assert values.std() > 1e-4
    aim = model.aim(images[:1])
    assert_close(aim.model(images[:1]), aim.read(model.outputs(images[:1])))
    assert all(probe.worst < 0.3 for probe in verify(model))


class Peeking(hf.DetrForObjectDetection):
    """Its classifier also reads pixels, around encoder and decoder."""

    def forward(self, pixel_values, **named):
        outputs = super().forward(pixel_values=pixel_values, **named)
        outputs.logits = outputs.logits + pixel_values.mean(dim=(1, 2, 3))[:, None, None]
        return outputs


class Transposed(hf.DetrForObjectDetection):
    """Its backbone sees pictures lying on their side, so that places are not where they seem."""

    def forward(self, pixel_values, **named):
        return super().forward(pixel_values=pixel_values.mT.flip(2), **named)


@pytest.mark.parametrize(("kind", "probe"), [(Peeking, "answers"), (Transposed, "places")])
def test_planted_mistakes_are_refused(kind, probe):
    module = tiny_dense("detr").module
    wrong = kind(module.config).double().eval()
    wrong.load_state_dict(module.state_dict())
    with pytest.raises(ViewMismatch, match=probe) as refusal:
        sc.wrap(wrong, mean=(0.5,) * 3, std=(0.5,) * 3, size=(96, 96))
    if probe == "places":
        assert "where features move has a correlation of" in str(refusal.value)


def test_places_of_one_picture_have_the_slope_that_they_have_in_a_batch():
    native = tiny_dense("rt_detr")
    model, images = sc.wrap(native.module, check=False, **native.options), 0.3 * pictures(native)
    aim = model.aim(images[:1], "box:2:frog").model
    with pytest.raises(UnknownName, match="stage"):
        aim.run_from("model.decoder", aim.run_to(model.cells, images))
    slopes = []
    for batch in (1, 2):
        places = aim.run_to(model.cells, images[:1].expand(batch, -1, -1, -1))
        leaves = [level.detach().requires_grad_() for level in places.maps]
        logits = aim.run_from(model.cells, Places(tuple(leaves), places.size))
        slopes.append([x[0] for x in torch.autograd.grad(logits[0, 1], leaves)])
    assert_close(slopes[0], slopes[1], atol=1e-12, rtol=0)
    assert slopes[0][0].abs().max() > 0


@torch.no_grad()
def test_chosen_queries_stay_those_of_the_explained_picture():
    native = tiny_dense("rt_detr")
    model, images = sc.wrap(native.module, check=False, **native.options), 0.3 * pictures(native)
    aim = model.aim(images[:1], "box:2:frog").model
    mine = native.module(pixel_values=images[:1]).logits[:, 2]
    assert_close(aim(images[:1]), mine, atol=1e-10, rtol=0)
    other = native.module(pixel_values=images[1:]).logits[:, 2]
    assert (aim(images[1:]) - other).abs().max() > 1e-4
    part = native.module.model.enc_score_head
    choice = output_of(lambda given: native.module(pixel_values=given), part, images[:1])
    with overwritten(part, lambda output: choice):
        held = native.module(pixel_values=images[1:]).logits[:, 2]
    assert_close(aim(images[1:]), held, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("corners", "rows", "columns"),
    [
        ([1, 2, 5, 4], range(2, 4), range(1, 5)),
        ([-3, -2, 2, 99], range(6), range(2)),
        ([-9, 1, -4, 3], range(0), range(0)),  # left of the frame
        ([1, -9, 3, -1], range(0), range(0)),  # above it
        ([8, 1, 9, 3], range(0), range(0)),
    ],
)
def test_pixels_of_a_box_are_those_inside_of_the_frame(corners, rows, columns):
    mask = rectangle(corners, (6, 8))
    assert mask.nonzero().tolist() == [[row, column] for row in rows for column in columns]


def test_corners_of_a_box_are_in_pixels_of_the_frame():
    corners = corners_of(torch.tensor([0.5, 0.25, 0.5, 0.5]), (100, 200))
    assert corners.tolist() == [50, 0, 150, 50]


def test_windows_that_lose_their_places_are_refused():
    """transformers cuts the windows of RF-DETR's tower with height and width swapped."""
    with pytest.raises(ViewMismatch, match="places"):
        sc.wrap(tiny_dense("rf_detr").module, mean=(0.5,) * 3, std=(0.5,) * 3, size=(64, 96))
