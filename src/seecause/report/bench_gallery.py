"""Pictures of a benchmark: where a method did best and worst, and where methods disagree most."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from seecause.attribution.registry import find, is_signed
from seecause.bench.measures import higher_is_better
from seecause.bench.plan import Plan
from seecause.bench.results import RunResults
from seecause.data.batch import raw_in_frame
from seecause.data.dataset import Dataset
from seecause.data.registry import open_data
from seecause.errors import BadImage, DataMissing
from seecause.metrics import rank_correlation
from seecause.models.preprocess import Preprocess
from seecause.report.cards import Card, MapView, Strip, render_cards
from seecause.report.overlay import number, scale_of
from seecause.report.page import Section, fragment

SHOWN = 3  # pictures of each kind
Maps = Mapping[str, Mapping[int, Tensor]]  # by method and sample


def gallery_section(
    results: RunResults, plan: Plan, *, reference: str, shown: int = SHOWN
) -> Section:
    """Cards with the maps of all methods, `shown` of each kind. Pictures are read again; where they
    are gone, the section says so."""
    title = "Which pictures tell most?"
    metric = headline(plan)
    scores = {method: columns[metric] for method, columns in results.values.items()}
    picked = {
        f"{reference} does best": _ranked(scores[reference], higher=higher_is_better(metric)),
        f"{reference} does worst": _ranked(scores[reference], higher=not higher_is_better(metric)),
        "methods disagree most": _disagreed(plan, results.maps),
    }
    try:
        data = open_data(plan.request.data, limit=plan.request.limit)
        groups = []
        for kind, indices in picked.items():
            cards = [_card(index, data, plan, results, scores) for index in indices[:shown]]
            if cards:
                groups.append((kind, render_cards(cards)))
    except (BadImage, DataMissing) as gone:
        groups = [(f"The pictures cannot be read any more: {gone}", "")]
        return Section(title, fragment("bench_gallery.html.j2", groups=groups))
    note = (
        f"Best and worst by {metric}, the number beside each method. Methods disagree where their"
        " maps correlate least (ranks), controls left out. Dark to bright: low to high; where"
        " colours run from blue to red, red is for the class and blue against."
    )
    body = fragment("bench_gallery.html.j2", groups=groups)
    return Section(title, body, note, short="Pictures")


def headline(plan: Plan) -> str:
    """The one metric that orders pictures and methods."""
    return "ins-del" if "ins-del" in plan.request.metrics else plan.request.metrics[0]


def _ranked(scores: Tensor, *, higher: bool) -> list[int]:
    order = (
        scores.nan_to_num(-torch.inf if higher else torch.inf)
        .argsort(descending=higher, stable=True)
        .tolist()
    )
    known = (~scores.isnan()).tolist()
    return [index for index in order if known[index]][:SHOWN]


def _disagreed(plan: Plan, maps: Maps) -> list[int]:
    """The samples whose maps correlate least between methods, of those that are kept; controls,
    which do not run the model, only count if nothing else is there."""
    architecture = plan.model["architecture"]
    entries = {method: find(plan.request.method(method), architecture) for method in maps}
    methods = [method for method, entry in entries.items() if entry.forwards != "0"]
    methods = methods if len(methods) > 1 else list(maps)
    shared = sorted(set.intersection(*(set(maps[method]) for method in methods)))
    pairs = list(itertools.combinations(methods, 2))
    if not pairs or not shared:
        return []
    stacked = {method: torch.stack([maps[method][index] for index in shared]) for method in methods}
    alike = [rank_correlation(stacked[a], stacked[b]).nan_to_num() for a, b in pairs]
    order = torch.stack(alike).mean(dim=0).argsort(stable=True).tolist()
    return [shared[place] for place in order[:SHOWN]]


def _card(
    index: int, data: Dataset, plan: Plan, results: RunResults, scores: Mapping[str, Tensor]
) -> Card:
    maps = {method: results.map_of(method, index) for method in results.maps}
    kind = plan.model["architecture"]
    signed = {method: is_signed(plan.request.method(method), kind) for method in maps}
    views = [
        _view(method, values, float(scores[method][index]), signed=signed[method])
        for method, values in maps.items()
        if values is not None
    ]
    sample = data[index]
    answer = f"answer: {_named(plan.model['classes'], int(results.answers['predicted'][index]))}"
    truth = "" if sample.label is None else f"; it is {_named(plan.data['classes'], sample.label)}"
    strip = Strip(_seen(plan, sample.image), views)
    return Card(plan.samples[index], [strip], caption=answer + truth)


def _view(method: str, values: Tensor, score: float, *, signed: bool | None) -> MapView:
    return MapView(f"{method} {number(score)}", values, scale_of(values, signed=signed))


def _named(names: Sequence[str], place: int) -> str:
    return names[place] if 0 <= place < len(names) else f"class {place}"


def _seen(plan: Plan, image: Tensor) -> Tensor:
    """The part of a picture [3, H, W] that the model sees."""
    frame = Preprocess(**{**plan.model["frame"], "size": tuple(plan.model["frame"]["size"])})
    return raw_in_frame(frame, image)
