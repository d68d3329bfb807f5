"""Augmentation: the right light, and the same picture whenever it is asked for."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from seecause.faithful.images import PlanckianJitter, augmentation, illuminants, seeded
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
