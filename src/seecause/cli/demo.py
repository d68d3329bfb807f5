"""`seecause demo`: every job on the embedded models, in one page. And `seecause zoo`: the embedded
models, and how to make them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from seecause.cli.options import Device, DeviceOption, Output, Seed, pick_device
from seecause.cli.progress import Facts

_COLUMNS = {
    "accuracy": "accuracy",
    "balanced": "balanced_accuracy",
    "worst\ngroup": "worst_group_accuracy",
    "scene\nflips": "background_flip_rate",
    "creature\nflips": "creature_flip_rate",
}


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: seecause demo --out demo --open")(demo)
    commands = typer.Typer(
        no_args_is_help=True,
        help="The embedded Critters models: list them, or train one from its recipe.",
    )
    commands.command("list")(list_models)
    commands.command("train", epilog="Example: seecause zoo train critters-vit --out weights")(
        train
    )
    app.add_typer(commands, name="zoo")


def demo(
    output: Output = Output(out=Path("demo")),
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser at the end.")
    ] = False,
    device: DeviceOption = Device.auto,
    seed: Seed = 0,
) -> None:
    """Run every job on the embedded Critters models and write one page. Needs no download and no
    picture."""
    from seecause.critters.demo import JOBS, DemoSetting, run_job
    from seecause.report.pages import Section, protocol_section

    replaces = output.check()
    setting = DemoSetting(device=pick_device(device), seed=seed)
    sections: list[Section] = []
    manifests: list[dict[str, Any]] = []
    lines: list[str] = []
    with output.counting("running jobs", len(JOBS)) as advance:
        for chapter in JOBS:
            shown = run_job(chapter, setting)
            sections += shown.sections
            manifests += shown.manifests
            lines += shown.lines
            advance(1)
    lead = (
        "Small generated creatures on textured backgrounds, so that every answer can be checked."
        " critters-vit learned the creatures; critters-biased learned their usual backgrounds too."
    )
    sections.append(replace(protocol_section(manifests), chapter="Protocol"))
    manifest = {"command": "demo", "runs": manifests}
    output.write(manifest, "seecause on Critters", sections, lead=lead)
    output.say(lines, replaced=replaces)
    if open_page:
        typer.launch((output.out / "index.html").absolute().as_uri())


def list_models() -> Facts:
    """The embedded models, what each was trained on and how well it does."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    from seecause.critters import train as zoo
    from seecause.models.sources import ZOO

    columns = [
        Column("name", overflow="fold"),
        *(Column(title, no_wrap=True) for title in ("regime", *_COLUMNS)),
    ]  # fits 80 columns; names give way first
    table = Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    facts: Facts = {}
    for name, recipe in zoo.recipes().items():
        card = zoo.card(ZOO, name)
        measured = {} if card is None else card["evaluation"]
        shown = [f"{measured[key]:.3f}" if key in measured else "-" for key in _COLUMNS.values()]
        table.add_row(name, recipe.regime, *(shown if card else ["untrained", *shown[1:]]))
        facts[name] = {"regime": recipe.regime, **measured}
    Console().print(table)
    return facts


def train(
    name: Annotated[
        str,
        typer.Argument(
            help="A name from `seecause zoo list`, without 'builtin:'.", show_default=False
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the weights, the card and the log.")
    ] = Path("weights"),
    samples: Annotated[
        int | None, typer.Option(help="Training pictures.", min=1, show_default="the recipe's")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Pictures in a step.", min=1, show_default="the recipe's")
    ] = None,
    test_samples: Annotated[
        int, typer.Option(help="Held-out pictures for the numbers reported.", min=1)
    ] = 8192,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Go on from this folder (critters-llava): answering only, at a tenth of the rate."
        ),
    ] = None,
    device: DeviceOption = Device.auto,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of weights and pictures; other seeds than 0 are part of the name.", min=0
        ),
    ] = None,
    background_reliability: Annotated[
        float | None,
        typer.Option(
            help="How often a class stands on its usual background (r_s); part of the name.",
            min=0.0,
            max=1.0,
            show_default="the recipe's",
        ),
    ] = None,
) -> None:
    """Train an embedded model from its recipe: minutes on a GPU, hours on a CPU."""
    from seecause.critters import train as zoo

    recipe = zoo.find_recipe(
        name.removeprefix("builtin:"),
        samples=samples,
        batch=batch,
        seed=seed,
        background_reliability=background_reliability,
    )
    measured = zoo.train(
        recipe, out=out, start=start, device=pick_device(device), test_samples=test_samples
    )
    typer.echo(
        f"{out / recipe.stem}: accuracy {measured['accuracy']:.3f} on {measured['samples']} test"
        f" pictures of {measured.get('regime', recipe.regime)}"
    )
