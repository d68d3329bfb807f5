"""Gradients at stages: input x gradient and Grad-CAM by hand and by their libraries, on networks of
every order of features."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import seecause as sc
from seecause.attribution.gradients import channel_weights
from seecause.engine.chunks import budget
from tests.families.conv import tiny_conv
from tests.families.staged import tiny_staged
from tests.helpers import hooks, view
from tests.reference.caap_cnn import features, overwritten
from tests.tiny import pictures

TARGET = 3
GRADIENTS = ["ixg", "grad-cam", "integrated-gradients", "smoothgrad"]
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


def test_ixg_is_features_times_their_native_gradient(small):
    native, model, images = small
    number = [stage.name for stage in model.stages].index(model.cells)
    theirs, slope = native_slope(native, number, images)
    expected = as_map(theirs * slope, model.run_to(model.cells, images)).sum(dim=1)
    maps = sc.attribute(model, images, TARGET, "ixg", score="logit")
    assert_close(maps.maps, expected, atol=1e-10, rtol=1e-10)
    assert maps.manifest["used"] == {"stage": model.cells}


def test_ixg_of_a_finer_stage_adds_up_to_the_same(small):
    native, model, images = small
    finer = model.stages[2].name
    theirs, slope = native_slope(native, 2, images)
    maps = sc.attribute(model, images, TARGET, "ixg", score="logit", stage=finer).maps
    total = (theirs * slope).flatten(1).sum(dim=1)
    assert_close(maps.sum(dim=(1, 2)), total, atol=1e-10, rtol=1e-10)


def test_pixel_methods_are_the_native_gradient(small):
    native, model, images = small
    leaf = images.clone().requires_grad_()
    slope = torch.autograd.grad(native.forward(leaf)[:, TARGET].sum(), leaf)[0]
    ours = sc.attribute(model, images, TARGET, "ixg", space="pixel", score="logit")
    assert_close(ours.native, (images * slope).sum(dim=1), atol=1e-10, rtol=1e-10)
    still = sc.attribute(model, images, TARGET, "smoothgrad", samples=1, noise=0.0, show="signed")
    assert_close(still.native, slope.sum(dim=1), atol=1e-10, rtol=1e-10)


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


PEERS = {"mean": "GradCAM", "layer": "LayerCAM", "x": "XGradCAM", "++": "GradCAMPlusPlus"}
PEERS |= {"hires": "HiResCAM"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", PEERS)
def test_grad_cam_is_pytorch_grad_cam(variant):
    """On a network without norms over channels: behind one, HiResCAM is rounding (below)."""
    library = pytest.importorskip(
        "pytorch_grad_cam", reason="grad-cam is not installed; run: pip install 'seecause[dev]'"
    )
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    native = tiny_conv("timm_resnet")
    model, images = view(native, check=False), pictures(native)
    native.module.requires_grad_(True)  # the library asks for gradients of parameters
    peer = getattr(library, PEERS[variant])(native.module, [native.module.layer3])
    varied = 0
    for target in range(4):
        # scaled to 0..1, resized, and scaled again
        theirs = torch.from_numpy(peer(images, [ClassifierOutputTarget(target)] * 2))
        ours = sc.attribute(model, images, target, "grad-cam", variant=variant, stage="layer3").maps
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


def test_hires_cam_is_what_speaks_for_the_class_in_ixg(small):
    _, model, images = small
    ours = sc.attribute(model, images, TARGET, "grad-cam", variant="hires", stage=model.cells).maps
    expected = sc.attribute(model, images, TARGET, "ixg", score="logit").maps.relu()
    assert_close(ours, expected, atol=1e-10, rtol=1e-10)


def test_gradients_of_one_picture_are_finite_differences():
    native = tiny_conv("timm_resnet")
    model, images = view(native, check=False), pictures(native, batch=1)
    features = model.run_to("layer3", images)
    maps = sc.attribute(model, images, TARGET, "grad-cam", variant="hires", stage="layer3").maps
    step, total = 1e-6, torch.zeros_like(features[0, 0])
    for place in torch.cartesian_prod(*map(torch.arange, features.shape[-2:])).tolist():
        near = features.repeat(2, 1, 1, 1)  # along the features of one place
        near[:, :, *place] *= torch.tensor([[1 + step], [1 - step]], dtype=near.dtype)
        up, down = model.run_from("layer3", near)[:, TARGET]
        total[*place] = (up - down) / (2 * step)
    assert total.max() > 1e-2
    expected = sc.attribute(model, images, TARGET, "ixg", score="logit", stage="layer3").maps
    assert_close(maps.sum(), total.relu().sum(), atol=1e-6, rtol=1e-6)
    assert_close(expected.sum(), total.sum(), atol=1e-6, rtol=1e-6)


def test_features_times_gradient_are_nothing_before_a_norm():
    """Scaling what a norm reads changes nothing, so f . f' = 0 at every place but for its eps."""
    native = tiny_staged("timm_convnext")
    model, images = view(native, check=False), pictures(native)
    options = {"method": "grad-cam", "stage": "stage3"}
    hires = sc.attribute(model, images, TARGET, variant="hires", **options).maps
    layer = sc.attribute(model, images, TARGET, variant="layer", **options).maps
    assert hires.max() < 1e-4 * layer.max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["timm_convnext", "timm_hiera", "timm_swin"])
def test_a_map_of_rounding_says_so_once(family, dtype, caplog):
    """ConvNeXt and Hiera norm what a stage gives and read it in no other way; Swin adds to it."""
    native = tiny_staged(family, dtype=dtype)
    model, images = view(native, check=False), 0.3 * pictures(native)
    for options in ({"method": "ixg"}, {"method": "grad-cam", "variant": "hires"}):
        for _ in range(2):
            sc.attribute(model, images, TARGET, stage=model.cells, score="logit", **options)
    warnings = [line for line in caplog.messages if "add up to nothing" in line]
    assert len(warnings) == (0 if family == "timm_swin" else 1)


def test_weights_of_grad_cam_by_hand():
    make = torch.Generator().manual_seed(0)
    f, g = (torch.randn(1, 3, 2, 2, generator=make, dtype=torch.float64) for _ in range(2))
    for channel in range(3):
        here, slope = f[0, channel], g[0, channel]
        total = here.sum()
        expected = {
            "mean": slope.mean(),
            "x": (here * slope).sum() / (total + 1e-7),
            "++": sum(
                (s**2 / (2 * s**2 + total * s**3 + 1e-6)) * max(s, 0.0) for s in slope.flatten()
            ),
        }
        for variant, weight in expected.items():
            ours = channel_weights(f, g, variant)[0, channel, 0, 0]
            assert_close(ours, weight, atol=1e-12, rtol=0)
