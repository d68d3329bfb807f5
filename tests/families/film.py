"""Tiny film models of transformers."""

import transformers
from torch import Tensor

from tests.families.native import Native

FRAMES, TUBELET, SIDE = 6, 2, (16, 24)  # tubelets of 2 x 8 x 8 make 3 x 2 x 3


def videomae() -> Native:
    config = transformers.VideoMAEConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        patch_size=8, image_size=SIDE, num_frames=FRAMES, tubelet_size=TUBELET, num_labels=5,
        use_mean_pooling=True,
    )  # fmt: skip
    module = transformers.VideoMAEForVideoClassification(config)
    options = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    blocks = module.videomae.encoder.layer
    return Native(module, blocks, lambda x: module(as_frames(x)).logits, options, (3 * 16, 24))


def vjepa2() -> Native:
    config = transformers.VJEPA2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, patch_size=8,
        crop_size=16, frames_per_clip=FRAMES, tubelet_size=TUBELET, num_labels=5,
        num_pooler_layers=1, pred_hidden_size=24, pred_num_attention_heads=2,
        pred_num_hidden_layers=1, pred_num_mask_tokens=1,
    )  # fmt: skip
    module = transformers.VJEPA2ForVideoClassification(config)
    options = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    blocks = [*module.vjepa2.encoder.layer, *module.pooler.self_attention_layers]
    return Native(module, blocks, lambda x: module(as_frames(x, 16)).logits, options, (3 * 16, 16))


def as_frames(strips: Tensor, wide: int = SIDE[1]) -> Tensor:
    """Strips [B, tubelet * 3, times * H, W] -> frames [B, T, 3, H, W], one by one."""
    frames = Tensor(len(strips), FRAMES, 3, SIDE[0], wide).to(strips)
    for frame in range(FRAMES):
        time, inside = divmod(frame, TUBELET)
        rows = slice(time * SIDE[0], (time + 1) * SIDE[0])
        frames[:, frame] = strips[:, 3 * inside : 3 * inside + 3, rows]
    return frames
