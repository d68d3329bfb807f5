"""Tiny timm models: `VisionTransformer`, its distilled DeiT, and `Eva`."""

from tests.families.native import HALF, SIZE, Native


def _timm(**options: object) -> Native:
    from timm.models.vision_transformer import VisionTransformer

    base = dict(img_size=SIZE, patch_size=8, embed_dim=24, depth=4, num_heads=3, num_classes=7)
    module = VisionTransformer(**{**base, **options})
    return Native(module, module.blocks, module, HALF)


def timm_deit3() -> Native:
    return _timm(no_embed_class=True, init_values=1e-5, qk_norm=True)


def timm_registers() -> Native:
    return _timm(reg_tokens=3, init_values=1e-5)


def timm_swiglu() -> Native:
    from timm.layers import SwiGLUPacked

    return _timm(mlp_layer=SwiGLUPacked, reg_tokens=1)


def timm_clip() -> Native:
    return _timm(pre_norm=True, scale_attn_norm=True)


def timm_mean() -> Native:
    return _timm(class_token=False, global_pool="avg", reg_tokens=2)


def timm_mean_with_class() -> Native:
    return _timm(global_pool="avg")


def timm_map() -> Native:
    return _timm(class_token=False, global_pool="map", reg_tokens=1)


def timm_dynamic() -> Native:
    return _timm(dynamic_img_size=True, img_size=(32, 32))


def timm_distilled() -> Native:
    from timm.models.deit import VisionTransformerDistilled

    module = VisionTransformerDistilled(
        img_size=SIZE, patch_size=8, embed_dim=24, depth=4, num_heads=3, num_classes=7
    )
    return Native(module, module.blocks, module, HALF)


def timm_post_norm() -> Native:
    from timm.models.vision_transformer import ResPostBlock

    return _timm(block_fn=ResPostBlock, init_values=1e-5)


def _eva(**options: object) -> Native:
    from timm.models.eva import Eva

    base = dict(
        img_size=SIZE, patch_size=8, embed_dim=24, depth=4, num_heads=3, num_classes=7,
        use_rot_pos_emb=True,
    )  # fmt: skip
    module = Eva(**{**base, **options})
    return Native(module, module.blocks, module, HALF)


def timm_eva() -> Native:
    return _eva(swiglu_mlp=True, scale_mlp=True, init_values=1e-5, global_pool="avg")


def timm_eva_registers() -> Native:
    return _eva(
        num_reg_tokens=2, attn_type="rope", rope_rotate_half=True, global_pool="token",
        use_abs_pos_emb=False,
    )  # fmt: skip


FAMILIES = {
    f.__name__: f
    for f in (
        timm_deit3, timm_registers, timm_swiglu, timm_clip, timm_mean, timm_mean_with_class,
        timm_map, timm_dynamic, timm_distilled,
        timm_post_norm, timm_eva, timm_eva_registers,
    )
}  # fmt: skip
