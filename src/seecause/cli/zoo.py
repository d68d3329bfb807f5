"""`seecause zoo`: the embedded models, and how to make them again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from seecause.cli.options import Device, DeviceOption


def register(app: typer.Typer) -> None:
    commands = typer.Typer(no_args_is_help=True, help="The embedded Critters models: list them, or train one from its recipe.")
    commands.command("list")(list_models)
    commands.command("train", epilog="Example: seecause zoo train critters-vit --out weights")(train)
    app.add_typer(commands, name="zoo")


def list_models() -> None:
    """The embedded models, what each was trained on and how well it does."""
    import json

    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    from seecause.models.sources import ZOO
    from seecause.train.recipes import RECIPES

    columns = {"accuracy": "accuracy", "balanced": "balanced_accuracy", "worst": "worst_group_accuracy"}
    columns |= {"scene flips": "background_flip_rate", "creature flips": "creature_flip_rate"}
    table = Table(Column("name", no_wrap=True), Column("regime", no_wrap=True), *columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, recipe in RECIPES.items():
        card = ZOO / f"{name}.json"
        measured = json.loads(card.read_text(encoding="utf-8"))["evaluation"] if card.is_file() else {}
        table.add_row(name, recipe.regime, *(f"{measured[key]:.3f}" if key in measured else "not trained" for key in columns.values()))
    Console(highlight=False).print(table)


def train(
    name: Annotated[str, typer.Argument(help="A name from `seecause zoo list`, without 'builtin:'.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for NAME.safetensors, NAME.json and the log.")] = Path("weights"),
    samples: Annotated[int | None, typer.Option(help="Training pictures.", min=1, show_default="the recipe's")] = None,
    device: DeviceOption = Device.auto,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and pictures.", min=0, show_default="the recipe's")] = None,
) -> None:
    """Train an embedded model from its recipe: minutes on a GPU, hours on a CPU."""
    from seecause.cli.options import pick_device
    from seecause.train.classifier import train as run
    from seecause.train.recipes import find_recipe

    recipe = find_recipe(name.removeprefix("builtin:"), samples=samples, seed=seed)
    measured = run(recipe, out=out, device=pick_device(device))
    typer.echo(f"{out / recipe.name}.safetensors: accuracy {measured['accuracy']:.3f} on {measured['samples']} test pictures of {measured['regime']}")
