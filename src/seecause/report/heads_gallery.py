"""Pictures behind the numbers: what the model answers with and without background and object,
before and after heads go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seecause.heads.audit import Audit, top_answers
from seecause.heads.erase import ErasedViews, Erasure
from seecause.heads.outcomes import logits_without
from seecause.heads.pictures import Pictures, logits_of
from seecause.heads.scores import Head
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel
from seecause.report.cards import Answer
from seecause.report.overlay import data_uri, picture
from seecause.report.page import Section, fragment

SHOWN = 6  # pictures
AUDIT_NOTE = (
    "The pictures whose answers hang most on the background. The bold answer is the true class. A"
    " model that answers from the object keeps its answer without the background, and loses it"
    " without the object."
)
REPAIR_NOTE = "The bold answer is the true class: a repair keeps it whatever the background."
EVIDENCE, ELSEWHERE = "its evidence", "elsewhere"
VERSIONS = {
    EVIDENCE: "the discovered mask: the part of the picture that the model keeps its answer with",
    "no background, no object": "cut out with {masks} and filled ({fill})",
    ELSEWHERE: "the same object drawn with another background",
}


@dataclass(frozen=True)
class Shot:
    """A version of a picture, with one list of answers for each model."""

    title: str
    picture: str
    answers: Sequence[tuple[str, Sequence[Answer]]] = ()


@dataclass(frozen=True)
class ShotCard:
    title: str
    shots: Sequence[Shot]
    said: str = ""


def audit_gallery(model: ImageModel, found: Audit, *, count: int = SHOWN) -> Section:
    """The worst pictures: as they are, what was discovered in them, without background, without
    object, and elsewhere where exact swaps exist."""
    places = torch.tensor(found.worst(count))
    cases = found.cases.take(places)
    masked = {name: look for name, look in found.looks.items() if look.masks is not None}
    shown = (
        found.looks[max(masked, key=lambda name: found.gains[name].bir_ratio_of_means)]
        if masked
        else None
    )
    versions = _versions(model, cases, None if shown is None else shown.take(places))
    answers = {
        name: top_answers(logits_of(model, images), model.classes)
        for name, images in versions.items()
    }
    discovered = next(
        (
            look.masks
            for look in masked.values()
            if look.masks is not None and look.masks.source == "discovered"
        ),
        None,
    )
    raw = model.preprocess.raw(cases.images)
    cards = []
    for i, place in enumerate(places.tolist()):
        shots = [
            _shot(
                name,
                model.preprocess.raw(images)[i],
                [("", _named(answers[name][i], model, cases, i))],
            )
            for name, images in versions.items()
        ]
        if discovered is not None:
            shots.insert(
                1, Shot(EVIDENCE, _uri(_dimmed(raw[i], discovered.hard[place].to(raw.device))))
            )
        gains = found.gains[found.trusted]
        cards.append(
            ShotCard(cases.ids[i], shots, f"BIR {float(gains.bir[place]):.2f} ({found.trusted})")
        )
    terms = _terms([EVIDENCE, *versions] if discovered is not None else versions, shown)
    return Section(
        "Where does it happen?", fragment("shots.html.j2", cards=cards), AUDIT_NOTE, terms
    )


def repair_gallery(
    model: VisionModel,
    cases: Pictures,
    heads: Sequence[Head],
    look: Erasure | None,
    *,
    title: str = "The same pictures, before and after",
) -> Section:
    """Each version of each picture with the answers before and after `heads` go."""
    versions = _versions(model, cases, look)
    found = {
        name: [
            top_answers(logits, model.classes)
            for logits in logits_without(model, images, [[], heads])
        ]
        for name, images in versions.items()
    }
    cards = []
    for i in range(len(cases)):
        shots = [
            _shot(
                name,
                model.preprocess.raw(images)[i],
                [
                    (when, _named(found[name][j][i], model, cases, i))
                    for j, when in enumerate(("before", "after"))
                ],
            )
            for name, images in versions.items()
        ]
        cards.append(ShotCard(cases.ids[i], shots))
    return Section(
        title, fragment("shots.html.j2", cards=cards), REPAIR_NOTE, _terms(versions, look)
    )


def _terms(versions: Iterable[str], look: Erasure | None) -> dict[str, str]:
    """What the versions that are shown are."""
    told = (
        {"masks": "", "fill": ""}
        if look is None or look.masks is None
        else {"masks": f"{look.masks.source} masks", "fill": look.name.rpartition(", ")[2]}
    )
    told["masks"] = told["masks"].replace("oracle", "true")
    names = " ".join(versions)
    return {
        name: said.format(**told)
        for name, said in VERSIONS.items()
        if name.partition(",")[0] in names
    }


def _versions(model: ImageModel, cases: Pictures, look: Erasure | None) -> Mapping[str, Tensor]:
    """The pictures and their counterfactuals by name."""
    found = {"picture": cases.images}
    if look is not None and look.masks is not None:
        erased = ErasedViews(model, cases.images, look.masks, look.baseline).erased(
            slice(0, len(cases))
        )
        assert erased.no_foreground is not None
        found |= {"no background": erased.no_background, "no object": erased.no_foreground}
    if cases.swapped is not None:
        found[ELSEWHERE] = cases.swapped.background
    return found


def _named(
    answers: Sequence[tuple[str, float]], model: ImageModel, cases: Pictures, place: int
) -> list[Answer]:
    truth = None if cases.labels is None else model.class_name(int(cases.labels[place]))
    return [Answer(name, probability, name == truth) for name, probability in answers]


def _shot(title: str, raw: Tensor, answers: Sequence[tuple[str, Sequence[Answer]]]) -> Shot:
    return Shot(title, _uri(raw), answers)


def _uri(raw: Tensor) -> str:
    return data_uri(
        picture(raw).resize((192, round(192 * raw.shape[1] / raw.shape[2]))), photo=True
    )


def _dimmed(raw: Tensor, mask: Tensor) -> Tensor:
    """The picture [3, H, W] with everything outside mask [H, W] faded."""
    return torch.where(mask, raw, 0.75 + 0.2 * (raw.mean(dim=0, keepdim=True) - 0.5))
