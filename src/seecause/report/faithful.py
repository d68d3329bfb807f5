"""A classifier that cannot look elsewhere, on a page: its parts, the mask they make, and what
changes without one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seecause.faithful.drawing import part_colours, part_picture
from seecause.faithful.evaluate import patches
from seecause.faithful.interventions import intervene
from seecause.faithful.net import IFAM
from seecause.faithful.output import IFAMOutput
from seecause.report.cards import Answer
from seecause.report.overlay import data_uri, picture
from seecause.report.page import Section, fragment

NOTE = (
    "Stage 1 gives every patch to one of its parts or to the background; colours are parts. Stage 2"
    " answers from the coloured patches alone: with this mask, no dark pixel can change the answer."
    " Stage 1 sees the whole picture when it chooses the mask. The last pictures have one part"
    " taken out of the mask; the network is the same."
)
NO_PROMISE = (
    "Every patch goes to one of the parts or to the background; colours are parts. This network"
    " promises nothing about the dark pixels: {why}. The last pictures have one part taken out; the"
    " network is the same."
)


@dataclass(frozen=True)
class Tile:
    """One picture of a card, with what is written above and what is answered below."""

    title: str
    image: str  # data URI
    answers: Sequence[Answer] = ()
    changed: bool = False  # another answer than with all parts


@dataclass(frozen=True)
class PartCard:
    title: str
    tiles: Sequence[Tile]
    said: str = ""
    warnings: Sequence[str] = field(default=())


@torch.no_grad()
def part_cards(
    net: IFAM, images: Tensor, *, titles: Sequence[str], without: Sequence[int] | None = None
) -> list[PartCard]:
    """One card for each of the normalised images [B, 3, H, W]: the picture, its parts, what stage 2
    sees, and the answer `without` each of these parts, where the picture shows it (all of them
    unless told)."""
    assert net.preprocess is not None
    raw = net.preprocess.raw(images)
    whole = net(images)
    left_out = range(net.parts) if without is None else without
    changed = {}
    for part in left_out:
        with intervene(net, drop_parts=[part]):
            changed[part] = net(images)
    cards, seen = [], "stage 2 sees" if note_of(net) == NOTE else "in some part:"
    for index, title in enumerate(titles):
        there = set(whole.maps[index].argmax(dim=0).unique().tolist())
        base = int(whole.logits[index].argmax())
        share = whole.mask[index].double().mean().item()
        tiles = [
            Tile("picture", data_uri(picture(raw[index]), photo=True)),
            Tile("parts", data_uri(part_picture(raw[index], whole.maps[index]))),
            Tile(
                f"{seen} {share:.0%}",
                data_uri(picture(_seen(raw[index], whole.mask[index])), photo=True),
                _answers(net, whole, index),
            ),
        ]
        for part, out in ((part, out) for part, out in changed.items() if part in there):
            shown = data_uri(part_picture(raw[index], whole.maps[index], removed=[part]))
            tiles.append(
                Tile(
                    f"without part {part}",
                    shown,
                    _answers(net, out, index),
                    int(out.logits[index].argmax()) != base,
                )
            )
        flips = [
            str(part) for part, out in changed.items() if int(out.logits[index].argmax()) != base
        ]
        said = (
            f"answer: {_name(net, base)}; changes without part {', '.join(flips)}"
            if flips
            else f"answer: {_name(net, base)}, whichever part is left out"
        )
        nothing = (
            ["no patch is selected: the answer says nothing about the picture"]
            if bool(whole.empty[index])
            else []
        )
        cards.append(PartCard(title, tiles, said, nothing))
    return cards


def note_of(net: IFAM) -> str:
    """What the mask of this network promises, and what not."""
    if net.stage2 is None:
        return NO_PROMISE.format(
            why="its parts vote with features that have seen the whole picture"
        )
    return (
        NO_PROMISE.format(why="with gradient='soft', every patch is read a little")
        if net.gradient == "soft"
        else NOTE
    )


def parts_section(
    cards: Sequence[PartCard], parts: int, *, title: str = "What can it look at?", note: str = NOTE
) -> Section:
    """Cards under a legend of the parts' colours."""
    colours = [
        "#" + "".join(f"{round(255 * c):02x}" for c in colour)
        for colour in part_colours(parts).tolist()
    ]
    return Section(title, fragment("faithful.html.j2", cards=cards, colours=colours), note)


def _seen(raw: Tensor, mask: Tensor) -> Tensor:
    """The picture [3, H, W] with hidden patches grey."""
    return torch.where(patches(mask[None], (raw.shape[1], raw.shape[2])), raw, 0.5)


def _answers(net: IFAM, out: IFAMOutput, index: int, count: int = 2) -> list[Answer]:
    probabilities = out.logits[index].double().softmax(dim=0)
    values, best = probabilities.topk(min(count, len(probabilities)))
    return [
        Answer(_name(net, int(c)), float(p), rank == 0)
        for rank, (p, c) in enumerate(zip(values, best, strict=True))
    ]


def _name(net: IFAM, label: int) -> str:
    return net.class_names[label] if net.class_names else f"class {label}"
