"""A vision-language model without some heads, on disk: the same architecture, zeros where the
output projections read those heads.

transformers loads it like any other; so does `sc.lvlm.load`. Nothing is copied but the weights that
change, so this needs no more memory than saving does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from seecause import __version__
from seecause.errors import NotDefined
from seecause.heads.ablate import checked
from seecause.heads.export import check_place
from seecause.heads.readme import page
from seecause.heads.result import Head
from seecause.lvlm.classifier import PromptClassifier
from seecause.models.slicing import columns, output_weight

CARD = "seecause-heads.json"


def export(
    model: PromptClassifier, heads: Iterable[Head], folder: str | Path, *, note: str = ""
) -> Path:
    """Write the whole model, its processor, a card and a README to `folder`, without `heads` of the
    classifier's scope."""
    removed = checked(model, heads)
    if model.gates is not None:
        raise NotDefined(
            "export",
            "this model has gates on its heads, which a file would not have",
            "Leave the `ablate` block first",
        )
    folder = Path(folder)
    check_place(folder, CARD)
    module, state = model.lvlm.module, dict(model.lvlm.module.state_dict())
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for layer, block in enumerate(model.blocks):
        gone = [head for at, head in removed if at == layer]
        if gone:
            weight = output_weight(block.native)
            edited = weight.detach().clone()
            edited[:, columns(gone, weight.shape[1] // block.heads).to(weight.device)] = 0
            state[names[id(weight)]] = edited
    with torch.no_grad():
        module.save_pretrained(folder, state_dict=state)
    model.lvlm.processor.save_pretrained(folder)
    card = {
        "form": "zeroed",
        "model": model.name,
        "scope": model.scope,
        "removed": removed,
        "layers": [block.heads for block in model.blocks],
        "asked": model.asked.said,
        "template": model.lvlm.template,
        "classes": list(model.classes),
        "fingerprint": model.lvlm.fingerprint(),
        "seecause": __version__,
    }
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_readme(card, type(module).__name__, note), encoding="utf-8")
    return folder


def _readme(card: dict[str, Any], kind: str, note: str) -> str:
    part = "vision tower" if card["scope"] == "vision" else "language model"
    template = "" if card["template"] is None else f", template={card['template']!r}"
    how = (
        f"from transformers import AutoProcessor, {kind}\nmodel ="
        f" {kind}.from_pretrained(FOLDER)\nprocessor = AutoProcessor.from_pretrained(FOLDER)\n\n#"
        f" or\nimport seecause as sc\nlvlm = sc.lvlm.load(FOLDER{template})"
    )
    more = [f"It came from weights {card['fingerprint']} (seecause {card['seecause']})."]
    return page(
        card,
        note,
        of=f"the {sum(card['layers'])} attention heads of its {part}",
        how=how,
        more=more,
    )
