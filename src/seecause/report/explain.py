"""The page of `seecause explain`: a card and a panel for each picture, drawn as they are
explained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from PIL import Image

from seecause.attribution.explain import AttributionWriter, Explanation
from seecause.attribution.registry import find
from seecause.attribution.result import MANIFEST, Attribution
from seecause.errors import SeecauseError
from seecause.files import write_json
from seecause.report import explain_pictures
from seecause.report.cards import Card, CardFile, MapView, Strip, TitledPicture, render_cards
from seecause.report.folder import made_names, result_folder
from seecause.report.overlay import Scale, legend, overlay, panel, picture, scale_of
from seecause.report.page import (
    HtmlFile,
    Section,
    fragment,
    holes_section,
    protocol_section,
    title_name,
    write_page,
)

if TYPE_CHECKING:
    from seecause.data.dataset import Hole

HOW_TO_READ = (
    "Where colours run from dark to bright, bright patches speak for the explained class; where"
    " they run from blue to red around 0, red ones speak for it and blue ones against. CAAP puts"
    " each patch, with its neighbours, into a blank picture, and its value is the class score that"
    " comes out; other methods have units of their own. Colours run over the range written under"
    " each map, leaving out its most extreme patches, which is said where they are far out; a map"
    " that is nearly the same everywhere is pale, one without differences has no colour. Compare"
    " places within a map, and numbers between maps. Move over a picture to read a patch, by its"
    " row and column counted from 0 at the top left; the same patch lights up in every map of its"
    " card."
)
BOTH = (
    "Two questions: caap asks where it is (what a patch causes alone), mosaic what the answer hangs"
    " on (how the score changes with a patch, over many half-shown pictures; patches below 0 speak"
    " against the class)."
)
# what a reader of one good picture should know of others (docs/trust.md)
DONE_BADLY = {
    "caap": "CAAP finds objects; of what the score depends on it is in the middle of 21 methods.",
    "mosaic": "Mosaic misses parts of the object that the answer does not hang on, and loses on"
    " small models and where tokens are averaged.",
}
MANY = 4  # pictures from which on they can be sorted and searched
ORDERS = {  # what cards are sorted by -> titles
    "confidence up": "least confident first",
    "confidence down": "most confident first",
    "error down": "worst errors first",
    "background down": "most on the background first",
}
UNITS = {"mosaic": "slope of the {}", "caap+mosaic": "deviations in {} and logit"}
SCORES = {"prob": "probability", "logprob": "log probability", "logit": "logit"}


def explain_to_folder(
    out: Path,
    parts: Iterable[Explanation],
    files: Sequence[str],
    shown: Sequence[str],
    *,
    holes: Sequence[Hole] = (),
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """A result folder of explained pictures, which are called `shown` and came from `files`: page,
    overlays, maps and a manifest, which is returned. `holes` fill while the parts are made; where
    nothing could be read, the first of them is the error."""
    overlays = made_names(shown, ".png")
    manifest: dict[str, Any] = {}
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        rows = _write_explanations(folder, parts, overlays, holes, advance)
        reasons = {hole.name: hole.reason for hole in holes}
        manifest |= {
            "command": "explain",
            "out": str(out),
            "page": "index.html",
            "maps": {
                path.name: f"maps/{path.name}" for path in sorted((folder / "maps").iterdir())
            },
            "images": [
                {"file": file, "name": name, **rows.get(place, {"error": reasons.get(name)})}
                for place, (file, name) in enumerate(zip(files, shown, strict=True))
            ],
        }
    return manifest


def _write_explanations(
    folder: Path,
    parts: Iterable[Explanation],
    overlays: Sequence[str],
    holes: Sequence[Hole],
    advance: Callable[[int], None],
) -> dict[int, dict[str, Any]]:
    """Page, maps and one overlay for each picture, by the names given; each part is written and let
    go. What the manifest says of each picture, by its place."""
    (folder / "overlays").mkdir()
    rows: dict[int, dict[str, Any]] = {}
    numbers: list[dict[str, Any]] = []
    writers: dict[str, AttributionWriter] = {}
    last: Explanation | None = None
    with CardFile(folder / ".cards.partial") as cards:
        for part in parts:
            for method, run in part.runs.items():
                writers.setdefault(method, AttributionWriter(folder / "maps" / method)).add(run)
            part = _drawn(part)
            for index, place in enumerate(part.places):
                cards.add(_card(part, index))
                explain_panel(part, index).save(folder / "overlays" / overlays[place])
                rows[place] = {"overlay": f"overlays/{overlays[place]}", **_row(part, index)}
                numbers.append({"picture": part.names[index], **_findings(part, index)})
                advance(1)
            last = part
        if last is None:
            raise SeecauseError(holes[0].reason if holes else "there is no picture to explain")
        for writer in writers.values():
            writer.close(last.fingerprint)
        if any(len(row) > 1 for row in numbers):
            write_json(folder / "findings.json", numbers)
        section = _section(last, cards.finish(), list(rows.values()))
        sections = [section, *holes_section(holes), protocol_section(_manifests(folder, last))]
        title = f"What {title_name(last.first.manifest['model'])} saw"
        lead = _lead(len(rows), writers, holes)
        write_page(folder / "index.html", title, sections, lead=lead)
    return rows


def _manifests(folder: Path, last: Explanation) -> list[dict[str, Any]]:
    """Of every method, and of what was asked for beside them."""
    files = [folder / "maps" / method / MANIFEST for method in last.runs]
    manifests = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for result in (last.evidence, last.interactions):
        if result is not None:
            manifests.append({**result.manifest, "data_fingerprint": last.fingerprint})
    return manifests


def _section(
    explanation: Explanation, body: Markup | HtmlFile, rows: Sequence[Mapping[str, Any]]
) -> Section:
    """Cards of all `rows`, and how to read them; where they are many, with controls."""
    architecture = explanation.first.manifest["architecture"]
    terms = {
        method: find(method, architecture).summary.replace("`", "") for method in explanation.runs
    }
    badly = [DONE_BADLY[method] for method in explanation.runs if method in DONE_BADLY]
    if badly:
        badly.append("A bright patch of a deep layer also carries what it read elsewhere.")
        terms["what they do badly elsewhere"] = " ".join(badly)
    tools = _sorter(rows) if len(rows) >= MANY else Markup()
    return Section(
        "Which patches caused the answer?", body, _how_to_read(explanation), terms, tools=tools
    )


def _sorter(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Controls for what is known of some picture."""
    truths = any(row.get("truth") for row in rows)
    masks = any(row.get("background") is not None for row in rows)
    known = {"confidence", *(["error"] * truths), *(["background"] * masks)}
    orders = [(key, title) for key, title in ORDERS.items() if key.split()[0] in known]
    return fragment("sorter.html.j2", orders=orders, truths=truths)


def write_runs_page(path: Path, runs: Mapping[str, Attribution]) -> Path:
    """One HTML file of results in memory: `path`, or index.html in a folder."""
    file = path if path.suffix.lower() in (".html", ".htm") else path / "index.html"
    first = next(iter(runs.values()))
    names = [first.name(index) for index in range(len(first))]
    explanation = Explanation(names, first.answers, runs)
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_page(
        file,
        f"What {title_name(first.manifest['model'])} saw",
        [explain_section(explanation), protocol_section([run.manifest for run in runs.values()])],
        lead=_lead(len(first), runs),
    )


def _lead(count: int, methods: Iterable[str], holes: Sequence[Hole] = ()) -> str:
    words = f"{count} picture{'s' * (count != 1)}, explained with {', '.join(methods)}."
    return f"{words} {len(holes)} could not be read." if holes else words


def explain_section(explanation: Explanation) -> Section:
    """One card for each picture, one column for each method."""
    explanation = _drawn(explanation)
    indices = range(len(explanation.names))
    cards = render_cards([_card(explanation, index) for index in indices])
    rows = [_row(explanation, index) for index in indices]
    return _section(explanation, cards, rows)


def _drawn(explanation: Explanation) -> Explanation:
    """Turned as people look at it."""
    return replace(
        explanation, runs={name: explain_pictures.drawn(r) for name, r in explanation.runs.items()}
    )


def _how_to_read(explanation: Explanation) -> str:
    notes = [HOW_TO_READ]
    if {"caap", "mosaic"} <= set(explanation.runs):
        notes.append(BOTH)
    kind = explanation.first.manifest.get("preprocessing", {}).get("kind")
    if kind is not None:
        notes.append(explain_pictures.INPUTS[kind])
    if explanation.first.regions is not None:
        notes.append(explain_pictures.ROWS_NOTE)
    if explanation.evidence is not None:
        notes.append(explain_pictures.EVIDENCE_NOTE)
    if explanation.interactions is not None:
        notes.append(explain_pictures.PAIRS_NOTE.format(explanation.interactions.regions))
    return " ".join(notes)


def explain_panel(explanation: Explanation, index: int) -> Image.Image:
    """The picture and each method's overlay side by side, for slides and papers."""
    shown: list[Image.Image] = [picture(explanation.first.images[index])]
    below: list[Image.Image | None] = [None]
    titles = [
        explain_pictures.answer_text(explanation.answers[index]) if explanation.answers else ""
    ]
    for method, run in explanation.runs.items():
        scale = _scale(run, index)
        shown.append(overlay(run.images[index], run.pixels()[index], scale=scale))
        below.append(legend(scale, width=shown[-1].width))
        remark = f"{scale.remark.partition(':')[0]}; " if scale.remark else ""
        titles.append(remark + _title(method, run, index))
    outline = explain_pictures.outline(explanation.first, index, shown[0].size)
    if outline is not None:
        for image in shown:
            image.paste(outline, mask=outline)
    return panel(shown, titles=titles, below=below)


def card_text(explanation: Explanation, index: int) -> str:
    """The answer, and what is known about the picture."""
    row = _row(explanation, index)
    words = [explain_pictures.answer_text(explanation.answers[index])] if row["answers"] else []
    words = [explain_pictures.row_text(row)] if "row" in row else words
    if "truth" in row:
        words.append("right" if row["right"] else f"wrong: it is {row['truth']}")
    if "background" in row:
        share = f"{100 * row['background']:.0f} % of the map on the background"
        even = row.get("background_area")
        words.append(share if even is None else f"{share} (an even map: {100 * even:.0f} %)")
    return "; ".join(words)


def _card(explanation: Explanation, index: int) -> Card:
    manifest = explanation.first.manifest
    warnings = []
    if manifest["random_weights"]:
        warnings.append(f"{manifest['model']} has random weights: its answers mean nothing")
    maps = []
    for method, run in explanation.runs.items():
        native = None if run.native is None else run.native[index]
        title, scale = _title(method, run, index), _scale(run, index)
        maps.append(MapView(title, run.maps[index], scale, native))
    answers = explanation.answers[index] if explanation.answers else []
    image = explanation.first.images[index]
    outline = explain_pictures.outline(explanation.first, index, picture(image).size)
    strip = Strip(image, maps, answers=answers, outline=outline)
    return Card(
        explanation.names[index],
        [strip],
        caption=card_text(explanation, index),
        warnings=warnings,
        shown=_shown(explanation, index),
        data=_data(_row(explanation, index)),
    )


def _row(explanation: Explanation, index: int) -> dict[str, Any]:
    """What a machine may want to know about a picture: the answers, and how they compare with what
    is known."""
    answers = explanation.answers[index] if explanation.answers else []
    row: dict[str, Any] = {"answers": [asdict(answer) for answer in answers]}
    target = explanation.first.manifest.get("target", {})
    if "row" in target:
        row |= {name: target[name][index] for name in ("row", "value", "place", "boxes")}
        row["explained"] = explanation.first.labels[index]
    if explanation.truths and explanation.truths[index] is not None:
        truth = explanation.truths[index]
        row |= {"truth": truth, "right": bool(answers) and answers[0].name == truth}
    if explanation.background and explanation.background[index] is not None:
        row["background"] = explanation.background[index]
        if explanation.background_area:
            row["background_area"] = explanation.background_area[index]
    return row


def _data(row: Mapping[str, Any]) -> dict[str, str]:
    """What a card is sorted and filtered by. The worst error is the most confident wrong answer."""
    data: dict[str, str] = {}
    if row["answers"]:
        data["confidence"] = f"{row['answers'][0]['probability']:.6g}"
    if "right" in row:
        data["answer"] = "right" if row["right"] else "wrong"
        sign = -1 if row["right"] else 1
        data["error"] = f"{sign * float(data['confidence']):.6g}"
    if "background" in row:
        data["background"] = f"{row['background']:.6g}"
    return data


def _findings(explanation: Explanation, index: int) -> dict[str, Any]:
    """The same in numbers."""
    both, pairs = explanation.evidence, explanation.interactions
    numbers: dict[str, Any] = {}
    if both is not None:
        numbers["evidence"] = explain_pictures.evidence_numbers(both, index)
    if pairs is not None:
        numbers["pairs"] = [asdict(pair) for pair in pairs.pairs(index, 50)]
    return numbers


def _shown(explanation: Explanation, index: int) -> list[TitledPicture]:
    """What is enough, what is needed, and the pairs, where they were asked for."""
    shown: list[TitledPicture] = []
    if explanation.evidence is not None:
        both = explanation.evidence
        pictures = zip(both.sentence(index), both.overlay(index), strict=True)
        shown += [TitledPicture(words, image) for words, image in pictures]
    if explanation.interactions is not None:
        image = explain_pictures.pairs_image(explanation.interactions, index)
        rows = explain_pictures.pair_rows(explanation.interactions, index)
        shown.append(TitledPicture(explain_pictures.PAIRS_TITLE, image, rows))
    return shown


def _title(method: str, run: Attribution, index: int) -> str:
    """The method and what its values are values of."""
    if not find(method, run.manifest["architecture"]).class_specific:
        return f"{method}: the same for every class"
    score = SCORES.get(run.manifest["options"].get("score"), "score")
    score = "value" if run.manifest.get("target", {}).get("values") else score
    values = UNITS.get(method, "{}").format(score)
    return f"{method}: {values} of {run.labels[index]}" if run.labels else method


def _scale(run: Attribution, index: int) -> Scale:
    """The range of what is laid over the picture: the method's own pixels where it has them."""
    return scale_of((run.maps if run.native is None else run.native)[index], signed=run.signed)
