"""Pictures of parts show exactly what is seen."""

from __future__ import annotations

import numpy as np
import torch

from seecause.faithful.images import part_colours, part_picture, part_sheet


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
