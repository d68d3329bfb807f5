"""Remedies for a model that answers from the background: one protocol, side by side.

    @remedy("name", cost="...", needs="...")
    def name(model, lesson, *, option=default) -> Mended: ...

A remedy learns from `lesson.learn` and makes its own choices (a rank, how many heads, how long) by
transplant-worst on `lesson.choose`. What is reported comes from pictures that neither has seen.

`nothing`, the model as it is, wins where there is nothing to repair.

With a work folder, a finished remedy is kept in its own folder (`done.sealed`: its weights, what
was done, what it took), and so is the last whole epoch of a training that has not ended. Every file
carries its checksum: one that was cut or changed is named, left aside and made again.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from seecause.background.baselines import LastLayer, last_layer, with_last_layer
from seecause.background.images import Progress, no_progress
from seecause.background.versions import JudgedAnswers, VersionedPictures, VersionLogits
from seecause.errors import BadOption, NotDefined, UnknownName
from seecause.files import read_sealed, write_sealed
from seecause.loading import rewrap
from seecause.models.heads import TextHead
from seecause.models.view import VisionModel
from seecause.options import check_options, keyword_options, summary_of

DONE, EPOCH = "done.sealed", "fine-tune.sealed"  # files of a work folder
# options that are whole numbers from 1
COUNTS = {"epochs", "batch", "patience", "pairs", "counts", "rank", "most", "refits", "steps"}
COUNTS |= {"parts"}
AMOUNTS = ("strength", "rate")  # options that are above 0
K = TypeVar("K")


@dataclass(frozen=True, eq=False)
class Lesson:
    """What remedies learn from and choose by; `work` is where long ones keep how far they are."""

    learn: VersionedPictures
    choose: VersionedPictures
    seed: int = 0
    groups: bool = False  # whether group labels may be used
    work: Path | None = None
    progress: Progress = no_progress

    def worst(self, logits: VersionLogits) -> float:
        """Transplant-worst of held-out versions, by their logits."""
        return JudgedAnswers(self.choose, logits).transplant_worst

    def best(self, views: Iterable[tuple[K, VisionModel]]) -> tuple[K, VisionModel, dict[str, Any]]:
        """The view with the best transplant-worst, the first of equals, and what each came to."""
        tried, best = dict[str, Any](), list[tuple[float, K, VisionModel]]()
        for name, view in views:
            worst = self.worst(self.choose.logits(view))
            tried[str(name)] = round(worst, 4)
            if not best or worst > best[0][0]:
                best = [(worst, name, view)]
        _, name, view = best[0]
        return name, view, tried

    @property
    def group_codes(self) -> Tensor:
        groups = self.learn.data.groups
        if not self.groups or not groups or None in groups:
            raise BadOption(
                "remedies",
                "one that needs group labels",
                "groups=True (--groups) and data with a group for every picture",
            )
        return torch.tensor(groups)


@dataclass(frozen=True, eq=False)
class Mended:
    """A remedied model, and what was done to it."""

    model: VisionModel
    done: str  # one sentence
    details: dict[str, Any] = field(default_factory=dict)  # what JSON can hold
    layer: LastLayer | None = None  # where nothing else of `base` was changed
    base: VisionModel | None = None

    def judge(self, part: VersionedPictures) -> JudgedAnswers:
        if self.layer is not None and self.base is not None:
            return JudgedAnswers(part, part.under(self.base, self.layer))
        return JudgedAnswers(part, part.logits(self.model))


@dataclass(frozen=True)
class Remedy:
    """One entry of the registry."""

    name: str
    fit: Callable[..., Mended]
    cost: str
    needs: str
    summary: str

    @property
    def options(self) -> dict[str, Any]:
        return keyword_options(self.fit)


_REMEDIES: dict[str, Remedy] = {}
_FILES = ("last_layer", "head_remedies", "training_remedies")


def remedy(
    name: str, *, cost: str, needs: str = "masks or pairs"
) -> Callable[[Callable[..., Mended]], Callable[..., Mended]]:
    """Register a function under `name`."""

    def register(fit: Callable[..., Mended]) -> Callable[..., Mended]:
        summary = summary_of(fit)
        _REMEDIES[name] = Remedy(name, fit, cost, needs, summary)
        return fit

    return register


def remedies() -> dict[str, Remedy]:
    """All remedies by name.

    >>> sorted(remedies())[:3]
    ['dfr', 'directions', 'directions-refit']
    """
    for file in _FILES:
        importlib.import_module(f"seecause.background.{file}")
    return dict(_REMEDIES)


def find_remedy(name: str, options: dict[str, Any]) -> Remedy:
    """A remedy by name, if it has these options and they can be used, as far as that is known
    before there are pictures."""
    known = remedies()
    if name not in known:
        raise UnknownName("remedy", name, known)
    check_options(name, known[name].fit, options)
    for option, value in options.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        if option in COUNTS and (not numbers or any(n is not None and n < 1 for n in numbers)):
            raise BadOption(f"{name}.{option}", value, "a whole number from 1")
        if option in AMOUNTS and not all(n > 0 for n in numbers):
            raise BadOption(f"{name}.{option}", value, "a number above 0")
    return known[name]


def with_layer(model: VisionModel, layer: LastLayer, done: str, details: dict[str, Any]) -> Mended:
    """The model with another last layer; it is verified when it is chosen."""
    view = with_last_layer(model, layer, check=False)
    return Mended(view, done, details, layer, model)


@remedy("nothing", cost="nothing", needs="nothing")
def nothing(model: VisionModel, lesson: Lesson) -> Mended:
    """The model as it is."""
    try:
        layer = last_layer(model)
    except NotDefined:
        layer = None
    return Mended(model, "Nothing was changed.", {}, layer, model)


def write_remedy(place: Path, result: Mended, seconds: float) -> None:
    """Weights and facts in one file, so that neither is there without the other."""
    if result.layer is not None:
        tensors = {"weight": result.layer.weight, "bias": result.layer.bias}
    elif hasattr(result.model.module, "view_parts"):
        return  # a network of another shape writes itself, when it is exported
    else:
        tensors = {f"module.{k}": v for k, v in result.model.module.state_dict().items()}
        if (head := _own_head(result.model)) is not None:
            tensors |= {f"extra.{k}": v for k, v in head.state_dict().items()}
    content = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    facts = {"done": result.done, "details": result.details, "seconds": seconds}
    content["facts"] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    write_sealed(place / DONE, save(content))
    (place / EPOCH).unlink(missing_ok=True)


def read_remedy(model: VisionModel, place: Path) -> tuple[Mended, float] | None:
    """What an earlier run finished, and its seconds; None where that is missing or damaged."""
    content = read_sealed(place / DONE)
    if content is None:
        return None
    tensors = load(content)
    facts = json.loads(bytes(tensors.pop("facts").tolist()))
    if "weight" in tensors:
        layer = LastLayer(tensors["weight"], tensors["bias"])
        return with_layer(model, layer, facts["done"], facts["details"]), facts["seconds"]
    module, head = copy.deepcopy((model.module, _own_head(model)))
    module.load_state_dict(_under("module.", tensors))
    if head is not None:
        head.load_state_dict(_under("extra.", tensors))
    view = rewrap(model, module, head=head)
    return Mended(view, facts["done"], facts["details"]), facts["seconds"]


def _own_head(model: VisionModel) -> nn.Module | None:
    """A head beside the module with weights of its own: one of texts shares the module's."""
    return None if isinstance(model.extra, TextHead) else model.extra


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
