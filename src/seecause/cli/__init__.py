"""The command line: `app` lists the commands, `main` runs one.

A command is imported when it is called, and imports what it needs when it runs. A user's mistake is
one line and exit code 2; 1 means that something is missing, 3 that a limit is not met, 130 that the
user stopped it.
"""

from __future__ import annotations

import errno
import logging
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from cyclopts import App, CycloptsError, Group, Parameter

from seecause.errors import SeecauseError, printable

USAGE_ERROR, INTERRUPTED = 2, 130
_TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
GROUPS, HELP = _TABLE["panels"], _TABLE["help"]  # commands by panel; help of their groups


def _shown(default: object) -> str | None:
    """A default as shown in the help; None if it is not informative."""
    return None if default in (None, "") or default is False else str(default)


app = App(
    name="seecause",
    help="See what causes a vision transformer's prediction, and change it.",
    help_flags=["--help", "-h"],
    help_format="markdown",
    version=lambda: f"seecause {version('seecause')}",
    default_parameter=Parameter(negative="", show_default=_shown),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
for _title, _commands in GROUPS.items():
    _panel = Group.create_ordered(_title)
    for _name, _place in _commands.items():
        _parent, _own, _group = app, _name, _panel
        if " " in _name:
            _group_name, _own = _name.split()
            if _group_name not in app:
                app.command(App(name=_group_name, help=HELP[_group_name], group=_panel))
            _parent, _group = app[_group_name], None
        _parent.command(f"seecause.cli.{_place}", name=_own, group=_group)


def run(words: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = sys.argv[1:] if words is None else list(words)
    log = logging.getLogger("seecause")
    level = log.level
    if len(words) < 2 or {"--help", "-h"} & set(words):  # the list has the first line of each
        _import_all(app)
    if {"--quiet", "-q"} & set(words):
        log.setLevel(logging.ERROR)
    try:
        return app(words, exit_on_error=False, print_error=False) or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (CycloptsError, SeecauseError) as error:
        message = str(error)
    except OSError as failure:  # a full disk, a folder that may not be written
        if failure.errno in (None, errno.EPIPE) or not failure.strerror:
            raise
        place = "" if failure.filename is None else f": {failure.filename}"
        message = f"{failure.strerror}{place}; incomplete files are ignored"
    finally:
        log.setLevel(level)
    print(f"seecause: {printable(' '.join(message.split()))}", file=sys.stderr)
    return USAGE_ERROR


def _import_all(group: App) -> None:
    for command in group.resolved_commands().values():
        _import_all(command)


def main() -> None:
    sys.exit(run())
