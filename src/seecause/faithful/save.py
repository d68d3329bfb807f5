"""iFAM networks in a folder: NAME.json says how the network is built, NAME.safetensors holds its
weights.

The backbone is described as its library builds it:

    {"library": "timm", "name": NAME, "options": {...}}                           timm.create_model
    {"library": "timm", "class": "VisionTransformer", "arguments": {...}}         the class itself
    {"library": "transformers", "class": NAME, "config": {...}}                   with its
    configuration
    {"library": "torchvision", "name": NAME, "options": {...}}
    torchvision.models.get_model
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from seecause.errors import BadOption
from seecause.faithful.net import IFAM
from seecause.faithful.output import Thresholds
from seecause.models.preprocess import Preprocess
from seecause.models.sources import Source, fill, saved


def save(net: IFAM, folder: Path, name: str, told: dict[str, Any]) -> Path:
    """Write the card and the weights; `told` is added to the card. Returns the card's path."""
    described = description(net)
    moved = net.stages == 1 and told.get(
        "removed"
    )  # heads of stage 1 are gone, so distances are no longer those that were calibrated
    card = {
        "name": name,
        "architecture": {
            "library": "seecause",
            "class": "IFAM",
            "arguments": net.options,
            "backbone": described,
        },
        "classes": list(net.class_names),
        "preprocess": None if net.preprocess is None else asdict(net.preprocess),
        "thresholds": [] if moved else [asdict(found) for found in net.thresholds.values()],
        **told,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: value.detach().cpu().contiguous() for key, value in net.state_dict().items()},
        folder / f"{name}.safetensors",
    )
    path = folder / f"{name}.json"
    path.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    return path


def load(folder: str | Path, name: str = "ifam") -> IFAM:
    """The network that `net.save` wrote, to train or to intervene on; `sc.load(folder)` gives a
    view of it."""
    net = saved(Path(folder), name).module
    assert isinstance(net, IFAM)
    return net


def from_card(card: dict[str, Any], state: dict[str, Tensor], source: str) -> Source:
    """A network from its card and its weights (`models/sources.py` calls this)."""
    architecture = card["architecture"]
    options, steps = dict(architecture["arguments"]), card["preprocess"]
    if card["classes"]:
        options["classes"] = card["classes"]
    told: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in (steps or {}).items()
    }
    preprocess = Preprocess(**told) if told else None
    net = IFAM(
        build_backbone(architecture["backbone"]),
        **options,
        preprocess=preprocess,
        architecture=architecture["backbone"],
    )
    fill(net, state, source)
    for found in card["thresholds"]:
        kept = Thresholds(
            found["quantile"],
            found["by"],
            tuple(found["values"]),
            tuple(found["tokens"]),
            found.get("pictures", 0),
        )
        net.thresholds[kept.quantile, kept.by] = kept
    return Source(net.eval(), {}, architecture)


def description(net: IFAM) -> dict[str, Any]:
    """How the backbone is built, checked: a card that builds another network would only be noticed
    when it is loaded."""
    described = net.architecture or describe(net.stage1.tower.native)
    _check_description(net, described)
    return described


def describe(native: Any) -> dict[str, Any]:
    """How the library builds this backbone, where the module itself tells."""
    library = type(native).__module__.split(".")[0]
    if library == "transformers":
        return {
            "library": library,
            "class": type(native).__name__,
            "config": native.config.to_dict(),
        }
    known = getattr(native, "pretrained_cfg", None) or {}
    if library == "timm" and known.get("architecture"):
        return {
            "library": library,
            "name": known["architecture"],
            "options": {"img_size": list(native.patch_embed.img_size), "num_classes": 0},
        }
    raise _undescribed(native, "the module does not tell how it was built")


def build_backbone(described: dict[str, Any]) -> nn.Module:
    """The backbone with random weights."""
    if described["library"] == "transformers":
        import transformers

        kind = getattr(transformers, described["class"])
        return kind(kind.config_class.from_dict(described["config"]))
    if described["library"] == "torchvision":
        from torchvision import models

        return models.get_model(described["name"], weights=None, **described["options"])
    import timm

    if "arguments" in described:
        return timm.models.VisionTransformer(**described["arguments"])
    return timm.create_model(described["name"], pretrained=False, **described["options"])


def _check_description(net: IFAM, described: dict[str, Any]) -> None:
    with torch.device("meta"):
        again = IFAM(build_backbone(described), **net.options)
    shapes, built = (
        {key: tuple(value.shape) for key, value in module.state_dict().items()}
        for module in (net, again)
    )
    if shapes != built:
        different = next(
            iter(
                sorted(
                    key for key in shapes.keys() | built.keys() if shapes.get(key) != built.get(key)
                )
            )
        )
        raise _undescribed(
            net.stage1.tower.native,
            f"building it so gives another {different}: {built.get(different)} instead of"
            f" {shapes.get(different)}",
        )


def _undescribed(native: nn.Module, reason: str) -> BadOption:
    expected = (
        f"how {type(native).__name__} is built, as IFAM(..., architecture={{'library': 'timm',"
        " 'class': 'VisionTransformer', 'arguments': {...}})"
    )
    return BadOption("architecture", None, f"{expected}: {reason}")
