"""Answers in words, and the box or the region that was asked about, drawn on its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from seecause.attribution.result import Attribution
from seecause.report.overlay import number, outline_layer
from seecause.target import Answer

HOW_TO_READ = (
    "The line marks the box or the pixels that were asked about; thin lines are other boxes, by"
    " number. Maps are over the places that a row reads (encoder tokens, feature maps), which have"
    " seen their surroundings."
)


def answer_text(answers: Sequence[Answer]) -> str:
    """The answer in words: what the model says, and what was explained where that is something
    else."""
    best, explained = answers[0], [a for a in answers if a.explained]
    words = f"{best.name}, probability {best.probability:.3f}"
    if not explained or explained == [best]:
        return words
    named = [f"{answer.name}, {answer.probability:.3f}" for answer in explained]
    return f"{words}; explained: {' against '.join(named)}"


def row_text(row: Mapping[str, Any]) -> str:
    """What was asked of a detector or a model of pixels, and what it says."""
    if row["answers"]:
        answers = [Answer(**answer) for answer in row["answers"]]
        return f"{row['row']}: {answer_text(answers)}"
    return f"{row['explained']}: {number(row['value'])}"


def box_texts(row: Mapping[str, Any]) -> list[str]:
    """All boxes that the detector is sure of."""
    return [
        f"box {box['index']}: {box['name']}, probability {box['probability']:.3f}"
        for box in row["boxes"]
    ]


def outline(run: Attribution, index: int, size: tuple[int, int]) -> Image.Image | None:
    """A layer of width x height: the box or the region that was asked about, and thinly the other
    boxes that the detector is sure of. None where the whole picture was asked about."""
    if run.regions is None:
        return None
    target = run.manifest["target"]
    asked = target["row"][index].removeprefix("box ")
    boxes = {str(box["index"]): box["place"] for box in target["boxes"][index]}
    others = {name: place for name, place in boxes.items() if name != asked}
    return outline_layer(size, run.regions[index], others)
