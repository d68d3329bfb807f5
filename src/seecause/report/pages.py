"""One self-contained HTML file made of sections, which works offline, and the parts that sections
are made of: tables, cards of images and maps, grids of heads.

A section knows its content and the page knows its frame:

    Section("Which heads carry the background?", head_grid("scores", values), note="Red heads ...")
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from seecause.files import atomic_file, csv_text
from seecause.report.figures import (
    LONG,
    Scale,
    colour_bar_uri,
    data_uri,
    display_image,
    grid_image,
    heat_layer,
    is_long,
    number,
    scale_of,
)
from seecause.target import Answer

if TYPE_CHECKING:
    from seecause.data.dataset import Hole

REPRODUCE = "Everything needed to get the same numbers again"
SHORT_NOTE = 180  # characters of a note that are shown without folding
WRITTEN = 16  # heads in a layer up to which a grid writes its numbers
LONGEST = 80  # characters of a file name that is made


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: The heading.
        body: HTML, or a file that holds it where it is too large for memory.
        note: How to read it: the first sentence stands above, the rest is folded.
        terms: What short names mean, listed below.
        chapter: Opens a chapter; navigation then lists chapters only.
        short: The name in the navigation, instead of the title.
        tools: Controls for the cards.
        fold: Folds the body under these words.
    """

    title: str
    body: Markup | Path
    note: str = ""
    terms: Mapping[str, str] = field(default_factory=dict)
    chapter: str = ""
    short: str = ""
    tools: Markup = field(default=Markup())
    fold: str = ""

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @property
    def opening(self) -> str:
        """The sentence that stands above the body; the whole note where that is short."""
        if len(self.note) <= SHORT_NOTE:
            return self.note
        return re.split(r"(?<=[.!?])\s+(?=[A-Z0-9↑])", self.note, maxsplit=1)[0]

    @property
    def rest(self) -> str:
        return self.note[len(self.opening) :].strip()

    @property
    def has_script(self) -> bool:
        """Whether the body has maps or words that the page's script makes interactive."""
        return isinstance(self.body, Path) or 'class="heat"' in self.body

    def pieces(self) -> Iterator[Markup]:
        if isinstance(self.body, Path):
            with self.body.open(encoding="utf-8") as file:
                yield from map(Markup, iter(lambda: file.read(1 << 20), ""))
        else:
            yield self.body


def write_page(path: Path, title: str, sections: Sequence[Section], *, lead: str = "") -> Path:
    """Write a page atomically; `lead` is the sentence under its title."""
    with atomic_file(path) as file:
        for piece in _generate(title, sections, lead):
            file.write(piece.encode())
    return path


def render_page(title: str, sections: Sequence[Section], *, lead: str = "") -> str:
    return "".join(_generate(title, sections, lead))


def _generate(title: str, sections: Sequence[Section], lead: str) -> Iterator[str]:
    chapters = [(section.chapter, section) for section in sections if section.chapter]
    script = _environment().get_template("page.js").render()
    script = script if any(section.has_script for section in sections) else ""
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _environment()
        .get_template("page.html.j2")
        .generate(
            title=title,
            lead=lead,
            sections=sections,
            contents=chapters
            or [(section.short or section.title, section) for section in sections],
            script=Markup(script),
            script_policy=f"'sha256-{allowed}'" if script else "'none'",
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("seecause.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment


def part(name: str, *values: Any, **options: Any) -> Markup:
    """HTML by a macro of `templates/parts.html.j2`; text is escaped unless it is `Markup`."""
    macros = _environment().get_template("parts.html.j2").module
    return Markup(getattr(macros, name)(*values, **options))


def title_name(model: str) -> str:
    """A model's name for the title of a page: of a folder's path the end.

    >>> title_name("/home/me/runs/seed-1/best"), title_name("../swin"), title_name("timm:test_vit")
    ('seed-1/best', 'swin', 'timm:test_vit')
    """
    _, colon, path = model.rpartition(":")
    if colon and not path.startswith(("/", ".", "~")):
        return model
    ends = [name for name in Path(path).parts if name not in ("/", "..", "~")][-2:]
    return "/".join(ends) or model


# Text, tables and protocol.


def table(
    rows: Iterable[Sequence[Any]], *, head: Sequence[str] = (), marked: Sequence[int] = ()
) -> Markup:
    """A table of text.

    Args:
        rows: Cells are text, `Markup`, or a dict with "text" and optional "title" (shown when
            pointed at) and "strength" (percent of shading).
        head: Titles of the columns.
        marked: Rows that are shaded.
    """
    return part("table", [list(row) for row in rows], head, marked)


def folded(summary: str, body: Markup) -> Markup:
    """HTML that is shown when its summary is clicked."""
    return Markup('<details class="fold"><summary>{}</summary>{}</details>').format(summary, body)


def warnings(lines: Sequence[str]) -> Markup:
    return Markup("").join(Markup('<p class="warning">{}</p>').format(line) for line in lines)


def verdict_box(lines: Sequence[str]) -> Markup:
    """A conclusion in a frame, with the findings behind it as a list."""
    return part("verdict", lines)


def skipped_section(skipped: Sequence[Hole]) -> list[Section]:
    """Images that could not be read; no section if there are none."""
    if not skipped:
        return []
    return [Section("Skipped images", table((hole.name, hole.reason) for hole in skipped))]


def protocol_section(manifests: Sequence[Mapping[str, Any]]) -> Section:
    """How each result was computed: what all manifests share, then the rest of each."""
    tables = [_protocol(manifest) for manifest in manifests]
    shared: dict[str, str] = {}
    if len(tables) > 1:
        common = set.intersection(*(set(rows.items()) for rows in tables))
        shared = {key: value for key, value in tables[0].items() if (key, value) in common}
    own = [{key: value for key, value in rows.items() if key not in shared} for rows in tables]
    note = f"{REPRODUCE}. The fingerprint names the exact weights."
    fold = "Model, options, versions, fingerprints"
    return Section("Protocol", part("protocol", [shared, *own]), note, fold=fold)


def _protocol(manifest: Mapping[str, Any]) -> dict[str, str]:
    def text(name: str) -> str:
        return str(manifest.get(name, ""))

    options = {**manifest.get("options", {}), **manifest.get("used", {})}
    preprocessing = manifest.get("preprocessing")
    rows = {
        "method": text("method"),
        "options": ", ".join(f"{key}={value}" for key, value in options.items()) or "none",
        "model": text("model") + (" with RANDOM weights" if manifest.get("random_weights") else ""),
        "fingerprint": text("model_fingerprint"),
        "patch grid": " x ".join(map(str, manifest.get("grid", ()))),
        "readout": text("readout"),
        **({} if preprocessing is None else _preprocessing(preprocessing)),
        "device, dtype": f"{text('device')}, {text('dtype').removeprefix('torch.')}".strip(", "),
        "versions": ", ".join(f"{name} {v}" for name, v in manifest.get("versions", {}).items()),
        "data fingerprint": text("data_fingerprint"),
    }
    return {key: value for key, value in rows.items() if value}


def _preprocessing(record: Mapping[str, Any]) -> dict[str, str]:
    from seecause.models.preprocess import from_record

    rows = {record.get("kind", "images"): from_record(record).geometry()}
    if "mean" in record:
        mean, std = (", ".join(f"{value:.4g}" for value in record[key]) for key in ("mean", "std"))
        rows["normalised by"] = f"mean {mean}; std {std}"
    return rows


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV of rows that may lack columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return csv_text([columns, *([row.get(name, "") for name in columns] for row in rows)])


def file_names(names: Sequence[str], suffix: str) -> list[str]:
    """A file name for each of some names: without folders or unusual characters, and no two equal
    on any file system."""
    taken: set[str] = set()
    made = []
    for name in names:
        plain = re.sub(r"[^\w.]+", "-", name).strip(".-")[:LONGEST] or "image"
        unique, count = plain, 1
        while unique.casefold() in taken:
            count += 1
            unique = f"{plain}-{count}"
        taken.add(unique.casefold())
        made.append(unique + suffix)
    return made


# Cards: one for each image, with its maps, versions and predictions.


@dataclass(frozen=True, eq=False)
class MapView:
    """A map [gh, gw] under a title; `native` is the same at image resolution, if there is one."""

    title: str
    values: Tensor
    scale: Scale
    native: Tensor | None = None
    answers: Sequence[Answer] = ()  # where maps of several models share an image

    @property
    def layer(self) -> str:
        """At the resolution of the map: the browser enlarges it, so that pages stay small."""
        return data_uri(heat_layer(self.values if self.native is None else self.native, self.scale))

    @property
    def grid(self) -> str:
        own = self.native is not None
        scale = scale_of(self.values, signed=self.scale.signed) if own else self.scale
        return data_uri(grid_image(self.values, scale))

    @property
    def bar(self) -> str:
        return colour_bar_uri(self.scale.colormap, self.scale.signed)

    @property
    def numbers(self) -> str:
        """All values row by row, for the read-out under the pointer."""
        return json.dumps([number(value) for value in self.values.flatten().tolist()])

    def top(self, count: int = 5) -> list[tuple[int, int, str]]:
        """Row, column and value of the patches with the highest values."""
        values, order = self.values.flatten().topk(min(count, self.values.numel()))
        places = [divmod(place, self.values.shape[1]) for place in order.tolist()]
        return [(*at, number(value)) for at, value in zip(places, values.tolist(), strict=True)]


@dataclass(frozen=True, eq=False)
class Strip:
    """Raw pixels [3, H, W], the predictions for them, and their maps."""

    image: Tensor
    maps: Sequence[MapView]
    label: str = ""
    answers: Sequence[Answer] = ()
    outline: Image.Image | None = None  # drawn over the image and over every map

    @property
    def picture(self) -> str:
        return data_uri(display_image(self.image), photo=True)

    @property
    def outline_uri(self) -> str:
        return "" if self.outline is None else data_uri(self.outline)


@dataclass(frozen=True)
class Shot:
    """A finished image (a data URI) under a title, with predictions and rows of a table below."""

    title: str
    uri: str
    answers: Sequence[tuple[str, Sequence[Answer]]] = ()  # for each model, under its name
    changed: bool = False  # another prediction than for the whole image
    rows: Sequence[Mapping[str, str]] = ()


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
        """Films are long: their maps are shown one below the other."""
        return any(is_long(strip.image.shape[2], strip.image.shape[1]) for strip in self.strips)

    @property
    def columns(self) -> int:
        if not self.strips:
            return len(self.shots)
        return LONG if self.wide else 1 + max(len(strip.maps) for strip in self.strips)


def cards_html(cards: Sequence[Card]) -> Markup:
    return part("cards", cards)


class CardFile:
    """Cards written to a file one by one, for pages with any number of images. The file is deleted
    when the block ends."""

    def __init__(self, path: Path):
        self.path, self._begun = path, False

    def __enter__(self) -> CardFile:
        self._file = self.path.open("w", encoding="utf-8")
        return self

    def add(self, card: Card) -> None:
        if not self._begun:
            self._file.write(f'<div class="cards" style="--columns: {card.columns}">\n')
            self._begun = True
        self._file.write(part("card", card) + "\n")

    def finish(self) -> Path:
        """The file, as the body of a section."""
        self._file.write("</div>\n" if self._begun else "")
        self._file.flush()
        return self.path

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


# Grids of heads.


def head_grid(
    title: str,
    values: Tensor,
    *,
    chosen: Iterable[tuple[int, int]] = (),
    errors: Tensor | None = None,
    without: Mapping[str, Tensor] | None = None,
    most: float = 0.0,
    key: str = "",
) -> Markup:
    """A coloured cell for each layer (down) and head (across).

    Args:
        title: Stands above the grid.
        values: [L, H]; NaN: not measured; minus infinity: the head must stay.
        chosen: Heads that are outlined.
        errors: Standard errors [L, H], shown when a cell is pointed at.
        without: What the model is like without each head [L, H] by name, shown likewise.
        most: The value of full colour; 0 takes the largest.
        key: A remark below the grid.
    """
    finite = values[values.isfinite()].abs()
    most = most or (float(finite.max()) if len(finite) else 0.0) or 1.0
    power = min(0, math.floor(math.log10(most)) - 1)
    written, outlined = values.shape[1] <= WRITTEN, set(chosen)
    rows = []
    for layer, row in enumerate(values.tolist()):
        rows.append([])
        for head, value in enumerate(row):
            where = f"layer {layer}, head {head}"
            if not math.isfinite(value):
                stays = value == -math.inf
                title_text = "must stay, its removal costs too much" if stays else "not measured"
                cell = ("none", 0, "stays" if stays and written else "", title_text)
            else:
                about = number(value)
                if errors is not None and not math.isnan(float(errors[layer, head])):
                    about += f" ± {number(float(errors[layer, head]))}"
                costs = [f"{n} {number(float(v[layer, head]))}" for n, v in (without or {}).items()]
                about += f"; without it: {', '.join(costs)}" if costs else ""
                text = f"{value * 10**-power:z.0f}" if written else ""
                strength = min(90, round(90 * abs(value) / most))
                cell = ("for" if value >= 0 else "against", strength, text, about)
            sign, strength, text, about = cell
            classes = f"{sign} chosen" if (layer, head) in outlined else sign
            rows[-1].append((classes, strength, text, f"{where}: {about}"))
    unit = f"numbers are multiples of {number(10.0**power)}" if power and written else ""
    remarks = ["rows: layers, columns: heads", key, unit]
    return part("head_grid", title, rows, "; ".join(filter(None, remarks)))


def side_by_side(grids: Iterable[Markup]) -> Markup:
    return Markup('<div class="head-grids">{}</div>').format(Markup("").join(grids))
