"""The explain job: pictures in; answers, maps and a section of the page out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from seecause.attribution.attribute import attribute, digest
from seecause.attribution.registry import find
from seecause.attribution.result import Attribution
from seecause.models.base import ImageModel
from seecause.report.cards import Answer, Card, MapView, Strip, render_cards
from seecause.report.overlay import Scale, legend, overlay, panel, picture, scale_of
from seecause.report.page import Section
from seecause.target import spread

HOW_TO_READ = (
    "Bright patches speak for the explained class: each patch was put, with its neighbours, into a"
    " blank picture, and its value is the class score that came out (CAAP; other methods have units"
    " of their own). Colours run over the range written under each map, leaving out its most"
    " extreme patches; a map without differences has no colour. Compare places within a map, and"
    " numbers between maps. Move over a picture to read a patch, by its row and column counted from"
    " 0 at the top left; the same patch lights up in every map of its card."
)
SCORES = {"prob": "probability", "logprob": "log probability", "logit": "logit"}


@dataclass(frozen=True, eq=False)
class Explanation:
    """What was found for some pictures. `runs` holds one attribution for each method, all over the
    same pictures."""

    names: Sequence[str]
    answers: Sequence[
        Sequence[Answer]
    ]  # the most probable classes of each picture, and the explained one
    runs: Mapping[str, Attribution]

    @property
    def first(self) -> Attribution:
        return next(iter(self.runs.values()))


def explain(
    model: ImageModel,
    images: Tensor,
    *,
    names: Sequence[str],
    methods: Sequence[str] = ("caap",),
    target: int | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    batch: int = 16,
    advance: Callable[[int], None] = lambda done: None,
) -> Explanation:
    """Attribute normalised pictures [N, 3, H, W] by each method. `options` are by method; `advance`
    hears of every finished picture."""
    parts: dict[str, list[Attribution]] = {method: [] for method in methods}
    answers: list[list[Answer]] = []
    for some in images.split(batch):
        some = some.to(model.device, model.dtype)
        answers += top_answers(model, some, target=target)
        for method in methods:
            parts[method].append(
                attribute(model, some, target, method, **(options or {}).get(method, {}))
            )
            advance(len(some))
    return Explanation(
        names, answers, {method: _join(found, images) for method, found in parts.items()}
    )


@torch.no_grad()
def top_answers(
    model: ImageModel, images: Tensor, *, target: int | None = None, count: int = 3
) -> list[list[Answer]]:
    """The `count` most probable classes of each picture, then `target` if it is not among them."""
    logits = model(images)
    probabilities = spread(logits.double(), "prob", sigmoid=model.sigmoid).cpu()
    found = []
    for row in probabilities:
        best = row.topk(min(count, len(row))).indices.tolist()
        explained = best[0] if target is None else target
        shown = best if explained in best else [*best, explained]
        found.append([Answer(model.class_name(c), float(row[c]), c == explained) for c in shown])
    return found


def explain_section(
    found: Explanation, *, title: str = "Which patches caused the answer?"
) -> Section:
    """One card for each picture, one column for each method."""
    random = [
        f"{run.manifest['model']} has random weights: its answers mean nothing"
        for run in (found.first,)
        if run.manifest["random_weights"]
    ]
    cards = []
    for index, name in enumerate(found.names):
        maps = [_view(method, run, index) for method, run in found.runs.items()]
        strip = Strip(found.first.images[index], maps, answers=found.answers[index])
        cards.append(Card(name, [strip], said=said(found.answers[index]), warnings=random))
    return Section(title, render_cards(cards), HOW_TO_READ)


def explain_panel(found: Explanation, index: int) -> Image.Image:
    """The picture and each method's overlay side by side, for slides and papers."""
    shown: list[Image.Image] = [picture(found.first.images[index])]
    below: list[Image.Image | None] = [None]
    for run in found.runs.values():
        scale = _scale(run, index)
        shown.append(overlay(run.images[index], run.pixels()[index], scale=scale))
        below.append(legend(scale, width=shown[-1].width))
    titles = [
        said(found.answers[index]),
        *(_title(method, run, index) for method, run in found.runs.items()),
    ]
    return panel(shown, titles=titles, below=below)


def said(answers: Sequence[Answer]) -> str:
    """The answer in words: what the model says, and what was explained where that is something
    else."""
    best, explained = answers[0], next(a for a in answers if a.explained)
    words = f"{best.name}, probability {best.probability:.3f}"
    return (
        words
        if best is explained
        else f"{words}; explained: {explained.name}, {explained.probability:.3f}"
    )


def _view(method: str, run: Attribution, index: int) -> MapView:
    return MapView(
        _title(method, run, index),
        run.maps[index],
        _scale(run, index),
        None if run.native is None else run.native[index],
    )


def _title(method: str, run: Attribution, index: int) -> str:
    """The method and what its values are values of."""
    if not find(method, run.manifest["architecture"]).class_specific:
        return f"{method}: the same for every class"
    score = SCORES.get(run.manifest["options"].get("score"), "score")
    return f"{method}: {score} of {run.labels[index]}" if run.labels else method


def _scale(run: Attribution, index: int) -> Scale:
    """The range of what is laid over the picture: the method's own pixels where it has them."""
    return scale_of((run.maps if run.native is None else run.native)[index])


def _join(parts: Sequence[Attribution], images: Tensor) -> Attribution:
    """Batches of one method as one result over all pictures."""
    if len(parts) == 1:
        return parts[0]
    manifest = dict(parts[0].manifest)
    targets = [part.manifest["target"] for part in parts]
    manifest["target"] = {key: _concatenated([t[key] for t in targets]) for key in targets[0]}
    manifest["images"], manifest["data_fingerprint"] = list(images.shape), digest(images)
    manifest["memory_halvings"] = [
        said for part in parts for said in part.manifest["memory_halvings"]
    ]
    return Attribution(
        maps=torch.cat([part.maps for part in parts]),
        images=torch.cat([part.images for part in parts]),
        native=(
            None
            if parts[0].native is None
            else torch.cat([part.native for part in parts if part.native is not None])
        ),
        class_maps=(
            None
            if parts[0].class_maps is None
            else torch.cat([part.class_maps for part in parts if part.class_maps is not None])
        ),
        labels=[label for part in parts for label in part.labels],
        manifest=manifest,
    )


def _concatenated(values: list[Any]) -> Any:
    """Lists of one entry a picture become one list; what is the same for all batches stays."""
    return (
        [entry for value in values for entry in value] if isinstance(values[0], list) else values[0]
    )
