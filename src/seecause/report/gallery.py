"""Pictures of a benchmark: where a method did best and worst, and where methods disagree most."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from seecause.attribution.registry import find
from seecause.bench.measures import higher_is_better
from seecause.bench.plan import Plan, Store
from seecause.bench.table import values
from seecause.data.batch import seen
from seecause.data.dataset import Dataset
from seecause.data.registry import open_data
from seecause.errors import BadImage, DataMissing
from seecause.metrics import rank_correlation
from seecause.models.preprocess import Preprocess
from seecause.report.cards import Card, MapView, Strip, render_cards
from seecause.report.overlay import number, scale_of
from seecause.report.page import Section, fragment

SHOWN = 3  # pictures of each kind
Maps = Mapping[str, dict[int, Tensor]]  # by method and sample


def gallery_section(store: Store, plan: Plan, *, reference: str) -> Section:
    """Cards with the maps of all methods. Pictures are read again; where they are gone, the section
    says so."""
    title = "Which pictures tell most?"
    rows = store.rows(plan)
    metric = headline(plan)
    scores = {method: found[metric] for method, found in values(rows, plan).items()}
    about = {
        row["index"]: row
        for row in rows.select(["index", "image", "label", "predicted"]).to_pylist()
    }
    maps = store.maps(plan)
    picked = {
        f"{reference} does best": _ranked(scores[reference], higher=higher_is_better(metric)),
        f"{reference} does worst": _ranked(scores[reference], higher=not higher_is_better(metric)),
        "methods disagree most": _disagreed(plan, maps),
    }
    try:
        data = open_data(plan.request.data, limit=plan.request.limit)
        groups = [
            (kind, render_cards([_card(i, data, plan, maps, scores, about[i]) for i in found]))
            for kind, found in picked.items()
            if found
        ]
    except (BadImage, DataMissing) as gone:
        return Section(
            title,
            fragment(
                "bench_gallery.html.j2",
                groups=[(f"The pictures cannot be read any more: {gone}", "")],
            ),
        )
    note = (
        f"Best and worst by {metric}, the number beside each method. Methods disagree where their"
        " maps correlate least (ranks), controls left out."
    )
    return Section(title, fragment("bench_gallery.html.j2", groups=groups), note)


def headline(plan: Plan) -> str:
    """The one metric that orders pictures and methods."""
    return "ins-del" if "ins-del" in plan.request.metrics else plan.request.metrics[0]


def _ranked(scores: Tensor, *, higher: bool) -> list[int]:
    order = (
        scores.nan_to_num(-torch.inf if higher else torch.inf)
        .argsort(descending=higher, stable=True)
        .tolist()
    )
    return [index for index in order if scores[index] == scores[index]][:SHOWN]


def _disagreed(plan: Plan, maps: Maps) -> list[int]:
    """The samples whose maps correlate least between methods; controls, which do not run the model,
    only count if nothing else is there."""
    asked = [
        method
        for method in maps
        if find(plan.request.method(method), plan.model["architecture"]).forwards != "0"
    ]
    methods = asked if len(asked) > 1 else list(maps)
    known = sorted(set.intersection(*(set(maps[method]) for method in methods)))
    pairs = list(itertools.combinations(methods, 2))
    if not pairs or not known:
        return []
    stacked = {method: torch.stack([maps[method][index] for index in known]) for method in methods}
    alike = torch.stack(
        [rank_correlation(stacked[a], stacked[b]).nan_to_num() for a, b in pairs]
    ).mean(dim=0)
    return [known[place] for place in alike.argsort(stable=True).tolist()[:SHOWN]]


def _card(
    index: int,
    data: Dataset,
    plan: Plan,
    maps: Maps,
    scores: Mapping[str, Tensor],
    row: Mapping[str, Any],
) -> Card:
    views = [
        _view(method, found[index], float(scores[method][index]))
        for method, found in maps.items()
        if index in found
    ]
    truth = "" if row["label"] is None else f"; it is {_named(plan.data['classes'], row['label'])}"
    said = f"answer: {_named(plan.model['classes'], row['predicted'])}{truth}"
    return Card(row["image"], [Strip(_seen(plan, data[index].image), views)], said=said)


def _view(method: str, values: Tensor, score: float) -> MapView:
    return MapView(f"{method} {number(score)}", values, scale_of(values))


def _named(names: Sequence[str], place: int) -> str:
    return names[place] if place < len(names) else f"class {place}"


def _seen(plan: Plan, image: Tensor) -> Tensor:
    """The part of a picture [3, H, W] that the model sees."""
    frame = Preprocess(**{**plan.model["frame"], "size": tuple(plan.model["frame"]["size"])})
    return seen(frame, image)
