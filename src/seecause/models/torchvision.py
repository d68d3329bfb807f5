"""torchvision's classifiers by name, and views of its `VisionTransformer` (ViT-B/16 ... ViT-H/14,
with either stem)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seecause.errors import BadOption, UnknownName, UnsupportedModel
from seecause.models.block import Block, chain, packed
from seecause.models.layout import TokenLayout
from seecause.models.load import Source, chosen_checkpoint, class_count, fetched, fill, names_in
from seecause.models.parts import Parts
from seecause.models.preprocess import Preprocess

CLASSES = ("VisionTransformer",)


def find(module: Any, kind: str) -> Parts:
    """The parts of a torchvision vision transformer."""
    if kind not in CLASSES:
        raise UnsupportedModel(
            f"torchvision {kind}",
            "its rows do not attend to all rows of one token sequence",
            "torchvision's VisionTransformer works",
        )
    patch, size = (module.patch_size,) * 2, (module.image_size,) * 2
    layout = TokenLayout(grid=(size[0] // patch[0], size[1] // patch[1]), prefix=1, class_index=0)
    classifies = any(not isinstance(layer, nn.Identity) for layer in module.heads.children())
    return Parts(
        family="torchvision.VisionTransformer",
        embed=partial(_with_positions, module),
        layout_at=lambda height, width: layout,
        blocks=[_block(native, f"blocks.{i}") for i, native in enumerate(module.encoder.layers)],
        norm=module.encoder.ln,
        patch=patch,
        native_tokens=lambda images: module.encoder(_with_class(module, images)),
        pool="cls",
        head=module.heads if classifies else None,
        native_logits=module,
        size=size,
    )


def _with_class(module: Any, images: Tensor) -> Tensor:
    return torch.cat(
        [module.class_token.expand(len(images), -1, -1), module._process_input(images)], dim=1
    )


def _with_positions(module: Any, images: Tensor) -> Tensor:
    return _with_class(module, images) + module.encoder.pos_embedding


def _block(native: Any, name: str) -> Block:
    attention = native.self_attention
    shared: dict[str, Any] = {
        "name": name,
        "native": native,
        "norm": native.ln_1,
        "feed": chain(native.ln_2, native.mlp),
    }
    return Block(**shared, **packed(attention, name))


def open_torchvision(name: str, weights: str | Path | None, size: tuple[int, int] | None) -> Source:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known and name in models.list_models():  # of detection, segmentation, video ...
        reason, remedy = "it is no classifier of images", "name one: vit_b_16, resnet50, swin_t"
        raise UnsupportedModel(f"torchvision {name}", reason, remedy)
    if name not in known:
        raise UnknownName("torchvision model", name, known)
    default: Any = getattr(models.get_model_weights(name), "DEFAULT")  # noqa: B009  an enum's own
    state, content = chosen_checkpoint(weights)
    options: dict[str, Any] = class_count(state, "heads.head", "fc", "classifier", "classifier.6")
    if size is not None and name.startswith("vit_"):
        if size[0] != size[1]:
            raise BadOption(
                "size", size, "a square: torchvision's VisionTransformer takes no other"
            )
        options["image_size"] = size[0]
    module = fetched(
        f"torchvision:{name}",
        lambda: models.get_model(name, weights=default if weights is None else None, **options),
    )
    if state:
        fill(module, state, str(weights))
    count = options.get("num_classes", 1000)
    names = names_in(content, count) or (default.meta["categories"] if count == 1000 else ())
    steps = default.transforms()
    side = steps.crop_size[0]
    frame = Preprocess(
        size or (side, side),
        steps.mean,
        steps.std,
        side / steps.resize_size[0],
        filter=steps.interpolation.value,
    )
    wrap_options = {"preprocess": frame, "classes": tuple(names)}
    origin = {"library": "torchvision", "name": name, "options": options}
    return Source(module, wrap_options, origin)
