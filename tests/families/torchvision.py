"""Tiny torchvision vision transformers (square pictures only)."""

from tests.families.native import HALF, Native


def _vit(**options: object) -> Native:
    from torchvision.models.vision_transformer import VisionTransformer

    base = dict(
        image_size=32, patch_size=8, num_layers=4, num_heads=3, hidden_dim=24, mlp_dim=48,
        num_classes=7,
    )  # fmt: skip
    module = VisionTransformer(**{**base, **options})
    return Native(module, module.encoder.layers, module, HALF, size=(32, 32))


def torchvision_vit() -> Native:
    return _vit()


def torchvision_pre_logits() -> Native:
    return _vit(representation_size=16, dropout=0.1)


FAMILIES = {f.__name__: f for f in (torchvision_vit, torchvision_pre_logits)}
