"""Pages of iFAM: parts of images, what the second stage sees, and what changes without a part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from seecause.faithful.evaluation import mask_pixels, part_colours, part_picture, part_sheet
from seecause.report.figures import data_uri, display_image
from seecause.report.pages import Card, Section, Shot, cards_html, part, write_page
from seecause.target import Answer

if TYPE_CHECKING:
    from seecause.faithful.evaluation import Evaluation, PartExamples
    from seecause.faithful.net import IFAM, IFAMOutput, Intervention

NOTE = (
    "Stage 1 gives every patch to one of its parts or to the background; colours are parts. Stage 2"
    " predicts from the coloured patches alone: with this mask, no dark pixel can change the"
    " prediction. Stage 1 sees the whole image when it chooses the mask."
)
NO_PROMISE = (
    "Every patch goes to one of the parts or to the background; colours are parts. This network"
    " promises nothing about the dark pixels: {}."
)
NUMBERS = {  # name in results -> name in tables
    "average": "AA",
    "worst": "WGA",
    "worst_public": "WGA*",
    "background_gap": "BG-gap",
    "stage1_average": "stage 1",
    "auc": "AUC",
    "miou": "mIoU",
    "miou_public": "mIoU*",
    "miou_pictures": "IoU/image",
    "mask_iou": "mask IoU",
    "keypoints": "Kp",
    "nmi": "NMI",
    "ari": "ARI",
    "kept": "kept",
    "empty": "empty",
}
DIGITS = {"keypoints": ".2f", "empty": ".0f"}  # others have four
NUMBER_NOTES = {
    "keypoints": "Kp: mean distance of key points from where parts put them, in percent of the"
    " object's box; lower is better",
    "worst_public": "WGA*: as iFAM's public code has it, over some groups only (docs/faithful.md)",
    "miou_public": "mIoU*: as iFAM's public code has it, on random cuts that hold some of the"
    " object (docs/faithful.md)",
}


def write_parts(folder: Path, examples: PartExamples, *, lead: str) -> None:
    """Write a page of some images with their parts (index.html), and one sheet (parts.png)."""
    section = parts_section(part_cards(examples), examples.net, title="Parts")
    write_page(folder / "index.html", "What can it look at?", [section], lead=lead)
    assert examples.net.preprocess is not None
    raw = examples.net.preprocess.raw(examples.images)
    part_sheet(raw, examples.output.maps).save(folder / "parts.png")


def part_lines(data: str, examples: PartExamples) -> list[str]:
    """How many predictions change without each part, and how many images it is in."""
    output, count = examples.output, len(examples.images)
    predicted = output.logits.argmax(dim=1)
    present = [set(maps.argmax(dim=0).unique().tolist()) for maps in output.maps]
    lines = [f"{count} images of {data}, {examples.net.parts} parts"]
    for number, without in examples.without.items():
        changed = int((without.logits.argmax(dim=1) != predicted).sum())
        held = sum(number in parts for parts in present)
        lines.append(f"part {number}: in {held} images; predictions changed without it: {changed}")
    return lines


def part_cards(examples: PartExamples) -> list[Card]:
    """One card for each image: its parts, what stage 2 sees, and the prediction without each
    part."""
    assert examples.net.preprocess is not None
    raw = examples.net.preprocess.raw(examples.images)
    return [_card(examples, raw[index], index) for index in range(len(raw))]


def _card(examples: PartExamples, raw: Tensor, index: int) -> Card:
    net, output = examples.net, examples.output
    maps, mask = output.maps[index], output.mask[index]
    sees = "stage 2 sees" if note_of(net) == NOTE else "in some part:"
    share = f"{sees} {mask.double().mean().item():.0%}"
    seen = data_uri(display_image(seen_pixels(raw, mask)), photo=True)
    shots = [
        Shot("image", data_uri(display_image(raw), photo=True)),
        Shot("parts", data_uri(part_picture(raw, maps))),
        Shot(share, seen, _predictions(net, output, index)),
    ]
    base, flips = int(output.logits[index].argmax()), []
    present = set(maps.argmax(dim=0).unique().tolist())
    for number, without in examples.without.items():
        changed = int(without.logits[index].argmax()) != base
        flips += [str(number)] * changed
        # every card has every column, so that parts can be compared down the page
        title = f"without part {number}" if number in present else f"part {number} is not in it"
        image = data_uri(part_picture(raw, maps, removed=[number]))
        shots.append(Shot(title, image, _predictions(net, without, index), changed))
    end = f"changes without part {', '.join(flips)}" if flips else "whichever part is removed"
    empty = "no patch is selected: the prediction says nothing about the image"
    return Card(
        examples.titles[index],
        shots=shots,
        caption=f"prediction: {_name(net, base)}; {end}",
        warnings=[empty] if bool(output.empty[index]) else [],
    )


def note_of(net: IFAM) -> str:
    """What the mask of this network promises, and what not."""
    if net.stage2 is None:
        return NO_PROMISE.format("its parts vote with features that have seen the whole image")
    if net.options.gradient == "soft":
        return NO_PROMISE.format("with gradient='soft', every patch is read a little")
    return NOTE


def parts_section(
    cards: Sequence[Card], net: IFAM, *, title: str = "What can it look at?", note: str = ""
) -> Section:
    """Cards under a legend of the parts' colours."""
    body = part("swatches", css_colours(net.parts)) + cards_html(cards)
    last = " The last images have one part removed from the mask; the network is the same."
    return Section(title, body, (note or note_of(net)) + last)


def css_colours(parts: int) -> list[str]:
    """The colours of parts, as CSS names them."""
    return [
        "#" + "".join(f"{round(255 * c):02x}" for c in colour)
        for colour in part_colours(parts).tolist()
    ]


def seen_pixels(raw: Tensor, mask: Tensor) -> Tensor:
    """The image [3, H, W] with hidden patches grey."""
    return torch.where(mask_pixels(mask[None], (raw.shape[1], raw.shape[2])), raw, 0.5)


def _predictions(net: IFAM, out: IFAMOutput, index: int) -> list[tuple[str, list[Answer]]]:
    """The two likeliest classes, the first marked."""
    probabilities = out.logits[index].double().softmax(dim=0)
    values, best = probabilities.topk(min(2, len(probabilities)))
    pairs = enumerate(zip(best.tolist(), values.tolist(), strict=True))
    return [("", [Answer(_name(net, label), p, rank == 0) for rank, (label, p) in pairs])]


def _name(net: IFAM, label: int) -> str:
    return net.class_names[label] if net.class_names else f"class {label}"


def evaluation_table(evaluation: Evaluation) -> tuple[list[str], list[list[str]], list[str]]:
    """Column titles, a row for every number, and notes on some of them, for the terminal."""
    columns = {"plain": evaluation.plain}
    if evaluation.changed is not None and evaluation.intervention is not None:
        columns[_in_words(evaluation.intervention)] = evaluation.changed
    known = [key for key in NUMBERS if any(key in column for column in columns.values())]
    rows = []
    for key in known:
        digits = DIGITS.get(key, ".4f")
        cells = [f"{column[key]:{digits}}" if key in column else "-" for column in columns.values()]
        rows.append([NUMBERS[key], *cells])
    return ["", *columns], rows, [note for key, note in NUMBER_NOTES.items() if key in known]


def _in_words(change: Intervention) -> str:
    removed = []
    if change.drop_parts:
        removed.append(f"part {', '.join(map(str, change.drop_parts))}")
    if change.quantile is not None:
        by = " by dot product" if change.by == "dot" else ""
        removed.append(f"tokens beyond {change.quantile:g}{by}")
    return f"without {' and '.join(removed)}" if removed else "no change: best on validation"
