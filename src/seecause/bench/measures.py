"""The metrics a benchmark knows, by groups that share their work. A new group is a function and a line in `MEASURES`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seecause.errors import UnknownName
from seecause.metrics import insertion_deletion, localization
from seecause.models.base import ImageModel


class Case(NamedTuple):
    """A batch and its maps, as a measure gets it."""

    model: ImageModel
    images: Tensor  # [B, 3, H, W], normalised
    maps: Tensor  # [B, gh, gw], or [B, H, W] where the method has pixels of its own
    masks: Tensor | None  # [B, H, W]
    target: Tensor  # [B] classes


@dataclass(frozen=True, eq=False)
class Measured:
    """Values [B] by metric, NaN where an image has none and `reasons` says why; `kept` is what the report draws."""

    values: dict[str, Tensor]
    reasons: Sequence[str]  # "" for measured images
    protocol: dict[str, Any]
    kept: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """Metrics that come out of one computation: whether higher is better, how to run it, and the function whose options they take."""

    metrics: dict[str, bool]
    run: Callable[..., Measured]
    of: Callable[..., Any]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options and their defaults."""
        return {p.name: p.default for p in inspect.signature(self.of).parameters.values() if p.kind is p.KEYWORD_ONLY}


def _localization(case: Case, **options: Any) -> Measured:
    if case.masks is None:
        nothing = torch.full((len(case.images),), torch.nan, dtype=torch.float64)
        return Measured(dict.fromkeys(("aupr1", "aupr0", "pointing"), nothing), ["no mask: this dataset has none"] * len(case.images), options)
    found = localization(case.maps, case.masks, **options)
    return Measured({"aupr1": found.aupr1, "aupr0": found.aupr0, "pointing": found.pointing}, found.reasons, found.protocol)


def _curves(case: Case, **options: Any) -> Measured:
    found = insertion_deletion(case.model, case.images, case.maps, case.target, **options)
    protocol = {key: value for key, value in found.protocol.items() if key != "target"}  # rows have a column for it
    values = {"insertion": found.insertion_area, "deletion": found.deletion_area, "ins-del": found.difference}
    kept = {"insertion": found.insertion, "deletion": found.deletion, "shares": found.shares}
    return Measured(values, [""] * len(case.images), protocol, kept)


MEASURES: dict[str, Measure] = {
    "localization": Measure({"aupr1": True, "aupr0": True, "pointing": True}, _localization, localization),
    "curves": Measure({"insertion": True, "deletion": False, "ins-del": True}, _curves, insertion_deletion),
}


def higher_is_better(metric: str) -> bool:
    return MEASURES[group_of(metric)].metrics[metric]


def group_of(metric: str) -> str:
    for group, measure in MEASURES.items():
        if metric in measure.metrics:
            return group
    raise UnknownName("metric", metric, (name for measure in MEASURES.values() for name in measure.metrics))


def groups_of(metrics: Iterable[str]) -> list[str]:
    """The groups some metrics need, each once."""
    return list(dict.fromkeys(group_of(metric) for metric in metrics))
