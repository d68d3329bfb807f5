"""`seecause doctor`: what was verified about a model, and what this machine has. `seecause list`:
what can be named in the other commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from cyclopts import Parameter

from seecause.cli.shared import ModelName, Output, Reading, print_table
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.models.base import ImageModel
    from seecause.models.dense import DenseModel
    from seecause.models.staged import StagedModel
    from seecause.models.view import VisionModel

LIBRARIES = (
    "seecause", "torch", "torchvision", "timm", "transformers", "safetensors", "numpy", "pillow",
    "open_clip_torch",
)  # fmt: skip
EXTRAS = {  # optional groups of pyproject.toml -> a module of each
    "adapters": "peft",
    "app": "fastapi",
    "cluster": "ray",
    "clip": "open_clip",
    "medical": "pydicom",
    "tools": "captum",
}
HEADS = {
    "transformer": "scores, ablation, pruning, repair",
    "prompt": "scores, ablation",
    "staged": "none: it is read by stages; what asks for tokens or heads is refused",
    "dense": "none: its rows read places; what asks for tokens or heads is refused",
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
    output: Output = Output(),
) -> int:
    """Check a model's view against the model itself and print what was found; without --model,
    describe this machine.

    Four probes compare the view with the native model: logits, every block's output, attention to
    recorded keys, and which pixels feed which token.

    For example: seecause doctor --model timm:deit3_small_patch16_224 --list-classes

    Args:
        list_classes: Also list the class names.
    """
    if not model:
        if list_classes:
            raise BadOption("--list-classes", True, "a --model whose classes are to be listed")
        facts = environment()
    else:
        opened = reading.load(model, check=False, quiet=output.quiet)
        facts = checkup(opened)
        facts["model"]["weights"] = reading.weights or "pretrained, or the model's own"
        if list_classes:
            indices = range(opened.n_classes)
            facts["classes"] = {str(index): opened.class_name(index) for index in indices}
    for title, rows in {} if output.silent else facts.items():
        first = next(iter(rows.values()))
        heads = ["", *first] if isinstance(first, Mapping) else ["", ""]
        shown = [
            [name, *map(_text, fact.values() if isinstance(fact, Mapping) else [fact])]
            for name, fact in rows.items()
        ]
        print_table(heads, shown, title=title)
    return output.finish(facts)


def _text(fact: Any) -> str:
    if fact is None or fact == []:
        return "none"
    if isinstance(fact, float):
        return f"{fact:.1e}"
    return f"{fact:,}" if isinstance(fact, int) else str(fact)


def environment() -> dict[str, dict[str, Any]]:
    """Versions, devices and optional parts of this machine."""
    import platform
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    import torch

    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    threads = torch.get_num_threads()
    devices = {"cpu": f"{threads} thread{'s' * (threads != 1)}"}
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{card.name}, {_size(card.total_memory)}"
    extras = {
        name: "installed" if find_spec(module) else f"pip install 'seecause[{name}]'"
        for name, module in EXTRAS.items()
    }
    return {"versions": versions, "devices": devices, "extras": extras}


def checkup(model: ImageModel) -> dict[str, dict[str, Any]]:
    """The verified wrap, and what a user may want to know before trusting a map; refuses a view
    that does not match."""
    from seecause.attribution.registry import methods
    from seecause.engine.verify import verify
    from seecause.models.view import VisionModel

    probes = {
        probe.name: {"worst relative difference": probe.worst, "compared": probe.compared}
        for probe in verify(model)
    }
    inside = _tokens(model) if isinstance(model, VisionModel) else _cells(cast("Any", model))
    mean, std = (
        ", ".join(f"{value:.6g}" for value in values)
        for values in (model.preprocess.mean, model.preprocess.std)
    )
    return {
        "verified": probes,
        "model": {
            "name": model.name + (" (RANDOM weights)" if model.random_weights else ""),
            "family": model.family,
            "fingerprint": model.fingerprint(),
            "parameters": sum(p.numel() for p in model.module.parameters()),
            "readout": model.readout_name,
            "classes": model.n_classes,
            "probability": "sigmoid" if model.sigmoid else "softmax",
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "preprocessing": {
            "images": model.preprocess.geometry() + ("" if model.fixed_size else "; others too"),
            "mean": mean,
            "std": std,
        },
        **inside,
        "what works": {
            "methods": ", ".join(sorted(methods(model.architecture))) or "none",
            "heads": HEADS[model.architecture],
        },
    }


def _tokens(model: VisionModel) -> dict[str, dict[str, Any]]:
    layout, block = model.layout, model.blocks[0]
    (rows, columns), (high, wide) = layout.grid, model.patch
    width = block.heads * block.head_dim
    return {
        "tokens": {
            "blocks": f"{model.n_layers} of width {width}, {block.heads} heads",
            "grid": f"{rows} x {columns} patches of {high} x {wide} pixels",
            "prefix": layout.prefix,
            "class token": layout.class_index,
            "distillation token": layout.distill_index,
            "registers": list(layout.registers),
        },
        "caap": _caap_cost(model),
    }


def _cells(model: DenseModel | StagedModel) -> dict[str, dict[str, Any]]:
    """What can be patched of a network of stages, or where the rows of a detector or a segmenter
    read the image."""
    from seecause.models.staged import StagedModel

    (rows, columns), (high, wide) = model.layout.grid, model.patch
    grid = f"{rows} x {columns} cells of {high} x {wide} pixels"
    cost = _size(model.forward_bytes(model.layout, model.cells)) + " a cell that is patched"
    if isinstance(model, StagedModel):
        stages = ", ".join(stage.name for stage in model.stages)
        grid = f"{grid} after {model.cells}"
        return {"features": {"stages": stages, "grid": grid, "one image": cost}}
    kept = ", ".join(model.seam.held) or "nothing"
    place = {"read at": model.cells, "grid": grid, "kept of the explained image": kept}
    return {"places": {**place, "one image": cost}}


def _caap_cost(model: VisionModel) -> dict[str, Any]:
    """What CAAP with its default options takes on this device."""
    import torch

    from seecause.attribution.caap import make_plan, row_bytes
    from seecause.engine import kernel
    from seecause.engine.chunks import memory
    from seecause.engine.trace import trace_bytes

    layout, block = model.layout, model.blocks[0]
    plan = make_plan(model, layout, tail=None, layers=None)
    live = len(plan.live)
    rows = max(1, live) if plan.tail == "source" else live + 9  # a patch and its eight neighbours
    probe = torch.empty(1, block.heads, 1, block.head_dim, device=model.device, dtype=model.dtype)
    patched = (
        "one Triton kernel"
        if kernel.usable(probe) and kernel.fits(probe, [], None)
        else "explicit, in chunks,"
    )
    together = layout.n_patches * rows * row_bytes(model, layout)
    return {
        "default tail": plan.tail,
        "attention": f"fused in plain runs; {patched} in patched runs",
        "keys and values of one image": _size(trace_bytes(model, layout)),
        "all patches of one image at once": _size(together),
        "memory budget": f"{_size(memory().bytes(model.device))} (work is cut to fit it)",
        **({"CUDA graphs": _graphs(model)} if model.device.type == "cuda" else {}),
    }


def _graphs(model: VisionModel) -> str:
    """Whether CAAP of one image is replayed as a CUDA graph, from the third map on, or why not."""
    import os

    import torch

    from seecause.attribution.attribute import attribute
    from seecause.engine import graphs

    if os.environ.get(graphs.SWITCH) == "0":
        return f"off: {graphs.SWITCH}=0"
    size = (len(model.preprocess.mean), *model.preprocess.size)
    image = torch.zeros(1, *size, device=model.device, dtype=model.dtype)
    for _ in range(3):
        attribute(model, image, 0)
    return "; ".join(graphs.report())


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def list_names(
    what: Annotated[
        Literal["methods", "selectors", "metrics", "models", "datasets", "experiments"],
        Parameter(name="WHAT"),
    ],
    name: Annotated[str, Parameter(name="NAME")] = "",
    /,
    *,
    staged: bool = False,
    output: Output = Output(),
) -> int:
    """List what can be named in the other commands, with what it needs and costs.

    For example:

    seecause list methods

    seecause list methods caap

    Args:
        what: What to list.
        name: Show the options of this method or selector.
        staged: Methods for networks of stages (ResNet, Swin ...).
    """
    if name and what not in ("methods", "selectors"):
        raise BadOption("NAME", name, "nothing: only methods and selectors have options")
    if name:
        facts, titles, rows = _options(what, name, staged)
    else:
        facts, titles, rows = LISTS[what](staged)
    if not output.silent:
        print_table(titles, rows)
    return output.finish(facts)


Listed = tuple[dict[str, Any], list[str], list[list[str]]]


def _options(what: str, name: str, staged: bool) -> Listed:
    """The options of a method or selector with their defaults."""
    from seecause.attribution.registry import find

    if what == "methods":
        entry: Any = find(name, "staged" if staged else "transformer")
        unset = entry.unset
    else:
        from seecause.background.heads import selectors

        known = selectors()
        if name not in known:
            from seecause.errors import UnknownName

            raise UnknownName("selector", name, known)
        entry, unset = known[name], {}
    later = "decided when it runs"
    rows = [
        [option, unset.get(option, later) if default is None else str(default)]
        for option, default in entry.options.items()
    ]
    facts = {"name": name, "summary": entry.summary, "options": entry.options}
    return facts, [f"option of {name}", "default"], rows


def _methods(staged: bool) -> Listed:
    from seecause.attribution.registry import methods

    rows, facts = [], {}
    for name, entry in sorted(methods("staged" if staged else "transformer").items()):
        specific = "yes" if entry.class_specific else "any"
        rows.append([name, entry.needs, specific, entry.forwards, entry.summary])
        facts[name] = {"summary": entry.summary, "needs": entry.needs, "options": entry.options}
        facts[name] |= {"forwards": entry.forwards, "class specific": entry.class_specific}
    return facts, ["method", "needs", "class", "forwards", "what it is"], rows


def _selectors(staged: bool) -> Listed:
    from seecause.background.heads import selectors

    entries = sorted(selectors().items())
    rows = [[name, e.needs, e.cost, e.summary] for name, e in entries]
    facts = {n: {"needs": e.needs, "cost": e.cost, "summary": e.summary} for n, e in entries}
    return facts, ["selector", "needs", "cost of one image", "what it scores"], rows


def _metrics(staged: bool) -> Listed:
    from seecause.metrics.registry import metrics

    rows = [
        [column, name, about.meaning]
        for name, entry in metrics().items()
        for column, about in entry.columns.items()
    ]
    facts = {column: {"group": group, "meaning": meaning} for column, group, meaning in rows}
    return facts, ["metric", "group", "what it measures"], rows


def _models(staged: bool) -> Listed:
    from seecause.models.load import ZOO

    cards = {path.stem: path for path in ZOO.glob("*.json")}
    cards |= {path.parent.name: path for path in ZOO.glob("*/card.json")}
    rows, facts = [], {}
    for name, path in sorted(cards.items()):
        card = json.loads(path.read_text(encoding="utf-8"))
        numbers = card.get("evaluation", {})
        shown = [f"{numbers[key]:.3f}" if key in numbers else "-" for key in CARD]
        rows.append([f"builtin:{name}", *shown])
        facts[f"builtin:{name}"] = numbers
    return facts, ["model", *CARD.values()], rows


def _datasets(staged: bool) -> Listed:
    from seecause.data.registry import datasets

    forms = datasets()
    return {"datasets": list(forms)}, ["dataset"], [[form] for form in forms]


def _experiments(staged: bool) -> Listed:
    from seecause.experiments import experiments

    rows = [[name, entry.question] for name, entry in sorted(experiments().items())]
    return {name: question for name, question in rows}, ["experiment", "question"], rows


LISTS = {
    "methods": _methods,
    "selectors": _selectors,
    "metrics": _metrics,
    "models": _models,
    "datasets": _datasets,
    "experiments": _experiments,
}
