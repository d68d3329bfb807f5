"""The page of `seecause explain`, and results as notebooks show them.

A card for each image has its maps, and beside them what else is known: the box or region that was
asked about, the patches that are enough for the prediction and those it needs, pairs of regions
that act together. Of many images thumbnails come first. `write_explanations` writes cards while
images are explained, so that any number of them fits into memory:

    index.html          thumbnails, or the cards of a few images
    images/00001.jpg    one for each image, also for its thumbnail
    data/index.js       what thumbnails are sorted and filtered by
    data/0000.js        200 cards each, loaded when one of them is opened
    maps/METHOD         maps (safetensors) and how they were made
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, Literal

from markupsafe import Markup
from PIL import Image, ImageDraw

from seecause.attribution.attribute import Explanation
from seecause.attribution.registry import find
from seecause.attribution.result import MANIFEST, Attribution, AttributionWriter
from seecause.data.dataset import uninterrupted
from seecause.errors import SeecauseError
from seecause.files import write_json
from seecause.models.preprocess import from_record
from seecause.report import (
    FEW,
    TOGETHER,
    Card,
    MapView,
    Section,
    Shot,
    Strip,
    part,
    protocol_section,
    sentences,
    skipped_section,
    write_page,
)
from seecause.report.figures import (
    data_uri,
    display_image,
    figure_image,
    outline_layer,
    overlay,
    page_image,
    save_photo,
    scale_of,
    side_by_side,
    thumbnail,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from seecause.attribution.evidence import Evidence, Interactions, PatchSet
    from seecause.data.dataset import SkippedImage

Runs = Mapping[str, Attribution]
WEAK = 0.02  # maps of probabilities whose values are all below this are drawn pale
NOTE = (
    "Bright patches speak for the class above the map. Where colours run from blue to red, red"
    " patches speak for the class and blue ones against it. Move over an image to read the values"
    " of a patch. Values can be compared within a map, and between maps of the same method."
)
NOTES = {  # what is said of the parts of a page that are there
    "film": "A film is shown as frames in a row, one for each time that the model reads.",
    "regions": "The thick line marks the box or the pixels that were asked about; thin lines are"
    " other boxes, by number.",
    "evidence": "Patches were taken in the order of mosaic's map (of the first map, if mosaic was"
    " not drawn). Enough: shown alone on a blank, the outlined patches keep the prediction. Needed:"
    " without them, it is gone. The model was run"
    " on exactly these two images.",
    "interactions": "Lines join regions whose joint effect is not the sum of their effects alone:"
    " red pairs need each other, of blue pairs one region is enough.",
}
WEAKNESSES = {  # what a reader of one good map should know of others (docs/trust.md)
    "caap": "CAAP finds objects; of what the score depends on it is in the middle of 21 methods.",
    "mosaic": "Mosaic misses parts of the object that the prediction does not depend on, and loses"
    " on small models and where tokens are averaged.",
}
OUTLINES = {"enough": "#1a7f37", "needed": "#d62839"}
NEED, EITHER = "#d62839", "#1d6fd1"  # the colours of maps: red for, blue against
LINES = 8  # pairs that are drawn
SHOWN = 8  # images of a figure
INCHES = 2.6  # one image of a figure
AHEAD = 4  # overlays that wait for each process
Draw = Callable[[Image.Image, str], str]  # keeps an image; returns its address


def write_explanations(
    folder: Path,
    parts: Iterable[Explanation],
    shown: Sequence[str],
    *,
    skipped: Sequence[SkippedImage] = (),
    progress: Callable[[int], None] = lambda done: None,
    one_file: bool = False,
    drawn: bool = False,
    workers: int = 0,
) -> dict[int, dict[str, Any]]:
    """Write page and maps, while images are explained.

    Args:
        folder: An empty folder.
        parts: Explanations of a few images each.
        shown: Names of all images, also of those that are skipped.
        skipped: Images that could not be read; filled while parts are made.
        progress: Called with the number of images finished since the last call.
        one_file: Embed everything in index.html.
        drawn: Write overlays at full size, too (PNG).
        workers: Processes that draw overlays; 0 draws them in this one.

    Returns:
        What is known about each image, by its place in `shown`.

    Raises:
        SeecauseError: If no image could be read, with the first reason.
    """
    rows = dict[int, dict[str, Any]]()
    findings: list[dict[str, Any]] = []
    writers: dict[str, AttributionWriter] = {}
    last: Explanation | None = None
    if drawn:
        (folder / "overlays").mkdir(exist_ok=True)
    with TemporaryFile("w+", encoding="utf-8") as text, _processes(workers) as run_one:
        cards = _Cards(text, None if one_file else folder)
        for explained in parts:
            last, photos = _upright(explained), []
            for index, place in enumerate(last.places):
                rows[place] = _row(last, index)
                photos.append(cards.add(last, index))
                if drawn:
                    name = re.sub(r"[^\w.]+", "-", shown[place])[-60:]
                    rows[place]["overlay"] = f"overlays/{place + 1}-{name}.png"
                    runs = {method: run[[index]] for method, run in last.runs.items()}
                    alone = replace(last, runs=runs, evidence=None, interactions=None)
                    run_one(_save_overlays, alone, folder / rows[place]["overlay"])
                if found := _findings(last, index):
                    findings.append({"image": last.names[index], **found})
                progress(1)
            beside = not one_file and last.first.images is explained.first.images
            kept = [f"../../{photo}" for photo in photos if beside]
            for method, run in explained.runs.items():
                if method not in writers:
                    writers[method] = AttributionWriter(folder / "maps" / method)
                writers[method].add(run, kept)
        if last is None:
            raise SeecauseError(skipped[0].reason if skipped else "there is no image to explain")
        for writer in writers.values():
            writer.close(last.fingerprint)
        if findings:
            write_json(folder / "findings.json", findings)
        files = [folder / "maps" / method / MANIFEST for method in last.runs]
        manifests = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        _write(folder / "index.html", last, cards, manifests, skipped)
    return rows


@contextmanager
def _processes(workers: int) -> Iterator[Callable[..., object]]:
    """Yields what calls a function in another process, or in this one without workers; it waits
    where too many calls do."""
    if not workers:
        yield lambda call, *values: call(*values)
        return
    waiting = deque[Future[object]]()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:

        def submit(call: Callable[..., object], *values: Any) -> None:
            if len(waiting) >= AHEAD * workers:
                waiting.popleft().result()
            with uninterrupted():
                waiting.append(pool.submit(call, *values))

        yield submit
        for job in waiting:
            job.result()


class _Cards:
    """The cards of a page, written one after the other: into files beside the page, or without a
    folder into a text that the page embeds."""

    keys = ("title", "photo", "class", "truth", "answer", "confidence", "background")

    def __init__(self, text: IO[str], folder: Path | None = None):
        self.text, self.folder, self.columns = text, folder, 1
        self.waiting: list[Markup] = []
        self.index: list[list[str]] = []

    def add(self, explained: Explanation, index: int) -> str:
        """Add the card of one image; returns the address of the image."""
        stem = f"images/{explained.places[index] + 1:05d}" if self.folder else ""

        def draw(image: Image.Image, name: str) -> str:
            if self.folder is None:
                return data_uri(image, photo=True)
            file = f"{stem}{name}.jpg"
            (self.folder / file).parent.mkdir(exist_ok=True)
            save_photo(image, self.folder / file)
            return file

        card = _card(explained, index, draw)
        self.waiting.append(part("card", card))
        photo, self.columns = card.strips[0].file, card.columns
        small = photo if self.folder else thumbnail(explained.first.images[index])
        entry = {"title": card.title, "photo": small, **card.data}
        self.index.append([entry.get(key, "") for key in self.keys])
        if len(self.waiting) == TOGETHER:
            self._write(f"{len(self.index) // TOGETHER - 1:04d}", self.waiting)
            self.waiting = []
        return photo

    def close(self) -> Markup | IO[str]:
        """The body of the section with all cards."""
        if len(self.index) <= FEW:
            return part("grid", self.columns, self.waiting)
        if self.waiting:
            self._write(f"{len(self.index) // TOGETHER:04d}", self.waiting)
        self._write("index", {"keys": self.keys, "rows": self.index})
        body = part("browse", "data" if self.folder else "")
        if self.folder:
            return body
        self.text.write(body)
        return self.text

    def _write(self, name: str, value: Any) -> None:
        """Write a value as a script, or as a block that no script can end."""
        text = json.dumps(value, separators=(",", ":"))
        if self.folder is None:
            block = '<script type="application/json" id="data-{}">{}</script>\n'
            self.text.write(block.format(name, text.replace("<", "\\u003c")))
            return
        file = self.folder / "data" / f"{name}.js"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f'seecause.data("{name}", {text});\n', encoding="ascii")


def _save_overlays(explained: Explanation, file: Path) -> None:
    overlays(explained, 0).save(file)


def write_runs_page(path: Path, runs: Runs) -> Path:
    """Write results in memory as one HTML file: `path`, or index.html in a folder."""
    file = path if path.suffix.lower() in (".html", ".htm") else path / "index.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    first = next(iter(runs.values()))
    names = [first.name(index) for index in range(len(first))]
    explained = Explanation(names, first.answers, runs)
    return _write(file, explained, _cards(explained), [run.manifest for run in runs.values()])


def _write(
    file: Path,
    explained: Explanation,
    cards: _Cards,
    manifests: Sequence[Mapping[str, Any]],
    skipped: Sequence[SkippedImage] = (),
) -> Path:
    title = f"What {Path(explained.first.manifest['model']).name} saw"
    count, methods = len(cards.index), ", ".join(explained.runs)
    lead = f"{count} image{'s' * (count != 1)}, explained with {methods}."
    lead += f" {len(skipped)} could not be read." if skipped else ""
    body = _section(explained, cards.close())
    sections = [body, *skipped_section(skipped), protocol_section(manifests)]
    return write_page(file, title, sections, lead=lead, beside=cards.folder is not None)


def _cards(explanation: Explanation) -> _Cards:
    cards, drawn = _Cards(StringIO()), _upright(explanation)
    for index in range(len(explanation.names)):
        cards.add(drawn, index)
    return cards


def explain_section(explained: Explanation) -> Section:
    """The section of a page that holds everything itself."""
    return _section(explained, _cards(explained).close())


def _section(explanation: Explanation, body: Markup | IO[str]) -> Section:
    """Cards, how to read them, and what methods are."""
    manifest = explanation.first.manifest
    entries = {method: find(method, manifest["architecture"]) for method in explanation.runs}
    terms = {method: entry.summary.replace("`", "") for method, entry in entries.items()}
    for method in WEAKNESSES.keys() & terms.keys():
        terms[method] += f" {WEAKNESSES[method]}"
    there = {
        "film": manifest.get("preprocessing", {}).get("kind") == "film",
        "regions": explanation.first.regions is not None,
        "evidence": explanation.evidence is not None,
        "interactions": explanation.interactions is not None,
    }
    notes = [NOTE, *(NOTES[name] for name, known in there.items() if known)]
    return Section("Which patches caused the prediction?", body, "\n".join(notes), terms)


def overlays(explanation: Explanation, index: int) -> Image.Image:
    """An image and the overlay of each method side by side, for slides and papers."""
    images = [display_image(explanation.first.images[index])]
    for run in explanation.runs.values():
        images.append(overlay(run.images[index], run.pixels()[index], signed=run.signed))
    if (outline := asked_outline(explanation.first, index)) is not None:
        for image in images:
            image.paste(outline, mask=outline)
    return side_by_side(images)


def _card(explanation: Explanation, index: int, draw: Draw) -> Card:
    first, row, maps = explanation.first, _row(explanation, index), []
    for method, run in explanation.runs.items():
        native = None if run.native is None else run.native[index]
        values = run.maps[index]
        scale = scale_of(values if native is None else native, signed=run.signed)
        if run.manifest.get("options", {}).get("score") == "prob":  # units of probability
            pale = max(scale.paleness, 1 - max(abs(scale.low), abs(scale.high)) / WEAK)
            scale = replace(scale, paleness=pale)
        maps.append(MapView(_map_title(method, run, index), values, scale, native))
    answers = explanation.answers[index] if explanation.answers else []
    shots = []
    if (both := explanation.evidence) is not None:
        for words, which in zip(evidence_sentences(both, index), ("enough", "needed"), strict=True):
            shots.append(Shot(words, draw(evidence_image(both, index, which), f"-{which}")))
    if (result := explanation.interactions) is not None:
        title = "Pairs: red regions need each other, of blue ones one is enough"
        shots.append(Shot(title, draw(pairs_image(result, index), "-pairs")))
    photo = draw(page_image(first.images[index]), "")
    random = f"{first.manifest['model']} has random weights: its predictions mean nothing"
    return Card(
        explanation.names[index],
        [Strip(first.images[index], maps, "", answers, asked_outline(first, index), photo)],
        shots,
        caption="; ".join(sentences("caption", row=row)),
        warnings=[random] if first.manifest["random_weights"] else [],
        data=_sort_keys(row),
    )


def _row(explanation: Explanation, index: int) -> dict[str, Any]:
    """What is known about an image, for programs: predictions, and how they compare with the truth
    and the object."""
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
        row["background_area"] = explanation.background_area[index]
    return row


def _sort_keys(row: Mapping[str, Any]) -> dict[str, str]:
    """What images are sorted, filtered and found by."""
    data: dict[str, str] = {}
    if row["answers"]:
        data["class"] = row["answers"][0]["name"]
        data["confidence"] = f"{row['answers'][0]['probability']:.4g}"
    elif "explained" in row:
        data["class"] = row["explained"]
    if "right" in row:
        data["truth"], data["answer"] = row["truth"], "right" if row["right"] else "wrong"
    if "background" in row:
        data["background"] = f"{row['background']:.4g}"
    return data


def _findings(explanation: Explanation, index: int) -> dict[str, Any]:
    """Evidence and pairs of an image in numbers."""
    numbers: dict[str, Any] = {}
    if (both := explanation.evidence) is not None:
        found: dict[str, Any] = {"probability": float(both.probability[index])}
        numbers["evidence"] = found
        for name in ("enough", "needed"):
            chosen: PatchSet = getattr(both, name)
            found[name] = {
                "exists": bool(chosen.exists[index]),
                "patches": chosen.patches[index].nonzero().tolist(),
                "probability": float(chosen.probability[index]),
                "answer": chosen.labels[index],
            }
    if explanation.interactions is not None:
        numbers["pairs"] = [asdict(pair) for pair in explanation.interactions.pairs(index, 50)]
    return numbers


def _map_title(method: str, run: Attribution, index: int) -> str:
    """The method, and the class that its values are about."""
    if not find(method, run.manifest.get("architecture", "transformer")).class_specific:
        return f"{method}: the same for every class"
    return f"{method}: {run.labels[index]}" if run.labels else method


def upright(run: Attribution) -> Attribution:
    """A result turned as people look at it: frames of a film in a row. Images stay as they are."""
    record = run.manifest.get("preprocessing") or {}
    if "kind" not in record or run.manifest.get("drawn"):
        return run
    steps = from_record(record)
    turned: dict[str, Any] = {"images": steps.drawn(run.images, 2).clone()}
    if steps.kind == "film":
        turned["images"][..., steps.size[1] :: steps.size[1]] = 1  # a line where a frame begins
    for name in ("maps", "errors"):
        tensor = getattr(run, name)
        turned[name] = None if tensor is None else steps.drawn(tensor.flatten(1, -2), 1)
    for name in ("native", "regions"):
        tensor = getattr(run, name)
        turned[name] = None if tensor is None else steps.drawn(tensor, 1)
    return replace(run, **turned, class_maps=None, manifest={**run.manifest, "drawn": True})


def _upright(explanation: Explanation) -> Explanation:
    return replace(explanation, runs={m: upright(run) for m, run in explanation.runs.items()})


# Predictions in words, also for the terminal.


def prediction_text(row: Mapping[str, Any]) -> str:
    """The prediction in a row of `write_explanations`, also of a detector or a segmenter."""
    return sentences("caption", row=row)[0]


def evidence_sentences(evidence: Evidence, index: int) -> tuple[str, str]:
    """What is enough and what is needed, in words."""
    first, second = sentences("evidence", evidence=evidence, index=index)
    return first, second


# Images with lines: what was asked about, evidence, pairs.


def asked_outline(run: Attribution, index: int) -> Image.Image | None:
    """A layer with the box or region that was asked about and, thinly, the other boxes; None where
    the whole image was asked about."""
    if run.regions is None:
        return None
    target = run.manifest["target"]
    asked = target["row"][index].removeprefix("box ")
    boxes = {str(box["index"]): box["place"] for box in target["boxes"][index]}
    others = {name: place for name, place in boxes.items() if name != asked}
    return outline_layer(display_image(run.images[index]).size, run.regions[index], others)


def evidence_image(
    evidence: Evidence, index: int, which: Literal["enough", "needed"]
) -> Image.Image:
    """The image with a set of patches outlined; what the model did not see is washed out."""
    chosen = getattr(evidence, which).patches[index]
    shown = display_image(evidence.images[index])
    white = Image.new("RGB", shown.size, "white")
    washed = Image.blend(shown.convert("L").convert("RGB"), white, 0.7)
    seen = chosen if which == "enough" else ~chosen
    mask = Image.fromarray((seen.byte() * 255).cpu().numpy())
    image = Image.composite(shown, washed, mask.resize(shown.size, Image.Resampling.NEAREST))
    if chosen.any():
        outline = outline_layer(shown.size, chosen, colour=OUTLINES[which])
        image.paste(outline, mask=outline)
    return image


def pairs_image(result: Interactions, index: int, *, count: int = LINES) -> Image.Image:
    """The image with a line for each of the strongest pairs: thicker is stronger, red needs both,
    blue needs either."""
    shown = display_image(result.images[index]).convert("L")
    size = (2 * shown.width, 2 * shown.height)  # lines are drawn twice as large: they are smoother
    canvas = Image.blend(shown, Image.new("L", shown.size, 255), 0.32).convert("RGB").resize(size)
    draw, pairs = ImageDraw.Draw(canvas), result.pairs(index, count)
    strongest = max((abs(pair.interaction) for pair in pairs), default=0.0)
    for pair in reversed(pairs if strongest else []):  # the strongest on top
        ends = [
            ((column + 0.5) / result.regions * size[0], (row + 0.5) / result.regions * size[1])
            for row, column in (pair.first, pair.second)
        ]
        width = round(4 + 16 * abs(pair.interaction) / strongest)
        for colour, more in (("white", 3), (NEED if pair.interaction > 0 else EITHER, 0)):
            draw.line(ends, colour, width + 2 * more)
            for end in ends:
                draw.circle(end, 9 + more, colour)
    return canvas.resize(shown.size, Image.Resampling.LANCZOS)


# Notebooks.


def plot(runs: Runs) -> Figure:
    """Rows of images and their maps."""
    from matplotlib.figure import Figure

    runs = {method: upright(run) for method, run in runs.items()}
    first = next(iter(runs.values()))
    count, columns = min(len(first), SHOWN), 1 + len(runs)
    figure = Figure(figsize=(INCHES * columns, (INCHES + 0.35) * count), layout="constrained")
    for index, axes in enumerate(figure.subplots(count, columns, squeeze=False)):
        title = first.name(index)
        if first.answers:
            best = first.answers[index][0]
            title = f"{best.name}, {best.probability:.2f}"
        views = [(title, display_image(first.images[index]))]
        for method, run in runs.items():
            image = overlay(run.images[index], run.pixels()[index], signed=run.signed)
            low, high = scale_of(run.pixels()[index], signed=run.signed).ends
            views.append((f"{_map_title(method, run, index)}\n{low} to {high}", image))
        for axis, (words, image) in zip(axes, views, strict=True):
            axis.imshow(image)
            axis.set_title(words, fontsize=8)
            axis.set_axis_off()
    return figure


def notebook_html(runs: Runs) -> str:
    """The figure of `plot`, as an image."""
    return Markup('<img alt="maps" src="{}">').format(
        data_uri(figure_image(plot(runs)), photo=True)
    )
