"""Our curves are Quantus's curves, for the same map, the same order and the same fill."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from seecause.metrics.faithfulness import perturbation
from tests.helpers import noise, view
from tests.tiny import pictures, tiny

quantus = pytest.importorskip("quantus", reason="Quantus is not installed: pip install quantus")

CLASSES = [2, 5, 3]
FILL = 0.25
PATCH = 8
QUIET = {"normalise": False, "perturb_baseline": FILL, "disable_warnings": True}

pytestmark = pytest.mark.filterwarnings("ignore:::quantus.*")


@pytest.fixture(scope="module")
def setting():
    native = tiny("timm_registers", dtype=torch.float32)
    images = pictures(native, batch=3)
    return native.module, view(native, check=False), images


def theirs(metric, module, images, maps) -> torch.Tensor:
    """Quantus's scores for pixel maps [B, H, W], computed in one batch."""
    found = metric(
        model=module,
        x_batch=images.numpy(),
        y_batch=np.array(CLASSES),
        a_batch=maps[:, None].numpy(),
        softmax=True,
        device="cpu",
    )
    return torch.tensor(np.array(found), dtype=torch.float64)


@pytest.mark.parametrize("order", ["morf", "lerf"])
def test_region_perturbation(setting, order):
    module, model, images = setting
    maps = noise(3, 4, 6)
    pixels = maps.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
    ours = perturbation(model, images, maps, CLASSES, fill=FILL)
    curve = ours[order]
    lost = theirs(
        quantus.RegionPerturbation(patch_size=PATCH, order=order, regions_evaluation=24, **QUIET),
        module,
        images,
        pixels,
    )
    assert_close(curve[:, :1] - curve[:, 1:], lost, atol=1e-6, rtol=0)
    assert_close(
        ours[f"aopc-{order}"], lost.sum(dim=1) / 25, atol=1e-6, rtol=0
    )  # ours counts the untouched picture, as the paper does
    assert lost.abs().max() > 0.05  # the curve has something to say
