"""The command line: one file for each sub-command, registered in `COMMANDS`.

Only typer is imported here; a command imports what it needs when it runs, so `seecause --help` is
quick.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from seecause.cli import bench, demo, doctor, explain, faithful, heads, lvlm, methods, study, zoo
from seecause.errors import SeecauseError

COMMANDS = (explain, bench, heads, faithful, lvlm, study, doctor, demo, zoo, methods)
USAGE_ERROR = 2


class Commands(TyperGroup):
    """A user's mistake is one line and exit code 2, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SeecauseError as error:
            typer.echo(f"seecause: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(USAGE_ERROR) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"seecause {version('seecause')}")
        raise typer.Exit


@app.callback()
def seecause(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and leave.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """See what causes a vision transformer's answer, and change it."""


for command in COMMANDS:
    command.register(app)


def main() -> None:
    app(prog_name="seecause")
