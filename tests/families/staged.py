"""Tiny networks of stages of timm, torchvision and transformers, scrambled with their running
statistics.

`ends` are the native modules that give the features of each stage; `order` says how those lie:

    planes [B, C, h, w]    last [B, h, w, C]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.families.native import HALF, Native, scramble_statistics

SIZE = (64, 96)  # 4 x 6 cells of 16 pixels
DEPTHS = (2, 1, 2, 1)  # windows are shifted in every second block
HEADS = (1, 2, 2, 2)


@dataclass
class StagedNative(Native):
    orders: Sequence[Any] = ()
    grid: tuple[int, int] = (4, 6)
    cells: int = 3  # the number of the stage whose features are the cells; 0 is the stem
    strides: Sequence[int] = field(default=(4, 4, 8, 16, 32))


def _native(module: Any, ends: Sequence[Any], orders: Sequence[Any], **more: Any) -> StagedNative:
    options = {**HALF, "size": more.get("size", SIZE)}
    forward = more.pop("forward", module)
    return StagedNative(module, ends, forward, options, **({"size": SIZE} | more), orders=orders)


def _swin(module: Any) -> StagedNative:
    return _native(module, [module.patch_embed, *module.layers], ["last"] * 5)


def timm_swin() -> StagedNative:
    from timm.models.swin_transformer import SwinTransformer

    return _swin(SwinTransformer(SIZE, 4, 3, 7, "avg", 8, DEPTHS, HEADS, window_size=2))


def timm_swin_v2() -> StagedNative:
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    return _swin(SwinTransformerV2(SIZE, 4, 3, 7, "avg", 8, DEPTHS, HEADS, window_size=2))


def _stem_and_stages(module: Any, **more: Any) -> StagedNative:
    return _native(module, [module.stem, *module.stages], ["planes"] * 5, **more)


def timm_convnext() -> StagedNative:
    from timm.models.convnext import ConvNeXt

    return _stem_and_stages(ConvNeXt(num_classes=7, depths=(1, 1, 2, 1), dims=(4, 8, 8, 8)))


def timm_convnext_v2() -> StagedNative:
    from timm.models.convnext import ConvNeXt

    options = dict(depths=(1, 1, 1, 1), dims=(4, 8, 8, 8), kernel_sizes=3, use_grn=True)
    return _stem_and_stages(ConvNeXt(num_classes=7, ls_init_value=None, **options))


def torchvision_swin() -> StagedNative:
    from torchvision.models.swin_transformer import SwinTransformer

    module = SwinTransformer([4, 4], 8, list(DEPTHS), list(HEADS), [2, 2], num_classes=7)
    return _native(module, [module.features[i] for i in (0, 1, 3, 5, 7)], ["last"] * 5)


def torchvision_convnext() -> StagedNative:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    widths = [(4, 8), (8, 8), (8, 8), (8, None)]
    module = ConvNeXt([CNBlockConfig(*pair, 1) for pair in widths], num_classes=7)
    return _native(module, [module.features[i] for i in (0, 1, 3, 5, 7)], ["planes"] * 5)


STAGED_FAMILIES: dict[str, Callable[[], StagedNative]] = {
    make.__name__: make
    for make in (
        timm_swin, timm_swin_v2, timm_convnext, timm_convnext_v2, torchvision_swin,
        torchvision_convnext,
    )
}  # fmt: skip


def tiny_staged(family: str, dtype: torch.dtype = torch.float64) -> StagedNative:
    """A scrambled network of one family: every parameter, and the statistics that eval mode
    normalises by."""
    from tests.tiny import scramble

    torch.manual_seed(0)
    native = STAGED_FAMILIES[family]()
    scramble(native.module)
    scramble_statistics(native.module)
    native.module.to(dtype).requires_grad_(False)
    return native


def place(native: StagedNative, stage: int) -> Callable[[int, int], tuple[Any, ...]]:
    """The index of a place of the grid into what the native module of a stage gives."""
    order, every = native.orders[stage], slice(None)
    if order == "planes":
        return lambda row, column: (every, every, row, column)
    return lambda row, column: (every, row, column)
