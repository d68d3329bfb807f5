"""`seecause doctor`: the verified properties of a model, and the environment. `seecause list`:
names that the other commands accept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from seecause.cli.shared import Facts, ModelName, Printing, Reading, print_table
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.lvlm import LVLM
    from seecause.models.base import ImageModel

EXTRAS = {  # optional groups of pyproject.toml -> a module of each
    "app": "fastapi",
    "cluster": "ray",
    "clip": "open_clip",
    "medical": "pydicom",
}
CARD = {  # numbers of an embedded model -> their columns
    "accuracy": "accuracy",
    "worst_group_accuracy": "worst group",
    "background_flip_rate": "scene flips",
    "creature_flip_rate": "creature flips",
}


def doctor(
    *,
    model: ModelName = "",
    reading: Reading = Reading(),
    list_classes: bool = False,
    output: Printing = Printing(),
) -> int:
    """Compare a model's view with the native model and print the results; without --model, print
    the environment.

    Probes compare the view with the native model: logits, every block's output, attention to
    recorded keys, and which pixels feed which token. Proofs compare known edits of the native model
    with what is computed for them: how far they move its output, and the error of that.

    For example:

    seecause doctor --model timm:deit3_small_patch16_224 --list-classes

    seecause doctor --model builtin:critters-llava

    Args:
        list_classes: Also list the class names.
    """
    from seecause.cli.lvlm import load_lvlm
    from seecause.loading import LanguageModel

    if model:
        try:
            opened: Any = reading.load(model, output, check=False)
        except LanguageModel:
            if list_classes:
                raise  # it has none
            opened = load_lvlm(model, reading.device, reading.dtype, check=False)
        facts = checkup(opened)
        if list_classes:
            indices = range(opened.n_classes)
            facts["classes"] = {str(index): opened.class_name(index) for index in indices}
    elif list_classes:
        raise BadOption("--list-classes", True, "a --model whose classes are to be listed")
    else:
        facts = environment()
    for title, rows in {} if output.silent else facts.items():
        checks = title == "verified"
        titles = ["check", "moved", "error", "compared"] if checks else ["", ""]
        cells = [[name, *(fact.values() if checks else [fact])] for name, fact in rows.items()]
        print_table(titles, [[_cell(cell) for cell in row] for row in cells], title=title)
    return output.finish(facts)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.1e}" if isinstance(value, float) else str(value)


def environment() -> dict[str, Facts]:
    """Versions, devices and optional parts of this machine."""
    from importlib.util import find_spec

    import torch

    from seecause.models.base import library_versions

    devices = {"cpu": f"{torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{card.name}, {card.total_memory / 2**30:.1f} GiB"
    extras = {
        name: "installed" if find_spec(module) else f"pip install 'seecause[{name}]'"
        for name, module in EXTRAS.items()
    }
    return {"versions": library_versions(), "devices": devices, "extras": extras}


def checkup(model: ImageModel | LVLM) -> dict[str, Facts]:
    """The checks of `sc.doctor`, and what a user may want to know before trusting a map; refuses a
    model that fails one."""
    import seecause as sc
    from seecause.attribution.registry import methods
    from seecause.lvlm import LVLM
    from seecause.models.staged import StagedModel
    from seecause.models.view import VisionModel

    verified = {row.pop("name"): row for row in sc.doctor(model).rows()}
    about = {
        "family": model.family,
        "fingerprint": model.fingerprint(),
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    if isinstance(model, LVLM):
        parts = {"blocks": model.n_layers, "heads": model.n_heads}
        return {"verified": verified, "model": {"name": model.name, **about}, "inside": parts}
    (rows, columns), (high, wide) = model.layout.grid, model.patch
    inside: Facts = {"grid": f"{rows} x {columns} patches of {high} x {wide} pixels"}
    if isinstance(model, VisionModel):
        layout, block = model.layout, model.blocks[0]
        inside |= {
            "blocks": model.n_layers,
            "heads": block.heads,
            "width of a head": block.head_dim,
        }
        inside |= {"prefix tokens": layout.prefix, "class token": layout.class_index}
        inside["registers"] = list(layout.registers)
    elif isinstance(model, StagedModel):
        inside["stages"] = ", ".join(stage.name for stage in model.stages)
    return {
        "verified": verified,
        "model": {
            "name": model.name + (" (RANDOM weights)" if model.random_weights else ""),
            **about,
            "readout": model.readout_name,
            "classes": model.n_classes,
            "probability": "sigmoid" if model.sigmoid else "softmax",
        },
        "preprocessing": {
            "images": model.preprocess.geometry(),
            "mean": model.preprocess.mean,
            "std": model.preprocess.std,
        },
        "inside": inside,
        "what works": {"methods": ", ".join(sorted(methods(model.architecture))) or "none"},
    }


Rows = list[Facts]


def list_names(
    what: Annotated[
        Literal["methods", "selectors", "metrics", "models", "datasets", "experiments"],
        Parameter(name="WHAT"),
    ],
    name: Annotated[str, Parameter(name="NAME")] = "",
    /,
    *,
    output: Printing = Printing(),
) -> int:
    """List names that the other commands accept, with requirements and costs.

    For example:

    seecause list methods

    seecause list methods caap

    Args:
        what: The kind of names to list.
        name: Show the options of this method or selector.
    """
    from seecause.attribution.registry import find
    from seecause.background.heads import SELECTORS
    from seecause.data.dataset import datasets
    from seecause.experiments.base import listing

    if name and what not in ("methods", "selectors"):
        raise BadOption("NAME", name, "nothing: only methods and selectors have options")
    if name:
        entry: Any = find(name) if what == "methods" else SELECTORS.get(name)
        rows = [{"option": option, "default": value} for option, value in entry.options.items()]
    elif what == "datasets":
        rows = [{"dataset": form} for form in datasets()]
    else:
        rows = listing() if what == "experiments" else LISTS[what]()
    if not output.silent:
        print_table(list(rows[0]) if rows else [""], [[*map(str, row.values())] for row in rows])
    return output.finish({what: rows})


def _methods() -> Rows:
    from seecause.attribution.registry import methods

    kinds = {kind: methods(kind) for kind in ("transformer", "staged", "dense")}
    names = dict.fromkeys(name for entries in kinds.values() for name in sorted(entries))
    rows = []
    for name in names:
        works = [kind for kind, entries in kinds.items() if name in entries]
        entry = kinds[works[0]][name]
        row = {"method": name, "needs": entry.needs, "forwards": entry.forwards}
        rows.append({**row, "models": ", ".join(works), "what it is": entry.summary})
    return rows


def _selectors() -> Rows:
    from seecause.background.heads import selectors

    return [
        {
            "selector": name,
            "needs": e.needs,
            "cost of one image": e.cost,
            "what it scores": e.summary,
        }
        for name, e in sorted(selectors().items())
    ]


def _metrics() -> Rows:
    from seecause.metrics.registry import metrics

    return [
        {"metric": column, "group": name, "what it measures": about.meaning}
        for name, entry in metrics().items()
        for column, about in entry.columns.items()
    ]


def _models() -> Rows:
    from seecause.loading import ZOO

    cards = {path.stem: path for path in ZOO.glob("*.json")}
    cards |= {path.parent.name: path for path in ZOO.glob("*/card.json")}
    rows = []
    for name, path in sorted(cards.items()):
        numbers = json.loads(path.read_text(encoding="utf-8")).get("evaluation", {})
        shown = {title: numbers.get(key, "-") for key, title in CARD.items()}
        rows.append({"model": f"builtin:{name}", **shown})
    return rows


LISTS = {
    "methods": _methods,
    "selectors": _selectors,
    "metrics": _metrics,
    "models": _models,
}
