"""The list of attribution methods. A new method is a decorated function:

    @method("name", forwards="2", needs="activations")
    def name(model, images, target, *, option=default) -> Maps: ...

Its name also goes into `methods.toml`, so that only its file is imported when the method is used.
It is called with a normalised batch [B, 3, H, W] and a `Target`, and returns patch scores [B, N] as
`Maps(scores, target)`; the target may be passed on unchanged (the predicted class is filled in
later). A method is for transformers unless `architectures` says otherwise; functions for different
architectures may share a name (CAAP). Options are checked against their annotations before the
method runs (`options.py`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from seecause.data.dataset import Size
from seecause.engine.trace import Blank, blank_image
from seecause.errors import NotDefined, UnknownName
from seecause.models.base import Architecture, ImageModel
from seecause.options import check_options, keyword_options, summary_of
from seecause.registry import Registry
from seecause.target import Target

T = TypeVar("T")
Run = Callable[..., "Maps"]  # a method: model, images, target, and its options
BlankLike = Blank | Tensor  # a name, or normalised images: one of all, or one for each


@dataclass(frozen=True, eq=False)
class Maps:
    """What a method returns."""

    scores: Tensor  # [B, N]
    target: Target
    native: Tensor | None = None  # [B, H, W], for methods that work on pixels
    class_maps: Tensor | None = None  # [B, N, C'], for methods that return several classes
    used: dict[str, Any] | None = None  # options as they were decided, for the manifest
    errors: Tensor | None = None  # [B, N], standard errors of methods that average random draws


def size_of(images: Tensor) -> Size:
    """Height and width of images [..., H, W]."""
    return images.shape[-2], images.shape[-1]


def blanks(model: ImageModel, images: Tensor, blank: BlankLike, seed: int = 0) -> Tensor:
    """The blank of images [B, 3, H, W]: [1, 3, H, W], or [B, 3, H, W] where each has its own."""
    size = size_of(images)
    return blank_image(model, size, blank, seed=seed, count=len(images))


def join(parts: Sequence[T]) -> T:
    """Join results of consecutive images: tensors (without a graph) and lists are concatenated,
    field by field; other fields are those of the first result."""
    first: Any = parts[0]
    every: Any = parts
    joined: Any = first
    if isinstance(first, Tensor):
        joined = torch.cat([part.detach() for part in every])
    elif isinstance(first, list):
        joined = [entry for part in every for entry in part]
    elif is_dataclass(first) and not callable(first):  # a target may be a function of the user
        columns = {x.name: [getattr(part, x.name) for part in parts] for x in fields(first)}
        joined = replace(first, **{name: join(column) for name, column in columns.items()})
    return cast(T, joined)


@dataclass(frozen=True)
class Method:
    """One entry of the registry."""

    name: str
    run: Run
    forwards: str  # cost of one image in plain forwards
    needs: str  # what it reads of the model: logits, activations, attention, gradients
    class_specific: bool
    summary: str
    # negative values are evidence against the class; maps get a diverging colour scale, even those
    # whose values are all positive
    signed: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options and their defaults."""
        return keyword_options(self.run)

    def check(self, options: Mapping[str, Any]) -> None:
        check_options(self.name, self.run, options)


FILES: dict[Architecture, dict[str, list[str]]] = tomllib.loads(  # type: ignore[assignment]
    Path(__file__).with_name("methods.toml").read_text(encoding="utf-8")
)
EVERY_VIEW: tuple[Architecture, ...] = ("transformer", "staged", "dense")  # whatever has a forward
KINDS: dict[Architecture, str] = {
    "transformer": "vision transformers",
    "staged": "networks of stages (ResNet, Swin, ConvNeXt ...), which have no tokens and no heads",
    "dense": "detectors and models of pixels, by the row that they are aimed at",
    "prompt": "vision-language models that are asked for classes",
}
METHODS: dict[Architecture, Registry[Method]] = {
    kind: Registry(
        "method",
        group="seecause.methods",
        homes={
            name: f"seecause.attribution.{file}" for file, names in files.items() for name in names
        },
    )
    for kind, files in FILES.items()
}


def method(
    name: str,
    *,
    forwards: str,
    needs: str,
    class_specific: bool = True,
    architectures: Sequence[Architecture] = ("transformer",),
    signed: bool = False,
) -> Callable[[Run], Run]:
    """Register a function under `name`, for some architectures; see `Method` for the rest."""

    def register(run: Run) -> Run:
        summary = summary_of(run)
        entry = Method(name, run, forwards, needs, class_specific, summary, signed)
        for architecture in architectures:
            METHODS[architecture].add(name, entry)
        return run

    return register


def methods(architecture: Architecture = "transformer") -> dict[str, Method]:
    """List the attribution methods for one kind of model.

    Args:
        architecture: `model.architecture`: "transformer", "staged", "dense" or "prompt".

    Returns:
        The methods by name, each with `summary`, `options`, `forwards` (its cost) and `needs`.

    Example:
        >>> methods()["rollout"].options
        {'start': 0}
    """
    return METHODS[architecture].all()


def find(name: str, architecture: Architecture = "transformer") -> Method:
    """The method of one name. Only the file that has it is imported."""
    try:
        return METHODS[architecture].get(name)
    except UnknownName:
        if not any(name in registry for registry in METHODS.values()):
            raise
        known = ", ".join(sorted(methods(architecture))) or "none"
        reason = f"it is not for {KINDS[architecture]}"
        raise NotDefined(name, reason, f"Methods that are: {known}") from None


def is_signed(name: str, architecture: Architecture = "transformer") -> bool | None:
    """True if the values of a method are for and against by definition; None if the sign of
    its maps decides, or if the method is not installed."""
    try:
        return find(name, architecture).signed or None
    except (UnknownName, NotDefined):
        return None
