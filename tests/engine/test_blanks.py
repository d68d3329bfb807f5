"""Blank pictures and their kept runs."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from seecause.engine.trace import blank_image, blank_trace
from seecause.errors import BadImage, BadOption
from tests.helpers import noise, view
from tests.tiny import tiny


@pytest.mark.parametrize(("blank", "raw"), [("white", 1.0), ("black", 0.0), ("mean", 0.5)])
def test_flat_blanks_are_flat_in_raw_pixels(blank, raw):
    model = view(tiny("timm_deit3"))
    image = blank_image(model, (32, 48), blank)
    assert image.dtype == torch.float64 and image.shape == (1, 3, 32, 48)
    assert_close(model.preprocess.raw(image), torch.full_like(image, raw))


def gaussian(size: int, sigma: float) -> torch.Tensor:
    weights = torch.exp(-0.5 * (torch.arange(size).double() - size // 2) ** 2 / sigma**2)
    return weights / weights.sum()


def test_noise_is_drawn_by_its_seed_and_blurred_by_a_28th_of_the_longer_side():
    model = view(tiny("timm_deit3"), check=False)
    drawn = noise(1, 3, 32, 48, seed=3)
    assert torch.equal(blank_image(model, (32, 48), "noise", seed=3), drawn)
    assert torch.equal(blank_image(model, (32, 48), "noise", seed=4), noise(1, 3, 32, 48, seed=4))
    line, side = gaussian(7, 48 / 28), 3  # pixels around, at least as many as two deviations
    padded = torch.nn.functional.pad(drawn, (side,) * 4, mode="reflect")
    soft = torch.einsum("bcyxij,i,j->bcyx", padded.unfold(2, 7, 1).unfold(3, 7, 1), line, line)
    expected = (soft - soft.mean()) / soft.std()
    assert_close(blank_image(model, (32, 48), "blur-noise", seed=3), expected)


def test_blanks_of_other_shapes_steps_and_precision_are_others():
    model = view(tiny("timm_deit3"), check=False)
    white = blank_image(model, (32, 48))
    assert blank_image(model, (32, 48)) is white
    assert blank_image(model, (48, 32)).shape[-2:] == (48, 32)
    flat = [blank_image(model, size, torch.ones(3, *size)) for size in ((32, 48), (48, 32))]
    assert [blank.shape[-2:] for blank in flat] == [(32, 48), (48, 32)]
    other = replace(model, preprocess=replace(model.preprocess, mean=(0.2, 0.3, 0.4)))
    assert other.memo is model.memo
    assert_close(other.preprocess.raw(blank_image(other, (32, 48))), torch.ones_like(white))
    model.module.float()
    for kind in ("white", torch.ones(3, 32, 48)):
        assert blank_image(model, (32, 48), kind).dtype == torch.float32


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


def test_a_picture_as_a_blank_is_the_same_object_while_its_pixels_are():
    model = view(tiny("timm_deit3"))
    picture = torch.rand(3, 32, 48)
    blank = blank_image(model, (32, 48), picture)
    assert blank is blank_image(model, (32, 48), picture.clone()) and blank.dtype == model.dtype
    picture += 1
    assert not torch.equal(blank_image(model, (32, 48), picture), blank)
    own = torch.rand(1, 3, 32, 48, dtype=torch.float64)
    blank, before = blank_image(model, (32, 48), own), own.clone()
    own += 1
    assert torch.equal(blank, before)  # it does not change with what it was made of


def test_blanks_may_be_one_for_each_image_and_odd_ones_are_refused():
    model = view(tiny("timm_deit3"))
    both = torch.cat([blank_image(model, (32, 48), kind) for kind in ("white", "noise")])
    assert torch.equal(blank_image(model, (32, 48), both, count=2), both)
    assert blank_image(model, (32, 48), both.float(), count=2).dtype == model.dtype
    for wrong, count in ((both, 3), (both[:, :2], 2), (both[..., :-1], 2)):
        with pytest.raises(BadImage, match="blank of shape"):
            blank_image(model, (32, 48), wrong, count=count)
    with pytest.raises(BadOption, match="white, black"):
        blank_image(model, (32, 48), "grey")
