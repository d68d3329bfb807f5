"""Faithfulness metrics with update, compute and reset, as torchmetrics has them.

    metric = sc.integrations.torchmetrics.Faithfulness(model, "insertion-deletion", steps=32)
    for images, labels in loader:
        metric.update(images, sc.attribute(model, images, labels).maps, labels)
    metric.compute()            # {"insertion": 0.61, "deletion": 0.18, "ins-del": 0.43}

A `torchmetrics.Metric` where torchmetrics is installed (values of several processes are gathered,
collections work); without it the same calls on one process.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seecause.errors import BadOption
from seecause.loading import as_view
from seecause.metrics.registry import MetricInputs, find_metric
from seecause.metrics.statistics import Summary, summarise
from seecause.models.base import ImageModel
from seecause.options import check_options
from seecause.target import Spec

_OFFERED = ("model", "images", "maps", "target", "masks")  # what `update` can hand on


class _Plain:
    """What is used of `torchmetrics.Metric`, on one process."""

    def __init__(self) -> None:
        self._lists: list[str] = []

    def add_state(self, name: str, default: list[Any], dist_reduce_fx: str) -> None:
        self._lists.append(name)
        setattr(self, name, list(default))

    def reset(self) -> None:
        """Forget all pictures."""
        for name in self._lists:
            setattr(self, name, [])

    def update(self, *arguments: Any, **more: Any) -> None:
        raise NotImplementedError

    def compute(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def __call__(self, *arguments: Any, **more: Any) -> dict[str, Tensor]:
        """The values of these pictures alone, which count from now on."""
        before = {name: getattr(self, name) for name in self._lists}
        self.reset()
        self.update(*arguments, **more)
        values = self.compute()
        for name, tensors in before.items():
            setattr(self, name, [*tensors, *getattr(self, name)])
        return values


if TYPE_CHECKING:
    _Base = _Plain
else:
    try:
        from torchmetrics import Metric as _Base
    except ImportError:
        _Base = _Plain


class Faithfulness(_Base):
    """The mean over pictures of each column of a metric (`sc.metrics.metrics()`), of maps that are
    handed in. Pictures that could not be scored are left out; `summary` counts them.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-vit")
    >>> data = sc.data.open_data("critters:clean:test", limit=2)
    >>> images = sc.data.to_batch(model, list(data)).images
    >>> metric = sc.integrations.torchmetrics.Faithfulness(model, "complexity")
    >>> metric.update(images, sc.attribute(model, images, method="rollout").maps)
    >>> sorted(metric.compute())
    ['entropy', 'gini']
    """

    full_state_update = False  # of torchmetrics: pictures do not depend on those before
    is_differentiable = False

    def __init__(
        self, model: ImageModel | nn.Module, metric: str = "insertion-deletion", **options: Any
    ) -> None:
        super().__init__()
        self.entry, self.options = find_metric(metric), options
        beyond = [name for name in self.entry.takes if name not in _OFFERED]
        if beyond:
            raise BadOption(
                "metric", metric, f"one that takes maps; it needs {beyond[0]}: sc.metrics.measure"
            )
        check_options(metric, self.entry.run, options)
        self.view = as_view(model)
        self._states = {name: f"values_{i}" for i, name in enumerate(self.entry.columns)}
        for state in self._states.values():
            self.add_state(state, default=[], dist_reduce_fx="cat")

    def __deepcopy__(self, memo: dict[int, Any]) -> Faithfulness:
        """For `clone`: scores are copied, the model that is asked is shared."""
        memo[id(self.view)] = self.view
        clone = memo[id(self)] = type(self).__new__(type(self))
        state: Any = copy.deepcopy(self.__getstate__(), memo)
        getattr(clone, "__setstate__", clone.__dict__.update)(state)
        return clone

    @property
    def higher_is_better(self) -> bool | None:
        """Of all columns; None where they differ."""
        directions = {column.better for column in self.entry.columns.values()}
        return directions == {"higher"} if len(directions) == 1 else None

    def update(
        self, images: Tensor, maps: Tensor, target: Spec = None, masks: Tensor | None = None
    ) -> None:
        """Score maps [B, gh, gw] or [B, H, W] of normalised images [B, 3, H, W]; `target` as in
        `sc.attribute`, `masks` [B, H, W] for metrics of place."""
        inputs = MetricInputs(self.view, images, maps, target, masks)
        columns = self.entry.read(self.entry.result(inputs, **self.options))
        for name, values in columns.items():
            getattr(self, self._states[name]).append(values.detach().double().cpu())

    def compute(self) -> dict[str, Tensor]:
        """Means over all pictures so far, by column."""
        return {
            name: torch.tensor(summary.mean, dtype=torch.float64)
            for name, summary in self.summary().items()
        }

    def summary(self) -> dict[str, Summary]:
        """Mean, standard error, and how many pictures count, by column."""
        return {name: summarise(self._values(state)) for name, state in self._states.items()}

    def _values(self, state: str) -> Tensor:
        values = getattr(self, state)  # one tensor once torchmetrics has gathered processes
        if isinstance(values, Tensor):
            return values
        if not values:
            raise BadOption("compute()", "no pictures", "at least one update() before it")
        return torch.cat(values)
