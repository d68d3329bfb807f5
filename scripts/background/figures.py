"""The pictures of the background study: a sheet of photos and what was made of them, and charts of its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from PIL import Image, ImageDraw
from torch import Tensor

from scripts.background.composites import ALONE, MIXED, Composites
from scripts.background.numbers import ACCURACIES, Lots, Removals, effects, mean, tensor
from scripts.background.page import NAME, bir, right_ones
from scripts.head_methods import GREY, GUARD, PRINTED
from seecause.heads import Cases, Masks

Row = dict[str, Any]
SIDE, GAP, TOP, SHOWN = 96, 4, 16, 5  # pixels of a photo, between photos, of the words above; photos
DRAWN = {PRINTED: "#d1552a", f"{GREY}{GUARD}": "#2f7ed8", "regression, true masks, grey": "#2a9d6f", "taylor": "#9b59b6", "gating": "#c9a227"}


def write(pets: Cases, made: Composites, masks: Masks | None, found: Row, removals: Removals, lots: Lots, out: Path) -> None:
    """evidence-background-photos.png, and evidence-background.png from what is there."""
    sheet(pets, made, masks).save(out / f"{NAME}-photos.png", optimize=True)
    matplotlib.use("Agg")
    figure, ((first, second), (third, fourth)) = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    if "composites" in found:
        kinds = found["composites"]["kinds"]
        bars(first, {kind.replace("_", "-"): mean(tensor(kinds[kind]["right"])) for kind in reversed((*ALONE, *MIXED))}, "accuracy on pets")
    if "audit" in found:
        rows = right_ones(found)
        bars(second, {name: bir(one, rows) for name, one in reversed(found["audit"]["gains"].items())}, "BIR, ratio of means")
    if lots:
        whole = effects(found["nothing removed"][0], found["nothing removed"][0])
        for axes, measure in ((third, ACCURACIES[0]), (fourth, "BG-gap")):
            curves(axes, removals, lots, whole[measure].value, measure)
        third.legend(fontsize=7, loc="lower left")
    figure.savefig(out / f"{NAME}.png", dpi=90)
    plt.close(figure)


def sheet(pets: Cases, made: Composites, masks: Masks | None) -> Image.Image:
    """Some photos, one in a row: as it is, what the discovered mask keeps, and every composite. In 256 colours, to be small."""
    pixels = made.alone["original"]
    rows = torch.arange(SHOWN) * len(pets) // SHOWN
    columns = {"original": pixels[rows]}
    if masks is not None:
        columns["discovered mask"] = torch.where(masks.hard[rows][:, None], pixels[rows], 0.5)
    columns |= {name.replace("_", "-"): made.alone[name][rows] for name in ALONE[1:]} | {name.replace("_", "-"): made.mixed[name][0][rows] for name in MIXED}
    grid = Image.new("RGB", (len(columns) * (SIDE + GAP), TOP + len(rows) * (SIDE + GAP)), "white")
    draw = ImageDraw.Draw(grid)
    for place, (name, column) in enumerate(columns.items()):
        draw.text((place * (SIDE + GAP), 2), name, fill="black")
        for line, small in enumerate(F.interpolate(column.float().cpu(), size=(SIDE, SIDE), mode="area")):
            grid.paste(as_image(small), (place * (SIDE + GAP), TOP + line * (SIDE + GAP)))
    return grid.quantize(256)


def as_image(pixels: Tensor) -> Image.Image:
    """[3, H, W] in [0, 1]."""
    return Image.fromarray((pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy())


def bars(axes: Axes, values: Row, label: str) -> None:
    """Estimates from top to bottom, with their intervals."""
    middle = [one.value for one in values.values()]
    reach = [[max(0.0, one.value - one.low) for one in values.values()], [max(0.0, one.high - one.value) for one in values.values()]]
    axes.barh(list(values), middle, xerr=reach, color=["#bbbbbb" if name.startswith("control") else "#2f7ed8" for name in values], ecolor="#444444")
    axes.set_xlabel(label)
    axes.tick_params(axis="y", labelsize=7)


def curves(axes: Axes, removals: Removals, lots: Lots, start: float, measure: str) -> None:
    """A measure against K: some methods in colour, all others thin, random sets as a band from the lowest to the highest."""
    drawn = {size: [lot[measure].value for lot in some] for size, some in lots.items()}
    at = [0, *drawn]
    axes.fill_between(at, [start, *map(min, drawn.values())], [start, *map(max, drawn.values())], color="#dddddd", label="random, all sets")
    ks = sorted({k for _, k in removals})
    for method in dict.fromkeys(method for method, _ in removals):
        values = [start, *(removals[method, k].effects[measure].value for k in ks)]
        told: Row = {"color": DRAWN[method], "label": method, "linewidth": 1.8} if method in DRAWN else {"color": "#999999", "linewidth": 0.5}
        axes.plot([0, *ks], values, marker="o", markersize=3 if method in DRAWN else 0, **told)
    axes.set_xlabel("K: heads that may go (scores above 0 only)")
    axes.set_ylabel(f"{measure}, without them")
