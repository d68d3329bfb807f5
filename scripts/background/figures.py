"""The pictures of the background study: a sheet of photos and what was made of them, and charts of
its numbers."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from PIL import Image, ImageDraw
from torch import Tensor

from scripts.background.composites import ALONE, MIXED, Composites
from scripts.background.numbers import (
    ACCURACIES,
    Effect,
    Removals,
    bir,
    effects,
    mean,
    right_ones,
    tensor,
)
from scripts.background.page import NAME
from scripts.background.removal import ENDS
from scripts.head_methods import GREY, PRINTED
from seecause.heads import Masks, Pictures

Row = dict[str, Any]
SIDE, GAP, TOP, SHOWN = (
    96,
    4,
    16,
    5,
)  # pixels of a photo, between photos, of the words above; photos
WORDS = {
    "original": "photo as it is", "only_fg": "only the animal, on black",
    "only_bg_b": "only background, box black",
    "only_bg_t": "only background, box tiled", "only_bg_f": "only background, shape filled",
    "mixed_same": "animal on a photo of its breed", "mixed_rand": "animal on another breed's photo",
}  # fmt: skip
DRAWN = {
    PRINTED: "#d1552a",
    GREY: "#2f7ed8",
    ENDS["attention mass"]: "#6b6b6b",
}  # a row of panels for each; all other methods are in the tables
DRAWN_MEASURES = (*ACCURACIES, "BG-gap", "BIR, true masks, grey")


def write(
    pets: Pictures, made: Composites, masks: Masks | None, found: Row, removals: Removals, out: Path
) -> None:
    """evidence-background-photos.png, and evidence-background.png from what is there."""
    sheet(pets, made, masks).save(out / f"{NAME}-photos.png", optimize=True)
    matplotlib.use("Agg")
    figure = plt.figure(figsize=(11.5, 10), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(4, 6))
    first, second = above.subplots(1, 2)
    if "composites" in found:
        kinds = found["composites"]["kinds"]
        bars(
            first,
            {
                WORDS[kind]: mean(tensor(kinds[kind]["right"]))
                for kind in reversed((*ALONE, *MIXED))
            },
            "accuracy on pets",
        )
        first.set_title("What the model still answers right", fontsize=11)
    if "audit" in found:
        rows = right_ones(found)
        bars(
            second,
            {name: bir(one, rows) for name, one in reversed(found["audit"]["gains"].items())},
            "BIR, ratio of means",
        )
        second.set_title("BIR, by how the background is taken away", fontsize=11)
    if removals.lots:
        whole = effects(found["nothing removed"][0], found["nothing removed"][0])
        panels(below, removals, {measure: whole[measure].value for measure in DRAWN_MEASURES})
    figure.savefig(out / f"{NAME}.png", dpi=90)
    plt.close(figure)


def sheet(pets: Pictures, made: Composites, masks: Masks | None) -> Image.Image:
    """Some photos, one in a row: as it is, what the discovered mask keeps, and every composite. In
    256 colours, to be small."""
    pixels = made.alone["original"]
    rows = torch.arange(SHOWN) * len(pets) // SHOWN
    columns = {"original": pixels[rows]}
    if masks is not None:
        columns["discovered mask"] = torch.where(masks.hard[rows][:, None], pixels[rows], 0.5)
    columns |= {name.replace("_", "-"): made.alone[name][rows] for name in ALONE[1:]} | {
        name.replace("_", "-"): made.mixed[name][0][rows] for name in MIXED
    }
    grid = Image.new("RGB", (len(columns) * (SIDE + GAP), TOP + len(rows) * (SIDE + GAP)), "white")
    draw = ImageDraw.Draw(grid)
    for place, (name, column) in enumerate(columns.items()):
        draw.text((place * (SIDE + GAP), 2), name, fill="black")
        for line, small in enumerate(
            F.interpolate(column.float().cpu(), size=(SIDE, SIDE), mode="area")
        ):
            grid.paste(as_image(small), (place * (SIDE + GAP), TOP + line * (SIDE + GAP)))
    return grid.quantize(256)


def as_image(pixels: Tensor) -> Image.Image:
    """[3, H, W] in [0, 1]."""
    return Image.fromarray((pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy())


def bars(axes: Axes, values: Row, label: str) -> None:
    """Estimates from top to bottom, with their intervals."""
    middle = [one.value for one in values.values()]
    reach = [
        [max(0.0, one.value - one.low) for one in values.values()],
        [max(0.0, one.high - one.value) for one in values.values()],
    ]
    axes.barh(
        list(values),
        middle,
        xerr=reach,
        color=["#bbbbbb" if name.startswith("control") else "#2f7ed8" for name in values],
        ecolor="#444444",
    )
    axes.set_xlabel(label)
    axes.tick_params(axis="y", labelsize=8)


def panels(figure: SubFigure, removals: Removals, whole: dict[str, float]) -> None:
    """A row for each method, a column for each measure with one scale: nothing hides anything
    else."""
    grid = figure.subplots(len(DRAWN), len(whole), sharex=True, sharey="col", squeeze=False)
    figure.suptitle("What removing heads does, by method (rows) and measure (columns)", fontsize=11)
    for row, (method, colour) in zip(grid, DRAWN.items(), strict=True):
        row[0].set_ylabel(method.replace(", ", ",\n").replace(" on ", "\non "), fontsize=9)
        for axes, (measure, start) in zip(row, whole.items(), strict=True):
            curve(axes, removals, method, measure, start, colour)
    for axes, measure in zip(grid[0], whole, strict=True):
        axes.set_title(measure, fontsize=10)
    for axes, (measure, start) in zip(grid[-1], whole.items(), strict=True):
        axes.set_xlabel("heads removed", fontsize=9)
        axes.set_ylim(*reach(removals, measure, start))
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)


def by_size(removals: Removals, method: str, measure: str) -> dict[int, Effect]:
    """What a method does to a measure, by the number of heads that really go: less than K where
    fewer have a score above 0."""
    return {
        len(one.heads): one.effects[measure]
        for (name, _), one in removals.chosen.items()
        if name == method and one.heads
    }


def curve(
    axes: Axes, removals: Removals, method: str, measure: str, start: float, colour: str
) -> None:
    """One method with the intervals of its changes; random sets as the line of their means and a
    band from the lowest to the highest."""
    drawn, found = (
        {
            size: [lot.effects[measure].value for lot in some]
            for size, some in removals.lots.items()
        },
        by_size(removals, method, measure),
    )
    axes.axhline(start, color="#444444", linewidth=0.8, linestyle=":", label="the whole model")
    axes.fill_between(
        [0, *drawn],
        [start, *map(min, drawn.values())],
        [start, *map(max, drawn.values())],
        color="#e8e8e8",
        label="random, lowest to highest",
    )
    axes.plot(
        [0, *drawn],
        [start, *map(fmean, drawn.values())],
        color="#a8a8a8",
        linewidth=1.2,
        label="random, mean",
    )
    errors = [
        [one.change.value - one.change.low for one in found.values()],
        [one.change.high - one.change.value for one in found.values()],
    ]
    shown = {
        "color": colour,
        "linewidth": 1.4,
        "elinewidth": 1,
        "capsize": 2.5,
        "marker": "o",
        "markersize": 4,
    }
    axes.errorbar(
        list(found),
        [one.value for one in found.values()],
        yerr=errors,
        **shown,
        label="the row's method" if method == PRINTED else None,
    )
    axes.set_xticks(sorted({0, *drawn}))
    axes.tick_params(labelsize=8)


def reach(removals: Removals, measure: str, start: float) -> tuple[float, float]:
    """Lowest and highest of what a column's methods do with their intervals, and of random means: a
    random set may break the model, and is cut off."""
    found = [one for method in DRAWN for one in by_size(removals, method, measure).values()]
    ends = [
        one.value - one.change.value + end
        for one in found
        for end in (one.change.low, one.change.high)
    ]
    ends += [
        start,
        *(fmean(lot.effects[measure].value for lot in some) for some in removals.lots.values()),
    ]
    margin = 0.05 * (max(ends) - min(ends)) or 0.01
    return min(ends) - margin, max(ends) + margin
