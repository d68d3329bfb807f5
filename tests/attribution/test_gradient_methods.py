"""Every method gives an image the same map in any batch and leaves nothing behind; gradient methods
equal captum and pytorch-grad-cam."""

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.attribution.registry import methods
from seecause.engine.chunks import budget
from seecause.engine.trace import record, suffix
from tests.families.conv import tiny_conv
from tests.families.staged import tiny_staged
from tests.helpers import hooks, near, ready, view
from tests.tiny import pictures

TARGET = 3
QUICK = {
    **{"tam": {"steps": 5}, "bt": {"steps": 3}, "integrated-gradients": {"steps": 5}},
    **{"smoothgrad": {"samples": 5}, "rise": {"masks": 12, "cells": 3}, "tis": {"masks": 9}},
    **{"mosaic": {"masks": 4}, "caap+mosaic": {"masks": 4}},
    **{"vit-cx": {"threshold": 0.2}, "mda": {"candidates": 2}},
}
METHODS = sorted(set(methods()) - {"random"})
CLASSLESS = ("rollout", "raw-attention", "center", "sobel")
MAY_BE_CUT = ("grad-cam",)  # by the ReLU at its end
# all on a 4 x 6 grid
READOUTS = ["timm_registers", "timm_mean", "timm_map", "timm_distilled", "hf_dinov2_registers"]


def explain(model, images, name, **options):
    return sc.attribute(model, images, method=name, **{**QUICK.get(name, {}), **options})


# What all of them promise


@pytest.mark.parametrize("family", READOUTS)
@pytest.mark.parametrize("name", METHODS)
def test_a_batch_is_its_images_one_by_one(name, family):
    _, model, images = ready(family, batch=3)
    whole = explain(model, images, name)
    single = [explain(model, one[None], name) for one in images]
    assert whole.maps.shape == (3, 4, 6)
    assert name in CLASSLESS or whole.manifest["target"]["class"] == [
        s.manifest["target"]["class"][0] for s in single
    ]
    near = {"atol": 1e-10, "rtol": 1e-7 if name == "t-attr" else 1e-10}
    assert_close(whole.maps, torch.cat([s.maps for s in single]), **near)
    with budget(1):  # one image, one step at a time
        assert_close(explain(model, images, name).maps, whole.maps, **near)
    assert name in MAY_BE_CUT or (whole.maps.flatten(1).std(dim=1) > 1e-9).all()


@pytest.mark.parametrize("name", METHODS)
def test_targets_are_explained_and_nothing_is_left_on_the_model(name):
    native, model, images = ready("timm_registers")
    native.module.requires_grad_(True)
    before = model(images).detach()
    with torch.no_grad():  # as callers may well do
        maps = [
            explain(model, images, name, target=t).maps
            for t in (1, [1, 4], (1, 4), lambda logits: logits[:, 1] - logits[:, 4])
        ]
    assert not any(m.requires_grad for m in maps)
    assert (
        hooks(native.module) == 0
        and all(p.grad is None for p in native.module.parameters())
        and images.grad is None
    )
    assert torch.equal(model(images), before)
    assert torch.equal(maps[0][0], maps[1][0])
    near(maps[2], maps[3], 1e-10)
    assert name in CLASSLESS + MAY_BE_CUT or (maps[0][1] - maps[1][1]).abs().max() > 1e-9


# Peers


@pytest.fixture
def captum():
    return pytest.importorskip(
        "captum.attr", reason="captum is not installed; run: pip install 'seecause[tools]'"
    )


def unit(maps):
    """To 0..1, as pytorch-grad-cam does it."""
    maps = maps - maps.amin(dim=(1, 2), keepdim=True)
    return maps / (1e-7 + maps.amax(dim=(1, 2), keepdim=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["timm_registers", "timm_mean"])
def test_grad_cam_is_pytorch_grad_cam(family):
    library = pytest.importorskip(
        "pytorch_grad_cam", reason="grad-cam is not installed; run: pip install 'seecause[dev]'"
    )
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    native, model, images = ready(family, batch=3, dtype=torch.float32)
    native.module.requires_grad_(True)  # the library asks for gradients of parameters
    prefix = model.layout.prefix
    peer = library.GradCAM(
        native.module,
        [native.blocks[-1].norm1],
        reshape_transform=lambda x: x[:, prefix:].unflatten(1, (4, 6)).permute(0, 3, 1, 2),
    )
    found = 0
    for target in range(7):
        theirs = torch.from_numpy(
            peer(images, [ClassifierOutputTarget(target)] * 3)
        )  # scaled to 0..1, resized, and scaled again
        ours = explain(model, images, "grad-cam", target=target).maps
        ours = unit(
            torch.nn.functional.interpolate(
                unit(ours)[:, None], size=(32, 48), mode="bilinear", align_corners=False
            )[:, 0]
        )
        found += int((theirs.std(dim=(1, 2)) > 0.01).sum())
        near(ours, theirs, 1e-4)
    peer.activations_and_grads.release()
    assert found > 5  # not all were cut by the ReLU


@pytest.mark.filterwarnings("ignore")
def test_ixg_is_captums(captum):
    native, model, images = ready("timm_registers")
    peer = captum.LayerGradientXActivation(native.module, native.module.norm_pre)
    tokens = (
        peer.attribute(images.clone().requires_grad_(), target=TARGET)
        .sum(dim=-1)[:, model.layout.patches]
        .detach()
    )
    near(explain(model, images, "ixg", target=TARGET, score="logit").maps.flatten(1), tokens)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("baseline", ["mean", "white"])
def test_integrated_gradients_are_captums(captum, baseline):
    native, model, images = ready("timm_registers")
    base = torch.full_like(images, 1.0 if baseline == "white" else 0.0)
    theirs = captum.IntegratedGradients(native.module).attribute(
        images, base, target=TARGET, n_steps=50, method="gausslegendre"
    )
    ours = explain(
        model, images, "integrated-gradients", target=TARGET, baseline=baseline, steps=50
    )
    near(ours.native, theirs.sum(dim=1), 1e-8)  # captum rounds its weights to float32


# Each by itself


def plain_slope(native, images):
    images = images.clone().requires_grad_()
    return torch.autograd.grad(native.module(images)[:, TARGET].sum(), images)[0]


def test_smoothgrad_is_the_mean_over_noisy_copies():
    native, model, images = ready("timm_registers")
    noise = torch.randn(5, 3, 32, 48, generator=torch.Generator().manual_seed(7)).double()
    sigma = 0.15 * (images.flatten(1).max(dim=1).values - images.flatten(1).min(dim=1).values).view(
        2, 1, 1, 1
    )
    mean = sum(plain_slope(native, images + sigma * n) for n in noise) / 5
    ours = explain(model, images, "smoothgrad", target=TARGET, seed=7).native
    near(ours, mean.abs().sum(dim=1))
    still = explain(model, images, "smoothgrad", target=TARGET, noise=0.0).native
    near(still, plain_slope(native, images).abs().sum(dim=1))


@pytest.mark.parametrize(("options", "layers"), [({}, [0, 1, 2, 3]), ({"start": 3}, [3])])
def test_ixg_plus_by_hand(options, layers):
    _, model, images = ready("timm_registers")
    expected = 0
    for layer in layers:
        h = record(model, images, states={layer}).states[layer].detach().requires_grad_()
        (slope,) = torch.autograd.grad(
            suffix(model, h, model.layout.at(), layer).softmax(dim=1)[:, TARGET].sum(), h
        )
        expected = expected + (h * slope).sum(dim=-1)[:, model.layout.patches].detach()
    near(explain(model, images, "ixg+", target=TARGET, **options).maps.flatten(1), expected)


# Networks of stages


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
