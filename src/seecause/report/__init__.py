"""One self-contained HTML file made of sections, which works offline, and the parts that sections
are made of: tables, cards of images and maps, grids of heads.

A section knows its content and the page knows its frame:

    Section("Which heads carry the background?", head_grid("scores", values), note="Red heads ...")
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from seecause.files import atomic_file, csv_text
from seecause.report.figures import (
    SKIPPED,
    Scale,
    colours,
    data_uri,
    fixed,
    number,
    page_image,
)

if TYPE_CHECKING:
    from seecause.data.dataset import SkippedImage
    from seecause.target import Answer

FEW = 8  # most images that are shown with their maps at once; of more, thumbnails come first
TOGETHER = 200  # thumbnails on a page, and cards in a file
LONGEST = 1000  # maximum characters of a value in a protocol; the manifest has it in full
PROTOCOL = (  # fields of a manifest that a page shows
    *("method", "options", "used", "question", "answer", "bank", "sampling", "model"),
    *("model_fingerprint", "fingerprint", "random_weights", "grid", "image_tokens", "readout"),
    *("preprocessing", "device", "dtype", "versions", "torch", "data", "data_fingerprint"),
)


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: The heading.
        body: HTML, or an open file that holds it where it is too large for memory.
        note: How to read it.
        terms: Explanations of short names, folded below.
        chapter: Opens a chapter; navigation then lists chapters only.
        fold: Folds the body under these words.
    """

    title: str
    body: Markup | IO[str]
    note: str = ""
    terms: Mapping[str, str] = field(default_factory=dict)
    chapter: str = ""
    fold: str = ""

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @property
    def has_script(self) -> bool:
        """Whether the body has maps or words that the page's script makes interactive."""
        parts = ('class="heat"', 'class="browse"')
        return not isinstance(self.body, str) or any(part in self.body for part in parts)

    def pieces(self) -> Iterator[Markup]:
        """The body, piece by piece."""
        if isinstance(self.body, str):
            yield self.body
            return
        self.body.seek(0)
        while piece := self.body.read(1 << 20):
            yield Markup(piece)


def write_page(
    path: Path, title: str, sections: Sequence[Section], *, lead: str = "", beside: bool = False
) -> Path:
    """Write a page atomically.

    Args:
        path: The file.
        title: The heading.
        sections: What the page shows.
        lead: The sentence under the title.
        beside: Whether it may load images and data from files beside it.
    """
    chapters = [(section.chapter, section) for section in sections if section.chapter]
    interactive = any(section.has_script for section in sections)
    tables = {name: _base64(colours(name).tobytes()) for name in ("RdBu_r", "inferno")}
    values = {"colours": tables, "skipped": SKIPPED, "together": TOGETHER}
    script = _environment().get_template("page.js").render(values) if interactive else ""
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    pieces = (
        _environment()
        .get_template("page.html.j2")
        .generate(
            title=title,
            lead=lead,
            sections=sections,
            contents=chapters or [(section.title, section) for section in sections],
            script=Markup(script),
            script_policy=f"'sha256-{allowed}'" if script else "'none'",
            beside=beside,
        )
    )
    with atomic_file(path) as file:
        for piece in pieces:
            file.write(piece.encode(errors="replace"))  # a file's name may be no text
    return path


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


@cache
def _environment(package: str = "seecause.report") -> Environment:
    environment = Environment(
        loader=PackageLoader(package),
        autoescape=lambda name: not (name or "").endswith(".txt"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"fmt": format, "repr": repr, "number": number, "fixed": fixed}
    environment.tests["finite"] = math.isfinite
    return environment


def text(name: str, package: str = "seecause.report", **values: Any) -> str:
    """Text by the template `templates/NAME.txt` of a package."""
    return _environment(package).get_template(f"{name}.txt").render(values)


def sentences(name: str, **values: Any) -> list[str]:
    """The paragraphs of a text, each as one line."""
    paragraphs = text(name, **values).split("\n\n")
    return [" ".join(each.split()) for each in paragraphs if each.strip()]


def part(name: str, *values: Any, **options: Any) -> Markup:
    """HTML by a macro of `templates/parts.html.j2`; text is escaped unless it is `Markup`."""
    macros = _environment().get_template("parts.html.j2").module
    return Markup(getattr(macros, name)(*values, **options))


# Text, tables and protocol.


def table(
    rows: Iterable[Sequence[Any]], *, head: Sequence[str] = (), marked: Sequence[int] = ()
) -> Markup:
    """A table of text or `Markup` with titles of columns; `marked` rows are shaded."""
    return part("table", [list(row) for row in rows], head, marked)


def warnings(lines: Iterable[str]) -> Markup:
    """Lines in a highlighted box."""
    return part("warnings", lines)


def verdict_box(lines: Sequence[str]) -> Markup:
    """A conclusion in a frame, with the findings behind it as a list."""
    return part("verdict", lines)


def skipped_section(skipped: Sequence[SkippedImage]) -> list[Section]:
    """Images that could not be read; no section if there are none."""
    if not skipped:
        return []
    return [Section("Skipped images", table((image.name, image.reason) for image in skipped))]


def protocol_section(records: Sequence[Mapping[str, Any]]) -> Section:
    """How each result was computed, from its manifest: one table a record."""
    fold = "Everything needed to get the same numbers again"
    return Section("Protocol", part("protocol", records, PROTOCOL, LONGEST), fold=fold)


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV of rows that may lack columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return csv_text([columns, *([row.get(name, "") for name in columns] for row in rows)])


# Cards: one for each image, with its maps, versions and predictions.


@dataclass(frozen=True, eq=False)
class MapView:
    """A map [gh, gw] under a title; `native` is the same at image resolution, if there is one."""

    title: str
    values: Tensor
    scale: Scale
    native: Tensor | None = None
    answers: Sequence[Answer] = ()  # predictions, if maps of several models share an image

    @property
    def numbers(self) -> str:
        """All values row by row, float32 in base64: the page colours them, and reads them out."""
        return _base64(self.values.detach().float().cpu().numpy().tobytes())

    @property
    def pixels(self) -> str:
        """The map at image resolution in 8 bits of its scale."""
        assert self.native is not None
        unit = self.scale.unit(self.native.detach().float().cpu())
        return _base64((unit * 255).round().byte().numpy().tobytes())


@dataclass(frozen=True, eq=False)
class Strip:
    """Raw pixels [3, H, W], the predictions for them, and their maps."""

    image: Tensor
    maps: Sequence[MapView]
    label: str = ""
    answers: Sequence[Answer] = ()
    outline: Image.Image | None = None  # drawn over the image and over every map
    file: str = ""  # of the image, beside the page; without one it is embedded

    @property
    def photo(self) -> str:
        return self.file or data_uri(page_image(self.image), photo=True)

    @property
    def outline_uri(self) -> str:
        return "" if self.outline is None else data_uri(self.outline)


@dataclass(frozen=True)
class Shot:
    """A finished image (a data URI) under a title, with predictions below."""

    title: str
    uri: str
    answers: Sequence[tuple[str, Sequence[Answer]]] = ()  # for each model, under its name
    changed: bool = False  # another prediction than for the whole image


@dataclass(frozen=True)
class Card:
    """One image: strips of maps, or shots of its versions, or both."""

    title: str
    strips: Sequence[Strip] = ()
    shots: Sequence[Shot] = ()
    caption: str = ""
    warnings: Sequence[str] = ()
    data: Mapping[str, str] = field(default_factory=dict)  # what cards are sorted and filtered by

    @property
    def wide(self) -> bool:
        """Whether images are long, as films are: maps are shown one below the other."""
        return any(strip.image.shape[2] >= 4 * strip.image.shape[1] for strip in self.strips)

    @property
    def columns(self) -> int:
        if self.wide:
            return 4
        return max([len(self.shots), *(1 + len(strip.maps) for strip in self.strips)])


def cards_html(cards: Sequence[Card]) -> Markup:
    """Cards in a grid; a sentence where there are none."""
    return part("cards", cards) if cards else Markup("<p>There is no such image.</p>")


# Grids of heads.


def head_grid(
    title: str,
    values: Tensor,
    *,
    chosen: Iterable[tuple[int, int]] = (),
    errors: Tensor | None = None,
    most: float = 0.0,
) -> Markup:
    """A coloured cell for each layer (down) and head (across); its value is shown when it is
    pointed at.

    Args:
        title: Stands above the grid.
        values: [L, H]; NaN: not measured; minus infinity: the head must stay.
        chosen: Heads that are outlined.
        errors: Standard errors [L, H].
        most: The value of full colour; 0 takes the largest.
    """
    most = most or float(values.nan_to_num(0, 0, 0).abs().max()) or 1.0
    shown = None if errors is None else errors.tolist()
    return part("head_grid", title, values.tolist(), shown, set(chosen), most)
