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
from scripts.background.numbers import ACCURACIES, Removals, bir, effects, mean, right_ones, tensor
from scripts.background.page import NAME
from scripts.head_methods import GREY, GUARD, PRINTED
from seecause.heads import Cases, Masks

Row = dict[str, Any]
SIDE, GAP, TOP, SHOWN = 96, 4, 16, 5  # pixels of a photo, between photos, of the words above; photos
WORDS = {
    "original": "photo as it is", "only_fg": "only the animal, on black", "only_bg_b": "only background, box black",
    "only_bg_t": "only background, box tiled", "only_bg_f": "only background, shape filled",
    "mixed_same": "animal on a photo of its breed", "mixed_rand": "animal on another breed's photo",
}  # fmt: skip
DRAWN = {
    PRINTED: "#d1552a", f"{GREY}{GUARD}": "#2f7ed8", "regression, true masks, grey": "#2a9d6f", "smallest Taylor": "#9b59b6", "gating, contrastive": "#c9a227",
}  # fmt: skip


def write(pets: Cases, made: Composites, masks: Masks | None, found: Row, removals: Removals, out: Path) -> None:
    """evidence-background-photos.png, and evidence-background.png from what is there."""
    sheet(pets, made, masks).save(out / f"{NAME}-photos.png", optimize=True)
    matplotlib.use("Agg")
    figure, ((first, second), (third, fourth)) = plt.subplots(2, 2, figsize=(11.5, 8.2), layout="constrained")
    if "composites" in found:
        kinds = found["composites"]["kinds"]
        bars(first, {WORDS[kind]: mean(tensor(kinds[kind]["right"])) for kind in reversed((*ALONE, *MIXED))}, "accuracy on pets")
        first.set_title("What the model still answers right", fontsize=11)
    if "audit" in found:
        rows = right_ones(found)
        bars(second, {name: bir(one, rows) for name, one in reversed(found["audit"]["gains"].items())}, "BIR, ratio of means")
        second.set_title("BIR, by how the background is taken away", fontsize=11)
    if removals.lots:
        whole = effects(found["nothing removed"][0], found["nothing removed"][0])
        for axes, measure, title in ((third, ACCURACIES[0], "ImageNet accuracy without heads"), (fourth, "BG-gap", "BG-gap without heads")):
            curves(axes, removals, whole[measure].value, measure)
            axes.set_title(title, fontsize=11)
        figure.legend(*third.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
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
    axes.tick_params(axis="y", labelsize=8)


def curves(axes: Axes, removals: Removals, start: float, measure: str) -> None:
    """A measure against K: some methods in colour with the intervals of their changes, moved apart a little where they would hide each other; random sets
    as a band from the lowest to the highest. All others are in the tables."""
    drawn = {size: [lot.effects[measure].value for lot in some] for size, some in removals.lots.items()}
    axes.axhline(start, color="#444444", linewidth=0.8, linestyle=":", label="the whole model")
    axes.fill_between(
        [0, *drawn], [start, *map(min, drawn.values())], [start, *map(max, drawn.values())], color="#e4e4e4", label="random heads, lowest to highest"
    )
    ks = sorted({k for _, k in removals.chosen})
    for place, (method, colour) in enumerate(DRAWN.items()):
        if all((method, k) in removals.chosen for k in ks):
            aside, found = 0.12 * (place - (len(DRAWN) - 1) / 2), [removals.chosen[method, k].effects[measure] for k in ks]
            at, values = [k + aside for k in ks], [one.value for one in found]
            axes.plot([0, *at], [start, *values], color=colour, label=method, linewidth=1.4, marker="o", markersize=4)
            axes.vlines(at, [start + one.change.low for one in found], [start + one.change.high for one in found], color=colour, linewidth=0.8, alpha=0.7)
    axes.set_xticks([0, *ks])
    axes.set_xlabel("K: heads that may go (scores above 0 only)")
    axes.set_ylabel(measure)
