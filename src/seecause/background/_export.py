"""A model without some of its heads, in memory and on disk.

A head is multiplied by zero at the input of the output projection W_O, which is the same as zeroing
its columns of W_O, or its rows of W_V and b_V (CIGMA, sections 1.7 and 1.8):

    W_O concat_h(o_h) + b_O = sum_h W_O[:, S_h] o_h + b_O           b_O belongs to no head

`zero` and `export` keep the architecture, with zeros in the output projections, so that plain timm,
transformers, torchvision or open_clip load what is written. `prune_heads` cuts rows of Q, K and V
and columns of O out, in memory: a smaller module (16 of a ViT-B/16's 144 heads are 4 % of its
arithmetic).

All compute what the ablated model computes: a written model is loaded again and compared. A
README names the removed heads and how to load the model; `seecause.json` holds the same for
programs. A module with its own view and a method `save` (iFAM) is saved by that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import save
from torch import nn

from seecause import __version__
from seecause.background.heads import Head, checked_heads
from seecause.engine.canary import prove_export
from seecause.errors import BadOption, NotDefined, UnsupportedModel
from seecause.files import write_atomic, write_json
from seecause.loading import (
    BUILDERS,
    CARD,
    HEAD,
    PLAIN,
    load,
    need_own_classes,
    rewrap,
)
from seecause.models.block import ZEROED, slice_heads, zero_heads
from seecause.models.parts import CosineHead, UnitLinear
from seecause.models.preprocess import Preprocess
from seecause.models.view import VisionModel
from seecause.options import checked


def prune_heads(model: VisionModel, heads: Iterable[Head]) -> VisionModel:
    """A verified view of a copy without `heads`, pairs (layer, head) from 0. Its `module` is
    smaller and works without this package.

    Args:
        model: A vision transformer.
        heads: Pairs (layer, head), both from 0.

    Returns:
        A `VisionModel`.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> sc.background.prune_heads(model, [(0, 1)]).blocks[0].heads
        7
    """
    removed, keep = removable(model, heads), list[list[int] | None]()
    refused = {
        "every head has rotary frequencies of its own": any(
            getattr(part, "rope_mixed", False) for part in model.module.modules()
        ),
        "every head has relative position biases of its own": any(
            block.additive is not None for block in model.blocks
        ),
        "it decides by itself what each head sees": hasattr(model.module, "view_parts"),
    }
    for reason in (reason for reason, holds in refused.items() if holds):
        raise UnsupportedModel(f"cutting heads out of {model.family}", reason, ZEROED)
    for layer, block in enumerate(model.blocks):
        stay = [head for head in range(block.heads) if (layer, head) not in removed]
        keep.append(stay if len(stay) < block.heads else None)  # None where a layer is whole

    def cut(block: nn.Module, layer: int) -> None:
        if (stay := keep[layer]) is not None:
            slice_heads(block, stay)

    pruned = _edited_copy(model, cut)
    pruned.origin = {**model.origin, "kept": keep}
    return pruned


def zero(model: VisionModel, heads: Iterable[Head]) -> VisionModel:
    """A verified view of a copy whose output projections no longer read `heads`; the architecture
    is the same."""
    removed = removable(model, heads)

    def cut(block: nn.Module, layer: int) -> None:
        gone = [head for at, head in removed if at == layer]
        zero_heads(block, gone, of=model.blocks[layer].heads)

    return _edited_copy(model, cut)


def _edited_copy(model: VisionModel, edit: Callable[[nn.Module, int], None]) -> VisionModel:
    """A verified view of a copy of the native module, after `edit(native block, layer)` of every
    block."""
    memo: dict[int, Any] = {}
    module = copy.deepcopy(model.module, memo)
    for layer, block in enumerate(model.blocks):
        edit(memo[id(block.owner)], layer)
    return rewrap(model, module)


def removable(model: VisionModel, heads: Iterable[Head]) -> list[Head]:
    """Checked heads of a model without gates."""
    removed = checked_heads(model, heads)
    if model.gates is not None:
        reason = "this model has gates on its heads, which a copy would not have"
        raise NotDefined("cutting heads out", reason, "Leave the `ablate` block first")
    return removed


@checked
def export(
    model: VisionModel,
    heads: Iterable[Head],
    folder: str | Path,
    *,
    note: str = "",
) -> Path:
    """Write a model without some of its heads: the architecture is the same.

    Args:
        model: A vision transformer.
        heads: Pairs (layer, head) from 0; none writes the whole model.
        folder: A new folder, an empty one, or one with an earlier export.
        note: A paragraph for the README, such as how the heads were chosen.

    Returns:
        The folder.

    Raises:
        EditLost: If what was written does not compute what the ablated model computes.

    Example:
        >>> import tempfile
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> folder = sc.background.export(model, [(0, 1)], tempfile.mkdtemp())
        >>> sc.load(str(folder)).n_classes
        8
    """
    heads, folder = checked_heads(model, heads), Path(folder)
    check_exportable(model)
    origin, edited = _origin(model), zero(model, heads)
    head = _head_card(edited.extra)
    check_place(folder, CARD, "ifam.json")
    card = {
        "model": model.name,
        "family": model.family,
        "removed": heads,
        "layers": [block.heads for block in model.blocks],
        "origin": origin,
        "classes": list(model.classes),
        "sigmoid": model.sigmoid,
        "preprocess": asdict(model.preprocess),
        "pool": edited.readout.kind,
        "output": edited.output,
        "head": head,
        "templates": list(model.texts.get("templates", ())),
        "random_weights": model.random_weights,
        "fingerprint": edited.fingerprint(),
        "seecause": __version__,
    }
    if _writes_itself(model):
        own = ("model", "removed", "layers", "fingerprint", "seecause")
        edited.module.save(folder, **{name: card[name] for name in own})  # type: ignore[operator]
    else:
        if folder.is_file():
            raise BadOption("folder", str(folder), "a folder; this is a file")
        folder.mkdir(parents=True, exist_ok=True)
        if origin.get("library") == "transformers":
            module: Any = edited.module
            module.save_pretrained(folder)
            _save_processor(model.preprocess, folder)
            tokenizer: Any = model.texts.get("tokenizer")
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(folder)
        else:
            _save(edited.module, folder / PLAIN)
        if head is not None:
            _save(edited.extra, folder / HEAD)
        write_json(folder / CARD, card)
    line = _load_line(card["origin"], "FOLDER")
    write_atomic(folder / "README.md", rendered("heads.md.j2", card=card, note=note, load=line))
    del edited  # one copy at a time
    if not _writes_itself(model) or origin["class"] in BUILDERS:  # else nobody here can read it
        prove_export(model, heads, folder, lambda: _reloaded(model, folder, origin))
    return folder


def _reloaded(model: VisionModel, folder: Path, origin: Mapping[str, Any]) -> VisionModel:
    """A view of what was written; weights of a module of a user's own are read into a copy."""
    own = origin.get("library") in (None, "function")
    if not own:
        words = {name: model.texts[name] for name in ("tokenizer",) if name in model.texts}
        view = load(folder, device=model.device, dtype=model.dtype, check=False, **words)
        assert isinstance(view, VisionModel)
        return view
    view = load(copy.deepcopy(model.module), weights=folder, check=False)
    assert isinstance(view, VisionModel)
    return view


def check_place(folder: Path, *cards: str) -> None:
    """Refuse a folder with other files in it, unless it holds one of `cards` of an earlier
    export."""
    filled = folder.is_dir() and any(folder.iterdir())
    if filled and not any((folder / card).is_file() for card in cards):
        expected = "a new folder, an empty one, or one with an earlier export"
        raise BadOption("folder", str(folder), f"{expected}: this one has other files")


def check_exportable(model: VisionModel) -> None:
    """Refuse a model that cannot be written, whatever the heads."""
    if model.architecture == "prompt":
        remedy = "Use model.export, which zeroes heads in the whole model"
        raise NotDefined("export", f"{model.name} is a vision-language model", remedy)
    need_own_classes(model, "export")
    if "kept" in model.origin:
        reason = "heads were cut out of this model before, so no plain architecture fits it"
        raise NotDefined("export", reason, "Export the whole model without all of these heads")


def _writes_itself(model: VisionModel) -> bool:
    return hasattr(model.module, "view_parts") and hasattr(model.module, "save")


def _origin(model: VisionModel) -> dict[str, Any]:
    """How the module is built. Modules of transformers and modules with `save` describe themselves,
    others are known if `sc.load` made them."""
    if model.preprocess.kind != Preprocess.kind:
        reason = f"{model.name} takes a {model.preprocess.kind}, which the card of a folder lacks"
        raise NotDefined("an export", reason, "Use sc.background.prune_heads and save its module")
    if _writes_itself(model):
        return {"library": "seecause", "class": type(model.module).__name__}
    if hasattr(model.module, "save_pretrained") and hasattr(model.module, "config"):
        return {**model.origin, "library": "transformers", "class": type(model.module).__name__}
    return model.origin if "library" in model.origin else {}


def _save(module: Any, path: Path) -> None:
    state = module.state_dict().items()
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in state}
    write_atomic(path, save(copies))


def _save_processor(frame: Preprocess, folder: Path) -> None:
    """Write the configuration of a transformers image processor, if it can express the
    preprocessing (it has one short side only)."""
    scaled = [int(side / frame.crop + 1e-6) for side in frame.size]
    if not frame.squash and scaled[0] != scaled[1]:
        return
    from transformers import CLIPImageProcessor

    CLIPImageProcessor(
        size={"height": scaled[0], "width": scaled[1]}
        if frame.squash
        else {"shortest_edge": scaled[0]},
        crop_size={"height": frame.size[0], "width": frame.size[1]},
        resample=getattr(Image.Resampling, frame.filter.upper()),
        image_mean=list(frame.mean),
        image_std=list(frame.std),
    ).save_pretrained(folder)


def _head_card(head: nn.Module | None) -> dict[str, Any] | None:
    """A head that is not part of the native module; a zero-shot head is made again from its
    texts."""
    if head is None or (isinstance(head, CosineHead) and head.from_text):
        return None
    if isinstance(head, CosineHead):
        return {"kind": "cosine", "scale": head.scale}
    if isinstance(head, nn.Linear):
        return {"kind": "unit-linear" if isinstance(head, UnitLinear) else "linear"}
    reason = f"the head is a {type(head).__name__}, which no file describes"
    raise NotDefined("export", reason, "Use a linear head or a CosineHead")


def rendered(template: str, **values: Any) -> str:
    """Markdown by a template of this package."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("seecause.background"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)


def load_line(model: VisionModel, folder: str | Path) -> str:
    """The line that loads an exported model; `module` is one of a user's own code.

    Example:
        >>> import seecause as sc
        >>> load_line(sc.load("builtin:critters-vit"), "pruned")
        "model = sc.load('pruned')"
    """
    return _load_line(_origin(model), repr(str(folder)))


def _load_line(origin: Mapping[str, Any], where: str) -> str:
    if origin.get("library") in (None, "function"):
        code = repr(origin["name"]) if origin else "module"
        return f"model = sc.load({code}, weights={where})"
    return f"model = sc.load({where})"
