"""What Python promises: the defaults of every public function, class and method, and the options of
everything that is found by name.

`python -m tests.declared` writes `declared.txt`, and a test compares it: a default that changes is
a line of the diff."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

FILE = Path(__file__).with_name("declared.txt")
PACKAGES = ("", "background", "bench", "critters", "data", "faithful", "lvlm", "metrics")


def declared() -> str:
    lines = [f"{name}: {values}" for name, values in promises() if values]
    return "\n".join(dict.fromkeys(lines)) + "\n"


def promises() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        module = importlib.import_module(f"seecause.{package}".rstrip("."))
        for name in module.__all__:
            offered = getattr(module, name)
            if callable(offered) and not inspect.ismodule(offered):
                yield from _of(f"sc.{package}.{name}".replace("..", "."), offered)
    yield from found_by_name()


def found_by_name() -> Iterator[tuple[str, str]]:
    """Methods, metrics, selectors of heads and remedies."""
    from seecause.attribution.registry import methods
    from seecause.background import selectors
    from seecause.background._remedies import remedies
    from seecause.metrics.registry import metrics
    from seecause.models.base import Architecture

    listed = {f"method {{}} ({kind})": methods(kind) for kind in get_args(Architecture)}
    listed |= {"metric {}": metrics(), "selector {}": selectors(), "remedy {}": remedies()}
    for title, entries in listed.items():
        for name, entry in sorted(entries.items()):
            function = entry.fit if title.startswith("remedy") else entry.run
            if function.__module__.startswith("seecause."):  # not what a test registered
                yield title.format(name), defaults(function)


def _of(name: str, offered: Any) -> Iterator[tuple[str, str]]:
    yield name, defaults(offered)
    if inspect.isclass(offered) and offered.__module__.startswith("seecause"):
        for method, function in sorted(vars(offered).items()):
            function = getattr(function, "__func__", function)
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"{name}.{method}", defaults(function)


def defaults(function: Callable[..., Any]) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a class that is built in
        return ""
    given = [p for p in parameters if p.default is not inspect.Parameter.empty]
    return ", ".join(f"{p.name}={_shown(p.default)}" for p in given)


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return repr(value.value)
    if inspect.isfunction(value):
        return value.__name__
    return repr(value).replace("PosixPath", "Path")


if __name__ == "__main__":
    FILE.write_text(declared(), encoding="utf-8")
