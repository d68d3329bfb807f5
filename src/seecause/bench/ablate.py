"""Which of CAAP's settings decide the result? One of them is changed at a time; a setting is a
method of the run like any other.

    blank    what the patches are put into
    select   how many neighbours move with a patch
    layers   the range of layers that are patched, from its first and to its last (the paper's
    cumulative sweep); its first has no effect on a model
             without special tokens, and is not swept there
    tail     what the patched tokens do after the last of them
    score    what is read off the logits: probability, log-probability (the same order of patches)
    or logit
The first setting is the default; every other is compared with it image by image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from seecause.attribution.caap import make_plan
from seecause.attribution.registry import find
from seecause.attribution.select import Select
from seecause.bench.plan import Plan, Request, Store
from seecause.engine.blanks import Blank
from seecause.engine.sweep import Plan as SweepPlan
from seecause.engine.sweep import Tail
from seecause.errors import BadOption, NotDefined, UnknownName
from seecause.metrics import rank_correlation, standard_error
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel
from seecause.target import Score

STUDIES = {
    "blank": "Does the blank picture decide?",
    "select": "Do the neighbours decide?",
    "layers": "Do the patched layers decide?",
    "tail": "Does the tail decide?",
    "score": "Does the score decide?",
}
MOST = 12  # points of a sweep over layers
Settings = dict[str, dict[str, Any]]  # options by name, the default first


@dataclass(frozen=True, eq=False)
class Agreement:
    """Spearman's correlation between the maps of every two settings, mean over images and its
    standard error, [S, S]."""

    names: tuple[str, ...]
    mean: Tensor
    error: Tensor
    images: int


def with_settings(request: Request, model: ImageModel) -> Request:
    """The request with one method for each setting of its study; a request without a study stays as
    it is."""
    if not request.study:
        return request
    (method, fixed), *_ = request.methods.items()
    if request.study not in find(method, model.architecture).options:
        raise NotDefined(
            f"ablate {request.study}",
            f"{method} on a model of architecture {model.architecture!r} has no such option",
            "Use blank or select",
        )
    if request.study in fixed:
        raise BadOption(
            f"option {request.study!r}",
            fixed[request.study],
            f"another option: {request.study} is what this study changes",
        )
    found = settings(request.study, model, fixed)
    return replace(
        request,
        methods={name: {**fixed, **own} for name, own in found.items()},
        called=dict.fromkeys(found, method),
    )


def settings(study: str, model: ImageModel, fixed: Mapping[str, Any]) -> Settings:
    """What is compared, on this model, with `fixed` options kept."""
    if study == "blank":
        return _first("white", {name: {"blank": name} for name in get_args(Blank)})
    if study == "select":
        return _first("box1", {name: {"select": name} for name in get_args(Select)})
    if study == "score":
        return _first("prob", {name: {"score": name} for name in get_args(Score)})
    if study not in STUDIES:
        raise UnknownName("ablation", study, STUDIES)
    assert isinstance(model, VisionModel)  # what has layers and tails
    registers = bool(fixed.get("propagate_registers", False))
    default = make_plan(
        model, model.layout, tail=fixed.get("tail"), layers=None, propagate_registers=registers
    )
    if study == "tail":
        reads_class = bool(model.readout.read_prefix(model.layout))
        return _first(
            default.tail,
            {name: {"tail": name} for name in get_args(Tail) if name != "blank" or reads_class},
        )
    return sweep_layers(model.n_layers, default)


def sweep_layers(depth: int, default: SweepPlan) -> Settings:
    """`from l`: layers l to the default's last, with its tail; `to l`: the embedding to l, with the
    same tail, or `patched` where that is `source`, for which the last layer has no effect. Only
    special tokens are computed while layers are patched: without any, the first layer has no
    effect.
    """
    step, to_end = math.ceil(depth / MOST), default.tail == "source"
    starts = range(0, depth if to_end else default.stop + 1, step) if default.live else ()
    stops = sorted({*range(0, depth, step), depth, *(() if to_end else (default.stop,))})
    begun = {
        f"from {start}": {"tail": default.tail, "layers": (start, None if to_end else default.stop)}
        for start in starts
    }
    ended = {
        f"to {stop}": {"tail": "patched" if to_end else default.tail, "layers": (0, stop)}
        for stop in stops
    }
    return begun | ended if begun else _first(f"to {default.stop}", ended)


def agreement(store: Store, plan: Plan) -> Agreement:
    """How alike the maps of the settings are, over the images that all of them have."""
    maps = store.maps(plan)
    names = tuple(maps)
    known = sorted(set.intersection(*(set(found) for found in maps.values())))
    mean, error = (
        torch.eye(len(names), dtype=torch.float64),
        torch.zeros(len(names), len(names), dtype=torch.float64),
    )
    if not known:
        return Agreement(names, mean.fill_(torch.nan), error.fill_(torch.nan), 0)
    stacked = [
        torch.stack([maps[name][index] for index in known]) for name in names
    ]  # each [B, gh, gw]
    for i in range(len(names)):
        for j in range(i):
            alike = rank_correlation(stacked[i], stacked[j])
            alike = alike[~alike.isnan()]  # a flat map has no ranks
            mean[i, j] = mean[j, i] = alike.mean()
            error[i, j] = error[j, i] = standard_error(alike)
    return Agreement(names, mean, error, len(known))


def _first(name: str, found: Settings) -> Settings:
    """The same with `name` in front."""
    return {name: found[name], **found}
