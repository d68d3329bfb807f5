"""The list of metrics. A new metric is one file with one decorated function:

    @metric("name", columns=higher("what a large value means"))
    def name(model, images, maps, target, *, option=default) -> Tensor: ...

Its parameters before the star say what it needs: names of `MetricInputs`; those behind it are
options, checked against their annotations before it runs (`options.py`). It returns one number for
each image, [B], or a result whose fields are the columns, by name: they share their forwards.
Packages installed beside this one add metrics by the entry point `seecause.metrics`.

    inputs = MetricInputs(model, images, maps, target, masks=masks)
    measure("insertion-deletion", inputs)     # {"insertion": [B], "deletion": [B], "ins-del": [B]}
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial, wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from torch import Tensor

import seecause.metrics
from seecause.errors import BadOption, UnknownName
from seecause.models._settled import settles
from seecause.models.base import ImageModel
from seecause.options import check_options, summary_of
from seecause.registry import load_plugins
from seecause.target import Spec

if TYPE_CHECKING:
    from seecause.critters import Latents

F = TypeVar("F", bound=Callable[..., Any])
Explain = Callable[[Tensor, Spec], Tensor]  # images, target -> maps [B, gh, gw] or [B, H, W]
Attribute = Callable[[ImageModel, Tensor, Spec], Tensor]  # a method that can be given another model
Direction = Literal["higher", "lower"]  # is better
FAMILIES = (  # tables with many columns are cut into these, in this order
    "curves",
    "removal",
    "correlation with the drop of the score",
    "place of the object",
    "the map itself",
    "sanity checks",
    "truth by re-rendering",
    "other",
)


@dataclass(frozen=True, eq=False)
class MetricInputs:
    """What a runner has. A metric that needs something that is None is refused."""

    model: ImageModel | None = None
    images: Tensor | None = None
    maps: Tensor | None = None
    target: Spec = None
    masks: Tensor | None = None
    explain: Explain | None = None  # the method on this model
    attribute: Attribute | None = None  # the method on any model
    latents: Latents | None = None  # of a dataset whose samples can be drawn again


_INPUTS = tuple(field.name for field in fields(MetricInputs))
_NEEDS = ("masks", "model", "explain", "attribute", "latents")  # what not every runner has


@dataclass(frozen=True)
class Column:
    """One number for each image: which way is better, what it means in a line, and the field of
    the result that holds it, where that is not called as the column is."""

    better: Direction
    meaning: str = ""
    field: str = ""


higher = partial(Column, "higher")  # a column whose large values are good
lower = partial(Column, "lower")  # a column whose small values are good


@dataclass(frozen=True)
class Metric:
    """One entry of the registry. `takes` names the inputs that the function is called with, in
    order."""

    name: str
    run: Callable[..., Any]
    takes: tuple[str, ...]
    columns: Mapping[str, Column]
    family: str = "other"

    @property
    def needs(self) -> tuple[str, ...]:
        """Of masks, model, explain, attribute and latents: what it cannot do without."""
        return tuple(name for name in _NEEDS if name in self.takes)

    @property
    def summary(self) -> str:
        return summary_of(self.run)

    def missing(self, inputs: MetricInputs) -> tuple[str, ...]:
        """What it takes and `inputs` do not have; without a target the predicted class is meant."""
        wanted = [name for name in self.takes if name != "target"]
        return tuple(name for name in wanted if getattr(inputs, name) is None)

    def result(self, inputs: MetricInputs, **options: Any) -> Any:
        """What the function returns, with everything it knows beside its columns."""
        for name in self.missing(inputs):
            raise BadOption(name, None, f"a value: {self.name} needs it")
        return self.run(*(getattr(inputs, name) for name in self.takes), **options)

    def read(self, result: Any) -> dict[str, Tensor]:
        """The columns of a result, each [B]."""
        if isinstance(result, Tensor):
            return dict.fromkeys(self.columns, result)
        return {
            name: attrgetter(column.field or name.replace("-", "_"))(result)
            for name, column in self.columns.items()
        }


_METRICS: dict[str, Metric] = {}


def metric(
    name: str, *, columns: Mapping[str, Column] | Column, family: str = "other"
) -> Callable[[F], F]:
    """Register a function under `name`; a single column is called like it."""
    named = {name: columns} if isinstance(columns, Column) else dict(columns)

    def register(function: F) -> F:
        kinds = inspect.signature(function).parameters.values()
        takes = tuple(p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD)
        unknown = [parameter for parameter in takes if parameter not in _INPUTS]
        if unknown:
            raise BadOption(f"parameter of the metric {name}", unknown[0], ", ".join(_INPUTS))
        if family not in FAMILIES:
            raise UnknownName("family of metrics", family, FAMILIES)

        @wraps(function)
        def checked(*inputs: Any, **options: Any) -> Any:
            own = {key: value for key, value in options.items() if key not in takes}
            check_options(name, function, own)
            return function(*inputs, **options)

        run = cast(F, settles(checked) if takes[:1] == ("model",) else checked)
        _METRICS[name] = Metric(name, run, takes, named, family)
        return run

    return register


def metrics() -> dict[str, Metric]:
    """All metrics by name, family by family."""
    _load()
    return dict(sorted(_METRICS.items(), key=lambda item: FAMILIES.index(item[1].family)))


def find_metric(name: str) -> Metric:
    _load()
    if name not in _METRICS:
        raise UnknownName("metric", name, _METRICS)
    return _METRICS[name]


def measure(name: str, inputs: MetricInputs, **options: Any) -> dict[str, Tensor]:
    """The columns of one metric, each [B]. `options` are the metric's own.

    >>> import torch
    >>> measure("complexity", MetricInputs(maps=torch.ones(1, 2, 2)))["gini"]
    tensor([0.], dtype=torch.float64)
    """
    entry = find_metric(name)
    return entry.read(entry.result(inputs, **options))


@cache
def _load() -> None:
    for file in pkgutil.iter_modules(seecause.metrics.__path__):
        importlib.import_module(f"seecause.metrics.{file.name}")
    load_plugins("seecause.metrics")
