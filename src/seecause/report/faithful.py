"""A classifier that cannot look elsewhere, on a page: its parts, the mask they make, and what
changes without one of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from seecause.faithful.evaluation import Evaluation, PartExamples
from seecause.faithful.metrics import mask_pixels, part_colours, part_picture, part_sheet
from seecause.faithful.net import IFAM, IFAMOutput, Intervention
from seecause.report.cards import Shot, ShotCard
from seecause.report.overlay import data_uri, picture
from seecause.report.page import Section, fragment, write_page
from seecause.target import Answer

NOTE = (
    "Stage 1 gives every patch to one of its parts or to the background; colours are parts. Stage 2"
    " answers from the coloured patches alone: with this mask, no dark pixel can change the answer."
    " Stage 1 sees the whole picture when it chooses the mask."
)
NO_PROMISE = (
    "Every patch goes to one of the parts or to the background; colours are parts. This network"
    " promises nothing about the dark pixels: {why}."
)
NUMBERS = {
    "average": "AA",
    "worst": "WGA",
    "worst_public": "WGA*",
    "background_gap": "BG-gap",
    "stage1_average": "stage 1",
    "auc": "AUC",
    "miou": "mIoU",
    "miou_public": "mIoU*",
    "miou_pictures": "IoU/picture",
    "mask_iou": "mask IoU",
    "keypoints": "Kp",
    "nmi": "NMI",
    "ari": "ARI",
    "kept": "kept",
    "empty": "empty",
}
DIGITS = {"keypoints": ".2f", "empty": ".0f"}  # others have four
NUMBER_NOTES = {
    "keypoints": (
        "Kp: mean distance of key points from where parts put them, in percent of the object's box;"
        " lower is better"
    ),
    "worst_public": "WGA*: as iFAM's public code has it, over some groups only (docs/faithful.md)",
    "miou_public": (
        "mIoU*: as iFAM's public code has it, on random cuts that hold some of the object"
        " (docs/faithful.md)"
    ),
}
LAST = " The last pictures have one part taken out of the mask; the network is the same."


def write_parts(folder: Path, examples: PartExamples, *, lead: str) -> None:
    """A page of these pictures, and a sheet of them with their parts as one picture."""
    net, cards = examples.net, part_cards(examples)
    section = parts_section(cards, net.parts, title="Parts", note=note_of(net))
    write_page(folder / "index.html", "What can it look at?", [section], lead=lead)
    assert net.preprocess is not None
    raw = net.preprocess.raw(examples.images)
    part_sheet(raw, examples.output.maps).save(folder / "parts.png")


def part_lines(data: str, examples: PartExamples) -> list[str]:
    """How many answers change without each part, and how many pictures it is in."""
    output, count = examples.output, len(examples.images)
    answers = output.logits.argmax(dim=1)
    there = [set(maps.argmax(dim=0).unique().tolist()) for maps in output.maps]
    lines = [f"{count} pictures of {data}, {examples.net.parts} parts"]
    for part, without in examples.without.items():
        changed = int((without.logits.argmax(dim=1) != answers).sum())
        held = sum(part in parts for parts in there)
        lines.append(f"part {part}: in {held} pictures; answers that change without it: {changed}")
    return lines


def part_cards(examples: PartExamples) -> list[ShotCard]:
    """One card for each picture: the picture, its parts, what stage 2 sees, and the answer without
    each of the parts."""
    assert examples.net.preprocess is not None
    raw = examples.net.preprocess.raw(examples.images)
    return [_card(examples, raw[index], index) for index in range(len(raw))]


def _card(examples: PartExamples, raw: Tensor, index: int) -> ShotCard:
    net, output = examples.net, examples.output
    maps, mask = output.maps[index], output.mask[index]
    sees = "stage 2 sees" if note_of(net) == NOTE else "in some part:"
    share, seen = mask.double().mean().item(), picture(seen_pixels(raw, mask))
    shots = [
        Shot("picture", data_uri(picture(raw), photo=True)),
        Shot("parts", data_uri(part_picture(raw, maps))),
        Shot(f"{sees} {share:.0%}", data_uri(seen, photo=True), _answers(net, output, index)),
    ]
    base, flips = int(output.logits[index].argmax()), []
    shown = set(maps.argmax(dim=0).unique().tolist())
    for part, without in examples.without.items():
        flipped = int(without.logits[index].argmax()) != base
        if flipped:
            flips.append(str(part))
        # every card has every column, so that parts can be compared down the page
        title = f"without part {part}" if part in shown else f"part {part} is not in it"
        image = data_uri(part_picture(raw, maps, removed=[part]))
        shots.append(Shot(title, image, _answers(net, without, index), flipped))
    verdict = f"answer: {_name(net, base)}, whichever part is left out"
    if flips:
        verdict = f"answer: {_name(net, base)}; changes without part {', '.join(flips)}"
    warnings = []
    if bool(output.empty[index]):
        warnings = ["no patch is selected: the answer says nothing about the picture"]
    return ShotCard(examples.titles[index], shots, verdict, warnings)


def note_of(net: IFAM) -> str:
    """What the mask of this network promises, and what not."""
    if net.stage2 is None:
        why = "its parts vote with features that have seen the whole picture"
        return NO_PROMISE.format(why=why)
    if net.options.gradient == "soft":
        return NO_PROMISE.format(why="with gradient='soft', every patch is read a little")
    return NOTE


def parts_section(
    cards: Sequence[ShotCard], parts: int, *, title: str = "What can it look at?", note: str = NOTE
) -> Section:
    """Cards under a legend of the parts' colours."""
    colours = css_colours(parts)
    return Section(title, fragment("faithful.html.j2", cards=cards, colours=colours), note + LAST)


def css_colours(parts: int) -> list[str]:
    """The colours of parts, as a page names them."""
    return [
        "#" + "".join(f"{round(255 * c):02x}" for c in colour)
        for colour in part_colours(parts).tolist()
    ]


def seen_pixels(raw: Tensor, mask: Tensor) -> Tensor:
    """The picture [3, H, W] with hidden patches grey."""
    return torch.where(mask_pixels(mask[None], (raw.shape[1], raw.shape[2])), raw, 0.5)


def _answers(net: IFAM, out: IFAMOutput, index: int) -> list[tuple[str, list[Answer]]]:
    """The two likeliest, the first marked."""
    probabilities = out.logits[index].double().softmax(dim=0)
    values, best = probabilities.topk(min(2, len(probabilities)))
    answers = [
        Answer(_name(net, int(c)), float(p), rank == 0)
        for rank, (p, c) in enumerate(zip(values, best, strict=True))
    ]
    return [("", answers)]


def _name(net: IFAM, label: int) -> str:
    return net.class_names[label] if net.class_names else f"class {label}"


def print_evaluation(evaluation: Evaluation) -> None:
    """A line for every number, so that all of them fit on a narrow terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = {"plain": evaluation.plain}
    if evaluation.changed is not None and evaluation.intervention is not None:
        columns[_in_words(evaluation.intervention)] = evaluation.changed
    title = f"{evaluation.data}, {evaluation.pictures} pictures"
    table = Table("", *columns, title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    shown = [key for key in NUMBERS if any(key in column for column in columns.values())]
    for key in shown:
        digits = DIGITS.get(key, ".4f")
        cells = [
            f"{numbers[key]:{digits}}" if key in numbers else "-" for numbers in columns.values()
        ]
        table.add_row(NUMBERS[key], *cells)
    console = Console(highlight=False)
    console.print(table)
    for key, note in NUMBER_NOTES.items():
        if key in shown:
            console.print(note)


def _in_words(change: Intervention) -> str:
    """What was changed."""
    gone = []
    if change.drop_parts:
        gone.append(f"part {', '.join(map(str, change.drop_parts))}")
    if change.quantile is not None:
        by = " by dot product" if change.by == "dot" else ""
        gone.append(f"tokens beyond {change.quantile:g}{by}")
    return f"without {' and '.join(gone)}" if gone else "no change: best on validation"
