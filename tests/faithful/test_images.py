"""Pictures: augmented in the right light and the same whenever they are asked for, and with parts
in colour that show exactly what is seen."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torchvision.transforms import v2

from seecause.faithful.images import (
    PlanckianJitter,
    augmentation,
    illuminants,
    part_colours,
    part_picture,
    part_sheet,
    seeded,
)
from seecause.models.preprocess import Preprocess

FRAME = Preprocess(size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3, filter="bilinear")


def photo() -> torch.Tensor:
    return torch.rand(3, 20, 28, generator=torch.Generator().manual_seed(0))


def test_light_runs_from_warm_to_cold():
    table = illuminants()
    assert table.shape == (25, 3)
    assert (table[:, 0].diff() < 0).all() and (table[:, 2].diff() > 0).all()


def test_jitter_leaves_green_and_clips_at_white():
    image = torch.tensor([0.5, 0.5, 0.9])[:, None, None].expand(3, 2, 2)
    with seeded(0, 0, 0):
        seen = {tuple(PlanckianJitter(1.0)(image)[:, 0, 0].tolist()) for _ in range(200)}
    expected = {
        tuple((torch.tensor([0.5, 0.5, 0.9]) * (one / one[1])).clamp(max=1).tolist())
        for one in illuminants()
    }
    assert len(seen) > 15 and all(one[1] == 0.5 and max(one) <= 1 for one in seen)
    for one in seen:
        assert any(
            torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-6) for other in expected
        )
    with seeded(0, 0, 1):
        changed = sum(not torch.equal(PlanckianJitter()(image), image) for _ in range(500))
    assert 0.7 < changed / 500 < 0.9


@pytest.mark.parametrize(
    ("kind", "least", "most"), [("birds", 65, 95), ("birds_no_jitter", 0, 0), ("plain", 0, 0)]
)
def test_birds_are_seen_in_another_light(kind, least, most):
    """A grey picture gets a colour in no other way."""
    change, grey, coloured = augmentation(kind, FRAME), photo()[:1].expand(3, -1, -1), 0
    for sample in range(100):
        with seeded(0, 0, sample):
            red, green, blue = change(grey)
        coloured += not (torch.equal(red, green) and torch.equal(green, blue))
    assert least <= coloured <= most


def test_birds_are_mirrored_turned_shifted_and_scaled_as_far_as_the_paper_says(monkeypatch):
    """Half of them mirrored, by up to 90 degrees, 20 % of the side, and 0.8 to 1.2 times."""
    moves, flips = [], []
    turn, mirror = v2.RandomAffine.transform, v2.RandomHorizontalFlip.transform
    frame = dataclasses.replace(FRAME, size=(100, 100))

    def spy_turn(self, image, params):
        moves.append((params["angle"], *params["translate"], params["scale"]))
        return turn(self, image, params)

    def spy_mirror(self, image, params):
        flips.append(image)
        return mirror(self, image, params)

    monkeypatch.setattr(v2.RandomAffine, "transform", spy_turn)
    monkeypatch.setattr(v2.RandomHorizontalFlip, "transform", spy_mirror)
    change = augmentation("birds", frame)
    for sample in range(200):
        with seeded(0, 0, sample):
            change(photo()[:, :20, :20])
    lowest, highest = (fold(torch.tensor(moves), dim=0) for fold in (torch.amin, torch.amax))
    assert_close(lowest, torch.tensor([-90.0, -20, -20, 0.8]), atol=2, rtol=0.1)
    assert_close(highest, torch.tensor([90.0, 20, 20, 1.2]), atol=2, rtol=0.1)
    assert lowest[3] < 0.85 and highest[3] > 1.15 and 70 < len(flips) < 130


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


def test_generators_are_left_as_they_were():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with seeded(0, 0, 0):
        augmentation("birds", FRAME)(photo())
    assert (torch.rand(1), random.random(), np.random.rand()) == expected


def test_without_augmentation_a_picture_is_a_test_picture():
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
    shown = np.asarray(part_picture(image, maps())) / 255
    assert shown.shape == (192, 192, 3)
    for part, patch in ((0, shown[:96, :96]), (1, shown[:96, 96:])):
        assert np.allclose(patch, 0.8 * 0.4 + part_colours(2)[part].numpy() * 0.6, atol=3e-3)
    assert np.allclose(shown[96:], 0.8 * 0.35, atol=3e-3)
    without = np.asarray(part_picture(image, maps(), removed=[1])) / 255
    assert np.allclose(without[:96, 96:], 0.8 * 0.35, atol=3e-3) and np.array_equal(
        without[:, :96], shown[:, :96]
    )


def test_a_part_has_its_colour_whatever_it_covers():
    red, blue = (
        torch.zeros(3, 96, 96).index_fill(0, torch.tensor(channel), 0.9) for channel in (0, 2)
    )
    assert np.array_equal(*(np.asarray(part_picture(image, maps()))[:96] for image in (red, blue)))


def test_no_two_parts_share_a_colour():
    for parts in (4, 8, 12):
        assert len(part_colours(parts).unique(dim=0)) == parts


def test_a_sheet_has_every_picture_above_its_parts():
    images = torch.rand(3, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    drawn = part_sheet(images, torch.stack([maps()] * 3), columns=2)
    assert drawn.size == (2 * 192, 4 * 192)
    assert np.array_equal(
        np.asarray(drawn)[:192:2, :192:2], (images[0] * 255).round().byte().permute(1, 2, 0).numpy()
    )
    assert np.array_equal(
        np.asarray(drawn)[192:384, :192], np.asarray(part_picture(images[0], maps()))
    )
