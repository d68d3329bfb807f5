"""Images: augmented in the right light and the same whenever they are asked for, and with parts
in colour that show exactly what is seen."""

import random

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from seecause.faithful.data import PlanckianJitter, augmentation, illuminants, seeded
from seecause.faithful.evaluation import part_colours, part_image, part_sheet
from seecause.models.preprocess import Preprocess

FRAME = Preprocess(size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3, filter="bilinear")


def photo() -> torch.Tensor:
    return torch.rand(3, 20, 28, generator=torch.Generator().manual_seed(0))


def test_light_runs_from_warm_to_cold():
    table = illuminants()
    assert table.shape == (25, 3)
    assert (table[:, 0].diff() < 0).all() and (table[:, 2].diff() > 0).all()
    assert_close(table[0], torch.tensor([0.6743, 0.4029, 0.0013]))  # 3,000 kelvin
    assert_close(table[-1], torch.tensor([0.3503, 0.4653, 0.6933]))  # 15,000


def test_jitter_leaves_green_and_clips_at_white():
    image = torch.tensor([0.5, 0.5, 0.9])[:, None, None].expand(3, 2, 2)
    with seeded(0, 0, 0):
        seen = {tuple(PlanckianJitter()(image)[:, 0, 0].tolist()) for _ in range(200)}
    expected = torch.stack([image[:, 0, 0] * one / one[1] for one in illuminants()]).clamp(max=1)
    assert len(seen) > 15 and all(one[1] == 0.5 and max(one) <= 1 for one in seen)
    for one in seen:
        assert (torch.tensor(one) - expected).abs().amax(dim=1).min() < 1e-6


@pytest.mark.parametrize(
    ("kind", "least", "most"), [("birds", 65, 95), ("birds_no_jitter", 0, 0), ("plain", 0, 0)]
)
def test_birds_are_seen_in_another_light(kind, least, most):
    """A grey image gets a colour in no other way."""
    change, grey, coloured = augmentation(kind, FRAME), photo()[:1].expand(3, -1, -1), 0
    for sample in range(100):
        with seeded(0, 0, sample):
            red, green, blue = change(grey)
        coloured += not (torch.equal(red, green) and torch.equal(green, blue))
    assert least <= coloured <= most


@pytest.mark.parametrize("kind", ["birds", "birds_no_jitter", "plain", "imagenet", "none"])
def test_a_draw_depends_on_its_key_alone(kind):
    change = augmentation(kind, FRAME)

    def draw(epoch: int) -> torch.Tensor:
        with seeded(7, epoch, 3):
            return change(photo())

    first = draw(0)
    torch.rand(5), random.random(), np.random.rand()
    assert first.shape == (3, 16, 16) and first.min() >= 0 and first.max() <= 1
    assert torch.equal(draw(0), first)
    if kind != "none":
        assert any(not torch.equal(draw(epoch), first) for epoch in range(1, 6))


def test_without_augmentation_an_image_is_a_test_image():
    from PIL import Image

    raw = (photo() * 255).round() / 255
    seen = augmentation("none", FRAME)(raw)
    pil = Image.fromarray((raw * 255).round().byte().permute(1, 2, 0).numpy())
    assert_close(FRAME.normalise(seen[None]), FRAME(pil), atol=1e-6, rtol=0)


def maps() -> torch.Tensor:
    """[3, 2, 2]: part 0 wins the first patch, part 1 the second, the background the others."""
    return torch.eye(3)[[0, 1, 2, 2]].T.unflatten(1, (2, 2))


def test_hidden_patches_are_dark_and_parts_have_their_colour():
    image = torch.full((3, 96, 96), 0.8)
    shown = np.asarray(part_image(image, maps())) / 255
    assert shown.shape == (192, 192, 3)
    for part, patch in ((0, shown[:96, :96]), (1, shown[:96, 96:])):
        assert np.allclose(patch, 0.8 * 0.4 + part_colours(2)[part].numpy() * 0.6, atol=3e-3)
    assert np.allclose(shown[96:], 0.8 * 0.35, atol=3e-3)
    without = np.asarray(part_image(image, maps(), removed=[1])) / 255
    assert np.allclose(without[:96, 96:], 0.8 * 0.35, atol=3e-3) and np.array_equal(
        without[:, :96], shown[:, :96]
    )
    assert part_image(image[:, :80, :80], maps()).size == (240, 240)  # at least 192, as promised


def test_a_sheet_has_every_image_above_its_parts():
    images = torch.rand(9, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    every = torch.stack([maps(), maps().flip(1), maps().flip(2)] * 3)
    drawn = part_sheet(images, every)
    assert drawn.size == (8 * 192, 4 * 192)
    for place, (left, top) in {0: (0, 0), 1: (192, 0), 8: (0, 384)}.items():
        plain, parts = (np.asarray(drawn)[y : y + 192, left : left + 192] for y in (top, top + 192))
        pixels = (images[place] * 255).round().byte().permute(1, 2, 0).numpy()
        assert np.array_equal(plain[::2, ::2], pixels)
        assert np.array_equal(parts, np.asarray(part_image(images[place], every[place])))
    assert part_sheet(images[:1], every[:1]).size == (192, 2 * 192)
