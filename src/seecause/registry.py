"""Registries of named entries: methods, metrics, selectors, datasets, experiments.

    metrics: Registry[Metric] = Registry("metric", group="seecause.metrics", homes={...})
    metrics.add("insertion", Metric(...))         # what a decorator does
    metrics.get("insertion")                      # UnknownName with the nearest names

The package's own entries are imported on first use (`homes`). Other installed packages add theirs
by entry points:

    [project.entry-points."seecause.methods"]
    sparkle = "my_package.sparkle"          # a module that registers when imported, or a callable

A plug-in that breaks is skipped with a warning that names it.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from seecause.errors import UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries of one kind by name.

    Args:
        kind: What an entry is, for messages: "method".
        group: The group of entry points by which other packages add entries.
        homes: Where the package's own entries are: by name, a module that adds the entry when it is
            imported ("seecause.attribution.caap"), or "module:attribute", which is the entry.
        adopts: Whether a plug-in's callable that needs arguments and has not registered itself is
            an entry, such as a function that opens a dataset.
    """

    def __init__(
        self,
        kind: str,
        *,
        group: str = "",
        homes: Mapping[str, str] | None = None,
        adopts: bool = False,
    ):
        self.kind, self.group, self.homes, self.adopts = kind, group, dict(homes or {}), adopts
        self.entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> None:
        """Add an entry. One of another package replaces ours, also if ours is imported later, and
        a warning says so."""
        there = self.entries.get(name)
        if name in self.homes and not _is_ours(entry):
            warnings.warn(f"{self.kind} {name!r} is now that of another package", stacklevel=3)
        if there is None or _is_ours(there) or not _is_ours(entry):
            self.entries[name] = entry

    def get(self, name: str) -> T:
        """The entry of one name; imports only the file that has it.

        Raises:
            UnknownName: If there is no such entry; the message has the nearest names.
        """
        self._load_plugins()
        if name not in self.entries and name in self.homes:
            self._import(name)
        if name not in self.entries:
            raise UnknownName(self.kind, name, self.all())
        return self.entries[name]

    def all(self) -> dict[str, T]:
        """All entries by name; imports everything."""
        self._load_plugins()
        for name in self.homes:
            if name not in self.entries:
                self._import(name)
        return dict(self.entries)

    def names(self) -> list[str]:
        """The names of all entries, without importing the package's own."""
        self._load_plugins()
        return sorted({*self.homes, *self.entries})

    def __contains__(self, name: object) -> bool:
        return name in self.homes or name in self.names()

    def _import(self, name: str) -> None:
        module, _, attribute = self.homes[name].partition(":")
        imported = importlib.import_module(module)
        if attribute:
            self.add(name, getattr(imported, attribute))

    def _load_plugins(self) -> None:
        for name, plugin in plugins(self.group).items() if self.group else ():
            known = name in self.entries or name in self.homes
            if self.adopts and not known and callable(plugin):
                self.add(name, cast(T, plugin))


def _is_ours(entry: Any) -> bool:
    module = getattr(getattr(entry, "run", entry), "__module__", "")
    return str(module).startswith("seecause.")


@cache
def plugins(group: str) -> Mapping[str, Any]:
    """The entry points of one group by name, sorted. Each is loaded once: modules and decorated
    functions register as they are imported, and a callable that needs no argument is called."""
    loaded: dict[str, Any] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        try:
            plugin = entry.load()
            if callable(plugin) and not _needs_arguments(plugin):
                plugin()
            loaded[entry.name] = plugin
        except Exception as error:  # other packages may raise anything
            what = f"the plug-in {entry.name!r} of {group} ({entry.value}) is skipped"
            warnings.warn(f"{what}: {type(error).__name__}: {error}", stacklevel=4)
    return MappingProxyType(loaded)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    open_ended = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    parameters = signature(function).parameters.values()
    return any(p.default is p.empty and p.kind not in open_ended for p in parameters)
