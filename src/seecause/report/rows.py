"""Answers in words, and the box or the region that was asked about, drawn on its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from seecause.attribution.result import Attribution
from seecause.models.signals import Film, from_record
from seecause.report.overlay import number, outline_layer
from seecause.target import Answer

HOW_TO_READ = (
    "The line marks the box or the pixels that were asked about; thin lines are other boxes, by"
    " number. Maps are over the places that a row reads (encoder tokens, feature maps), which have"
    " seen their surroundings."
)

KINDS = {  # how inputs that are no pictures are drawn
    "bag": "Instances of a bag are shown row by row, in the order they came.",
    "film": (
        "A film is shown as frames in a row, one for each time that the model reads; columns of"
        " patches count through all of them."
    ),
    "spectrogram": (
        "Sound is shown as its spectrogram: time runs to the right, frequency upwards; rows of"
        " patches count from the highest."
    ),
}


def drawn(run: Attribution) -> Attribution:
    """A result turned as people look at it: frames of a film in a row, sound with time to the
    right and frequency upwards. Pictures stay as they are."""
    record = run.manifest.get("preprocessing") or {}
    if "kind" not in record or run.manifest.get("drawn"):
        return run
    steps = from_record(record)
    turned: dict[str, Any] = {"images": steps.drawn(run.images, 2).clone()}
    if isinstance(steps, Film):
        turned["images"][..., steps.size[1] :: steps.size[1]] = 1  # a line where a frame begins
    for name in ("maps", "errors"):
        tensor = getattr(run, name)
        turned[name] = None if tensor is None else steps.drawn(tensor.flatten(1, -2), 1)
    for name in ("native", "regions"):
        tensor = getattr(run, name)
        turned[name] = None if tensor is None else steps.drawn(tensor, 1)
    return replace(run, **turned, class_maps=None, manifest={**run.manifest, "drawn": True})


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
