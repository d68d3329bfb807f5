"""The page of `seecause explain`, and results as notebooks show them.

A card for each image has its maps, and beside them what else is known: the box or region asked
about, the patches that are enough for the prediction and those it needs, pairs of regions that act
together. `write_explanations` writes cards while images are explained, so that any number of them
fits into memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from markupsafe import Markup
from PIL import Image, ImageDraw

from seecause.attribution.explain import Explanation
from seecause.attribution.registry import find
from seecause.attribution.result import MANIFEST, Attribution, AttributionWriter, Viewable
from seecause.errors import BadOption, SeecauseError
from seecause.files import write_json
from seecause.models.preprocess import from_record
from seecause.report.figures import (
    LONG,
    Scale,
    data_uri,
    display_image,
    is_long,
    number,
    outline_layer,
    overlay,
    panel,
    scale_of,
)
from seecause.report.pages import (
    Card,
    CardFile,
    MapView,
    Section,
    Shot,
    Strip,
    cards_html,
    file_names,
    part,
    protocol_section,
    skipped_section,
    title_name,
    write_page,
)
from seecause.target import Answer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from seecause.attribution.evidence import Evidence, PatchSet
    from seecause.attribution.interactions import Interactions
    from seecause.data.dataset import Hole

Runs = Mapping[str, Attribution]
HOW_TO_READ = (
    "Where colours run from dark to bright, bright patches speak for the explained class; where"
    " they run from blue to red around 0, red ones speak for it and blue ones against. CAAP puts"
    " each patch, with its neighbours, into a blank image, and its value is the class score that"
    " comes out; other methods have units of their own. Colours run over the range written under"
    " each map, without its most extreme patches; a map that is nearly the same everywhere is pale."
    " Compare places within a map, and numbers between maps. Move over an image to read a patch by"
    " its row and column, counted from 0 at the top left; the same patch lights up in every map of"
    " its card."
)
BOTH = (
    "Two questions: caap asks where it is (what a patch causes alone), mosaic what the prediction"
    " depends on (how the score changes with a patch, over many half-shown images; patches below 0"
    " speak against the class)."
)
WEAKNESSES = {  # what a reader of one good map should know of others (docs/trust.md)
    "caap": "CAAP finds objects; of what the score depends on it is in the middle of 21 methods.",
    "mosaic": "Mosaic misses parts of the object that the prediction does not depend on, and loses"
    " on small models and where tokens are averaged.",
}
INPUTS = {  # how inputs that are not images are drawn
    "film": "A film is shown as frames in a row, one for each time that the model reads; columns of"
    " patches count through all of them.",
}
ROWS_NOTE = (
    "The line marks the box or the pixels that were asked about; thin lines are other boxes, by"
    " number. Maps are over the places that a row reads (encoder tokens, feature maps), which have"
    " seen their surroundings."
)
EVIDENCE_NOTE = (
    "Patches were taken in the order of the first map. Enough: shown alone on a blank, the outlined"
    " patches keep the prediction. Needed: without the outlined patches, which are blank then, it"
    " is gone. The model was run on exactly these two images, and one patch less was not enough; a"
    " smaller set in this order may exist where the prediction comes and goes."
)
PAIRS_TITLE = "Pairs, in logits: red regions need each other, of blue ones one is enough"
PAIRS_NOTE = (
    "The image is cut into {0} x {0} regions, named by row and column from 0. Lines join two"
    " regions that cause together what they do not cause one by one: both were put into a blank"
    " image at once, and their effects alone subtracted. The thickest line is the strongest pair of"
    " its image."
)
MANY = 4  # images from which on they can be sorted and searched
ORDERS = {  # what cards are sorted by -> titles
    "confidence up": "least confident first",
    "confidence down": "most confident first",
    "error down": "worst errors first",
    "background down": "most on the background first",
}
UNITS = {"mosaic": "slope of the {}", "caap+mosaic": "deviations in {} and logit"}
SCORES = {"prob": "probability", "logprob": "log probability", "logit": "logit"}
OUTLINES = {"enough": "#1a7f37", "needed": "#d62839"}
NEED, EITHER = "#d62839", "#1d6fd1"  # the colours of maps: red for, blue against
LINES = 8  # pairs that are drawn
SHOWN = 8  # images in a notebook
BYTES = 180_000  # of all images of a notebook's cell, as text
INCHES = 2.6  # one image of a figure


def write_explanations(
    folder: Path,
    parts: Iterable[Explanation],
    shown: Sequence[str],
    *,
    skipped: Sequence[Hole] = (),
    progress: Callable[[int], None] = lambda done: None,
) -> dict[int, dict[str, Any]]:
    """Write page, maps and an overlay for each image, while images are explained.

    Args:
        folder: An empty folder.
        parts: Explanations of a few images each.
        shown: Names of all images, also of those that are skipped.
        skipped: Images that could not be read; filled while parts are made.
        progress: Called with the number of images finished since the last call.

    Returns:
        What is known about each image, by its place in `shown`.

    Raises:
        SeecauseError: If no image could be read, with the first reason.
    """
    (folder / "overlays").mkdir()
    overlays, rows = file_names(shown, ".png"), dict[int, dict[str, Any]]()
    numbers: list[dict[str, Any]] = []
    writers: dict[str, AttributionWriter] = {}
    last: Explanation | None = None
    with CardFile(folder / ".cards.partial") as cards:
        for explained in parts:
            for method, run in explained.runs.items():
                writers.setdefault(method, AttributionWriter(folder / "maps" / method)).add(run)
            last = _upright(explained)
            for index, place in enumerate(last.places):
                cards.add(_card(last, index))
                explain_panel(last, index).save(folder / "overlays" / overlays[place])
                rows[place] = {"overlay": f"overlays/{overlays[place]}", **_row(last, index)}
                numbers.append({"image": last.names[index], **_findings(last, index)})
                progress(1)
        if last is None:
            raise SeecauseError(skipped[0].reason if skipped else "there is no image to explain")
        for writer in writers.values():
            writer.close(last.fingerprint)
        if any(len(row) > 1 for row in numbers):
            write_json(folder / "findings.json", numbers)
        files = [folder / "maps" / method / MANIFEST for method in last.runs]
        manifests = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        for result in (last.evidence, last.interactions):
            if result is not None:
                manifests.append({**result.manifest, "data_fingerprint": last.fingerprint})
        sections = [
            _section(last, cards.finish(), list(rows.values())),
            *skipped_section(skipped),
            protocol_section(manifests),
        ]
        lead = _lead(len(rows), writers)
        lead += f" {len(skipped)} could not be read." if skipped else ""
        write_page(folder / "index.html", _page_title(last.first), sections, lead=lead)
    return rows


def write_runs_page(path: Path, runs: Runs) -> Path:
    """Write results in memory as one HTML file: `path`, or index.html in a folder."""
    file = path if path.suffix.lower() in (".html", ".htm") else path / "index.html"
    first = next(iter(runs.values()))
    names = [first.name(index) for index in range(len(first))]
    sections = [
        explain_section(Explanation(names, first.answers, runs)),
        protocol_section([run.manifest for run in runs.values()]),
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_page(file, _page_title(first), sections, lead=_lead(len(first), runs))


def explain_section(explanation: Explanation) -> Section:
    """One card for each image, one column for each method."""
    explanation = _upright(explanation)
    indices = range(len(explanation.names))
    cards = cards_html([_card(explanation, index) for index in indices])
    return _section(explanation, cards, [_row(explanation, index) for index in indices])


def _page_title(first: Attribution) -> str:
    return f"What {title_name(first.manifest['model'])} saw"


def _lead(count: int, methods: Iterable[str]) -> str:
    return f"{count} image{'s' * (count != 1)}, explained with {', '.join(methods)}."


def _section(
    explanation: Explanation, body: Markup | Path, rows: Sequence[Mapping[str, Any]]
) -> Section:
    """Cards of all `rows`, how to read them, and controls where there are many."""
    manifest = explanation.first.manifest
    entries = {method: find(method, manifest["architecture"]) for method in explanation.runs}
    terms = {method: entry.summary.replace("`", "") for method, entry in entries.items()}
    weak = [WEAKNESSES[method] for method in explanation.runs if method in WEAKNESSES]
    if weak:
        weak.append("A bright patch of a deep layer also carries what it read elsewhere.")
        terms["weaknesses"] = " ".join(weak)
    kind = manifest.get("preprocessing", {}).get("kind")
    notes = [
        HOW_TO_READ,
        BOTH if {"caap", "mosaic"} <= set(explanation.runs) else "",
        INPUTS[kind] if kind else "",
        ROWS_NOTE if explanation.first.regions is not None else "",
        EVIDENCE_NOTE if explanation.evidence else "",
        PAIRS_NOTE.format(explanation.interactions.regions) if explanation.interactions else "",
    ]
    tools = Markup()
    if len(rows) >= MANY:
        truths = any(row.get("truth") for row in rows)
        masks = any(row.get("background") is not None for row in rows)
        known = {"confidence", *(["error"] * truths), *(["background"] * masks)}
        orders = [(key, title) for key, title in ORDERS.items() if key.split()[0] in known]
        tools = part("sorter", orders, truths)
    title = "Which patches caused the prediction?"
    return Section(title, body, " ".join(filter(None, notes)), terms, tools=tools)


def explain_panel(explanation: Explanation, index: int) -> Image.Image:
    """An image and the overlay of each method side by side, for slides and papers."""
    first = explanation.first
    images, scales = [display_image(first.images[index])], list[Scale | None]([None])
    titles = [answer_text(explanation.answers[index]) if explanation.answers else ""]
    for method, run in explanation.runs.items():
        scale = _scale(run, index)
        images.append(overlay(run.images[index], run.pixels()[index], scale=scale))
        scales.append(scale)
        remark = f"{scale.remark.partition(':')[0]}; " if scale.remark else ""
        titles.append(remark + _map_title(method, run, index))
    if (outline := asked_outline(first, index, images[0].size)) is not None:
        for image in images:
            image.paste(outline, mask=outline)
    return panel(images, titles, scales)


def _card(explanation: Explanation, index: int) -> Card:
    first, row = explanation.first, _row(explanation, index)
    maps = [
        MapView(
            _map_title(method, run, index),
            run.maps[index],
            _scale(run, index),
            None if run.native is None else run.native[index],
        )
        for method, run in explanation.runs.items()
    ]
    answers = explanation.answers[index] if explanation.answers else []
    outline = asked_outline(first, index, display_image(first.images[index]).size)
    shots = []
    if (both := explanation.evidence) is not None:
        pairs = zip(evidence_sentences(both, index), _evidence_images(both, index), strict=True)
        shots += [Shot(words, data_uri(image, photo=True)) for words, image in pairs]
    if (result := explanation.interactions) is not None:
        image = data_uri(pairs_image(result, index), photo=True)
        shots.append(Shot(PAIRS_TITLE, image, rows=pair_rows(result, index)))
    random = f"{first.manifest['model']} has random weights: its predictions mean nothing"
    return Card(
        explanation.names[index],
        [Strip(first.images[index], maps, answers=answers, outline=outline)],
        shots,
        caption=_caption(row),
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
        if explanation.background_area:
            row["background_area"] = explanation.background_area[index]
    return row


def _caption(row: Mapping[str, Any]) -> str:
    words = []
    if row["answers"] or "row" in row:
        words.append(prediction_text(row))
    if "truth" in row:
        words.append("right" if row["right"] else f"wrong: it is {row['truth']}")
    if "background" in row:
        share, even = row["background"], row.get("background_area")
        words.append(f"{share:.0%} of the map on the background")
        words[-1] += "" if even is None else f" (an even map: {even:.0%})"
    return "; ".join(words)


def _sort_keys(row: Mapping[str, Any]) -> dict[str, str]:
    """What cards are sorted and filtered by. The worst error is the most confident wrong one."""
    data: dict[str, str] = {}
    if row["answers"]:
        data["confidence"] = f"{row['answers'][0]['probability']:.6g}"
    if "right" in row:
        data["answer"] = "right" if row["right"] else "wrong"
        data["error"] = f"{(-1 if row['right'] else 1) * float(data['confidence']):.6g}"
    if "background" in row:
        data["background"] = f"{row['background']:.6g}"
    return data


def _findings(explanation: Explanation, index: int) -> dict[str, Any]:
    """Evidence and pairs of an image in numbers."""
    numbers: dict[str, Any] = {}
    if (both := explanation.evidence) is not None:
        numbers["evidence"] = {"probability": float(both.probability[index])}
        for name in ("enough", "needed"):
            chosen: PatchSet = getattr(both, name)
            numbers["evidence"][name] = {
                "exists": bool(chosen.exists[index]),
                "patches": chosen.patches[index].nonzero().tolist(),
                "probability": float(chosen.probability[index]),
                "answer": chosen.labels[index],
            }
    if explanation.interactions is not None:
        numbers["pairs"] = [asdict(pair) for pair in explanation.interactions.pairs(index, 50)]
    return numbers


def _map_title(method: str, run: Attribution, index: int) -> str:
    """The method and what its values are values of."""
    if not find(method, run.manifest["architecture"]).class_specific:
        return f"{method}: the same for every class"
    score = SCORES.get(run.manifest["options"].get("score"), "score")
    score = "value" if run.manifest.get("target", {}).get("values") else score
    values = UNITS.get(method, "{}").format(score)
    return f"{method}: {values} of {run.labels[index]}" if run.labels else method


def _scale(run: Attribution, index: int) -> Scale:
    return scale_of((run.maps if run.native is None else run.native)[index], signed=run.signed)


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


def answer_text(answers: Sequence[Answer]) -> str:
    """The prediction, and the explained class where that is another one."""
    best, explained = answers[0], [answer for answer in answers if answer.explained]
    words = f"{best.name}, probability {best.probability:.3f}"
    if not explained or explained == [best]:
        return words
    named = [f"{answer.name}, {answer.probability:.3f}" for answer in explained]
    return f"{words}; explained: {' against '.join(named)}"


def prediction_text(row: Mapping[str, Any]) -> str:
    """The prediction in a row of `write_explanations`, also of a detector or a segmenter."""
    answers = [Answer(**answer) for answer in row["answers"]]
    if "row" not in row:
        return answer_text(answers)
    if answers:
        return f"{row['row']}: {answer_text(answers)}"
    return f"{row['explained']}: {number(row['value'])}"


def box_texts(row: Mapping[str, Any]) -> list[str]:
    """All boxes that a detector is sure of."""
    return [
        f"box {box['index']}: {box['name']}, probability {box['probability']:.3f}"
        for box in row.get("boxes", ())
    ]


def evidence_sentences(evidence: Evidence, index: int) -> tuple[str, str]:
    """What is enough and what is needed, in words."""
    total, enough, needed = evidence.maps[index].numel(), evidence.enough, evidence.needed
    answer = evidence.labels[index] if evidence.labels else "the explained class"
    if not evidence.answered[index]:
        text = f"The model does not predict {answer}: there is nothing to keep or to break"
        return text, text
    first = f"Enough: nothing. The blank alone is predicted as {answer}"
    if count := int(enough.count[index]):
        odds = f"{enough.probability[index]:.3f}, of all {evidence.probability[index]:.3f}"
        first = f"Enough: {count} of {total} patches keep {answer}: probability {odds}"
    second = f"Needed: no set was found. The blank alone is predicted as {answer}"
    if needed.exists[index]:
        second = (
            f"Needed: without these {int(needed.count[index])} of {total} patches it is"
            f" {needed.labels[index]}; {answer} has probability {needed.probability[index]:.3f}"
        )
    return first, second


# Images with lines: what was asked about, evidence, pairs.


def asked_outline(run: Attribution, index: int, size: tuple[int, int]) -> Image.Image | None:
    """A layer with the box or region that was asked about and, thinly, the other boxes; None where
    the whole image was asked about."""
    if run.regions is None:
        return None
    target = run.manifest["target"]
    asked = target["row"][index].removeprefix("box ")
    boxes = {str(box["index"]): box["place"] for box in target["boxes"][index]}
    others = {name: place for name, place in boxes.items() if name != asked}
    return outline_layer(size, run.regions[index], others)


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


def _evidence_images(evidence: Evidence, index: int) -> list[Image.Image]:
    return [evidence_image(evidence, index, "enough"), evidence_image(evidence, index, "needed")]


def pairs_image(result: Interactions, index: int, *, count: int = LINES) -> Image.Image:
    """The image with a line for each of the strongest pairs: thicker is stronger, red needs both,
    blue needs either."""
    from seecause.attribution.interactions import region_of

    shown = display_image(result.images[index])
    size = (2 * shown.width, 2 * shown.height)  # lines are drawn large and shrunk: smooth edges
    grey = Image.blend(shown, shown.convert("L").convert("RGB"), 0.6).resize(size)
    image = Image.blend(grey, Image.new("RGB", size, "white"), 0.25)
    draw, cells = ImageDraw.Draw(image), region_of(result.grid, result.regions)

    def centre(region: tuple[int, int]) -> tuple[float, float]:
        inside = cells == region[0] * result.regions + region[1]
        down, across = ((p.double() + 0.5).mean() for p in inside.nonzero(as_tuple=True))
        return float(across / result.grid[1]) * size[0], float(down / result.grid[0]) * size[1]

    pairs = result.pairs(index, count)
    strongest = max((abs(pair.interaction) for pair in pairs), default=0.0)
    for pair in reversed(pairs if strongest else []):  # the strongest on top
        ends, width = (centre(pair.first), centre(pair.second)), abs(pair.interaction) / strongest
        colour = NEED if pair.interaction > 0 else EITHER
        for fill, more in (("white", 6), (colour, 0)):
            draw.line(ends, fill=fill, width=round(3 + 15 * width) + more)
            for x, y in ends:
                draw.circle((x, y), round(6 + 9 * width) + more / 2, fill=fill)
    return image.resize(shown.size, Image.Resampling.LANCZOS)


def pair_rows(result: Interactions, index: int) -> list[dict[str, str]]:
    """The strongest pairs in numbers, for a table."""
    return [
        {
            "regions": f"{pair.first} + {pair.second}",
            "together": f"{pair.joint:#.3g}",
            "alone": " + ".join(f"{value:#.3g}" for value in pair.singles),
            "interaction": f"{pair.interaction:+#.3g}",
        }
        for pair in result.pairs(index, 5)
    ]


# Notebooks.


def notebook_html(runs: Runs) -> str:
    """The first images, each beside its maps, with the predictions below."""
    runs = {method: upright(run) for method, run in runs.items()}
    first = next(iter(runs.values()))
    count = min(len(first), SHOWN)
    most, cards = BYTES // (count * (1 + len(runs))), []
    for index in range(count):
        views = [(_small(display_image(first.images[index]), most), _prediction(first, index))]
        for method, run in runs.items():
            image = overlay(run.images[index], run.pixels()[index], signed=run.signed)
            views.append((_small(image, most), _method_and_class(method, run, index)))
        cards.append((first.name(index), views))
    random = " with RANDOM weights" if first.manifest.get("random_weights") else ""
    remark = f"{', '.join(runs)} on {first.manifest.get('model', '')}{random}"
    more = f"; {len(first) - count} more, see .page(path)" if len(first) > count else ""
    return part("notebook", cards, remark + more)


def plot(runs: Runs, ax: Axes | None = None, **options: Any) -> Figure:
    """Rows of images and their maps; one map into `ax`, where axes are given."""
    from matplotlib.figure import Figure

    runs = {method: upright(run) for method, run in runs.items()}
    first = next(iter(runs.values()))
    count, columns = min(len(first), SHOWN), 1 + len(runs)
    if ax is not None:
        if len(runs) * len(first) != 1:
            given = f"{len(runs)} methods, {len(first)} images"
            raise BadOption("ax", given, "one map: att[0].plot(ax=ax)")
        grid = [[None, ax]]
    elif is_long(first.images.shape[-1], first.images.shape[-2]):  # films
        high = INCHES * LONG * first.images.shape[-2] / first.images.shape[-1] + 0.35
        figure = Figure(figsize=(INCHES * LONG, high * count * columns), layout="constrained")
        grid = figure.subplots(count * columns, 1, squeeze=False).reshape(count, columns)
    else:
        figure = Figure(figsize=(INCHES * columns, (INCHES + 0.35) * count), layout="constrained")
        grid = figure.subplots(count, columns, squeeze=False)

    def draw(axes: Axes, image: Image.Image, title: str) -> None:
        axes.imshow(image)
        axes.set_title(title, fontsize=8)
        axes.set_axis_off()

    for index in range(count):
        if ax is None:
            draw(grid[index][0], display_image(first.images[index]), _prediction(first, index))
        for axes, (method, run) in zip(grid[index][1:], runs.items(), strict=True):
            image = overlay(
                run.images[index], run.pixels()[index], **{"signed": run.signed, **options}
            )
            draw(axes, image, _method_and_class(method, run, index))
    return cast("Figure", ax.get_figure()) if ax is not None else figure


def show(result: Viewable) -> None:
    """In a notebook below the cell, else in a window."""
    if "IPython" in sys.modules:
        from IPython import get_ipython  # pyright: ignore[reportMissingImports]
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        if get_ipython() is not None:
            display(result)
            return
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(result.plot())
    canvas.draw()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).show()


def _prediction(run: Attribution, index: int) -> str:
    if not run.answers:
        return run.name(index)
    best = run.answers[index][0]
    return f"{best.name}, {best.probability:.2f}"


def _method_and_class(method: str, run: Attribution, index: int) -> str:
    return f"{method}: {run.labels[index]}" if run.labels else method


def _small(image: Image.Image, most: int) -> str:
    """A JPEG in a data URI of `most` characters or little more."""
    factor = 192 / min(image.size)
    image = image.resize((round(image.width * factor), round(image.height * factor)))
    for quality in (80, 70, 60, 45, 30, 15):
        uri = data_uri(image, photo=True, quality=quality)
        if len(uri) <= most:
            break
    return uri
