"""`seecause heads`: does the model answer from the background, which heads do it, and what if they
go?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from seecause.cli.heads_prune import prune, score
from seecause.cli.progress import Facts, print_rows

if TYPE_CHECKING:
    pass


def register(app: typer.Typer) -> None:
    commands = typer.Typer(
        no_args_is_help=True,
        help="Which heads answer from the background, and what if they go? (CIGMA)",
    )
    examples = {
        score: "--model hf:FOLDER --data waterbirds:PATH:train --limit 600 --out scores",
        prune: "--data waterbirds:PATH:train --test waterbirds:PATH:test --top 16",
    }
    for command, example in examples.items():
        name = command.__name__.replace("_", "-")
        listed = commands.command(name, epilog=f"Example: seecause heads {name} {example}")
        listed(command)
    commands.command()(selectors)
    app.add_typer(commands, name="heads")


def selectors() -> Facts:
    """The ways to choose heads, what each needs and what it costs."""
    from seecause.background.heads import selectors as registered

    entries = sorted(registered().items())
    titles = ("name", "needs", "cost for one picture", "what it scores")
    print_rows(titles, [(name, e.needs, e.cost, e.summary) for name, e in entries])
    columns = ("needs", "cost", "summary")
    return {name: {column: getattr(entry, column) for column in columns} for name, entry in entries}
