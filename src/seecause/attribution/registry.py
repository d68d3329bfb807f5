"""The list of attribution methods. A new method is one file with one decorated function:

    @method("name", forwards="2", needs="activations")
    def name(model, images, target, *, option=default) -> Maps | Tensor: ...

It gets a normalised batch [B, 3, H, W] and a `Target`, and returns patch scores [B, N]. A method is
for transformers unless it says otherwise; two functions may share a name if they are for different
architectures (CAAP). What an option is whose default is None, `unset` says in words:
unset={"option": "a third of the depth"}.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args

import torch
from torch import Tensor

from seecause import attribution
from seecause._options import check_options, keyword_options
from seecause._plugins import load_plugins
from seecause.errors import NotDefined, UnknownName
from seecause.models.base import Architecture
from seecause.target import Target


@dataclass(frozen=True, eq=False)
class Maps:
    """What a method returns. `native` [B, H, W] where it works on pixels; `class_maps` [B, N, C']
    where it gives all classes; `errors` [B, N] where it averages draws; `checks` [B] each, what it
    can say about its own exactness."""

    scores: Tensor  # [B, N]
    target: Target
    native: Tensor | None = None
    class_maps: Tensor | None = None
    used: dict[str, Any] | None = None  # options as they were decided, for the manifest
    errors: Tensor | None = None
    checks: Mapping[str, Tensor] = field(default_factory=dict)


def join(parts: Sequence[Maps]) -> Maps:
    """Maps of consecutive images as maps of one batch, without a graph."""

    def together(tensors: Sequence[Tensor | None]) -> Tensor | None:
        kept = [t.detach() for t in tensors if t is not None]
        return torch.cat(kept) if kept else None

    scores = together([p.scores for p in parts])
    assert scores is not None
    targets = [p.target for p in parts]
    target = Target(
        together([t.classes for t in targets]),
        together([t.against for t in targets]),
        targets[0].function,
        together([t.logits for t in targets]),
    )
    return Maps(
        scores,
        target,
        native=together([p.native for p in parts]),
        class_maps=together([p.class_maps for p in parts]),
        used=parts[0].used,
        errors=together([p.errors for p in parts]),
        checks={name: torch.cat([p.checks[name] for p in parts]) for name in parts[0].checks},
    )


@dataclass(frozen=True)
class Method:
    """One entry of the registry."""

    name: str
    run: Callable[..., Maps]
    forwards: str  # cost of one image in plain forwards
    needs: str  # of the model, beyond its forward: logits, activations, attention, gradients
    class_specific: bool
    summary: str
    # what an option is whose default is None, in words
    unset: Mapping[str, str] = field(default_factory=dict)
    signed: bool = False  # values below 0 speak against the class, whatever a picture's values are

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options and their defaults."""
        return keyword_options(self.run)

    def check(self, options: dict[str, Any]) -> None:
        check_options(self.name, self.run, options)


FORMER: dict[str, Architecture] = {"conv": "staged"}  # names that older results have
KINDS: dict[Architecture, str] = {
    "transformer": "vision transformers",
    "staged": "networks of stages (ResNet, Swin, ConvNeXt ...), which have no tokens and no heads",
    "dense": "detectors and models of pixels, by the row that they are aimed at",
    "prompt": "vision-language models that are asked for classes",
}
_METHODS: dict[Architecture, dict[str, Method]] = {kind: {} for kind in get_args(Architecture)}


def method(
    name: str,
    *,
    forwards: str,
    needs: str,
    class_specific: bool = True,
    architectures: Sequence[Architecture] = ("transformer",),
    unset: Mapping[str, str] | None = None,
    signed: bool = False,
) -> Callable[[Callable[..., Maps]], Callable[..., Maps]]:
    """Register a function under `name`, for some architectures."""
    architectures = [FORMER.get(kind, kind) for kind in architectures]

    def register(run: Callable[..., Maps]) -> Callable[..., Maps]:
        summary = (inspect.getdoc(run) or "").split("\n")[0]
        entry = Method(name, run, forwards, needs, class_specific, summary, unset or {}, signed)
        for architecture in architectures:
            there = _METHODS[architecture].get(name)
            if there is None or _is_ours(there.run) or not _is_ours(run):  # a plug-in's stays
                _METHODS[architecture][name] = entry
        return run

    return register


def methods(architecture: Architecture = "transformer") -> dict[str, Method]:
    """All methods for one architecture, by name."""
    architecture = FORMER.get(architecture, architecture)
    for file in _files():
        importlib.import_module(f"seecause.attribution.{file}")
    load_plugins("seecause.methods")
    return dict(_METHODS[architecture])


def is_signed(name: str, architecture: Architecture = "transformer") -> bool | None:
    """True where a method's values are for and against by definition; None where its maps tell, or
    where nobody knows it (a plug-in that is not installed)."""
    try:
        return find(name, architecture).signed or None
    except UnknownName:
        return None


def find(name: str, architecture: Architecture = "transformer") -> Method:
    """The method of one name: only its own file is imported, where the file is called like it."""
    architecture = FORMER.get(architecture, architecture)
    file = name.replace("-", "_")
    if file in _files():
        importlib.import_module(f"seecause.attribution.{file}")
        load_plugins("seecause.methods")
        if name in _METHODS[architecture]:
            return _METHODS[architecture][name]
    known = methods(architecture)
    if name in known:
        return known[name]
    if any(name in others for others in _METHODS.values()):
        raise NotDefined(
            name,
            f"it is not for {KINDS[architecture]}",
            f"Methods that are: {', '.join(sorted(known)) or 'none'}",
        )
    raise UnknownName("method", name, known)


@cache
def _files() -> tuple[str, ...]:
    return tuple(file.name for file in pkgutil.iter_modules(attribution.__path__))


def _is_ours(run: Callable[..., Maps]) -> bool:
    return run.__module__.startswith("seecause.")
