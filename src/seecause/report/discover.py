"""The page of `seecause discover`: one card for each kind of patch, and its pairs as folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seecause.attribution.explain import Answer, top_answers
from seecause.background.discover import Discovery, Finding
from seecause.background.patch_kinds import pasted
from seecause.data.images import to_pil
from seecause.report.cards import Shot, ShotCard
from seecause.report.overlay import data_uri, picture
from seecause.report.page import (
    Section,
    fragment,
    holes_section,
    protocol_section,
    verdict_box,
)

NAME = 80  # characters of a file's name, at most
CROPS = 9  # examples of a kind on its card
AROUND = 1  # patches around an example that its crop shows
FADED = 0.8  # how far what is not of the kind goes towards white
NOTE = (
    "Each card is a kind of patch: its examples; all of it in one picture of that answer, the rest"
    " faded; and what happens when it is pasted into a picture that is answered otherwise. A part"
    " of the object does that rightly; anything else is a shortcut."
)
TERMS = {
    "flips": "pictures that are answered so with the patches pasted in",
    "control": "the same with patches of pictures that are not answered so, in the same places",
    "on the object": "share of the kind's patches that known masks count as object",
}


def discover_sections(result: Discovery) -> list[Section]:
    """Cards of all findings, then how they came about."""
    if not result.findings:
        body = verdict_box(["No kind of patch turns pictures into a class by more than chance."])
    else:
        cards = [_card(result, *place) for place in enumerate(result.findings, 1)]
        body = fragment("shots.html.j2", cards=cards)
    title = "Which kinds of patches turn pictures into which class?"
    holes = holes_section(result.pictures.holes)
    return [Section(title, body, NOTE, TERMS), *holes, protocol_section([result.protocol])]


def _card(result: Discovery, rank: int, finding: Finding) -> ShotCard:
    flipped = finding.trials.flipped
    assert flipped is not None
    trial = int(flipped.double().argmax())  # the first that flipped
    shown = finding.trials.take(slice(trial, trial + 1))
    source, recipient = int(shown.sources[0]), int(shown.recipients[0])
    images, raw = result.pictures.images, result.model.preprocess.raw
    after = pasted(images, shown)
    before = images[recipient : recipient + 1]
    answers = top_answers(result.model, torch.cat([before, after]))
    shots = [
        Shot("examples", _uri(_crops(result, finding))),
        Shot("in a picture", _uri(_faded(raw(images[source]), shown.sets[0]))),
        Shot("before", _uri(raw(before)[0]), [("", _shown(answers[0], finding.name))]),
        Shot("with it", _uri(raw(after)[0]), [("", _shown(answers[1], finding.name))]),
    ]
    title = f"{rank}. {finding.name}: {finding.flips:.0%}, control {finding.control:.0%}"
    return ShotCard(title, shots, f"{finding.sentence()}.{_object(finding)}")


def _object(finding: Finding) -> str:
    if finding.on_object is None:
        return ""
    return f" {finding.on_object:.0%} of these patches are on the object."


def _shown(answers: Sequence[Answer], name: str) -> list[Answer]:
    return [Answer(answer.name, answer.probability, answer.name == name) for answer in answers]


def _crops(result: Discovery, finding: Finding) -> Tensor:
    """Examples with a little around them, in a square sheet [3, h, w]; of a picture only the best
    one."""
    model, seen, crops = result.model, set[int](), list[Tensor]()
    high, wide = model.patch
    edge = AROUND * max(high, wide)
    for place, patch in finding.tokens.tolist():
        if place in seen or len(crops) == CROPS:
            continue
        seen.add(place)
        row, column = divmod(patch, model.layout.grid[1])
        image = model.preprocess.raw(result.pictures.images[place]).float().cpu().clamp(0, 1)
        image = F.pad(image, [edge] * 4, value=1.0)
        top, left = row * high, column * wide
        crop = image[:, top : top + high + 2 * edge, left : left + wide + 2 * edge]
        crops.append(F.pad(crop, [1] * 4, value=1.0))
    side = 3 if len(crops) > 4 else 2 if len(crops) > 1 else 1
    crops += [torch.ones_like(crops[0])] * (side * side - len(crops))
    rows = [torch.cat(crops[start : start + side], dim=2) for start in range(0, len(crops), side)]
    return torch.cat(rows[:side], dim=1)


def _faded(image: Tensor, chosen: Tensor) -> Tensor:
    """A raw picture [3, H, W] whose patches outside chosen [gh, gw] are nearly white."""
    image = image.float().cpu().clamp(0, 1)
    high, wide = (size // cells for size, cells in zip(image.shape[1:], chosen.shape, strict=True))
    shown = chosen.repeat_interleave(high, dim=0).repeat_interleave(wide, dim=1)
    return torch.where(shown, image, image + (1 - image) * FADED)


def _uri(image: Tensor) -> str:
    return data_uri(picture(image.float().cpu().clamp(0, 1)), photo=True)


def findings_rows(result: Discovery) -> list[dict[str, Any]]:
    """A line for each finding."""
    rows = []
    for rank, finding in enumerate(result.findings, 1):
        low, high = finding.interval
        rows.append(
            {
                "rank": rank, "class": finding.name, "flips": finding.flips,
                "control": finding.control, "low": low, "high": high,
                "patches": finding.patches, "extent": finding.extent, "layer": finding.layer,
                "on the object": finding.on_object, "evidence": finding.evidence,
                "trials": len(finding.trials),
            }
        )  # fmt: skip
    return rows


def write_pairs(result: Discovery, places: Sequence[int], folder: Path) -> int:
    """Pairs of some findings as two folders, `with` and `without`, as `pairs:WITH:WITHOUT` takes
    them; how many. PICTURE~1.png and PICTURE~2.png are pairs of one picture: a repair keeps them
    together."""
    pairs, model = result.pairs(places), result.model
    assert pairs.labels is not None
    for number, label in enumerate(pairs.labels.tolist()):
        plain = re.sub(r"[^\w~-]+", "-", pairs.ids[number])[-NAME:]
        name = Path(model.class_name(label).replace("/", "-")) / f"{plain}.png"
        for version, images in (("with", pairs.others), ("without", pairs.images)):
            file = folder / version / name
            file.parent.mkdir(parents=True, exist_ok=True)
            to_pil(model.preprocess.raw(images[number])).save(file)
    return len(pairs)
