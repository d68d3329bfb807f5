"""`seecause doctor`: what was verified about a model, and what this machine has. And `seecause
methods`: what can be asked for with --method, what it needs and costs, and its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from seecause.cli.options import ModelOptions, RunOptions
from seecause.cli.progress import Facts, print_rows
from seecause.errors import BadOption

if TYPE_CHECKING:
    from rich.table import Table

    from seecause.attribution.registry import Method
    from seecause.models.base import Architecture, ImageModel
    from seecause.models.dense import DenseModel
    from seecause.models.staged import StagedModel
    from seecause.models.view import VisionModel

LIBRARIES = (
    "seecause",
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "safetensors",
    "numpy",
    "pillow",
    "open_clip_torch",
)
EXTRAS = {
    "adapters": "peft",
    "app": "fastapi",
    "cluster": "ray",
    "clip": "open_clip",
    "medical": "pydicom",
    "tools": "captum",
}  # the optional groups of pyproject.toml and the module that shows each is there
HEADS = {
    "transformer": "scores, ablation, pruning, repair",
    "prompt": "scores, ablation",
    "staged": "none: it is read by stages; what asks for tokens or heads is refused",
    "dense": "none: its rows read places; what asks for tokens or heads is refused",
}
EXAMPLES = """Examples:

  seecause doctor

  seecause doctor --model timm:deit3_small_patch16_224 --list-classes
"""


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(doctor)
    app.command(epilog="Example: seecause methods caap")(methods)


def doctor(
    model: ModelOptions = ModelOptions(model=""),
    list_classes: Annotated[
        bool, typer.Option("--list-classes", help="Also list the class names.")
    ] = False,
    where: RunOptions = RunOptions(),
) -> Facts:
    """Check a model's view against the model itself and print what was found; without --model,
    describe this machine.

    Four probes compare the view with the native model: logits, every block's output, attention to
    recorded keys, and which pixels feed which token.
    """
    if not model.model:
        if list_classes:
            raise BadOption("--list-classes", True, "a --model whose classes are to be listed")
        facts = environment()
    else:
        opened = model.open(where, check=False)
        facts = checkup(opened)
        facts["model"]["weights"] = model.weights or "pretrained, or the model's own"
        if list_classes:
            facts["classes"] = {
                str(index): opened.class_name(index) for index in range(opened.n_classes)
            }
    _show(facts)
    return facts


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
    """The verified wrap and everything a user may want to know before trusting a map; refuses a
    view that does not match."""
    from seecause.attribution.registry import methods
    from seecause.engine.verify import verify
    from seecause.models.view import VisionModel

    probes = {
        probe.name: {"worst relative difference": probe.worst, "compared": probe.compared}
        for probe in verify(model)
    }
    if isinstance(model, VisionModel):
        inside = _transformer(model)
    else:
        inside = _cells(cast("DenseModel | StagedModel", model))
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
            "pictures": model.preprocess.geometry() + ("" if model.fixed_size else "; others too"),
            "mean": _numbers(model.preprocess.mean),
            "std": _numbers(model.preprocess.std),
        },
        **inside,
        "what works": {
            "methods": ", ".join(sorted(methods(model.architecture))) or "none",
            "heads": HEADS[model.architecture],
        },
    }


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _transformer(model: VisionModel) -> dict[str, dict[str, Any]]:
    layout, block = model.layout, model.blocks[0]
    return {
        "tokens": {
            "blocks": (
                f"{model.n_layers} of width {block.heads * block.head_dim}, {block.heads} heads"
            ),
            "grid": (
                f"{layout.grid[0]} x {layout.grid[1]} patches of {model.patch[0]} x"
                f" {model.patch[1]} pixels"
            ),
            "prefix": layout.prefix,
            "class token": layout.class_index,
            "distillation token": layout.distill_index,
            "registers": list(layout.registers),
        },
        "caap": _caap_cost(model),
    }


def _cells(model: DenseModel | StagedModel) -> dict[str, dict[str, Any]]:
    """What can be patched of a network of stages, or where the rows of a detector or a model of
    pixels read the picture."""
    from seecause.models.staged import StagedModel

    (rows, columns), (high, wide) = model.layout.grid, model.patch
    grid = f"{rows} x {columns} cells of {high} x {wide} pixels"
    cost = _size(model.forward_bytes(model.layout, model.cells)) + " a cell that is patched"
    if isinstance(model, StagedModel):
        stages = ", ".join(stage.name for stage in model.stages)
        grid = f"{grid} after {model.cells}"
        return {"features": {"stages": stages, "grid": grid, "one image": cost}}
    kept = ", ".join(model.seam.held) or "nothing"
    place = {"read at": model.cells, "grid": grid, "kept of the explained picture": kept}
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
    rows = (
        max(1, len(plan.live)) if plan.tail == "source" else len(plan.live) + 9
    )  # a patch and its eight neighbours
    probe = torch.empty(1, block.heads, 1, block.head_dim, device=model.device, dtype=model.dtype)
    return {
        "default tail": plan.tail,
        "attention": (
            "fused in plain runs; "
            + ("one Triton kernel" if kernel.usable(probe, [], None) else "explicit, in chunks,")
            + " in patched runs"
        ),
        "keys and values of one image": _size(trace_bytes(model, layout)),
        "all patches of one image at once": _size(
            layout.n_patches * rows * row_bytes(model, layout)
        ),
        "memory budget": f"{_size(memory().bytes(model.device))} (work is cut to fit it)",
        **({"CUDA graphs": _graphs(model)} if model.device.type == "cuda" else {}),
    }


def _graphs(model: VisionModel) -> str:
    """Whether CAAP of one picture is replayed, or why not: the third map of a kind is."""
    import os

    import torch

    from seecause.attribution.attribute import attribute
    from seecause.engine import graphs

    if os.environ.get(graphs.SWITCH) == "0":
        return f"off: {graphs.SWITCH}=0"
    size = (len(model.preprocess.mean), *model.preprocess.size)
    picture = torch.zeros(1, *size, device=model.device, dtype=model.dtype)
    for _ in range(3):
        attribute(model, picture, 0)
    return "; ".join(graphs.report())


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _show(facts: Mapping[str, Mapping[str, Any]]) -> None:
    from rich.console import Console

    console = Console()
    for title, rows in facts.items():
        console.print(_table(title, rows))


def _table(title: str, facts: Mapping[str, Any]) -> Table:
    """One fact a line; facts with several parts get a column for each."""
    from rich import box
    from rich.table import Table

    first = next(iter(facts.values()))
    heads = ["", *first] if isinstance(first, Mapping) else []
    table = Table(
        *heads,
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE,
        show_header=bool(heads),
        pad_edge=False,
    )
    for name, fact in facts.items():
        table.add_row(name, *map(_plain, fact.values() if isinstance(fact, Mapping) else [fact]))
    return table


def _plain(fact: Any) -> str:
    if fact is None or fact == []:
        return "none"
    if isinstance(fact, float):
        return f"{fact:.1e}"
    return f"{fact:,}" if isinstance(fact, int) else str(fact)


def methods(
    name: Annotated[
        str, typer.Argument(help="Show the options of this method.", show_default=False)
    ] = "",
    staged: Annotated[
        bool,
        typer.Option("--staged", "--conv", help="Those for networks of stages (ResNet, Swin ...)."),
    ] = False,
) -> Facts:
    """List attribution methods with what they read off the model and their cost in plain forwards,
    or the options of one."""
    from rich.table import Column

    from seecause.attribution.registry import find, methods as known

    architecture: Architecture = "staged" if staged else "transformer"
    if name:
        entries = [find(name, architecture)]
        typer.secho(f"{name}: {entries[0].summary}", bold=True)
        print_rows(["option", "default"], _default_rows(entries[0]))
    else:
        entries = [entry for _, entry in sorted(known(architecture).items())]
        needs = Column("needs", max_width=14)  # words wrap here rather than in the last column
        print_rows(["method", needs, "class", "what it is"], map(_method_row, entries))
    return {"methods": [_facts(entry) for entry in entries]}


def _default_rows(entry: Method) -> Iterator[tuple[str, str]]:
    """Options and their defaults; None is no value that a reader could give."""
    for option, default in entry.options.items():
        later = entry.unset.get(option, "decided when it runs")
        yield option, later if default is None else str(default)


def _method_row(entry: Method) -> tuple[str, ...]:
    cost = f"[dim]forwards: {entry.forwards}[/dim]"
    answers = "yes" if entry.class_specific else "any"
    return entry.name, entry.needs, answers, f"{entry.summary}\n{cost}"


def _facts(entry: Method) -> Facts:
    return {
        "name": entry.name,
        "summary": entry.summary,
        "needs": entry.needs,
        "forwards": entry.forwards,
        "class specific": entry.class_specific,
        "options": entry.options,
    }
