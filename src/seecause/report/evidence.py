"""What is enough for an answer, and what it needs: two outlined pictures and their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from PIL import Image, ImageDraw
from torch import Tensor

from seecause.report.overlay import picture

if TYPE_CHECKING:
    from seecause.attribution.evidence import Evidence, PatchSet

Part = Literal["enough", "needed"]
COLOURS = {"enough": "#1a7f37", "needed": "#d62839"}
LINE = 3  # pixels
HOW_TO_READ = (
    "Patches were taken in the order of the first map. Enough: shown alone on a blank, the outlined"
    " patches keep the answer. Needed: without the outlined patches, which are blank then, the"
    " answer is gone. The model was run on exactly these two pictures, and one patch less did not"
    " do; a smaller set in this order may exist where the answer comes and goes."
)


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


def numbers(evidence: Evidence, index: int) -> dict[str, Any]:
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
