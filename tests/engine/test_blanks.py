"""Blank pictures and their kept runs."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from seecause.engine.blanks import blank_image, blank_trace
from seecause.errors import BadImage, BadOption
from tests.helpers import view
from tests.tiny import tiny


@pytest.mark.parametrize(("blank", "raw"), [("white", 1.0), ("black", 0.0), ("mean", 0.5)])
def test_flat_blanks_are_flat_in_raw_pixels(blank, raw):
    model = view(tiny("timm_deit3"))
    image = blank_image(model, (32, 48), blank)
    assert image.dtype == torch.float64 and image.shape == (1, 3, 32, 48)
    assert_close(model.preprocess.raw(image), torch.full_like(image, raw))


def test_noise_is_seeded_and_blur_keeps_its_strength():
    model = view(tiny("timm_deit3"))
    noise, soft = (blank_image(model, (32, 48), kind, seed=1) for kind in ("noise", "blur-noise"))
    assert torch.equal(noise, blank_image(model, (32, 48), "noise", seed=1))
    assert not torch.equal(noise, blank_image(model, (32, 48), "noise", seed=2))
    for image in (noise, soft):
        assert abs(image.mean()) < 0.1 and abs(image.std() - 1) < 0.1
    rough, smooth = ((image[..., 1:] - image[..., :-1]).abs().mean() for image in (noise, soft))
    assert smooth < rough / 2


def test_a_kept_run_is_reused_until_the_model_or_the_blank_changes():
    native = tiny("timm_deit3")
    model = view(native)
    blank = blank_image(model, (32, 48))
    first = blank_trace(model, blank, states={0}, kv={1})
    assert blank_trace(model, blank, states={0}, kv={1}) is first
    more = blank_trace(model, blank, states={4}, kv={2})
    assert set(more.states) == {0, 4} and set(more.kv) == {1, 2}
    other = blank_trace(model, blank_image(model, (32, 48), "black"), states={0}, kv=())
    assert blank_trace(model, blank, states={0}, kv={1}) is more  # beside the other's
    with torch.no_grad():
        native.module.norm.bias.add_(1)
    assert blank_trace(model, blank, states={0}, kv={1}) not in (more, other)
    assert len(model.memo["blanks"]) == 1  # those of the old weights are gone
    again = blank_trace(model, blank, states={0}, kv={1})
    blank += 1
    assert blank_trace(model, blank, states={0}, kv={1}) is not again


def test_at_most_four_runs_are_kept_and_the_newest_stay():
    model = view(tiny("timm_deit3"))
    blanks = [blank_image(model, (32, 48), "noise", seed=seed) for seed in range(6)]
    for blank in blanks:
        blank_trace(model, blank, states={0}, kv=())
    assert [held.blank for held in model.memo["blanks"]] == blanks[-4:]


def test_blanks_of_single_pictures_are_run_and_let_go():
    model = view(tiny("timm_deit3"))
    both = torch.cat([blank_image(model, (32, 48), kind) for kind in ("white", "noise")])
    blanks = blank_image(model, (32, 48), both, count=2)
    trace = blank_trace(model, blanks, states={0}, kv={1})
    assert torch.equal(blanks, both) and trace.batch == 2 and "blanks" not in model.memo
    for wrong, count in ((both, 3), (both[:, :2], 2), (both[..., :-1], 2)):
        with pytest.raises(BadImage, match="blank of shape"):
            blank_image(model, (32, 48), wrong, count=count)
    with pytest.raises(BadOption, match="white, black"):
        blank_image(model, (32, 48), "grey")


def test_a_picture_as_a_blank_is_the_same_object_while_its_pixels_are():
    model = view(tiny("timm_deit3"))
    picture = torch.rand(3, 32, 48)
    blank = blank_image(model, (32, 48), picture)
    assert blank is blank_image(model, (32, 48), picture.clone()) and blank.dtype == model.dtype
    picture += 1
    assert not torch.equal(blank_image(model, (32, 48), picture), blank)
