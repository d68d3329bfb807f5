"""What is said and drawn of a picture beside its maps: answers in words, the box or the region that
was asked about, what is enough for the answer and what it needs, and pairs of regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from seecause.attribution.result import Attribution
from seecause.models.preprocess import from_record
from seecause.report.overlay import number, outline_layer, picture
from seecause.target import Answer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from seecause.attribution.evidence import Evidence, PatchSet
    from seecause.attribution.interactions import Interactions

ROWS_NOTE = (
    "The line marks the box or the pixels that were asked about; thin lines are other boxes, by"
    " number. Maps are over the places that a row reads (encoder tokens, feature maps), which have"
    " seen their surroundings."
)

INPUTS = {  # how inputs that are no pictures are drawn
    "film": (
        "A film is shown as frames in a row, one for each time that the model reads; columns of"
        " patches count through all of them."
    ),
}
Part = Literal["enough", "needed"]
COLOURS = {"enough": "#1a7f37", "needed": "#d62839"}
LINE = 3  # pixels
EVIDENCE_NOTE = (
    "Patches were taken in the order of the first map. Enough: shown alone on a blank, the outlined"
    " patches keep the answer. Needed: without the outlined patches, which are blank then, the"
    " answer is gone. The model was run on exactly these two pictures, and one patch less did not"
    " do; a smaller set in this order may exist where the answer comes and goes."
)
NEED, EITHER = "#d62839", "#1d6fd1"  # the colours of maps: red for, blue against
WIDEST, THINNEST = 7.0, 1.0  # points
LINES = 8
PAIRS_TITLE = "Pairs, in logits: red places need each other, of blue ones one will do"
PAIRS_NOTE = (
    "The picture is cut into {0} x {0} regions, called by row and column from 0. Lines join two"
    " regions that cause together what they do not cause one by one: both were put into a blank"
    " picture at once, and their effects alone subtracted. Red: the two need each other. Blue: each"
    " will do without the other. The thickest line is the strongest pair of its picture."
)


def drawn(run: Attribution) -> Attribution:
    """A result turned as people look at it: frames of a film in a row, sound with time to the
    right and frequency upwards. Pictures stay as they are."""
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


def answer_text(answers: Sequence[Answer]) -> str:
    """The answer in words: what the model says, and what was explained where that is something
    else."""
    best, explained = answers[0], [a for a in answers if a.explained]
    words = f"{best.name}, probability {best.probability:.3f}"
    if not explained or explained == [best]:
        return words
    named = [f"{answer.name}, {answer.probability:.3f}" for answer in explained]
    return f"{words}; explained: {' against '.join(named)}"


def row_text(row: Mapping[str, Any]) -> str:
    """What was asked of a detector or a model of pixels, and what it says."""
    if row["answers"]:
        answers = [Answer(**answer) for answer in row["answers"]]
        return f"{row['row']}: {answer_text(answers)}"
    return f"{row['explained']}: {number(row['value'])}"


def box_texts(row: Mapping[str, Any]) -> list[str]:
    """All boxes that the detector is sure of."""
    return [
        f"box {box['index']}: {box['name']}, probability {box['probability']:.3f}"
        for box in row["boxes"]
    ]


def outline(run: Attribution, index: int, size: tuple[int, int]) -> Image.Image | None:
    """A layer of width x height: the box or the region that was asked about, and thinly the other
    boxes that the detector is sure of. None where the whole picture was asked about."""
    if run.regions is None:
        return None
    target = run.manifest["target"]
    asked = target["row"][index].removeprefix("box ")
    boxes = {str(box["index"]): box["place"] for box in target["boxes"][index]}
    others = {name: place for name, place in boxes.items() if name != asked}
    return outline_layer(size, run.regions[index], others)


def outlined(evidence: Evidence, index: int, part: Part) -> Image.Image:
    """The picture with the patches of a set outlined; what the model did not see is washed out."""
    chosen = getattr(evidence, part).patches[index]
    shown = picture(evidence.images[index])
    washed = Image.blend(
        shown.convert("L").convert("RGB"), Image.new("RGB", shown.size, "white"), 0.7
    )
    seen = chosen if part == "enough" else ~chosen
    image = Image.composite(shown, washed, _mask(seen, shown.size))
    _outline(ImageDraw.Draw(image), chosen, shown.size, COLOURS[part])
    return image


def sentences(evidence: Evidence, index: int) -> tuple[str, str]:
    """Both findings in words."""
    total = evidence.maps[index].numel()
    odds = f"{evidence.enough.probability[index]:.3f}, of all {evidence.probability[index]:.3f}"
    answer = evidence.labels[index] if evidence.labels else "the answer"
    if not evidence.answered[index]:
        text = f"The model does not answer {answer}: there is nothing to keep or to break"
        return text, text
    enough, needed = evidence.enough, evidence.needed
    count = int(enough.count[index])
    first = (
        f"Enough: {count} of {total} patches keep {answer}: probability {odds}"
        if count
        else f"Enough: nothing. The blank alone is answered {answer}"
    )
    count = int(needed.count[index])
    second = (
        f"Needed: without these {count} of {total} patches it is {needed.labels[index]};"
        f" {answer} has probability {needed.probability[index]:.3f}"
        if needed.exists[index]
        else f"Needed: no set was found. The blank alone is answered {answer}"
    )
    return first, second


def evidence_numbers(evidence: Evidence, index: int) -> dict[str, Any]:
    """The same for a file."""
    sets = {}
    for part in ("enough", "needed"):
        chosen: PatchSet = getattr(evidence, part)
        sets[part] = {
            "exists": bool(chosen.exists[index]),
            "patches": chosen.patches[index].nonzero().tolist(),
            "probability": float(chosen.probability[index]),
            "answer": chosen.labels[index],
        }
    return {"probability": float(evidence.probability[index]), **sets}


def _mask(patches: Tensor, size: tuple[int, int]) -> Image.Image:
    small = Image.fromarray((patches.byte() * 255).numpy())
    return small.resize(size, Image.Resampling.NEAREST)


def _outline(
    draw: ImageDraw.ImageDraw, patches: Tensor, size: tuple[int, int], colour: str
) -> None:
    """Lines where a patch of the set meets one that is not, or the edge of the picture."""
    rows, columns = patches.shape
    across = [round(x * size[0] / columns) for x in range(columns + 1)]
    down = [round(y * size[1] / rows) for y in range(rows + 1)]
    inside = patches.tolist()

    def chosen(row: int, column: int) -> bool:
        return 0 <= row < rows and 0 <= column < columns and inside[row][column]

    for row in range(rows + 1):
        for column in range(columns + 1):
            if column < columns and chosen(row, column) != chosen(row - 1, column):
                ends = (across[column], down[row], across[column + 1], down[row])
                draw.line(ends, fill=colour, width=LINE)
            if row < rows and chosen(row, column) != chosen(row, column - 1):
                ends = (across[column], down[row], across[column], down[row + 1])
                draw.line(ends, fill=colour, width=LINE)


def draw_pairs(ax: Axes, result: Interactions, index: int = 0, *, count: int = LINES) -> None:
    """The picture with a line for each of the strongest pairs, the strongest on top."""
    image = picture(result.images[index])
    ax.imshow(_pale(image))
    ax.set_axis_off()
    pairs = result.pairs(index, count)
    strongest = max((abs(pair.interaction) for pair in pairs), default=0.0)
    if strongest == 0:
        return
    for pair in reversed(pairs):
        ends = [_centre(region, result, image.size) for region in (pair.first, pair.second)]
        across, down = zip(*ends, strict=True)
        width = max(THINNEST, WIDEST * abs(pair.interaction) / strongest)
        colour = NEED if pair.interaction > 0 else EITHER
        style = {"solid_capstyle": "round", "marker": "o", "markersize": width + 4}
        ax.plot(across, down, color="white", linewidth=width + 2, alpha=0.7, **style)
        ax.plot(across, down, color=colour, linewidth=width, alpha=0.9, **style)


def pairs_image(result: Interactions, index: int) -> Image.Image:
    """The same as a picture of its own, as large as the picture is shown."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = picture(result.images[index]).size
    figure = Figure(figsize=(width / 100, height / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    draw_pairs(figure.add_axes((0, 0, 1, 1)), result, index)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())


def pair_rows(result: Interactions, index: int) -> list[dict[str, str]]:
    """The strongest pairs in words and numbers, for a table."""
    return [
        {
            "regions": f"{pair.first} + {pair.second}",
            "together": f"{pair.joint:#.3g}",
            "alone": " + ".join(f"{value:#.3g}" for value in pair.singles),
            "interaction": f"{pair.interaction:+#.3g}",
        }
        for pair in result.pairs(index, 5)
    ]


def _centre(
    region: tuple[int, int], result: Interactions, size: tuple[int, int]
) -> tuple[float, float]:
    """The middle of a region in pixels, across and down."""
    from seecause.attribution.interactions import region_of

    inside = region_of(result.grid, result.regions) == region[0] * result.regions + region[1]
    rows, columns = inside.nonzero(as_tuple=True)
    down, across = ((place.double() + 0.5).mean() for place in (rows, columns))
    return float(across / result.grid[1] * size[0]), float(down / result.grid[0] * size[1])


def _pale(image: Image.Image) -> Image.Image:
    grey = Image.blend(image, image.convert("L").convert("RGB"), 0.6)
    return Image.blend(grey, Image.new("RGB", image.size, "white"), 0.25)
