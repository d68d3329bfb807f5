"""The page of `seecause explain`: a card and a panel for each picture, drawn as they are
explained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from seecause._files import write_json
from seecause.attribution.explain import AttributionWriter, Explanation
from seecause.attribution.registry import find
from seecause.attribution.result import MANIFEST, Attribution
from seecause.report.cards import Card, CardFile, MapView, Shown, Strip, render_cards
from seecause.report.folder import made_names, result_folder
from seecause.report.overlay import Scale, legend, overlay, panel, picture, scale_of
from seecause.report.page import Section, protocol_section, write_page
from seecause.target import Answer

HOW_TO_READ = (
    "Bright patches speak for the explained class: each patch was put, with its neighbours, into a"
    " blank picture, and its value is the class score that came out (CAAP; other methods have units"
    " of their own). Colours run over the range written under each map, leaving out its most"
    " extreme patches; a map without differences has no colour. Compare places within a map, and"
    " numbers between maps. Move over a picture to read a patch, by its row and column counted from"
    " 0 at the top left; the same patch lights up in every map of its card."
)
BOTH = (
    "Two questions: caap asks where it is (what a patch causes alone), mosaic what the answer hangs"
    " on (how the score changes with a patch, over many half-shown pictures; patches below 0 speak"
    " against the class)."
)
TITLE = "Which patches caused the answer?"
UNITS = {"mosaic": "slope of the {}", "caap+mosaic": "deviations in {} and logit"}
SCORES = {"prob": "probability", "logprob": "log probability", "logit": "logit"}


def explain_to_folder(
    out: Path,
    parts: Iterable[Explanation],
    files: Sequence[str],
    shown: Sequence[str],
    *,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda done: None,
) -> list[list[Answer]]:
    """A result folder of explained pictures, which are called `shown` and came from `files`: page,
    overlays, maps and a manifest. The answers."""
    overlays = made_names(shown, ".png")
    manifest: dict[str, Any] = {}
    with result_folder(out, manifest, overwrite=overwrite) as folder:
        answers = write_explanations(folder, parts, overlays, advance=advance)
        rows = zip(files, overlays, answers, strict=True)
        manifest |= {
            "command": "explain",
            "page": "index.html",
            "maps": {
                path.name: f"maps/{path.name}" for path in sorted((folder / "maps").iterdir())
            },
            "images": [
                {"file": file, "overlay": f"overlays/{png}", "answers": [asdict(a) for a in best]}
                for file, png, best in rows
            ],
        }
    return answers


def write_explanations(
    folder: Path,
    parts: Iterable[Explanation],
    overlays: Sequence[str],
    *,
    advance: Callable[[int], None] = lambda done: None,
) -> list[list[Answer]]:
    """Page, maps and one overlay for each picture, by the names given; each part is written and let
    go. The answers."""
    (folder / "overlays").mkdir()
    answers: list[list[Answer]] = []
    findings: list[dict[str, Any]] = []
    writers: dict[str, AttributionWriter] = {}
    fingerprint, notes = "", HOW_TO_READ
    extras: list[dict[str, Any]] = []
    with CardFile(folder / ".cards.partial") as cards:
        for part in parts:
            for method, run in part.runs.items():
                writers.setdefault(method, AttributionWriter(folder / "maps" / method)).add(run)
            for index in range(len(part.names)):
                cards.add(_card(part, index))
                explain_panel(part, index).save(folder / "overlays" / overlays[len(answers)])
                answers.append(list(part.answers[index]))
                findings.append({"picture": part.names[index], **_findings(part, index)})
                advance(1)
            fingerprint, notes = part.fingerprint, _how_to_read(part)
            results = (part.evidence, part.interactions)
            extras = [result.manifest for result in results if result is not None]
        for writer in writers.values():
            writer.close(fingerprint)
        if any(len(finding) > 1 for finding in findings):
            write_json(folder / "findings.json", findings)
        files = [folder / "maps" / method / MANIFEST for method in writers]
        manifests = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        manifests += [{**manifest, "data_fingerprint": fingerprint} for manifest in extras]
        count = f"{len(answers)} picture{'s' * (len(answers) != 1)}"
        write_page(
            folder / "index.html",
            f"What {manifests[0]['model']} saw",
            [Section(TITLE, cards.finish(), notes), protocol_section(manifests)],
            lead=f"{count}, explained with {', '.join(writers)}.",
        )
    return answers


def explain_section(explanation: Explanation, *, title: str = TITLE) -> Section:
    """One card for each picture, one column for each method."""
    cards = [_card(explanation, index) for index in range(len(explanation.names))]
    return Section(title, render_cards(cards), _how_to_read(explanation))


def _how_to_read(explanation: Explanation) -> str:
    notes = [HOW_TO_READ]
    if {"caap", "mosaic"} <= set(explanation.runs):
        notes.append(BOTH)
    if explanation.evidence is not None:
        from seecause.report import evidence

        notes.append(evidence.HOW_TO_READ)
    if explanation.interactions is not None:
        from seecause.report import interactions

        notes.append(interactions.HOW_TO_READ)
    return " ".join(notes)


def explain_panel(explanation: Explanation, index: int) -> Image.Image:
    """The picture and each method's overlay side by side, for slides and papers."""
    shown: list[Image.Image] = [picture(explanation.first.images[index])]
    below: list[Image.Image | None] = [None]
    titles = [answer_text(explanation.answers[index])]
    for method, run in explanation.runs.items():
        scale = _scale(run, index)
        shown.append(overlay(run.images[index], run.pixels()[index], scale=scale))
        below.append(legend(scale, width=shown[-1].width))
        titles.append(_title(method, run, index))
    return panel(shown, titles=titles, below=below)


def answer_text(answers: Sequence[Answer]) -> str:
    """The answer in words: what the model says, and what was explained where that is something
    else."""
    best, explained = answers[0], next(a for a in answers if a.explained)
    words = f"{best.name}, probability {best.probability:.3f}"
    if best is explained:
        return words
    return f"{words}; explained: {explained.name}, {explained.probability:.3f}"


def _card(explanation: Explanation, index: int) -> Card:
    manifest = explanation.first.manifest
    warnings = []
    if manifest["random_weights"]:
        warnings.append(f"{manifest['model']} has random weights: its answers mean nothing")
    maps = [_view(method, run, index) for method, run in explanation.runs.items()]
    answers = explanation.answers[index]
    strip = Strip(explanation.first.images[index], maps, answers=answers)
    return Card(
        explanation.names[index],
        [strip],
        caption=answer_text(answers),
        warnings=warnings,
        shown=_shown(explanation, index),
    )


def _findings(explanation: Explanation, index: int) -> dict[str, Any]:
    """The same in numbers."""
    both, pairs = explanation.evidence, explanation.interactions
    numbers: dict[str, Any] = {}
    if both is not None:
        from seecause.report import evidence

        numbers["evidence"] = evidence.numbers(both, index)
    if pairs is not None:
        numbers["pairs"] = [asdict(pair) for pair in pairs.pairs(index, 50)]
    return numbers


def _shown(explanation: Explanation, index: int) -> list[Shown]:
    """What is enough, what is needed, and the pairs, where they were asked for."""
    shown: list[Shown] = []
    if explanation.evidence is not None:
        both = explanation.evidence
        pictures = zip(both.sentence(index), both.overlay(index), strict=True)
        shown += [Shown(words, image) for words, image in pictures]
    if explanation.interactions is not None:
        from seecause.report import interactions

        image = interactions.pairs_image(explanation.interactions, index)
        rows = interactions.pair_rows(explanation.interactions, index)
        shown.append(Shown(interactions.TITLE, image, rows))
    return shown


def _view(method: str, run: Attribution, index: int) -> MapView:
    return MapView(
        _title(method, run, index),
        run.maps[index],
        _scale(run, index),
        None if run.native is None else run.native[index],
    )


def _title(method: str, run: Attribution, index: int) -> str:
    """The method and what its values are values of."""
    if not find(method, run.manifest["architecture"]).class_specific:
        return f"{method}: the same for every class"
    score = SCORES.get(run.manifest["options"].get("score"), "score")
    values = UNITS.get(method, "{}").format(score)
    return f"{method}: {values} of {run.labels[index]}" if run.labels else method


def _scale(run: Attribution, index: int) -> Scale:
    """The range of what is laid over the picture: the method's own pixels where it has them."""
    return scale_of((run.maps if run.native is None else run.native)[index])
