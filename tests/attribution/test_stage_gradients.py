"""Gradients of pixels on networks of stages."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.engine.chunks import budget
from tests.families.conv import tiny_conv
from tests.families.staged import tiny_staged
from tests.helpers import hooks, view
from tests.tiny import pictures

TARGET = 3
FEW = {"integrated-gradients": {"steps": 3}, "smoothgrad": {"samples": 3}}


@pytest.fixture(
    scope="module", params=["timm_swin", "timm_convnext", "torchvision_swin", "timm_resnet"]
)
def small(request):
    make = tiny_conv if request.param == "timm_resnet" else tiny_staged
    native = make(request.param)
    return native, view(native, check=False), pictures(native)


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


@pytest.mark.parametrize("name", FEW)
def test_a_batch_is_its_images_and_nothing_is_left(small, name):
    native, model, images = small
    options = FEW[name]
    whole = sc.attribute(model, images, TARGET, name, **options).maps
    single = [sc.attribute(model, one[None], TARGET, name, **options).maps for one in images]
    assert_close(whole, torch.cat(single), atol=1e-10, rtol=1e-10)
    with budget(1):
        again = sc.attribute(model, images, TARGET, name, **options).maps
    assert_close(again, whole, atol=1e-10, rtol=1e-10)
    assert hooks(native.module) == 0 and images.grad is None and not whole.requires_grad
