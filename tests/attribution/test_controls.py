"""Controls know nothing of the model, and nothing of the batch."""

from __future__ import annotations

import torch

import seecause as sc
from tests.helpers import view
from tests.tiny import pictures, tiny


def test_each_picture_has_its_own_noise_whatever_its_place():
    native = tiny("timm_registers")
    model, images = view(native, check=False), pictures(native, 3)
    together = sc.attribute(model, images, 0, "random").maps
    alone = torch.cat(
        [sc.attribute(model, one[None], 0, "random").maps for one in images.flip(0)]
    ).flip(0)
    assert torch.equal(together, alone)
    assert len(torch.unique(together)) == together.numel()
    assert not torch.equal(together, sc.attribute(model, images, 0, "random", seed=1).maps)


def test_the_noise_does_not_depend_on_precision():
    native = tiny("timm_registers")
    images = (
        torch.rand(2, 3, *native.size, generator=torch.Generator().manual_seed(0)).mul(255).round()
        / 255
    )
    maps = []
    for dtype in (torch.float64, torch.float32):
        model = view(tiny("timm_registers", dtype=dtype), check=False)
        maps.append(
            sc.attribute(
                model, model.preprocess.normalise(images.to(dtype)), 0, "random"
            ).maps.double()
        )
    assert torch.equal(*maps)
