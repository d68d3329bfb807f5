"""The list of attribution methods. A new method is one file with one decorated function:

    @method("name", forwards="2", needs="class token")
    def name(model, images, target, *, option=default) -> Maps | Tensor: ...

It gets a normalised batch [B, 3, H, W] and a `Target`, and returns patch scores [B, N].
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from seecause.attribution.target import Target
from seecause.errors import BadOption, UnknownName


@dataclass(frozen=True, eq=False)
class Maps:
    """What a method returns. `native` [B, H, W] where it works on pixels; `class_maps` [B, N, C'] where it gives all classes."""

    scores: Tensor  # [B, N]
    target: Target
    native: Tensor | None = None
    class_maps: Tensor | None = None
    said: dict[str, Any] | None = None  # what the manifest should also say


@dataclass(frozen=True)
class Method:
    """One entry of the registry."""

    name: str
    run: Callable[..., Maps]
    forwards: str  # cost of one image in plain forwards
    needs: str
    class_specific: bool
    summary: str

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options and their defaults."""
        found = inspect.signature(self.run).parameters.values()
        return {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY}

    def check(self, options: dict[str, Any]) -> None:
        for name in options:
            if name not in self.options:
                raise BadOption(f"option {name!r} of {self.name}", options[name], f"one of {', '.join(self.options) or 'no options'}")


_METHODS: dict[str, Method] = {}
_FILES = ("caap", "simple", "controls")  # imported on first use


def method(name: str, *, forwards: str, needs: str = "any readout", class_specific: bool = True) -> Callable[[Callable[..., Maps]], Callable[..., Maps]]:
    """Register a function under `name`."""

    def register(run: Callable[..., Maps]) -> Callable[..., Maps]:
        summary = (inspect.getdoc(run) or "").split("\n")[0]
        _METHODS[name] = Method(name, run, forwards, needs, class_specific, summary)
        return run

    return register


def methods() -> dict[str, Method]:
    """All methods by name."""
    for file in _FILES:
        importlib.import_module(f"seecause.attribution.{file}")
    return dict(_METHODS)


def find(name: str) -> Method:
    known = methods()
    if name not in known:
        raise UnknownName("method", name, known)
    return known[name]
