"""A repaired model on disk, in one of two forms.

    zeroed   (to ship) the same architecture with zeros in the output projections: plain timm,
    transformers, torchvision or open_clip load it
    sliced   the heads are gone, the file is smaller, and `sc.load(folder)` loads it

Both answer like the ablated model. A README says which heads were removed and how to load what is
left; `seecause.json` says it to programs. A module that brings its own view and writes itself
(iFAM: `save`) does so, and says it in its own card.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image
from safetensors.torch import save
from torch import nn

from seecause import __version__
from seecause._files import write_atomic, write_json
from seecause.errors import BadOption, NotDefined
from seecause.heads._prune import check_sliceable, kept_heads, original_heads, prune, zero
from seecause.heads.scores import Head, checked_heads
from seecause.loading import need_own_classes
from seecause.models.folders import CARD, HEAD, PLAIN, SLICED
from seecause.models.heads import CosineHead, TextHead, UnitLinear
from seecause.models.preprocess import Preprocess
from seecause.models.view import VisionModel

Form = Literal["zeroed", "sliced"]


def export(
    model: VisionModel,
    heads: Iterable[Head],
    folder: str | Path,
    *,
    form: Form = "zeroed",
    note: str = "",
) -> Path:
    """Write `model` without `heads` to `folder` and return it. `note` goes into the README: how the
    heads were chosen, say."""
    heads = checked_heads(model, heads)
    check_form(model, form)
    origin = _origin(model)
    edited = zero(model, heads) if form == "zeroed" else prune(model, heads)
    head = _head_card(edited.extra)
    folder = Path(folder)
    check_place(folder, CARD, "ifam.json")
    if any((folder / stale).exists() for stale in ((SLICED,) if form == "zeroed" else (PLAIN,))):
        raise BadOption(
            "folder",
            str(folder),
            f"an empty folder, or one with a model of form={form!r}: this one has weights of the"
            " other form",
        )
    card = {
        "form": form,
        "model": model.name,
        "family": model.family,
        "removed": heads,
        "layers": [block.heads for block in model.blocks],
        "kept": original_heads(model, kept_heads(model, heads)) if form == "sliced" else None,
        "blocks": _places(edited),
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
        edited.module.save(
            folder,
            **{
                name: card[name]
                for name in ("model", "removed", "layers", "fingerprint", "seecause")
            },
        )  # type: ignore[operator]
    else:
        folder.mkdir(parents=True, exist_ok=True)
        _save_weights(edited, folder, form, library=origin.get("library"))
        if head is not None:
            _save(edited.extra, folder / HEAD)
        write_json(folder / CARD, card)
    write_atomic(folder / "README.md", readme(card, note))
    return folder


def check_place(folder: Path, *cards: str) -> None:
    """Refuse a folder with other things in it: one of `cards` says that an earlier export is all
    there is to replace."""
    if folder.exists() and not folder.is_dir():
        raise BadOption("folder", str(folder), "a folder; this is a file")
    if (
        folder.is_dir()
        and any(folder.iterdir())
        and not any((folder / card).is_file() for card in cards)
    ):
        raise BadOption(
            "folder",
            str(folder),
            "a new folder, an empty one, or one with an earlier export: this one has other files",
        )


def check_form(model: VisionModel, form: str) -> None:
    """Refuse a form that this model cannot be written in, whatever the heads."""
    if form not in get_args(Form):
        raise BadOption("form", form, " or ".join(get_args(Form)))
    if model.architecture == "prompt":
        raise NotDefined(
            "heads.export",
            f"{model.name} is a vision-language model",
            "Use lvlm.export, which zeroes heads in the whole model",
        )
    need_own_classes(model, "heads.export")
    if form == "zeroed" and "kept" in model.origin:
        raise NotDefined(
            "form='zeroed'",
            "heads were cut out of this model before, so no plain architecture fits it",
            "Use form='sliced'",
        )
    if form == "sliced":
        check_sliceable(model)
        if not _origin(model):
            raise NotDefined(
                "form='sliced'",
                "how this module is built is not known",
                "Load the model by sc.load, or use form='zeroed'",
            )


def _writes_itself(model: VisionModel) -> bool:
    return hasattr(model.module, "view_parts") and hasattr(model.module, "save")


def _origin(model: VisionModel) -> dict[str, Any]:
    """How the module is built: transformers' and those that write themselves know it, the others if
    `sc.load` made them."""
    if model.preprocess.kind != Preprocess.kind:
        reason = f"{model.name} takes a {model.preprocess.kind}, which the card of a folder lacks"
        raise NotDefined("an export", reason, "Use heads.prune and save its module")
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
    """What a transformers image processor reads, where it can say it: it knows one short side
    only."""
    scaled = [int(side / frame.crop + 1e-6) for side in frame.size]
    if not frame.squash and scaled[0] != scaled[1]:
        return
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": (
            {"height": scaled[0], "width": scaled[1]}
            if frame.squash
            else {"shortest_edge": scaled[0]}
        ),
        "do_center_crop": True,
        "crop_size": {"height": frame.size[0], "width": frame.size[1]},
        "resample": int(getattr(Image.Resampling, frame.filter.upper())),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(frame.mean),
        "image_std": list(frame.std),
    }
    write_json(folder / "preprocessor_config.json", processor)


def _head_card(head: nn.Module | None) -> dict[str, Any] | None:
    """A head that is not part of the native module; a zero-shot head is made again from its
    texts."""
    if head is None or isinstance(head, TextHead):
        return None
    if isinstance(head, CosineHead):
        return {"kind": "cosine", "scale": head.scale}
    if isinstance(head, nn.Linear):
        return {"kind": "unit-linear" if isinstance(head, UnitLinear) else "linear"}
    raise NotDefined(
        "export",
        f"the head is a {type(head).__name__}, which no file describes",
        "Use a linear head or a CosineHead",
    )


def _places(model: VisionModel) -> list[str]:
    """The dotted names of the native blocks."""
    names = {id(part): name for name, part in model.module.named_modules()}
    return [names[id(block.owner)] for block in model.blocks]


def readme(card: dict[str, Any], note: str) -> str:
    """Markdown for an exported model's card."""
    more = [
        *([_HEAD] if card["head"] is not None else []),
        f"Inputs: {_frame(card['preprocess'])}.",
        f"Weights: {card['fingerprint']} (seecause {card['seecause']}).",
    ]
    return page(
        card, note, of=f"its {sum(card['layers'])} attention heads", how=_how(card), more=more
    )


def page(card: dict[str, Any], note: str, *, of: str, how: str, more: Sequence[str]) -> str:
    """What every exported model has to say: how many heads are gone, which, and `how` to load the
    rest; `more` stands at the end."""
    parts = [
        f"# {card['model']} without {len(card['removed'])} of {of}",
        "The heads below say nothing any more: their columns of the output projection "
        + (
            "are zero. The architecture is the original one."
            if card["form"] == "zeroed"
            else "were cut out, with their queries, keys and values."
        ),
        (
            "The bias of the output projection belongs to no head and is unchanged. Layers and"
            " heads count from 0."
        ),
        removed_table(card["layers"], card["removed"]),
        *([note] if note else []),
        *(["The weights this model came from were random."] if card.get("random_weights") else []),
        "## Load it",
        f"```python\n{how}\n```",
        *more,
    ]
    return "\n\n".join(parts) + "\n"


def removed_table(layers: Sequence[int], removed: Sequence[tuple[int, int]]) -> str:
    """Which heads each layer lost, of how many; layers that lost none are left out."""
    rows = [
        f"| {layer} | {heads} | {', '.join(str(head) for at, head in removed if at == layer)} |"
        for layer, heads in enumerate(layers)
        if any(at == layer for at, _ in removed)
    ]
    return (
        "\n".join(["| layer | heads it had | removed |", "|---|---|---|", *rows])
        if rows
        else "No head was removed."
    )


_HEAD = (
    "`head.safetensors` holds the classifier, which is not part of the library's model;"
    " seecause.json says how tokens are pooled for it."
)


def _how(card: dict[str, Any]) -> str:
    ours = "import seecause as sc\nmodel = sc.load(FOLDER)"
    origin = card["origin"]
    if card["form"] == "sliced" or origin.get("library") == "seecause":
        return ours
    if not origin:
        return (
            "from safetensors.torch import"
            " load_file\nmodule.load_state_dict(load_file('model.safetensors'))  # a module of the"
            " same architecture"
        )
    options = "".join(f", {key}={value!r}" for key, value in origin.get("options", {}).items())
    plain = {
        "transformers": (
            f"from transformers import {origin.get('class')}\nmodel ="
            f" {origin.get('class')}.from_pretrained(FOLDER)"
        ),
        "torchvision": (
            "from safetensors.torch import load_file\nfrom torchvision import models\nmodel ="
            f" models.get_model({origin.get('name')!r}{options})\n"
            "model.load_state_dict(load_file('model.safetensors'))\nmodel.eval()"
        ),
        "open_clip": (
            f"import open_clip\nmodel = open_clip.create_model({origin.get('name')!r},"
            " pretrained='model.safetensors').eval()"
        ),
        "timm": (
            f"import timm\nmodel = timm.create_model({origin.get('name')!r}{options},"
            " checkpoint_path='model.safetensors').eval()"
        ),
    }[origin["library"]]
    if "arguments" in origin:
        arguments = ", ".join(f"{key}={value!r}" for key, value in origin["arguments"].items())
        plain = (
            "from safetensors.torch import load_file\n"
            "from timm.models.vision_transformer import VisionTransformer\n"
            f"model = VisionTransformer({arguments})\n"
            "model.load_state_dict(load_file('model.safetensors'))\n"
            "model.eval()"
        )
    return f"{plain}\n\n# or, with class names and preprocessing:\n{ours}"


def _frame(frame: dict[str, Any]) -> str:
    return (
        f"{frame['size'][0]} x {frame['size'][1]} pixels, mean {list(frame['mean'])}, deviation"
        f" {list(frame['std'])}"
    )
