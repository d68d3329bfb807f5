"""One self-contained HTML file made of sections. Works from disk and offline, and in ten years.

A job that wants to show something returns a `Section`; the page knows nothing about jobs:

    Section("Which heads carry the background?", body=fragment("heads.html.j2", heads=heads),
    note="Red heads ...")
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from seecause.files import atomic_file, digest
from seecause.report.overlay import fixed

if TYPE_CHECKING:
    from seecause.data.dataset import Hole

AGAIN = "Everything needed to get the same numbers again"
SHORT_NOTE = 180  # characters that stand above a picture without being in its way


def title_name(model: str) -> str:
    """A model's name in the title of a page: of a folder's path its end, which tells it apart.

    >>> title_name("/home/me/runs/seed-1/best"), title_name("../swin"), title_name("timm:test_vit")
    ('seed-1/best', 'swin', 'timm:test_vit')
    """
    _, colon, path = model.rpartition(":")
    local = not colon or path.startswith(("/", ".", "~"))
    ends = [part for part in Path(path).parts if part not in ("/", "..", "~")][-2:]
    return "/".join(ends) or model if local else model


@dataclass(frozen=True)
class HtmlFile:
    """Ready HTML in a file: the body of a section that is too large to hold."""

    path: Path

    def __str__(self) -> str:
        """What stands for it until the page is written."""
        return f"[[{digest(str(self.path))}]]"


@dataclass(frozen=True)
class Section:
    """A part of the page: ready HTML under a title, and in plain words how to read it: the first
    sentence of the `note` stands above, the rest is folded. `terms` says below what its short names
    mean; `tools` are controls for the cards. A body that few will ask for is folded under the words
    of `fold`.

    Navigation has its title, or a `short` name. On a page of many sections some open a `chapter`;
    navigation then has the chapters only.
    """

    title: str
    body: Markup | HtmlFile
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
        """What is folded away."""
        return self.note[len(self.opening) :].strip()


def render_page(title: str, sections: Sequence[Section], *, lead: str = "") -> str:
    """The whole page; `lead` is the sentence under its title."""
    return "".join(_pieces(title, sections, lead))


def write_page(path: Path, title: str, sections: Sequence[Section], *, lead: str = "") -> Path:
    """The same as a file, whole or not there; what is in files of its own is copied from there."""
    with atomic_file(path) as file:
        for piece in _pieces(title, sections, lead):
            file.write(piece.encode())
        file.write(b"\n")
    return path


def _pieces(title: str, sections: Sequence[Section], lead: str) -> Iterator[str]:
    chapters = [(section.chapter, section) for section in sections if section.chapter]
    contents = chapters or [(section.short or section.title, section) for section in sections]
    # what the controls and the script are for
    maps = any(isinstance(s.body, HtmlFile) or 'class="heat"' in s.body for s in sections)
    script = _script() if maps else ""
    page = fragment(
        "page.html.j2",
        title=title,
        lead=lead,
        sections=sections,
        contents=contents,
        maps=maps,
        script=Markup(script),
        policy=_policy(script),
    )
    files = {str(s.body): s.body.path for s in sections if isinstance(s.body, HtmlFile)}
    marks = "|".join(map(re.escape, files))
    for piece in re.split(f"({marks})", page) if files else [page]:
        if piece in files:
            with files[piece].open(encoding="utf-8") as html:
                yield from iter(lambda: html.read(1 << 20), "")
        else:
            yield piece


def _policy(script: str) -> str:
    """What a browser may do with the page: its own style and script, pictures inside it, and
    nothing from elsewhere."""
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    scripts = f"'sha256-{allowed}'" if script else "'none'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


@cache
def _script() -> str:
    return _environment().get_template("page.js").render()


def fragment(template: str, **values: Any) -> Markup:
    """HTML from a file in `templates/`; every value is escaped unless it is already `Markup`."""
    return Markup(_environment().get_template(template).render(**values))


def folded(summary: str, body: Markup) -> Markup:
    """HTML that is shown when its summary is touched."""
    opening = Markup('<details class="fold"><summary>{}</summary>').format(summary)
    return opening + body + Markup("</details>")


def table(
    rows: Iterable[Sequence[str]], *, head: Sequence[str] = (), marked: Sequence[int] = ()
) -> Markup:
    """Rows of text under a head; `marked` ones are shaded."""
    return fragment("facts.html.j2", rows=list(rows), head=head, marked=marked)


def chart_row(
    charts: Sequence[Markup], keys: Mapping[str, tuple[str, str]] | None = None
) -> Markup:
    """Charts side by side, and what their lines are: a colour and a dash for each name."""
    return fragment("chart_row.html.j2", charts=charts, keys=keys or {})


def verdict_box(lines: Sequence[str]) -> Markup:
    """A conclusion in a frame, and below it what it rests on, a line each."""
    return fragment("verdict.html.j2", verdict=lines)


def warnings(lines: Sequence[str]) -> Markup:
    """What a reader must know first, a line each."""
    return Markup("").join(Markup('<p class="warning">{}</p>').format(line) for line in lines)


def holes_section(holes: Sequence[Hole]) -> list[Section]:
    """Pictures that could not be read; none if all could."""
    if not holes:
        return []
    return [Section("Not read", table((hole.name, hole.reason) for hole in holes))]


def protocol_section(manifests: Sequence[Mapping[str, Any]]) -> Section:
    """How each result came about: first what all manifests share, then a table of its own for
    each."""
    tables = [_protocol_rows(manifest) for manifest in manifests]
    shared: dict[str, str] = {}
    if len(tables) > 1:
        in_all = set.intersection(*(set(table.items()) for table in tables))
        shared = {key: value for key, value in tables[0].items() if (key, value) in in_all}
    own = [[(key, value) for key, value in table.items() if key not in shared] for table in tables]
    body = fragment("protocol.html.j2", tables=[list(shared.items()), *own], shared=bool(shared))
    note = f"{AGAIN}. The fingerprint names the exact weights."
    return Section("Protocol", body, note, fold="Model, options, versions, fingerprints")


def protocol_table(rows: Iterable[tuple[str, str]]) -> Markup:
    """How one result came about."""
    return fragment("protocol.html.j2", tables=[list(rows)], shared=False)


def _protocol_rows(manifest: Mapping[str, Any]) -> dict[str, str]:
    def text(name: str) -> str:
        return str(manifest.get(name, ""))

    options = {**manifest.get("options", {}), **manifest.get("used", {})}
    versions = manifest.get("versions", {})
    random = " with RANDOM weights" if manifest.get("random_weights") else ""
    rows = {
        "method": text("method"),
        "options": ", ".join(f"{key}={value}" for key, value in options.items()) or "none",
        "model": text("model") + random,
        "fingerprint": text("model_fingerprint"),
        "patch grid": " x ".join(map(str, manifest.get("grid", ()))),
        "readout": text("readout"),
        **_preprocessing_rows(manifest.get("preprocessing")),
        "device, dtype": f"{text('device')}, {text('dtype').removeprefix('torch.')}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "data fingerprint": text("data_fingerprint"),
    }
    return {key: value for key, value in rows.items() if value}


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("seecause.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["fixed"] = fixed
    return environment


def _preprocessing_rows(record: Mapping[str, Any] | None) -> dict[str, str]:
    """How pictures were prepared; nothing for results of earlier versions."""
    if record is None:
        return {}
    from seecause.models.preprocess import from_record

    rows = {record.get("kind", "pictures"): from_record(record).geometry()}
    if "mean" in record:
        mean, std = (", ".join(f"{value:.4g}" for value in record[key]) for key in ("mean", "std"))
        rows["normalised by"] = f"mean {mean}; std {std}"
    return rows
