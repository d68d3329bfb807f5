"""Gradient methods on networks of stages: Grad-CAM by hand and by its library, and gradients of
pixels."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.engine.chunks import budget
from tests.families.conv import tiny_conv
from tests.families.staged import tiny_staged
from tests.helpers import hooks, view
from tests.reference.caap_cnn import features, overwritten
from tests.tiny import pictures

TARGET = 3
GRADIENTS = ["grad-cam", "integrated-gradients", "smoothgrad"]
FEW = {"integrated-gradients": {"steps": 3}, "smoothgrad": {"samples": 3}}


@pytest.fixture(scope="module", params=["timm_swin", "timm_convnext", "hf_swin", "timm_resnet"])
def small(request):
    make = tiny_conv if request.param == "timm_resnet" else tiny_staged
    native = make(request.param)
    return native, view(native, check=False), pictures(native)


def native_slope(native, stage, images):
    """Features after a native module, and the gradient of the target's logit there."""
    block = native.blocks[stage]
    leaf = features(native.forward, block, images).requires_grad_()
    with overwritten(block, lambda out: leaf.clone()):
        total = native.forward(images)[:, TARGET].sum()
    return leaf.detach(), torch.autograd.grad(total, leaf)[0]


def as_map(values, like):
    """What a native module gives, in whatever order, as [B, C, h, w] of the view's map `like`."""
    channels, size = like.shape[1], like.shape[-2:]
    if values.shape == like.shape:
        return values
    return values.reshape(len(values), *size, channels).permute(0, 3, 1, 2)


def test_grad_cam_weighs_features_by_their_mean_native_gradient(small):
    native, model, images = small
    number = [stage.name for stage in model.stages].index(model.cells)
    theirs, slope = native_slope(native, number, images)
    like = model.run_to(model.cells, images)
    theirs, slope = as_map(theirs, like), as_map(slope, like)
    expected = (theirs * slope.mean(dim=(2, 3), keepdim=True)).sum(dim=1).relu()
    maps = sc.attribute(model, images, TARGET, "grad-cam", stage=model.cells)
    assert_close(maps.maps, expected, atol=1e-10, rtol=1e-10)
    assert maps.manifest["used"] == {"stage": model.cells}


def test_pixel_methods_are_the_native_gradient(small):
    native, model, images = small
    leaf = images.clone().requires_grad_()
    slope = torch.autograd.grad(native.forward(leaf)[:, TARGET].sum(), leaf)[0]
    still = sc.attribute(model, images, TARGET, "smoothgrad", samples=1, noise=0.0)
    assert_close(still.native, slope.abs().sum(dim=1), atol=1e-10, rtol=1e-10)


def test_integrated_gradients_are_complete(small):
    _, model, images = small
    with torch.no_grad():
        rise = (model(images) - model(torch.zeros_like(images)))[:, TARGET]
    maps = sc.attribute(model, images, TARGET, "integrated-gradients", steps=60).maps
    assert_close(maps.sum(dim=(1, 2)), rise, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_batch_is_its_images_and_nothing_is_left(small, name):
    native, model, images = small
    options = FEW.get(name, {})
    whole = sc.attribute(model, images, TARGET, name, **options).maps
    single = [sc.attribute(model, one[None], TARGET, name, **options).maps for one in images]
    assert_close(whole, torch.cat(single), atol=1e-10, rtol=1e-10)
    with budget(1):
        again = sc.attribute(model, images, TARGET, name, **options).maps
    assert_close(again, whole, atol=1e-10, rtol=1e-10)
    assert hooks(native.module) == 0 and images.grad is None and not whole.requires_grad


@pytest.mark.filterwarnings("ignore")
def test_grad_cam_is_pytorch_grad_cam():
    library = pytest.importorskip(
        "pytorch_grad_cam", reason="grad-cam is not installed; run: pip install 'seecause[dev]'"
    )
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    native = tiny_conv("timm_resnet")
    model, images = view(native, check=False), pictures(native)
    native.module.requires_grad_(True)  # the library asks for gradients of parameters
    peer = library.GradCAM(native.module, [native.module.layer3])
    varied = 0
    for target in range(4):
        # scaled to 0..1, resized, and scaled again
        theirs = torch.from_numpy(peer(images, [ClassifierOutputTarget(target)] * 2))
        ours = sc.attribute(model, images, target, "grad-cam", stage="layer3").maps
        clear = ours.amax(dim=(1, 2)) > 1e-3  # others were cut by the ReLU, but for rounding
        ours = torch.nn.functional.interpolate(
            unit(ours)[:, None], size=native.size, mode="bilinear", align_corners=False
        )
        # the library adds 1e-7 where it scales, and rounds to float32
        assert_close(unit(ours[:, 0])[clear].float(), theirs[clear], atol=2e-6, rtol=0)
        varied += int(clear.sum())
    peer.activations_and_grads.release()
    assert varied > 2


def unit(maps):
    """Each map scaled to 0..1, as pytorch-grad-cam does it."""
    maps = maps - maps.amin(dim=(1, 2), keepdim=True)
    return maps / (1e-7 + maps.amax(dim=(1, 2), keepdim=True))
