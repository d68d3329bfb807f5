"""The README's first picture: two photos that come with scikit-image, four maps of each.

    python examples/first_picture.py --weights vit_tiny_patch16_224.safetensors

Coffee: Rachel Michetti, CC0. Eileen Collins: NASA, public domain. The weights are a ViT-Ti/16
trained on ImageNet-1k under timm's names; without --weights timm fetches its own. The numbers below
the maps are means over other photos, read from docs/results/mosaic.csv.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from PIL import Image

import seecause as sc

ROOT = Path(__file__).parents[1]
PHOTOS = ("coffee", "astronaut")
METHODS = {
    "caap": "CAAP",
    "mosaic": "mosaic",
    "grad-cam": "Grad-CAM",
    "integrated-gradients": "integrated gradients",
}
INK, SOFT = "#1c1c21", "#62626c"
HEAT = LinearSegmentedColormap.from_list("heat", ["#3b0f70", "#b5367a", "#fb8761", "#fcfdbf"])


def photo(name: str) -> Image.Image:
    from skimage import data

    return Image.fromarray(getattr(data, name)())


def published(method: str) -> str:
    """What the study of mosaic measured for a method, in points of 100."""
    wanted = {("imagenet, label", "ins-del"): "faithful", ("pets, label", "aupr1"): "finds animals"}
    with (ROOT / "docs/results/mosaic.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == method]
    means = {(row["table"], row["metric"]): 100 * float(row["mean"]) for row in rows}
    return "\n".join(f"{word} {means[key]:.1f}" for key, word in wanted.items())


def strength_of(result: Any, place: int) -> np.ndarray:
    """[H, W] from 0 to 1: what speaks for the class, by pixels where the method has them, else by
    patches enlarged. The highest 1 % share one colour, or single pixels would hide the others."""
    pixels = result.native if result.native is not None else result.pixels()
    values = pixels[place].clamp(min=0).double().numpy()
    return np.clip(values / (np.quantile(values, 0.99) or 1.0), 0, 1)


def draw(axis: Any, raw: np.ndarray, heat: np.ndarray | None) -> None:
    """The photo, or a greyed photo with the map over it: transparent where the map is 0."""
    axis.set_axis_off()
    if heat is None:
        axis.imshow(raw)
        return
    grey = raw.mean(axis=-1, keepdims=True).repeat(3, axis=-1) * 0.75 + 0.12
    opacity = (0.85 * heat**0.6)[..., None]
    axis.imshow(grey * (1 - opacity) + HEAT(heat)[..., :3] * opacity)


def caption(axis: Any, text: str, colour: str, weight: str = "normal") -> None:
    place = {"transform": axis.transAxes, "ha": "center", "va": "top"}
    axis.text(0.5, -0.035, text, fontsize=10.5, color=colour, weight=weight, **place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="timm:vit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/first.jpg")
    given = parser.parse_args()
    model = sc.load(given.model, **({"weights": given.weights} if given.weights else {}))
    images = torch.cat([model.preprocess(photo(name)) for name in PHOTOS])
    with torch.no_grad():
        chances, answers = model(images).softmax(dim=-1).max(dim=-1)
    results = {name: sc.attribute(model, images, answers, method=name) for name in METHODS}
    raw = model.preprocess.raw(images).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    margins = {"left": 0.008, "right": 0.992, "top": 0.935, "bottom": 0.075}
    figure, axes = plt.subplots(
        len(PHOTOS), 1 + len(METHODS), figsize=(12, 5.75), dpi=120,
        gridspec_kw={"wspace": 0.05, "hspace": 0.16, **margins},
    )  # fmt: skip
    for row, answer in enumerate(answers.tolist()):
        draw(axes[row][0], raw[row], None)
        name = model.classes[answer].split(",")[0]
        caption(axes[row][0], f"“{name}”, {chances[row]:.0%}", INK, "bold")
        for column, result in enumerate(results.values(), start=1):
            draw(axes[row][column], raw[row], strength_of(result, row))
    for axis, title in zip(axes[0], ["photo and prediction", *METHODS.values()], strict=True):
        axis.set_title(title, fontsize=13, color=INK, pad=7)
    for axis, name in zip(axes[-1][1:], METHODS, strict=True):
        caption(axis, published(name), SOFT)
    figure.savefig(given.out, pil_kwargs={"quality": 88, "subsampling": 0, "optimize": True})


if __name__ == "__main__":
    main()
