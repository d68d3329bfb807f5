"""Folders that `heads.export` writes, read back: a card (`seecause.json`) beside weights.

zeroed   the library's own checkpoint; the card adds class names, preprocessing and a head of our
own, if there is one
sliced   smaller weights; the module is built whole, loses the same heads, and is then filled
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from seecause.errors import MissingWeights, UnknownName
from seecause.models.checkpoints import fill, read_weights
from seecause.models.heads import CosineHead, UnitLinear
from seecause.models.hub import pretrained, pretrained_model, read_card, usable
from seecause.models.preprocess import Preprocess
from seecause.models.slicing import slice_heads
from seecause.models.sources import Source

CARD = "seecause.json"
PLAIN, SLICED, HEAD = "model.safetensors", "sliced.safetensors", "head.safetensors"


def read_exported(folder: Path) -> Source:
    """The module of an exported folder, and what `wrap` should be told about it."""
    card = read_card(folder / CARD)
    with usable(folder / CARD):
        return _from_card(card, folder)


def _from_card(card: dict[str, Any], folder: Path) -> Source:
    origin = card["origin"]
    if not origin:
        raise MissingWeights(
            str(folder),
            "its card does not say how the module is built",
            "Build it, load model.safetensors into it, and sc.wrap it",
        )
    if card["form"] == "sliced":
        module = _built(origin, folder)
        for place, keep in zip(card["blocks"], card["kept"], strict=True):
            if keep is not None:
                slice_heads(module.get_submodule(place), keep)
        fill(module, read_weights(folder / SLICED), str(folder))
        origin = {**origin, "kept": card["kept"]}
    elif origin["library"] == "transformers":
        read_card(folder / "config.json")
        module = pretrained_model(_model_class(origin["class"]), folder)
    else:
        module = _built(origin, folder)
        fill(module, read_weights(folder / PLAIN), str(folder))
    return Source(module, _told(card, folder), origin)


def _built(origin: dict[str, Any], folder: Path) -> Any:
    """The whole module, with random weights."""
    library = origin["library"]
    if library == "transformers":
        import transformers

        read_card(folder / "config.json")
        return _model_class(origin["class"])(pretrained(transformers.AutoConfig, folder))
    if library == "torchvision":
        from torchvision import models

        return models.get_model(origin["name"], weights=None, **origin["options"])
    if library == "open_clip":
        import open_clip

        _need_name("open_clip model", origin["name"], open_clip.list_models())
        return open_clip.create_model(origin["name"], pretrained=None)
    if library == "seecause":  # the only one of ours that does not write itself
        from seecause.critters.planted import PlantedViT

        return PlantedViT(**origin["arguments"])
    if "arguments" in origin:
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(**origin["arguments"])
    import timm

    _need_name("timm model", origin["name"], timm.list_models())
    return timm.create_model(origin["name"], pretrained=False, **origin["options"])


def _model_class(name: str) -> Any:
    """A model of transformers by its name; a card may not name anything else."""
    import transformers

    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise UnknownName("model class of transformers", str(name), ())
    return kind


def _need_name(kind: str, name: str, known: Sequence[str]) -> None:
    """No address of a hub: a folder that was given is read, and nothing else."""
    if str(name).partition(".")[0] not in known:
        raise UnknownName(kind, str(name), known)


def _told(card: dict[str, Any], folder: Path) -> dict[str, Any]:
    frame: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in card["preprocess"].items()
    }
    wrap_options: dict[str, Any] = {
        "preprocess": Preprocess(**frame),
        "classes": tuple(card["classes"]),
        "sigmoid": card["sigmoid"],
    }
    if card["head"] is not None:
        wrap_options |= {"head": _head(card["head"], folder), "pool": card["pool"]}
    if card["templates"]:
        wrap_options["templates"] = card["templates"]
        if (folder / "tokenizer_config.json").is_file():
            from transformers import AutoTokenizer

            wrap_options["tokenizer"] = pretrained(AutoTokenizer, folder)
        elif card["origin"]["library"] == "open_clip":
            import open_clip

            wrap_options["tokenizer"] = open_clip.get_tokenizer(card["origin"]["name"])
    return wrap_options


def _head(card: dict[str, Any], folder: Path) -> nn.Module:
    state = read_weights(folder / HEAD)
    if card["kind"] == "cosine":
        return CosineHead(state["matrix"], scale=card["scale"])
    kind = UnitLinear if card["kind"] == "unit-linear" else nn.Linear
    head = kind(state["weight"].shape[1], state["weight"].shape[0], bias="bias" in state)
    head.load_state_dict(state)
    return head
