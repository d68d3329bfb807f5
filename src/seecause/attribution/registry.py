"""The list of attribution methods. A new method is a decorated function:

    @method("name", forwards="2", needs="activations")
    def name(model, images, target, *, option=default) -> Maps | Tensor: ...

and its name in `FILES`, so that its file alone is imported when it is asked for. It gets a
normalised batch [B, 3, H, W] and a `Target`, and returns patch scores [B, N]. A method is for
transformers unless it says otherwise; two functions may share a name if they are for different
architectures (CAAP). Annotations of options are checked before it runs (`options.py`). What an
option is whose default is None, `unset` says in words: unset={"option": "a third of the depth"}.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import chain
from typing import Any, TypeVar, cast, get_args

import torch
from torch import Tensor

from seecause.errors import NotDefined, UnknownName
from seecause.models.base import Architecture
from seecause.options import check_options, keyword_options, summary_of
from seecause.registry import load_plugins
from seecause.target import Target

T = TypeVar("T")


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


def join(parts: Sequence[T]) -> T:
    """Results of consecutive images as one: tensors (without a graph) and lists are put together,
    field by field; what else a result holds is the first one's."""
    first: Any = parts[0]
    joined: Any = first
    if isinstance(first, Tensor):
        joined = torch.cat([cast(Tensor, part).detach() for part in parts])
    elif isinstance(first, list):
        joined = list(chain.from_iterable(cast("Sequence[list[Any]]", parts)))
    elif isinstance(first, Mapping) and all(isinstance(x, Tensor) for x in first.values()):
        joined = {name: join([cast(Any, part)[name] for part in parts]) for name in first}
    elif is_dataclass(first) and not callable(first):  # a target may be anybody's function
        columns = {x.name: [getattr(part, x.name) for part in parts] for x in fields(first)}
        joined = replace(first, **{name: join(column) for name, column in columns.items()})
    return joined


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


FILES = {  # of this folder, and the methods that each registers
    "attention_maps": ("raw-attention", "rollout", "attn-grad", "gae", "tam", "bt", "legrad"),
    "atman": ("atman",),
    "caap": ("caap",),
    "controls": ("random", "center", "sobel"),
    "grad_cam": ("grad-cam",),
    "input_gradients": ("ixg", "ixg+", "attcat"),
    "kept_patches": ("tis", "mutex"),
    "libra": ("libra-ixg+",),
    "masked_pixels": ("simple-insertion", "simple-deletion", "rise"),
    "mda": ("mda",),
    "mosaic": ("mosaic", "caap+mosaic"),
    "pixel_gradients": ("integrated-gradients", "smoothgrad"),
    "stages": ("caap", "mosaic"),
    "t_attr": ("t-attr",),
    "vit_cx": ("vit-cx",),
}
EVERY_VIEW: tuple[Architecture, ...] = ("transformer", "staged", "dense")  # whatever has a forward
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
        summary = summary_of(run)
        entry = Method(name, run, forwards, needs, class_specific, summary, unset or {}, signed)
        for architecture in architectures:
            there = _METHODS[architecture].get(name)
            if there is None or _is_ours(there.run) or not _is_ours(run):  # a plug-in's stays
                _METHODS[architecture][name] = entry
        return run

    return register


def methods(architecture: Architecture = "transformer") -> dict[str, Method]:
    """All methods for one architecture, by name."""
    for file in FILES:
        importlib.import_module(f"seecause.attribution.{file}")
    load_plugins("seecause.methods")
    return dict(_METHODS[FORMER.get(architecture, architecture)])


def is_signed(name: str, architecture: Architecture = "transformer") -> bool | None:
    """True where a method's values are for and against by definition; None where its maps tell, or
    where nobody knows it (a plug-in that is not installed)."""
    try:
        return find(name, architecture).signed or None
    except UnknownName:
        return None


def find(name: str, architecture: Architecture = "transformer") -> Method:
    """The method of one name: only the files that have it are imported."""
    architecture = FORMER.get(architecture, architecture)
    registered = _METHODS[architecture]
    load_plugins("seecause.methods")
    for file in [file for file, names in FILES.items() if name in names]:
        if name not in registered:
            importlib.import_module(f"seecause.attribution.{file}")
    if name in registered:
        return registered[name]
    known = methods(architecture)
    if any(name in others for others in _METHODS.values()):
        raise NotDefined(
            name,
            f"it is not for {KINDS[architecture]}",
            f"Methods that are: {', '.join(sorted(known)) or 'none'}",
        )
    raise UnknownName("method", name, known)


def _is_ours(run: Callable[..., Maps]) -> bool:
    return run.__module__.startswith("seecause.")
