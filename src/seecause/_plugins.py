"""What packages installed beside this one add: entry points of the groups `seecause.methods`,
`seecause.models`, `seecause.datasets` and `seecause.metrics`.

    [project.entry-points."seecause.methods"]
    sparkle = "my_package.sparkle"          # a module that registers when imported, or a callable

A plug-in that breaks is named in a warning and left out; nothing else stops.
"""

from __future__ import annotations

import inspect
import warnings
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType, ModuleType
from typing import Any


@cache
def plugins(group: str) -> MappingProxyType[str, Any]:
    """The loaded objects of one group by their entry point's name, in order of names."""
    loaded: dict[str, Any] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        try:
            loaded[entry.name] = entry.load()
        except Exception as error:  # whatever a stranger's code raises
            warn_of_plugin(group, entry.name, f"({entry.value}) is left out", error)
    return MappingProxyType(loaded)


@cache
def load_plugins(group: str) -> None:
    """Load every plug-in of a group, once. A module registers as it is imported, and so does a
    decorated function; a callable that needs no argument is called to do it."""
    for name, plugin in plugins(group).items():
        if isinstance(plugin, ModuleType) or not callable(plugin):
            continue
        try:
            if not _required(plugin):
                plugin()
        except Exception as error:  # whatever a stranger's code raises
            warn_of_plugin(group, name, f"({plugin!r}) is left out", error)


def _required(function: Any) -> list[str]:
    """Parameters that must be given."""
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in open_ended
    ]


def warn_of_plugin(group: str, name: str, what: str, error: Exception) -> None:
    """Name a plug-in that broke, and what becomes of it; the rest goes on."""
    reason = f"{type(error).__name__}: {error}"
    warnings.warn(f"the plug-in {name!r} of {group} {what}: {reason}", stacklevel=4)
