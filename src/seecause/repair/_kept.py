"""What a repair keeps in its work folder, so that one that was killed goes on.

    WORK/NAME-KEY/done.sealed       a finished remedy: its weights, what was done, what it took
    WORK/NAME-KEY/fine-tune.sealed  the last whole epoch of a training that has not ended
    WORK/eye/                       maps of the eye (`eye`)

KEY is a digest of all that decides a remedy: model, pixels, masks, options, seed, version. Every
file carries its checksum: one that was cut or changed is named, left aside and made again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from seecause import __version__
from seecause._files import digest, digest_json, read_sealed, write_sealed
from seecause.errors import BadOption
from seecause.loading import rewrap
from seecause.models.heads import TextHead
from seecause.models.view import VisionModel
from seecause.repair._remedies import Mended, Remedy, with_layer
from seecause.repair.fine_tune import EPOCH
from seecause.repair.last_layer import LastLayer
from seecause.repair.parts import Material

DONE = "done.sealed"


def work_folder(work: Path) -> Path:
    if work.exists() and not work.is_dir():
        raise BadOption("work", str(work), "a folder; this is a file")
    work.mkdir(parents=True, exist_ok=True)
    return work


def content_key(material: Material, *, groups: bool) -> str:
    """A digest of pixels, labels and masks, and of group labels where they are used."""
    labels = material.pictures.labels
    tensors = [material.pictures.images, labels]
    tensors += [] if material.masks is None else [material.masks.cut]
    if material.masks is None and material.pictures.swapped is not None:
        tensors.append(material.pictures.swapped.background)
    bytes_of = [
        t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for t in tensors
        if t is not None
    ]
    return digest(*bytes_of, repr(material.pictures.groups if groups else ()))


def remedy_name(entry: Remedy, settings: Mapping[str, Any], key: list[Any]) -> str:
    """Of the folder of a remedy."""
    return f"{entry.name}-{digest_json([entry.name, dict(settings), key, __version__])}"


def write_remedy(place: Path, result: Mended, seconds: float) -> None:
    """Weights and facts in one file, so that neither is there without the other."""
    if result.layer is not None:
        tensors = {"weight": result.layer.weight, "bias": result.layer.bias}
    elif hasattr(result.model.module, "view_parts"):
        return  # a network of another shape writes itself, when it is exported
    else:
        tensors = {f"module.{k}": v for k, v in result.model.module.state_dict().items()}
        if (head := _own_head(result.model)) is not None:
            tensors |= {f"extra.{k}": v for k, v in head.state_dict().items()}
    content = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    facts = {"done": result.done, "details": result.details, "seconds": seconds}
    content["facts"] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    write_sealed(place / DONE, save(content))
    (place / EPOCH).unlink(missing_ok=True)


def read_remedy(model: VisionModel, place: Path) -> tuple[Mended, float] | None:
    """What an earlier run finished, and its seconds; None where that is missing or damaged."""
    content = read_sealed(place / DONE)
    if content is None:
        return None
    tensors = load(content)
    facts = json.loads(bytes(tensors.pop("facts").tolist()))
    if "weight" in tensors:
        layer = LastLayer(tensors["weight"], tensors["bias"])
        return with_layer(model, layer, facts["done"], facts["details"]), facts["seconds"]
    module, head = copy.deepcopy((model.module, _own_head(model)))
    module.load_state_dict(_under("module.", tensors))
    if head is not None:
        head.load_state_dict(_under("extra.", tensors))
    view = rewrap(model, module, head=head)
    return Mended(view, facts["done"], facts["details"]), facts["seconds"]


def _own_head(model: VisionModel) -> nn.Module | None:
    """A head beside the module with weights of its own: one of texts shares the module's."""
    return None if isinstance(model.extra, TextHead) else model.extra


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
