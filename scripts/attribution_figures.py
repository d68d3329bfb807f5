"""The pictures of the attribution study: mean curves, a radar plot and a gallery, as small PNG files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from scripts.attribution_parts import Done
from scripts.tables import REFERENCE
from seecause.bench.measures import higher_is_better
from seecause.bench.table import Table, values
from seecause.data.photos import Photos
from seecause.data.sample import IGNORE
from seecause.errors import BadImage
from seecause.metrics import rank_correlation
from seecause.report.charts import COLOURS
from seecause.report.overlay import overlay, picture

TILE, LABEL, LEFT, GAP = 88, 30, 70, 4  # pixels of the gallery: tiles, words above them, words on the left, and between
SHADES = 256  # colours of the gallery: a third of the bytes
Means = Mapping[str, Mapping[str, float]]  # by axis, then by method


def axes(tables: Mapping[str, Table]) -> dict[str, dict[str, float]]:
    """Every metric of every table as an axis from its worst method (0) to its best (1); what was not measured, or on fewer photos, is left out."""
    found = {}
    for title, table in tables.items():
        for metric in table.metrics:
            means = {m: table.cells[m][metric].mean for m in table.methods if table.cells[m][metric].n and not m.endswith("*")}
            low, high = (min(means.values()), max(means.values())) if means else (0.0, 0.0)
            if high > low:
                scaled = {m: (mean - low) / (high - low) for m, mean in means.items()}
                found[f"{metric}\n{title}"] = scaled if higher_is_better(metric) else {m: 1 - v for m, v in scaled.items()}
    return found


def leaders(scaled: Means, count: int, *, beside: Sequence[str]) -> list[str]:
    """CAAP, the `count` others with the best mean over the axes, and some that are always shown."""
    everywhere = [m for m in next(iter(scaled.values()), {}) if all(m in axis for axis in scaled.values())]
    mean = {m: sum(axis[m] for axis in scaled.values()) / len(scaled) for m in everywhere}
    others = sorted((m for m in mean if m != REFERENCE and m not in beside), key=lambda m: -mean[m])[:count]
    return [m for m in (REFERENCE, *others, *beside) if m in mean]


def radar(scaled: Means, shown: Sequence[str], path: Path) -> None:
    """One polygon for each method; outside is better."""
    figure = Figure(figsize=(7.2, 5.2), dpi=90, layout="constrained")
    plot = figure.add_subplot(projection="polar")
    angles = [2 * math.pi * place / len(scaled) for place in range(len(scaled))]
    for colour, method in zip(_colours(shown), shown, strict=True):
        along = [axis[method] for axis in scaled.values()]
        plot.plot([*angles, angles[0]], [*along, along[0]], color=colour, label=method, linewidth=2.4 if method == REFERENCE else 1.2)
    plot.set_xticks(angles, list(scaled), fontsize=8)
    plot.tick_params(axis="x", pad=14)
    plot.set_yticks([0.25, 0.5, 0.75, 1.0], [])
    plot.set_ylim(0, 1.02)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path)


def curves(done: Done, shown: Sequence[str], path: Path) -> None:
    """Mean insertion and deletion curves; methods that are not named are grey."""
    figure = Figure(figsize=(9.6, 4.0), dpi=90, layout="constrained")
    found = _curves(done)
    colours = dict(zip(shown, _colours(shown), strict=True))
    for plot, kind, across in zip(figure.subplots(1, 2, sharey=True), ("insertion", "deletion"), ("uncovered", "covered"), strict=True):
        for method in sorted(found, key=lambda m: (m in colours, m == REFERENCE)):
            shares, mean, error = found[method][kind]
            named = {"color": colours[method], "label": method, "linewidth": 2.4 if method == REFERENCE else 1.2} if method in colours else {}
            plot.plot(shares, mean, **(named or {"color": "#dddddd", "linewidth": 0.7}))
            if named:
                plot.fill_between(shares, mean - error, mean + error, color=colours[method], alpha=0.12, linewidth=0)
        plot.set_title(f"{kind}, {len(done.part.data)} photos", fontsize=10)
        plot.set_xlabel(f"share of the photo {across}, most important pixels first", fontsize=9)
    figure.axes[0].set_ylabel("probability of the class", fontsize=9)
    handles = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    figure.legend([handles[m] for m in shown if m in handles], [m for m in shown if m in handles], loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path)


def gallery(done: Done, shown: Sequence[str], path: Path, *, photos: bool, each: int = 2) -> None:
    """Maps of some methods, over the photo or over the animal's silhouette: where CAAP does best, where it does worst, and where the methods disagree most."""
    maps = {m: found for m, found in done.store.maps(done.plan).items() if m in shown}
    known = sorted(set.intersection(*(set(found) for found in maps.values())))
    score = values(done.store.rows(done.plan), done.plan)[REFERENCE]["ins-del"]
    ranked = [place for place in score.argsort(descending=True, stable=True).tolist() if place in set(known)]
    stacked = [torch.stack([maps[m][place] for place in known]) for m in shown]
    alike = sum((rank_correlation(a, b).nan_to_num() for i, a in enumerate(stacked) for b in stacked[:i]), torch.zeros(len(known), dtype=torch.float64))
    apart = [known[place] for place in alike.argsort(stable=True).tolist()]
    why: dict[int, list[str]] = {}
    for reason, some in (("CAAP best", ranked[:each]), ("CAAP worst", ranked[::-1][:each]), ("most apart", apart[:each])):
        for place in some:
            why.setdefault(place, []).append(reason)
    rows = {}
    for place, reasons in why.items():
        image = _seen(done.part.data, place, photos=photos)
        if image is not None:
            rows[place] = ("\n".join(reasons), [picture(image), *(overlay(image, maps[m][place]) for m in shown)])
    drawn = _sheet(list(rows.values()), ["photo" if photos else "outline", *shown])
    drawn.quantize(SHADES, method=Image.Quantize.MAXCOVERAGE, kmeans=4).save(path, optimize=True)


def _seen(data: Photos, place: int, *, photos: bool) -> Tensor | None:
    """The photo [3, H, W], or the animal's shape in grey on white with the trimap's border darker; None if it cannot be read."""
    try:
        sample = data[place]
    except BadImage:
        return None
    if photos or sample.mask is None:
        return sample.image if photos else torch.ones_like(sample.image)
    paint = torch.where(sample.mask == 0, 1.0, torch.where(sample.mask == IGNORE, 0.7, 0.88))
    return paint.expand(3, -1, -1)


def _sheet(rows: Sequence[tuple[str, Sequence[Image.Image]]], titles: Sequence[str]) -> Image.Image:
    """Rows of tiles with their names on the left; titles above, in two lines where they are long."""
    side, font = TILE + GAP, ImageFont.load_default(11)
    sheet = Image.new("RGB", (LEFT + side * len(titles) + GAP, side * len(rows) + LABEL + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles):
        lines = title if font.getlength(title) <= TILE else title.replace("-", "-\n")
        draw.multiline_text((LEFT + GAP + column * side + TILE / 2, LABEL - 2), lines, fill="black", font=font, anchor="md", align="center", spacing=1)
    for row, (name, tiles) in enumerate(rows):
        top = LABEL + GAP + row * side
        draw.multiline_text((LEFT - 4, top + TILE / 2), name, fill="black", font=font, anchor="rm", align="right")
        for column, tile in enumerate(tiles):
            sheet.paste(tile.resize((TILE, TILE), Image.Resampling.LANCZOS), (LEFT + GAP + column * side, top))
    return sheet


def _curves(done: Done) -> dict[str, dict[str, tuple[Tensor, Tensor, Tensor]]]:
    """Shares, means and standard errors [n + 1] by method and kind, of the methods that are done."""
    parts: dict[str, list[dict[str, Tensor]]] = {}
    for shard in done.store.finished(done.plan):
        parts.setdefault(shard.method, []).append(done.store.tensors(shard))
    found = {}
    for method, tensors in parts.items():
        known = [one for one in tensors if "shares" in one]
        if known:
            joined = {kind: torch.cat([one[kind] for one in known]) for kind in ("insertion", "deletion")}
            found[method] = {
                kind: (known[0]["shares"], v.mean(dim=0), v.std(dim=0, correction=min(1, len(v) - 1)) / len(v) ** 0.5) for kind, v in joined.items()
            }
    return found


def _colours(shown: Sequence[str]) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(len(shown))]
