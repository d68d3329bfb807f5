"""iFAM networks in a folder: NAME.json says how the network is built, NAME.safetensors holds its
weights.

The backbone is described as its library builds it:

    {"library": "timm", "name": NAME, "options": {...}}                    timm.create_model
    {"library": "timm", "class": "VisionTransformer", "arguments": {...}}  the class itself
    {"library": "transformers", "class": NAME, "config": {...}}            with its configuration
    {"library": "torchvision", "name": NAME, "options": {...}}             models.get_model
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from seecause._files import write_atomic, write_json
from seecause.errors import BadOption
from seecause.faithful.net import IFAM, Thresholds
from seecause.models.checkpoints import fill
from seecause.models.folders import build_native
from seecause.models.preprocess import Preprocess
from seecause.models.sources import Source, saved


def save_network(net: IFAM, folder: Path, name: str, metadata: dict[str, Any]) -> Path:
    """Write the card and the weights; `metadata` is added to the card. Returns the card's path."""
    # where heads of stage 1 are gone, distances are no longer those that were calibrated
    stale = net.options.stages == 1 and metadata.get("removed")
    thresholds = [] if stale else [asdict(each) for each in net.thresholds.values()]
    card = {
        "name": name,
        "architecture": {
            "library": "seecause",
            "class": "IFAM",
            "arguments": net.arguments,
            "backbone": description(net),
        },
        "classes": list(net.class_names),
        "preprocess": None if net.preprocess is None else asdict(net.preprocess),
        "thresholds": thresholds,
        **metadata,
    }
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: value.detach().cpu().contiguous() for key, value in net.state_dict().items()}
    write_atomic(folder / f"{name}.safetensors", save(weights))
    path = folder / f"{name}.json"
    write_json(path, card)
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
    arguments = dict(architecture["arguments"])
    if card["classes"]:
        arguments["classes"] = card["classes"]
    preprocess = None
    if card["preprocess"]:
        preprocess = Preprocess(**_with_tuples(card["preprocess"]))
    net = IFAM(
        build_native(architecture["backbone"]),
        **arguments,
        preprocess=preprocess,
        architecture=architecture["backbone"],
    )
    fill(net, state, source)
    for fields in card["thresholds"]:
        thresholds = Thresholds(**_with_tuples(fields))
        net.thresholds[thresholds.quantile, thresholds.by] = thresholds
    return Source(net.eval(), {}, architecture)


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
    }


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
        config = native.config.to_dict()
        return {"library": library, "class": type(native).__name__, "config": config}
    pretrained = getattr(native, "pretrained_cfg", None) or {}
    if library == "timm" and pretrained.get("architecture"):
        options = {"img_size": list(native.patch_embed.img_size), "num_classes": 0}
        return {"library": library, "name": pretrained["architecture"], "options": options}
    raise _undescribed(native, "the module does not tell how it was built")


def _check_description(net: IFAM, described: dict[str, Any]) -> None:
    with torch.device("meta"):
        again = IFAM(build_native(described), **net.arguments)
    shapes, built = _shapes(net), _shapes(again)
    for key in sorted(shapes.keys() | built.keys()):
        if shapes.get(key) != built.get(key):
            difference = f"another {key}: {built.get(key)} instead of {shapes.get(key)}"
            raise _undescribed(net.stage1.tower.native, f"building it so gives {difference}")


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}


def _undescribed(native: nn.Module, reason: str) -> BadOption:
    example = "{'library': 'timm', 'class': 'VisionTransformer', 'arguments': {...}}"
    expected = f"how {type(native).__name__} is built, as IFAM(..., architecture={example})"
    return BadOption("architecture", None, f"{expected}: {reason}")
