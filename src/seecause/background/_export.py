"""A model without some of its heads, in memory and on disk.

A head is multiplied by zero at the input of the output projection W_O, which is the same as zeroing
its columns of W_O, or its rows of W_V and b_V (CIGMA, sections 1.7 and 1.8):

    W_O concat_h(o_h) + b_O = sum_h W_O[:, S_h] o_h + b_O           b_O belongs to no head

    zeroed   (to ship) the same architecture with zeros in the output projections: plain timm,
             transformers, torchvision or open_clip load it
    sliced   rows of Q, K and V and columns of O are gone, the file is smaller, and
             `sc.load(folder)` loads it. At the usual sizes this saves little (16 of a ViT-B/16's
             144 heads are 4 % of its arithmetic): the purpose is a model without the heads

Both compute what the ablated model computes: the written model is loaded again and compared. A
README names the removed heads and how to load the model; `seecause.json` holds the same for
programs. A module with its own view and a method `save` (iFAM) is saved by that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

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
    SLICED,
    fill,
    load,
    need_own_classes,
    read_checkpoint,
    rewrap,
)
from seecause.models.block import ZEROED, slice_heads, zero_heads
from seecause.models.parts import CosineHead, UnitLinear
from seecause.models.preprocess import Preprocess
from seecause.models.view import VisionModel
from seecause.options import checked

Form = Literal["zeroed", "sliced"]


def prune_heads(model: VisionModel, heads: Iterable[Head]) -> VisionModel:
    """A verified view of a copy without `heads`, pairs (layer, head) from 0. Its `module` is
    smaller and works without this package.

    Example:
        >>> import seecause as sc
        >>> model = sc.load("builtin:critters-vit")
        >>> sc.background.prune_heads(model, [(0, 1)]).blocks[0].heads
        7
    """
    removed = _removable(model, heads)
    check_sliceable(model)
    keep = _kept_heads(model, removed)

    def cut(block: nn.Module, layer: int) -> None:
        if (stay := keep[layer]) is not None:
            slice_heads(block, stay)

    pruned = _edited_copy(model, cut)
    pruned.origin = {**model.origin, "kept": keep}
    return pruned


def zero(model: VisionModel, heads: Iterable[Head]) -> VisionModel:
    """A verified view of a copy whose output projections no longer read `heads`; the architecture
    is the same."""
    removed = _removable(model, heads)

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


def check_sliceable(model: VisionModel) -> None:
    """Refuse a model whose heads cannot be cut out, whichever they are."""
    parts = model.module.modules()
    reasons = {
        "every head has rotary frequencies of its own": any(
            getattr(part, "rope_mixed", False) for part in parts
        ),
        "every head has relative position biases of its own": any(
            block.additive is not None for block in model.blocks
        ),
        "it decides by itself what each head sees": hasattr(model.module, "view_parts"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModel(f"cutting heads out of {model.family}", reason, ZEROED)


def _kept_heads(model: VisionModel, removed: Iterable[Head]) -> list[list[int] | None]:
    """The heads that stay, layer by layer; None where a layer is whole."""
    gone, keep = set(removed), list[list[int] | None]()
    for layer, block in enumerate(model.blocks):
        stay = [head for head in range(block.heads) if (layer, head) not in gone]
        keep.append(stay if len(stay) < block.heads else None)
    return keep


def _removable(model: VisionModel, heads: Iterable[Head]) -> list[Head]:
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
    form: Form = "zeroed",
    note: str = "",
) -> Path:
    """Write a model without some of its heads.

    Args:
        model: A vision transformer.
        heads: Pairs (layer, head) from 0; none writes the whole model.
        folder: A new folder, an empty one, or one with an earlier export.
        form: "zeroed" keeps the architecture, "sliced" makes the file smaller.
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
    check_form(model, form)
    origin = _origin(model)
    edited = zero(model, heads) if form == "zeroed" else prune_heads(model, heads)
    head = _head_card(edited.extra)
    check_place(folder, CARD, "ifam.json")
    names = {id(part): name for name, part in edited.module.named_modules()}
    card = {
        "form": form,
        "model": model.name,
        "family": model.family,
        "removed": heads,
        "layers": [block.heads for block in model.blocks],
        "kept": edited.origin.get("kept"),
        "blocks": [names[id(block.owner)] for block in edited.blocks],
        "origin": {key: value for key, value in origin.items() if key != "kept"},
        "classes": list(model.classes),
        "sigmoid": model.sigmoid,
        "preprocess": asdict(model.preprocess),
        "pool": edited.readout.kind,
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
        folder.mkdir(parents=True, exist_ok=True)
        for file in (PLAIN, SLICED):  # an earlier export of either form is replaced
            (folder / file).unlink(missing_ok=True)
        _save_weights(edited, folder, form, library=origin.get("library"))
        if head is not None:
            _save(edited.extra, folder / HEAD)
        write_json(folder / CARD, card)
    frame = model.preprocess
    more = [
        f"Inputs: {frame.size[0]} x {frame.size[1]} pixels, mean {list(frame.mean)}, deviation"
        f" {list(frame.std)}.",
        f"Weights: {card['fingerprint']} (seecause {card['seecause']}).",
    ]
    if head is not None:
        more.insert(0, "`head.safetensors` holds the classifier, which the library's model lacks.")
    write_atomic(folder / "README.md", readme(card, note, how=_how(card), more=more))
    del edited  # one copy at a time
    if not _writes_itself(model) or origin["class"] in BUILDERS:  # else nobody here can read it
        prove_export(model, heads, folder, lambda: _reloaded(model, folder, origin))
    return folder


def _reloaded(model: VisionModel, folder: Path, origin: Mapping[str, Any]) -> VisionModel:
    """A view of what was written; weights whose module nobody can build are read into a copy."""
    if origin:
        words = {name: model.texts[name] for name in ("tokenizer",) if name in model.texts}
        view = load(folder, device=model.device, dtype=model.dtype, check=False, **words)
        assert isinstance(view, VisionModel)
        return view
    module = copy.deepcopy(model.module)
    fill(module, read_checkpoint(folder / PLAIN), str(folder))
    return rewrap(model, module, check=False)


def check_place(folder: Path, *cards: str) -> None:
    """Refuse a folder with other files in it, unless it holds one of `cards` of an earlier
    export."""
    if folder.exists() and not folder.is_dir():
        raise BadOption("folder", str(folder), "a folder; this is a file")
    filled = folder.is_dir() and any(folder.iterdir())
    if filled and not any((folder / card).is_file() for card in cards):
        expected = "a new folder, an empty one, or one with an earlier export"
        raise BadOption("folder", str(folder), f"{expected}: this one has other files")


@checked
def check_form(model: VisionModel, form: Form) -> None:
    """Refuse a form that this model cannot be written in, whatever the heads."""
    if model.architecture == "prompt":
        remedy = "Use model.export, which zeroes heads in the whole model"
        raise NotDefined("export", f"{model.name} is a vision-language model", remedy)
    need_own_classes(model, "export")
    if "kept" in model.origin:
        reason = "heads were cut out of this model before, so no plain architecture fits it"
        raise NotDefined("export", reason, "Export the whole model without all of these heads")
    if form == "sliced":
        check_sliceable(model)
        if not _origin(model):
            remedy = "Load the model by sc.load, or use form='zeroed'"
            raise NotDefined("form='sliced'", "how this module is built is not known", remedy)


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


def _save_weights(model: VisionModel, folder: Path, form: Form, *, library: str | None) -> None:
    module: Any = model.module
    if library == "transformers":
        if form == "zeroed":
            module.save_pretrained(folder)
        else:
            module.config.save_pretrained(folder)
        _save_processor(model.preprocess, folder)
        tokenizer: Any = model.texts.get("tokenizer")
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
    if form == "sliced" or library != "transformers":
        _save(module, folder / (PLAIN if form == "zeroed" else SLICED))


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


def readme(card: Mapping[str, Any], note: str, *, how: str, more: Sequence[str]) -> str:
    """Markdown for an exported model: which heads are gone, and `how` to load the rest; `more`
    stands at the end."""
    zeroed = "are zero. The architecture is the original one."
    sliced = "were cut out, with their queries, keys and values."
    removed = ", ".join(f"({layer}, {head})" for layer, head in card["removed"])
    parts = [
        f"# {card['model']} without {len(card['removed'])} of {sum(card['layers'])} attention"
        " heads",
        "Removed heads have no effect: their columns of the output projection "
        + (zeroed if card["form"] == "zeroed" else sliced),
        "The bias of the output projection belongs to no head and is unchanged.",
        f"Removed (layer, head), from 0: {removed or 'none'}.",
        note,
        "The weights this model came from were random." if card.get("random_weights") else "",
        f"## Load it\n\n```python\n{how}\n```",
        *more,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _how(card: Mapping[str, Any]) -> str:
    """Python that loads an exported model."""
    ours = "import seecause as sc\nmodel = sc.load(FOLDER)"
    origin = card["origin"]
    if card["form"] == "sliced" or origin.get("library") == "seecause":
        return ours
    kind, name = origin.get("class"), repr(origin.get("name"))
    if origin.get("library") == "transformers":
        loaded = f"from transformers import {kind}\nmodel = {kind}.from_pretrained(FOLDER)"
        return f"{loaded}\n\n# or, with class names and preprocessing:\n{ours}"
    options = "".join(f", {key}={value!r}" for key, value in origin.get("options", {}).items())
    arguments = ", ".join(f"{k}={value!r}" for k, value in origin.get("arguments", {}).items())
    made = {
        "torchvision": f"from torchvision import models\nmodel = models.get_model({name}{options})",
        "open_clip": f"import open_clip\nmodel = open_clip.create_model({name})",
        "timm": f"import timm\nmodel = timm.create_model({name}{options})",
    }.get(origin.get("library"), "model = ...  # a module of the same architecture")
    if arguments:
        made = (
            "from timm.models.vision_transformer import VisionTransformer\n"
            f"model = VisionTransformer({arguments})"
        )
    return (
        f"from safetensors.torch import load_file\n{made}\n"
        "model.load_state_dict(load_file('model.safetensors'))\nmodel.eval()\n\n"
        f"# or, with class names and preprocessing:\n{ours}"
    )
