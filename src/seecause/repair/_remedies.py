"""Remedies for a model that answers from the background: one protocol, side by side.

    @remedy("name", cost="...", needs="...")
    def name(model, lesson, *, option=default) -> Mended: ...

A remedy learns from `lesson.learn` and makes its own choices (a rank, how many heads, how long) by
transplant-worst on `lesson.choose`. What is reported comes from pictures that neither has seen.

    nothing           the model as it is: it wins where there is nothing to repair
    last-layer        a new last layer on versions, classes balanced, ridge
    directions        directions in which versions differ, folded out of the old last layer
    directions-refit  the same, then a new last layer on plain pictures
    dfr, group-dro    last layers that need group labels
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seecause._options import check_options, keyword_options
from seecause.errors import BadOption, NotDefined, UnknownName
from seecause.heads.baselines import fit_head, last_layer, with_last_layer
from seecause.heads.pictures import Progress, no_progress
from seecause.models.view import VisionModel
from seecause.repair.last_layer import (
    MOST,
    STRENGTH,
    LastLayer,
    LossForm,
    blind,
    change_directions,
    group_dro,
    new_layer,
    random_directions,
)
from seecause.repair.parts import Judged, Part

CONTROLS = 5  # draws of random directions
COUNTS = (
    "epochs",
    "batch",
    "patience",
    "pairs",
    "counts",
    "rank",
    "most",
    "refits",
    "steps",
    "parts",
)  # options that are whole numbers from 1
AMOUNTS = ("strength", "rate")  # options that are above 0


@dataclass(frozen=True, eq=False)
class Lesson:
    """What remedies learn from and choose by; `work` is where long ones keep how far they are."""

    learn: Part
    choose: Part
    seed: int = 0
    groups: bool = False  # whether group labels may be used
    work: Path | None = None
    progress: Progress = no_progress

    @property
    def group_codes(self) -> Tensor:
        groups = self.learn.pictures.groups
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

    def judge(self, part: Part) -> Judged:
        if self.layer is not None and self.base is not None:
            return Judged(part, part.under(self.base, self.layer))
        return Judged(part, part.logits(self.model))


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
_FILES = ("_remedies", "head_remedies", "fine_tune", "ifam_remedy")


def remedy(
    name: str, *, cost: str, needs: str = "masks or pairs"
) -> Callable[[Callable[..., Mended]], Callable[..., Mended]]:
    """Register a function under `name`."""

    def register(fit: Callable[..., Mended]) -> Callable[..., Mended]:
        summary = (inspect.getdoc(fit) or "").split("\n")[0]
        _REMEDIES[name] = Remedy(name, fit, cost, needs, summary)
        return fit

    return register


def remedies() -> dict[str, Remedy]:
    """All remedies by name.

    >>> sorted(remedies())[:3]
    ['dfr', 'directions', 'directions-refit']
    """
    for file in _FILES:
        importlib.import_module(f"seecause.repair.{file}")
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
    view = with_last_layer(model, layer.weight, layer.bias, check=False)
    return Mended(view, done, details, layer, model)


@remedy("nothing", cost="nothing", needs="nothing")
def nothing(model: VisionModel, lesson: Lesson) -> Mended:
    """The model as it is."""
    try:
        layer = LastLayer(*last_layer(model))
    except NotDefined:
        layer = None
    return Mended(model, "Nothing was changed.", {}, layer, model)


@remedy("last-layer", cost="1 forward of each version")
def fit_last_layer(
    model: VisionModel,
    lesson: Lesson,
    *,
    strength: float = STRENGTH,
    form: LossForm = "logistic",
    anchor: bool | None = None,
) -> Mended:
    """A new last layer on versions, classes balanced, ridge. With `anchor` it stays near the old
    one; by default where the pictures lack some classes, which a new one would forget."""
    features, labels = lesson.learn.features(model).moved, lesson.learn.moved.labels
    lacking = len(labels.unique()) < model.n_classes
    anchored = lacking if anchor is None else anchor
    old = LastLayer(*last_layer(model)) if anchored else None
    layer = new_layer(
        features,
        labels,
        classes=model.n_classes,
        strength=strength,
        form=form,
        anchor=old,
    )
    near = ", held near the old one" if anchored else ""
    done = f"A new last layer ({form}, C = {strength:g}{near}) on {len(features)} versions."
    return with_layer(model, layer, done, {"versions": len(features), "anchored": anchored})


@remedy("directions", cost="1 forward of each version")
def fold_directions(
    model: VisionModel, lesson: Lesson, *, rank: int | None = None, most: int = MOST
) -> Mended:
    """Directions in which versions differ, folded out of the old last layer; the rank by the
    spectrum or by held-out versions, whichever is better on these."""
    old = LastLayer(*last_layer(model))
    seen = lesson.learn.features(model).moved
    directions = change_directions(seen, lesson.learn.moved.source_index)
    ranks = _ranks(rank, most, len(directions.values))
    tried = {r: _worst(lesson, model, directions.fold(old, r)) for r in ranks}
    chosen = max(tried, key=lambda r: (tried[r], r == directions.rank, -r))
    lots = [random_directions(chosen, seen.shape[1], seed=draw) for draw in range(CONTROLS)]
    by_lot = [_worst(lesson, model, blind(old, lot, directions.mean)) for lot in lots]
    details = {
        "rank": chosen,
        "rank of the spectrum": directions.rank,
        "spectrum": _rounded((directions.values / directions.values[0])[: most + 1].tolist()),
        "transplant-worst by rank": {str(r): round(v, 4) for r, v in tried.items()},
        "transplant-worst of random directions": _rounded(by_lot),
    }
    done = f"{chosen} of {seen.shape[1]} directions folded out of the last layer."
    return with_layer(model, directions.fold(old, chosen), done, details)


@remedy("directions-refit", cost="1 forward of each version")
def fold_and_refit(
    model: VisionModel,
    lesson: Lesson,
    *,
    rank: int | None = None,
    most: int = MOST,
    strength: float = STRENGTH,
) -> Mended:
    """Directions in which versions differ taken out, then a new last layer on plain pictures."""
    seen = lesson.learn.features(model)
    directions = change_directions(seen.moved, lesson.learn.moved.source_index)
    labels, classes = lesson.learn.labels, model.n_classes
    anchor = LastLayer(*last_layer(model)) if len(labels.unique()) < classes else None
    middle = directions.mean
    layers = {}
    for r in _ranks(rank, most, len(directions.values)):
        vectors = directions.vectors[:r]
        flat = seen.plain - ((seen.plain - middle) @ vectors.T) @ vectors
        held = None if anchor is None else directions.fold(anchor, r)
        layer = new_layer(flat, labels, classes=classes, strength=strength, anchor=held)
        layers[r] = blind(layer, vectors, middle)
    tried = {r: _worst(lesson, model, layer) for r, layer in layers.items()}
    chosen = max(tried, key=lambda r: (tried[r], r == directions.rank, -r))
    details = {
        "rank": chosen,
        "rank of the spectrum": directions.rank,
        "transplant-worst by rank": {str(r): round(v, 4) for r, v in tried.items()},
    }
    done = f"{chosen} directions taken out, and a new last layer on {len(labels)} plain pictures."
    return with_layer(model, layers[chosen], done, details)


@remedy("dfr", cost="1 forward of each picture", needs="group labels")
def retrain_by_groups(model: VisionModel, lesson: Lesson, *, refits: int = 20) -> Mended:
    """DFR (Kirichenko et al. 2023): a new last layer on group-balanced pictures."""
    groups = lesson.group_codes
    plain = lesson.learn.features(model).plain
    head = fit_head(
        plain, lesson.learn.labels, groups, classes=model.n_classes, refits=refits, seed=lesson.seed
    )
    done = f"DFR: a new last layer on {len(plain)} pictures with group labels (C = {head.strength})"
    return with_layer(model, LastLayer(head.weight, head.bias), f"{done}.", {})


@remedy("group-dro", cost="1 forward of each picture", needs="group labels")
def robust_last_layer(
    model: VisionModel, lesson: Lesson, *, strength: float = STRENGTH, steps: int = 500
) -> Mended:
    """Group DRO (Sagawa et al. 2020) of the last layer."""
    groups = lesson.group_codes
    plain = lesson.learn.features(model).plain
    layer = group_dro(
        plain, lesson.learn.labels, groups, classes=model.n_classes, strength=strength, steps=steps
    )
    done = f"Group DRO: a new last layer on {len(plain)} pictures with group labels."
    return with_layer(model, layer, done, {})


def _ranks(rank: int | None, most: int, available: int) -> list[int]:
    if rank is not None and rank > available:
        raise BadOption("rank", rank, f"1 to {available} directions")
    return [rank] if rank is not None else list(range(1, min(most, available) + 1))


def _worst(lesson: Lesson, model: VisionModel, layer: LastLayer) -> float:
    return Judged(lesson.choose, lesson.choose.under(model, layer)).transplant_worst


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
