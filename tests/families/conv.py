"""Tiny convolutional networks of torchvision and timm, scrambled with their running statistics.

`blocks` are the native modules that end the stages, in order.
"""

from typing import Any

import torch
from torch import nn

from tests.families.native import HALF, Native, scramble_statistics

SIZE = (48, 80)  # 3 x 5 cells of 16 pixels
OPTIONS = {**HALF, "size": SIZE}
LAYERS = ("maxpool", "layer1", "layer2", "layer3", "layer4")
VGG_LAYERS = [4, "M", 8, "M", 8, 8, "M", 8, 8, "M", 8, "M"]


def _resnet(module: Any) -> Native:
    return Native(module, [getattr(module, name) for name in LAYERS], module, OPTIONS, size=SIZE)


def _densenet(module: Any) -> Native:
    ends = [
        child
        for name, child in module.features.named_children()
        if name.startswith(("pool", "denseblock", "transition"))
    ]
    return Native(module, ends, module, OPTIONS, size=SIZE)


def _vgg(module: Any) -> Native:
    ends = [layer for layer in module.features if isinstance(layer, nn.MaxPool2d)]
    return Native(module, ends, module, OPTIONS, size=SIZE)


def torchvision_resnet() -> Native:
    from torchvision.models.resnet import BasicBlock, ResNet

    return _resnet(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=7))


def timm_resnet() -> Native:
    import timm

    return _resnet(timm.create_model("test_resnet", num_classes=7))


def torchvision_densenet() -> Native:
    from torchvision.models.densenet import DenseNet

    return _densenet(
        DenseNet(growth_rate=4, block_config=(2, 2, 2, 2), num_init_features=8, num_classes=7)
    )


def timm_densenet() -> Native:
    from timm.models.densenet import DenseNet

    return _densenet(DenseNet(growth_rate=4, block_config=(2, 2, 2, 2), num_classes=7))


def _torchvision_vgg(*, batch_norm: bool) -> Native:
    from torchvision.models.vgg import VGG, make_layers

    with torch.device("meta"):  # its classifier has a hundred million weights whatever the features
        module = VGG(nn.Identity(), init_weights=False)
    module.features = make_layers(VGG_LAYERS, batch_norm=batch_norm)
    module.classifier = nn.Sequential(
        nn.Linear(8 * 49, 12), nn.ReLU(True), nn.Dropout(), nn.Linear(12, 7)
    )
    return _vgg(module)


def torchvision_vgg() -> Native:
    return _torchvision_vgg(batch_norm=False)


def torchvision_vgg_bn() -> Native:
    return _torchvision_vgg(batch_norm=True)


def timm_vgg_bn() -> Native:
    from timm.models.vgg import VGG

    return _vgg(VGG(VGG_LAYERS, num_classes=7, mlp_ratio=0.01, norm_layer=nn.BatchNorm2d))


CONV_FAMILIES = {
    f.__name__: f
    for f in (
        torchvision_resnet, timm_resnet, torchvision_densenet, timm_densenet, torchvision_vgg,
        torchvision_vgg_bn, timm_vgg_bn,
    )
}  # fmt: skip


def tiny_conv(family: str, dtype: torch.dtype = torch.float64) -> Native:
    """A scrambled network of one family: every parameter, and the statistics that eval mode
    normalises by."""
    from tests.tiny import scramble

    native = CONV_FAMILIES[family]()
    scramble(native.module)
    scramble_statistics(native.module)
    native.module.to(dtype).requires_grad_(False)
    return native
