"""Tiny open_clip models, zero-shot over five classes."""

from tests.families.native import HALF, SIZE, TEXT, Native, matrix, prompts

TEXT_TOWER = dict(context_length=8, vocab_size=64, width=16, heads=2, layers=1)


def _clip(*, bias: float | None = None, **options: object) -> Native:
    from open_clip.model import CLIP

    vision = dict(layers=4, width=24, head_width=8, patch_size=8, image_size=SIZE, **options)
    module = CLIP(16, vision, TEXT_TOWER, quick_gelu=True, init_logit_bias=bias)
    return Native(
        module, module.visual.transformer.resblocks,
        lambda images: module.get_logits(images, prompts())[0], HALF | TEXT,
    )  # fmt: skip


def open_clip_clip() -> Native:
    return _clip()


def open_clip_scaled() -> Native:
    return _clip(ls_init_value=1e-5, bias=-2.0)


def open_clip_tower() -> Native:
    from open_clip.transformer import VisionTransformer

    module = VisionTransformer(
        image_size=SIZE, patch_size=8, width=24, layers=4, heads=3, mlp_ratio=2.0, output_dim=16
    )
    head = matrix(16)
    return Native(
        module, module.transformer.resblocks,
        lambda images: module(images) @ head.to(images.dtype).T, {**HALF, "head": head},
    )  # fmt: skip


def open_clip_timm() -> Native:
    """SigLIP's shape: a timm tower with a latent pool, a text tower of its own, and a bias."""
    from open_clip.model import CustomTextCLIP
    from open_clip.timm_model import TimmModel
    from timm.models.vision_transformer import VisionTransformer
    from torch import nn

    plain = dict(layers=1, width=8, head_width=8, patch_size=8, image_size=SIZE)
    module = CustomTextCLIP(16, plain, TEXT_TOWER, init_logit_bias=-2.0)
    visual = TimmModel.__new__(TimmModel)  # its constructor knows registered names only
    nn.Module.__init__(visual)
    visual.trunk = VisionTransformer(
        img_size=SIZE, patch_size=8, embed_dim=24, depth=4, num_heads=3, num_classes=0,
        class_token=False, global_pool="map",
    )  # fmt: skip
    visual.head = nn.Sequential(nn.Linear(24, 16))
    module.visual = visual
    return Native(
        module, visual.trunk.blocks, lambda images: module.get_logits(images, prompts())[0],
        HALF | TEXT,
    )  # fmt: skip


FAMILIES = {
    f.__name__: f for f in (open_clip_clip, open_clip_scaled, open_clip_tower, open_clip_timm)
}
