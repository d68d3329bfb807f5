"""The list of metrics of maps. A new metric is one decorated function:

    @metric("name", columns=higher("what a large value means"))
    def name(model, images, maps, target, *, option=default) -> Tensor: ...

Parameters before the star name what the metric needs: fields of `MetricInputs`. Parameters behind
it are options, checked against their annotations. The function returns one number for each image,
[B], or `Scores` with several columns that share their forward passes. Packages installed beside
this one add metrics by the entry point `seecause.metrics`.

    inputs = MetricInputs(model, images, maps, target, masks=masks)
    measure("insertion-deletion", inputs)     # {"insertion": [B], "deletion": [B], "ins-del": [B]}
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor

from seecause.errors import BadOption
from seecause.metrics.statistics import summarise
from seecause.models.base import ImageModel, in_eval_mode
from seecause.options import check_options
from seecause.registry import Registry
from seecause.target import Spec

if TYPE_CHECKING:
    from seecause.critters.world import Latents

F = TypeVar("F", bound=Callable[..., Any])
Explain = Callable[[Tensor, Spec], Tensor]  # images, target -> maps [B, gh, gw] or [B, H, W]
Attribute = Callable[[ImageModel, Tensor, Spec], Tensor]  # a method that can be given another model
Direction = Literal["higher", "lower"]  # which values are better
TABLE: Any = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))
HOMES = {name: f"seecause.metrics.{entry['file']}" for name, entry in TABLE.items()}


@dataclass(frozen=True, eq=False)
class Scores:
    """The result of a metric.

    Attributes:
        columns: One number for each image, [B], by column; NaN for an image that was skipped.
        details: Intermediate values of the columns, such as curves [B, n + 1].
        protocol: The options that decide the numbers.

    Example:
        >>> import torch, seecause as sc
        >>> masks = torch.zeros(1, 96, 96, dtype=torch.bool)
        >>> masks[:, :48] = True
        >>> scores = sc.metrics.localization(masks.float(), masks)
        >>> scores["aupr1"].tolist(), scores["pointing"].tolist()
        ([1.0], [1.0])
    """

    columns: dict[str, Tensor]
    details: dict[str, Any] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name] if name in self.columns else self.details[name]

    def numbers(self) -> dict[str, float]:
        """The mean of each column over the images that were not skipped."""
        return {name: summarise(values).mean for name, values in self.columns.items()}


@dataclass(frozen=True, eq=False)
class MetricInputs:
    """The inputs of metrics. A metric that needs a field that is None raises.

    Args:
        model: The model that is explained.
        images: [B, 3, H, W], normalised.
        maps: [B, h, w], of patches or pixels.
        target: The explained class of each image.
        masks: Object masks [B, H, W].
        explain: The method on this model: (images, target) -> maps.
        attribute: The method on any model: (model, images, target) -> maps.
        latents: Of a dataset whose samples can be drawn again.

    Example:
        >>> import torch, seecause as sc
        >>> maps = torch.rand(2, 12, 12)
        >>> sc.metrics.MetricInputs(maps=maps).masks is None
        True
    """

    model: ImageModel | None = None
    images: Tensor | None = None
    maps: Tensor | None = None
    target: Spec = None
    masks: Tensor | None = None
    explain: Explain | None = None
    attribute: Attribute | None = None
    latents: Latents | None = None


_NEEDS = ("masks", "model", "explain", "attribute", "latents")  # inputs that may be missing


@dataclass(frozen=True)
class Column:
    """One number for each image: which direction is better, and what it means in one line."""

    better: Direction
    meaning: str = ""


higher = partial(Column, "higher")  # a column whose large values are good
lower = partial(Column, "lower")  # a column whose small values are good


@dataclass(frozen=True)
class Metric:
    """One entry of the registry. `takes` names the inputs that `run` is called with, in order."""

    name: str
    run: Callable[..., Any]
    takes: tuple[str, ...]
    columns: Mapping[str, Column]

    @property
    def needs(self) -> tuple[str, ...]:
        """The required inputs among masks, model, explain, attribute and latents."""
        return tuple(name for name in _NEEDS if name in self.takes)

    def missing(self, inputs: MetricInputs) -> tuple[str, ...]:
        """The inputs it needs and `inputs` lacks. Without a target it uses the predicted class."""
        wanted = [name for name in self.takes if name != "target"]
        return tuple(name for name in wanted if getattr(inputs, name) is None)

    def scores(self, inputs: MetricInputs, **options: Any) -> Scores:
        """Run the metric. A function that returns a tensor has one column."""
        for name in self.missing(inputs):
            raise BadOption(name, None, f"a value: {self.name} needs it")
        result = self.run(*(getattr(inputs, name) for name in self.takes), **options)
        return result if isinstance(result, Scores) else Scores({x: result for x in self.columns})


METRICS: Registry[Metric] = Registry("metric", group="seecause.metrics", homes=HOMES)


def metric(name: str, *, columns: Mapping[str, Column] | Column | None = None) -> Callable[[F], F]:
    """Register a function as a metric.

    Args:
        name: The name of the metric, and of its column where there is only one.
        columns: The columns of its `Scores`, or one `Column` for a function that returns [B]. None
            for a metric that is in columns.toml.

    Returns:
        A decorator.

    Example:
        >>> @metric("largest", columns=higher("the largest value of the map"))
        ... def largest(maps):
        ...     return maps.flatten(1).amax(dim=1)
    """
    if columns is None:
        listed = TABLE[name]["columns"].items()
        columns = {column: Column(*text.split(": ", 1)) for column, text in listed}
    named = {name: columns} if isinstance(columns, Column) else dict(columns)

    def register(function: F) -> F:
        kinds = inspect.signature(function).parameters.values()
        takes = tuple(p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD)

        @wraps(function)
        def checked(*inputs: Any, **options: Any) -> Any:
            own = {key: value for key, value in options.items() if key not in takes}
            check_options(name, function, own)
            return function(*inputs, **options)

        run: Any = in_eval_mode(checked) if takes[:1] == ("model",) else checked
        METRICS.add(name, Metric(name, run, takes, named))
        return run

    return register


def metrics() -> dict[str, Metric]:
    """All metrics by name: those of the package, then those of plug-ins.

    Returns:
        A `Metric` for each name.

    Example:
        >>> "insertion-deletion" in metrics()
        True
    """
    found = METRICS.all()
    return {name: found[name] for name in (*HOMES, *found)}


def measure(name: str, inputs: MetricInputs, **options: Any) -> dict[str, Tensor]:
    """Compute the columns of one metric.

    Args:
        name: A name from `metrics()`.
        inputs: The inputs of the metric.
        **options: Options of the metric.

    Returns:
        The columns by name, each [B].

    Example:
        >>> import torch
        >>> maps, masks = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[1, 0]]])
        >>> measure("localization", MetricInputs(maps=maps, masks=masks))["aupr1"]
        tensor([1.], dtype=torch.float64)
    """
    return METRICS.get(name).scores(inputs, **options).columns
