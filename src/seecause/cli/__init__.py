"""The command line: a file for each sub-command of `COMMANDS`, some of which share one (`HOMES`).

Only typer is imported here. The file of a command is imported when it is called, and imports what
it needs when it runs.
"""

from __future__ import annotations

import copy
import errno
import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from seecause.errors import BadOption, SeecauseError, printable

COMMANDS = {  # their lines in `seecause --help`
    "demo": "Run every job on the embedded Critters models and write one page. Needs no download.",
    "doctor": "Check a model's view against the model itself, or describe this machine.",
    "explain": "Which patches of each picture caused the model's answer?",
    "methods": "List attribution methods, what they need and cost, or the options of one.",
    "bench": "Compare attribution methods over a dataset; runs can be stopped and continued.",
    "serve": "A page on which patches, heads and parts can be touched: see what happens.",
    "audit": "Does the model answer from the background? Objects are put on other backgrounds.",
    "discover": (
        "Which kinds of patches turn pictures into which class? Nobody has to name a shortcut"
        " first."
    ),
    "repair": "Mend a model that answers from the background; writes a checkpoint to ship.",
    "heads": "Which heads answer from the background, and what if they go? (CIGMA)",
    "faithful": (
        "A classifier that cannot look elsewhere (iFAM): train it, test it, change what it sees,"
        " ship it."
    ),
    "lvlm": "Trace a vision-language model's answer: heads, words and image tokens.",
}
COMMAND_PANELS = {  # the panel that a command opens in `seecause --help`; others follow in it
    "demo": "Start here",
    "explain": "Explain",
    "audit": "Audit and repair",
    "faithful": "Build and trace",
}
OPTION_PANELS = dict.fromkeys(("model", "weights", "class_names", "mean", "std", "size"), "Model")
OPTION_PANELS |= dict.fromkeys(
    ("device", "dtype", "seed", "out", "overwrite", "quiet", "as_json"), "Running and writing"
)
# files that are read together
HOMES = {"discover": "repair", "methods": "doctor"}
USAGE_ERROR = 2
SYNONYMS = {"--target": "--class"}  # what Python calls an option -> its name here
PLACEHOLDERS = {"model": "NAME|FOLDER", "eye": "NAME|given|own"}
PLACEHOLDERS |= dict.fromkeys(("data", "test"), "KIND:PATH")
PLACEHOLDERS |= dict.fromkeys(("method", "metric"), "NAME,NAME")
TYPES = {"int": "N", "float": "X", "str": "TEXT"}  # what the help says for them
TYPES |= {"list[str": "TEXT", "list[int": "N", "list[float": "X"}  # may be repeated
TYPES |= {"integer": "N", "text": "TEXT"}  # in the words of earlier releases of typer
TYPES |= {"path": "PATH", "file": "FILE", "directory": "FOLDER"}


class PlainHelp:
    """Help that says what to write: nothing behind a flag, words that wrap between choices, no
    type of Python; what commands share in panels of its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)  # pyright: ignore
        for parameter in parameters:
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: None  # its name says enough
                if hasattr(parameter, "type"):  # as releases before 0.28 describe it
                    parameter.type = copy.copy(parameter.type)
                    parameter.type.get_metavar = lambda *_, **__: ""
                continue
            parameter.rich_help_panel = parameter.rich_help_panel or OPTION_PANELS.get(
                parameter.name
            )
            if parameter.metavar is None:
                parameter.metavar = _placeholder(parameter, ctx)
        return parameters


class PlainCommand(PlainHelp, TyperCommand):
    """A command with such help, which knows what is meant by the names that Python has."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {flag for parameter in self.params for flag in parameter.opts}
        for word in args:
            name = word.partition("=")[0]
            if name not in flags and SYNONYMS.get(name) in flags:
                raise SeecauseError(f"{name} is no option of this command: it is {SYNONYMS[name]}")
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as wrong:
            got, between, choices = wrong.message.partition(" is not one of ")
            if not between or wrong.param is None:
                raise
            got = got.removeprefix("Value error, ").strip("'")
            listed = choices.replace("'", "").removesuffix(".")
            flag = max(wrong.param.opts, key=len)
            raise BadOption(flag, got, f"one of {listed}") from None


class PlainGroup(PlainHelp, TyperGroup):
    """A group of commands with such help."""


def _placeholder(option: Any, ctx: Any) -> str:
    """What stands for an option's value: its choices, or a word for what it holds."""
    if option.is_flag:
        return ""
    if option.name in PLACEHOLDERS:
        return PLACEHOLDERS[option.name]
    recent = hasattr(option, "display_type")  # typer from 0.28 on
    kind = option.display_type(ctx) if recent else option.make_metavar(ctx=ctx)
    kind = kind.strip("<>[]")
    return TYPES.get(kind.lower().removesuffix(" range"), " | ".join(kind.split("|")))


class Commands(PlainGroup):
    """Commands that are imported when called. A user's mistake is one line and exit code 2, never a
    traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            self.commands[cmd_name] = _load(cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS:  # typer suggests what is loaded
            for name in COMMANDS:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        loaded, self.commands, panel = self.commands, {}, ""
        for name, line in COMMANDS.items():
            panel = COMMAND_PANELS.get(name, panel)
            self.commands[name] = TyperCommand(name, help=line, rich_help_panel=panel)
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = loaded

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SeecauseError as error:
            typer.echo(f"seecause: {printable(' '.join(str(error).split()))}", err=True)
            raise typer.Exit(USAGE_ERROR) from None
        except OSError as failure:  # a full disk, a folder that may not be written
            if failure.errno in (None, errno.EPIPE) or not failure.strerror:
                raise
            place = "" if failure.filename is None else f": {printable(str(failure.filename))}"
            typer.echo(
                f"seecause: {failure.strerror}{place}; nothing half-written counts", err=True
            )
            raise typer.Exit(USAGE_ERROR) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
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


def _load(name: str) -> Any:
    """The command, or group of commands, that a file registers, each with what all have."""
    from seecause.cli.options import grouped
    from seecause.cli.progress import dressed

    own = typer.Typer()
    importlib.import_module(f"seecause.cli.{HOMES.get(name, name)}").register(own)
    groups = [group.typer_instance for group in own.registered_groups]
    for group in [own, *(group for group in groups if group is not None)]:
        group.info.cls = PlainGroup
        for command in group.registered_commands:
            assert command.callback is not None
            command.cls = PlainCommand
            command.callback = dressed(grouped(command.callback))
    return typer.main.get_group(own).commands[name]


def main() -> None:
    app(prog_name="seecause")
