"""Tiny iFAM networks whose parts share the image out."""

from typing import Any

import torch
from torch import Tensor, nn

from seecause.faithful import IFAM
from seecause.models.preprocess import Preprocess
from tests.tiny import scramble

SIZE = (40, 48)  # a 5 x 6 grid of 8-pixel patches
STEPS = Preprocess(size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)
SMALL: dict[str, Any] = {"patch_size": 8, "embed_dim": 24, "num_heads": 3}
SQUARE = {**SMALL, "img_size": 32, "depth": 2, "num_classes": 6}
ARGUMENTS = {**SMALL, "img_size": SIZE, "depth": 3, "num_classes": 0, "reg_tokens": 2}
ARGUMENTS["init_values"] = 1e-5
ARCHITECTURE = {"library": "timm", "class": "VisionTransformer", "arguments": ARGUMENTS}


def timm_backbone() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**ARGUMENTS)


def dinov2_backbone() -> nn.Module:
    """What RAD-DINO is: no registers, positions of the class token too."""
    import transformers as hf

    shape = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3}
    config = hf.Dinov2Config(**shape, patch_size=8, image_size=40, mlp_ratio=2)
    return hf.Dinov2Model(config)


def random_images(batch: int = 3, seed: int = 1, size: tuple[int, int] = SIZE) -> Tensor:
    return torch.randn(
        batch, 3, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def tiny_net(
    backbone: nn.Module | None = None,
    *,
    parts: int = 3,
    seed: int = 0,
    size: tuple[int, int] = SIZE,
    **options: Any,
) -> IFAM:
    """Scrambled, float64, in eval mode; prototypes are tokens of a image, so that every part wins
    some patches."""
    torch.manual_seed(seed)
    options = {
        "classes": 4,
        "preprocess": STEPS,
        "architecture": ARCHITECTURE if backbone is None else None,
        **options,
    }
    net = IFAM(timm_backbone() if backbone is None else backbone, parts, **options)
    scramble(net, seed)
    net.double().eval()
    with torch.no_grad():
        result = net.stage1.tower.features(random_images(1, seed=9, size=size))[0]
        chosen = result[:: len(result) // (parts + 1)][: parts + 1]
        net.stage1.prototypes.copy_(result.mean(dim=0) + 0.5 * (chosen - result.mean(dim=0)))
    return net
