"""Saved models small enough for commands: random weights, Critters' classes and size."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from seecause import critters
from seecause.background import LabelledImages
from seecause.critters.planted import PlantedViT
from tests.helpers import view
from tests.tiny import pictures, scramble, tiny

ARCHITECTURE = {
    "img_size": 96,
    "patch_size": 16,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 4,
    "num_classes": len(critters.CLASSES),
}
HALF = {"mean": [0.5] * 3, "std": [0.5] * 3}
ROUTERS = [
    {"block": 1, "background": [0, 3], "object": [1]},
    {"block": 2, "background": [2], "object": [0, 1]},
]


def masked_case(family="timm_registers", batch=2):
    """A tiny native model, its view, and images with random masks."""
    native = tiny(family)
    masks = torch.rand(batch, *native.size, generator=torch.Generator().manual_seed(3)) < 0.4
    data = LabelledImages(pictures(native, batch), masks=masks)
    return native, view(native, check=False), data


def toy(
    folder: Path,
    name: str = "toy",
    *,
    planted: bool = False,
    seed: int = 0,
    library: str = "timm",
    classes: Sequence[str] = critters.CLASSES,
) -> str:
    """A folder that `sc.load` opens."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (
        {**ARCHITECTURE, **HALF, "routers": ROUTERS}
        if planted
        else {**ARCHITECTURE, "num_classes": len(classes)}
    )
    module = scramble(PlantedViT(**arguments) if planted else VisionTransformer(**arguments), seed)
    save_file(module.state_dict(), folder / f"{name}.safetensors")
    architecture = {"library": library, "class": type(module).__name__, "arguments": arguments}
    card = {
        "architecture": architecture,
        "classes": list(classes),
        **HALF,
        "recipe": {"regime": "certified"},
    }
    (folder / f"{name}.json").write_text(json.dumps(card))
    return str(folder)


def some_of(versions, rows):
    """The versions at `rows` [M] bool."""
    names = ("source", "donor", "number", "control")
    return replace(versions, **{name: getattr(versions, name)[rows] for name in names}, memo={})
