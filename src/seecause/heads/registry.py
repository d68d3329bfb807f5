"""The ways to choose heads. A new one is a decorated function in a file that `_FILES` names:

    @selector("name", cost="1 forward", needs="labels")
    def name(model, images, labels, *, option=default) -> HeadScores: ...

It gets normalised images [N, 3, H, W] and class indices [N] on the model's device. Higher scores
mean more worth removing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seecause._options import check_options, keyword_options
from seecause.errors import BadImage, BadOption, NotDefined, UnknownName
from seecause.heads.scores import HeadScores
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel


@dataclass(frozen=True)
class Selector:
    """One entry of the registry."""

    name: str
    run: Callable[..., HeadScores]
    cost: str  # of one image
    needs: str
    summary: str

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options and their defaults."""
        return keyword_options(self.run, leave_out=("progress",))

    @property
    def tells_progress(self) -> bool:
        return "progress" in keyword_options(self.run)


_SELECTORS: dict[str, Selector] = {}
_FILES = {  # by selector; the last has all others too
    "cigma": "cigma",
    "greedy": "joint",
    "regression": "joint",
    "gating": "gating",
    "contrastive-gating": "gating",
    "interchange": "_interchange",
    "random": "simple_selectors",
}


def selector(
    name: str, *, cost: str, needs: str
) -> Callable[[Callable[..., HeadScores]], Callable[..., HeadScores]]:
    """Register a function under `name`."""

    def register(run: Callable[..., HeadScores]) -> Callable[..., HeadScores]:
        _SELECTORS[name] = Selector(
            name, run, cost, needs, (inspect.getdoc(run) or "").split("\n")[0]
        )
        return run

    return register


def selectors() -> dict[str, Selector]:
    """All ways to choose heads, by name."""
    for file in dict.fromkeys(_FILES.values()):
        importlib.import_module(f"seecause.heads.{file}")
    return dict(_SELECTORS)


def find_selector(name: str) -> Selector:
    """The one of that name; of the files, only its own is imported where that is known."""
    if name in _FILES:
        importlib.import_module(f"seecause.heads.{_FILES[name]}")
    if name not in _SELECTORS and name not in selectors():
        raise UnknownName("head selector", name, selectors())
    return _SELECTORS[name]


def select(
    by: str, model: ImageModel, images: Tensor, labels: Tensor, **options: Any
) -> HeadScores:
    """Scores by the selector called `by`; `HeadScores.top(k)` gives the heads to remove."""
    chosen = find_selector(by)
    check_options(by, chosen.run, options)
    if not isinstance(model, VisionModel):
        raise NotDefined(
            f"choosing heads by {by}",
            f"{model.family} is read by its stages, not by heads",
            "Use a vision transformer",
        )
    with model.settled(frozen=True):
        images = images.to(model.device, model.dtype)
        model.check(images)
        return chosen.run(model, images, checked_labels(model, images, labels), **options)


def checked_labels(model: ImageModel, images: Tensor, labels: Tensor) -> Tensor:
    """Class indices [N] on the model's device, one for each image."""
    labels = torch.as_tensor(labels)
    if labels.shape != images.shape[:1] or labels.dtype.is_floating_point:
        raise BadImage(
            f"labels of shape {list(labels.shape)}",
            f"expected a class index for each of the {len(images)} images",
            "give whole numbers [N]",
        )
    if not bool(((labels >= 0) & (labels < model.n_classes)).all()):
        raise BadOption(
            "labels",
            f"{int(labels.min())} to {int(labels.max())}",
            f"class indices 0-{model.n_classes - 1}",
        )
    return labels.long().to(images.device)
