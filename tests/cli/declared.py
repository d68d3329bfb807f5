"""What the command line promises: every command with its example, and every option with its flags,
default, range, where the help shows it, and the commands that have it so.

`python -m tests.cli.declared` writes `declared.txt`, and a test compares it: a default that changes
is a line of the diff."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from seecause.cli import app

FILE = Path(__file__).with_name("declared.txt")
SHOWN = ("min", "max", "metavar", "show_default", "rich_help_panel", "hidden")


def declared() -> str:
    examples, options = [], dict[str, list[str]]()
    for words, command in commands(typer.main.get_command(app)):
        examples.append(f"{words}: {' '.join((command.epilog or 'no example').split())}")
        parameters = inspect.signature(command.callback).parameters
        for shown in command.params:
            parameter = parameters.get(shown.name)
            if parameter is not None and hasattr(parameter.annotation, "__metadata__"):
                options.setdefault(_option(shown, parameter), []).append(words)
    told = [f"{option}\n    {', '.join(names)}" for option, names in options.items()]
    return "\n".join([*examples, "", *told]) + "\n"


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its words."""
    for name in group.list_commands(None):
        command, words = group.get_command(None, name), f"{path} {name}".strip()
        if hasattr(command, "list_commands"):
            yield from commands(command, words)
        else:
            yield words, command


def _option(shown: Any, parameter: inspect.Parameter) -> str:
    """Its flags, kind and default, and what of its declaration is not the usual."""
    kind, (info,) = parameter.annotation.__origin__, parameter.annotation.__metadata__
    value = parameter.default
    value = value.value if isinstance(value, Enum) else value
    value = "required" if value is inspect.Parameter.empty else repr(value)
    usual = type(info)(default=None)
    about = {name: getattr(info, name) for name in SHOWN}
    more = [f"{name}={v!r}" for name, v in about.items() if v != getattr(usual, name)]
    named = kind.__name__ if isinstance(kind, type) else str(kind)
    named = named.replace("pathlib._local", "pathlib")  # as Python 3.13 calls it
    choices = f" ({', '.join(kind)})" if isinstance(kind, type) and issubclass(kind, Enum) else ""
    flags = " ".join([*shown.opts, *shown.secondary_opts])
    start = f"{flags}: {named}{choices} = {value.replace('PosixPath', 'Path')}"
    return "; ".join([start, *more])


if __name__ == "__main__":
    FILE.write_text(declared(), encoding="utf-8")
