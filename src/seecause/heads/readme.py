"""The plain page in an exported folder: what was removed, and how to load what is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
    told = [
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
    return "\n\n".join(told) + "\n"


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
