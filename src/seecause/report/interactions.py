"""Pairs of regions as lines over a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from seecause.report.overlay import number, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from seecause.attribution.interactions import Interactions, Pair

NEED, EITHER = "#d62839", "#1d6fd1"  # the colours of maps: red for, blue against
WIDEST, THINNEST = 7.0, 1.0  # points
LINES = 8
TITLE = "Pairs: what two places cause only together"
HOW_TO_READ = (
    "Lines join two regions that cause together what they do not cause one by one: both were put"
    " into a blank picture at once, and their effects alone subtracted. Red: the two need each"
    " other. Blue: each will do without the other. The thickest line is the strongest pair of its"
    " picture."
)


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


def pairs_image(result: Interactions, index: int = 0, *, count: int = LINES) -> Image.Image:
    """The same as a picture of its own, as large as the picture is shown."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = picture(result.images[index]).size
    figure = Figure(figsize=(width / 100, height / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    draw_pairs(figure.add_axes((0, 0, 1, 1)), result, index, count=count)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())


def pair_rows(result: Interactions, index: int = 0, *, count: int = 5) -> list[dict[str, str]]:
    """The strongest pairs in words and numbers, for a table."""
    return [_row(pair) for pair in result.pairs(index, count)]


def _row(pair: Pair) -> dict[str, str]:
    places = " + ".join(f"{row}, {column}" for row, column in (pair.first, pair.second))
    return {
        "regions": places,
        "together": number(pair.joint),
        "alone": " + ".join(number(value) for value in pair.singles),
        "interaction": f"{'+' if pair.interaction > 0 else ''}{number(pair.interaction)}",
    }


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
