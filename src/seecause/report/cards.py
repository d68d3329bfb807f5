"""Cards: pictures with maps beside them, one card a picture, any number of maps and variants of the
picture in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from seecause.report.overlay import (
    LONG,
    Scale,
    data_uri,
    grid_image,
    heat_layer,
    is_long,
    number,
    picture,
    scale_of,
)
from seecause.report.page import HtmlFile, fragment
from seecause.target import Answer

WRITTEN = 16  # heads in a row that still have room for their numbers


@dataclass(frozen=True, eq=False)
class MapView:
    """One map [gh, gw] of a picture. `native` [H, W], where the method has pixels of its own, is
    what is laid over the picture; `scale` is the range of what is laid over it."""

    title: str
    values: Tensor
    scale: Scale
    native: Tensor | None = None
    answers: Sequence[Answer] = ()  # where maps of several models share a picture, of each its own

    @property
    def layer(self) -> str:
        """At patch resolution: the browser enlarges it, smooth or in patches, so a page stays
        small."""
        return data_uri(heat_layer(self.values if self.native is None else self.native, self.scale))

    @property
    def grid(self) -> str:
        return data_uri(
            grid_image(
                self.values,
                self.scale
                if self.native is None
                else scale_of(self.values, signed=self.scale.signed),
            )
        )

    @property
    def bar(self) -> str:
        return colour_bar(self.scale.colormap, self.scale.signed)

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def numbers(self) -> str:
        """Row by row, for the read-out under the pointer."""
        return json.dumps([number(v) for v in self.values.flatten().tolist()])

    def top(self, count: int = 5) -> list[tuple[int, int, str]]:
        """The patches with the highest values: row and column, from 0, and the value."""
        values, order = self.values.flatten().topk(min(count, self.values.numel()))
        columns = self.shape[1]
        return [
            (int(i) // columns, int(i) % columns, number(float(v)))
            for v, i in zip(values, order, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Strip:
    """A picture [3, H, W] in [0, 1], what the model answers, and its maps."""

    image: Tensor
    maps: Sequence[MapView]
    label: str = ""
    answers: Sequence[Answer] = ()
    outline: Image.Image | None = None  # drawn on the picture and on every map

    @property
    def picture(self) -> str:
        return data_uri(picture(self.image), photo=True)

    @property
    def outline_uri(self) -> str:
        return "" if self.outline is None else data_uri(self.outline)


@dataclass(frozen=True, eq=False)
class TitledPicture:
    """A finished picture under a title, with rows of a table below it where it has some."""

    title: str
    image: Image.Image
    rows: Sequence[Mapping[str, str]] = ()

    @property
    def uri(self) -> str:
        return data_uri(self.image, photo=True)


@dataclass(frozen=True)
class Card:
    title: str
    strips: Sequence[Strip]
    caption: str = ""
    warnings: Sequence[str] = ()
    shown: Sequence[TitledPicture] = ()
    data: Mapping[str, str] = field(default_factory=dict)  # what cards are sorted and filtered by

    @property
    def wide(self) -> bool:
        """Films and sounds are long: their maps are shown one below the other."""
        return any(is_long(strip.image.shape[2], strip.image.shape[1]) for strip in self.strips)

    @property
    def columns(self) -> int:
        return LONG if self.wide else 1 + max(len(strip.maps) for strip in self.strips)


@dataclass(frozen=True)
class Shot:
    """A version of a picture (a data URI), with one list of answers for each model."""

    title: str
    picture: str
    answers: Sequence[tuple[str, Sequence[Answer]]] = ()
    changed: bool = False  # another answer than the whole picture's


@dataclass(frozen=True)
class ShotCard:
    title: str
    shots: Sequence[Shot]
    caption: str = ""
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class GridCell:
    """One cell of a coloured grid: how strong, for or against, and what is written in it."""

    strength: int  # percent of the full colour
    sign: str
    text: str
    title: str  # shown when it is pointed at
    chosen: bool = False


@dataclass(frozen=True)
class HeadGrid:
    """A cell for each layer (down) and head (across), under a title; `key` says below what is
    outlined."""

    title: str
    cells: Sequence[Sequence[GridCell]]
    key: str = ""


def grid_of(
    title: str,
    values: Tensor,
    chosen: Tensor | None = None,
    key: str = "",
    *,
    errors: Tensor | None = None,
    most: float = 0.0,
) -> HeadGrid:
    """Values [L, H] as a table; `chosen` [L, H] are outlined, `errors` [L, H] stand beside a value
    that is pointed at. `most` has the full colour; 0: the largest value."""
    most = most or float(values.abs().max()) or 1.0
    rows = []
    for layer, row in enumerate(values.tolist()):
        rows.append([])
        for head, value in enumerate(row):
            text = "" if len(row) > WRITTEN else f"{value:z.2f}"
            text = text.replace("0.", ".") if abs(value) < 1 else text
            about = f"layer {layer}, head {head}: {number(value)}"
            if errors is not None:
                about += f" ± {number(float(errors[layer, head]))}"
            outlined = chosen is not None and bool(chosen[layer, head])
            strength = round(90 * abs(value) / most)
            rows[-1].append(GridCell(strength, sign_of(value), text, about, outlined))
    return HeadGrid(title, rows, key)


def head_grids(grids: Sequence[HeadGrid]) -> Markup:
    """Side by side."""
    return fragment("head_grid.html.j2", grids=grids)


def sign_of(value: float) -> str:
    return "for" if value >= 0 else "against"


class CardFile:
    """Cards written one by one, for a page of any number of them; the file goes when the block
    ends."""

    def __init__(self, path: Path):
        self._html, self._begun = HtmlFile(path), False

    def __enter__(self) -> CardFile:
        self._file = self._html.path.open("w", encoding="utf-8")
        return self

    def add(self, card: Card) -> None:
        if not self._begun:
            self._file.write(f'<div class="cards" style="--columns: {card.columns}">\n')
            self._begun = True
        self._file.write(fragment("card.html.j2", card=card) + "\n")

    def finish(self) -> HtmlFile:
        """All cards, as the body of a section."""
        self._file.write("</div>\n" if self._begun else "")
        self._file.flush()
        return self._html

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._html.path.unlink(missing_ok=True)


def render_cards(cards: Sequence[Card]) -> Markup:
    return fragment("cards.html.j2", cards=cards)


@cache
def colour_bar(colormap: str, signed: bool) -> str:
    """The colormap as a strip one pixel high."""
    return data_uri(grid_image(torch.linspace(0, 1, 128)[None], Scale(0, 1, signed, colormap)))
