"""`seecause methods`: what can be asked for with --method, what it needs and costs, and which
options it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from seecause.cli.progress import Facts

if TYPE_CHECKING:
    from seecause.attribution.registry import Method
    from seecause.models.base import Architecture


def register(app: typer.Typer) -> None:
    app.command("methods", epilog="Example: seecause methods caap")(methods)


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
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from seecause.attribution.registry import find, methods as known

    console = Console(highlight=False)
    architecture: Architecture = "staged" if staged else "transformer"
    if name:
        entry = find(name, architecture)
        console.print(f"{name}: {entry.summary}", style="bold", markup=False)
        table = Table("option", "default", box=box.SIMPLE_HEAD, pad_edge=False)
        for option, default in entry.options.items():
            table.add_row(
                option,
                (
                    entry.unset.get(option, "decided when it runs")
                    if default is None
                    else str(default)
                ),
            )
    else:
        table = Table("method", "needs", "class", "what it is", box=box.SIMPLE_HEAD, pad_edge=False)
        table.columns[1].max_width = 14  # words wrap here rather than in the last column
        for entry in sorted(known(architecture).values(), key=lambda entry: entry.name):
            table.add_row(
                entry.name,
                entry.needs,
                "yes" if entry.class_specific else "any",
                f"{entry.summary}\n[dim]forwards: {entry.forwards}[/dim]",
            )
    console.print(table)
    entries = [find(name, architecture)] if name else known(architecture).values()
    return {"methods": [_facts(entry) for entry in sorted(entries, key=lambda entry: entry.name)]}


def _facts(entry: Method) -> Facts:
    return {
        "name": entry.name,
        "summary": entry.summary,
        "needs": entry.needs,
        "forwards": entry.forwards,
        "class specific": entry.class_specific,
        "options": entry.options,
    }
