"""The pictures of the attribution study: a radar plot, mean curves and a gallery, as small PNG
files, and what they show in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from scripts.attribution_parts import Done, Photoset
from scripts.attribution_tables import BESIDE, By
from scripts.tables import REFERENCE
from seecause.bench.measures import higher_is_better
from seecause.bench.tables import Table, values
from seecause.data.dataset import IGNORE
from seecause.data.photos import Photos
from seecause.errors import BadImage
from seecause.metrics import rank_correlation
from seecause.report.overlay import overlay, picture

LEADERS = 6
TWICE = "ins-del"  # insertion less deletion: beside the two it would count them twice
GREY = "#dddddd"
# Okabe and Ito's colours, which colour-blind readers can tell apart, and dashes; controls are
# black.
FIRST = ("#d55e00", "-")
STYLES = (
    ("#0072b2", "-"),
    ("#009e73", "--"),
    ("#cc79a7", "-."),
    ("#e69f00", "-"),
    ("#56b4e9", "--"),
    ("#7a5c00", "-."),
)
CONTROL_STYLES = {"random": ("black", ":"), "center": ("black", (0, (6, 2, 1, 2, 1, 2)))}
TILE, LABEL, LEFT, GAP = (
    88,
    30,
    70,
    4,
)  # pixels of the gallery: tiles, words above them, words on the left, and between
SHADES = 256  # colours of the gallery: a third of the bytes
Means = Mapping[str, Mapping[str, float]]  # by axis, then by method


def pictures(
    stem: Path, tables: Mapping[tuple[str, str], Table], by: By, sets: Sequence[Photoset]
) -> list[str]:
    """Radar, curves and gallery, as far as there is something to draw, with what they show; files
    are called by `stem`."""
    scaled = axes({name: table for (name, target), table in tables.items() if target == "label"})
    shown, text = leaders(scaled, LEADERS, beside=BESIDE), []
    if len(scaled) > 2 and shown:
        radar(scaled, shown, stem.with_name(f"{stem.name}-radar.png"))
        text += [
            f"![radar plot]({stem.name}-radar.png)\n",
            (
                "Target = the given label. Every metric from its worst method (centre) to its best"
                " (rim), deletion turned round; insertion less deletion is left out, because it"
                " would count both twice. CAAP, the others with the best mean over all axes, and"
                " two controls in black: a method that is the worst on two axes side by side is a"
                " point there, in the centre.\n"
            ),
        ]
    parts = {
        photos.title: part
        for photos in sets
        if (part := by.get(f"{photos.name}-label")) is not None
        and shown
        and _all_begun(part, shown)
    }
    if parts:
        curves(parts, shown, stem.with_name(f"{stem.name}-curves.png"))
        text += [
            f"![insertion and deletion curves]({stem.name}-curves.png)\n",
            (
                "Mean probability of the given label over all photos of a set"
                f" ({', '.join(f'{title}: {len(one.part.data)}' for title, one in parts.items())}),"
                " while pixels of a blurred photo are uncovered (insertion) or pixels of the photo"
                " are covered (deletion), the most important by each map first; Protocol has the"
                " details. The methods of the radar plot; bands are one standard error of the mean"
                " either way, grey lines all other methods that saw all photos.\n"
            ),
        ]
    pets = by.get("pets-label")
    if pets is not None and shown and _all_begun(pets, shown):
        for name, photos in (("gallery", False), ("photos", True)):
            gallery(pets, shown, stem.with_name(f"{stem.name}-{name}.png"), photos=photos)
        text += [
            f"![gallery]({stem.name}-gallery.png)\n",
            (
                "Maps over the animal's outline. Rows: two photos each where CAAP does best"
                " (Ins-Del), where it does worst, and where these methods are furthest apart (the"
                " lowest rank correlations between their maps); a photo that is chosen twice is"
                " shown once. Red for, blue against, where a map has both signs. The script writes"
                f" the same maps over the photos beside this page, as `{stem.name}-photos.png`; it"
                " is not in the repository because it shows photos. Photos and outlines:"
                " Oxford-IIIT Pet (Parkhi et al. 2012), CC BY-SA 4.0, cut and overlaid.\n"
            ),
        ]
    return text


def axes(tables: Mapping[str, Table]) -> dict[str, dict[str, float]]:
    """Every metric of every table as an axis from its worst method (0) to its best (1); what was
    not measured, or on fewer photos, or twice, is left out."""
    found = {}
    for title, table in tables.items():
        for metric in (metric for metric in table.metrics if metric != TWICE):
            means = {
                m: table.cells[m][metric].mean
                for m in table.methods
                if table.cells[m][metric].n and not m.endswith("*")
            }
            low, high = (min(means.values()), max(means.values())) if means else (0.0, 0.0)
            if high > low:
                scaled = {m: (mean - low) / (high - low) for m, mean in means.items()}
                found[f"{metric}\n{title}"] = (
                    scaled if higher_is_better(metric) else {m: 1 - v for m, v in scaled.items()}
                )
    return found


def leaders(scaled: Means, count: int, *, beside: Sequence[str]) -> list[str]:
    """CAAP, the `count` others with the best mean over the axes, and some that are always shown."""
    everywhere = [
        m for m in next(iter(scaled.values()), {}) if all(m in axis for axis in scaled.values())
    ]
    mean = {m: sum(axis[m] for axis in scaled.values()) / len(scaled) for m in everywhere}
    others = sorted(
        (m for m in mean if m != REFERENCE and m not in beside), key=lambda m: -mean[m]
    )[:count]
    return [m for m in (REFERENCE, *others, *beside) if m in mean]


def radar(scaled: Means, shown: Sequence[str], path: Path) -> None:
    """One polygon for each method; outside is better."""
    figure = Figure(figsize=(7.2, 5.2), dpi=90, layout="constrained")
    plot = figure.add_subplot(projection="polar")
    angles = [2 * math.pi * place / len(scaled) for place in range(len(scaled))]
    plot.grid(color=GREY)
    for method, style in styles(shown).items():
        along = [axis[method] for axis in scaled.values()]
        plot.plot([*angles, angles[0]], [*along, along[0]], label=method, **style)
    plot.set_xticks(angles, list(scaled), fontsize=8)
    plot.tick_params(axis="x", pad=14)
    plot.set_yticks([0.25, 0.5, 0.75, 1.0], [])
    plot.set_ylim(0, 1.02)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False, handlelength=3.5)
    figure.savefig(path)


def curves(parts: Mapping[str, Done], shown: Sequence[str], path: Path) -> None:
    """Mean insertion and deletion curves, one row for each set of photos; methods that are not
    named are grey."""
    figure = Figure(figsize=(9.6, 3.6 * len(parts)), dpi=90, layout="constrained")
    drawn = styles(shown)
    for row, (title, done) in zip(
        figure.subplots(len(parts), 2, sharey=True, squeeze=False), parts.items(), strict=True
    ):
        found = _curves(done)
        for plot, kind, across in zip(
            row, ("insertion", "deletion"), ("uncovered", "covered"), strict=True
        ):
            for method in sorted(found, key=lambda m: (m in drawn, m == REFERENCE)):
                shares, mean, error = found[method][kind]
                plot.plot(
                    shares,
                    mean,
                    **(
                        {"label": method, **drawn[method]}
                        if method in drawn
                        else {"color": GREY, "linewidth": 0.7}
                    ),
                )
                if method in drawn:
                    plot.fill_between(
                        shares,
                        mean - error,
                        mean + error,
                        color=drawn[method]["color"],
                        alpha=0.12,
                        linewidth=0,
                    )
            plot.set_title(f"{title}: {kind}", fontsize=10)
            plot.set_xlabel(f"share of the photo {across}, most important pixels first", fontsize=9)
        row[0].set_ylabel("probability of the given label", fontsize=9)
    handles = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    named = [method for method in shown if method in handles]
    figure.legend(
        [handles[m] for m in named],
        named,
        loc="outside right upper",
        fontsize=8,
        frameon=False,
        handlelength=3.5,
    )
    figure.savefig(path)


def gallery(done: Done, shown: Sequence[str], path: Path, *, photos: bool, each: int = 2) -> None:
    """Maps of some methods, over the photo or over the animal's silhouette: where CAAP does best,
    where it does worst, and where the methods disagree most."""
    maps = {m: found for m, found in done.store.maps(done.plan).items() if m in shown}
    known = sorted(set.intersection(*(set(found) for found in maps.values())))
    score = values(done.store.rows(done.plan), done.plan)[REFERENCE]["ins-del"]
    ranked = [
        place
        for place in score.argsort(descending=True, stable=True).tolist()
        if place in set(known)
    ]
    stacked = [torch.stack([maps[m][place] for place in known]) for m in shown]
    alike = sum(
        (rank_correlation(a, b).nan_to_num() for i, a in enumerate(stacked) for b in stacked[:i]),
        torch.zeros(len(known), dtype=torch.float64),
    )
    apart = [known[place] for place in alike.argsort(stable=True).tolist()]
    why: dict[int, list[str]] = {}
    for reason, some in (
        ("CAAP best", ranked[:each]),
        ("CAAP worst", ranked[::-1][:each]),
        ("most apart", apart[:each]),
    ):
        for place in some:
            why.setdefault(place, []).append(reason)
    rows = {}
    for place, reasons in why.items():
        image = _seen(done.part.data, place, photos=photos)
        if image is not None:
            rows[place] = (
                "\n".join(reasons),
                [picture(image), *(overlay(image, maps[m][place]) for m in shown)],
            )
    drawn = _sheet(list(rows.values()), ["photo" if photos else "outline", *shown])
    drawn.quantize(SHADES, method=Image.Quantize.MAXCOVERAGE, kmeans=4).save(path, optimize=True)


def _seen(data: Photos, place: int, *, photos: bool) -> Tensor | None:
    """The photo [3, H, W], or the animal's shape in grey on white with the trimap's border darker;
    None if it cannot be read."""
    try:
        sample = data[place]
    except BadImage:
        return None
    if photos or sample.mask is None:
        return sample.image if photos else torch.ones_like(sample.image)
    paint = torch.where(sample.mask == 0, 1.0, torch.where(sample.mask == IGNORE, 0.7, 0.88))
    return paint.expand(3, -1, -1)


def _sheet(rows: Sequence[tuple[str, Sequence[Image.Image]]], titles: Sequence[str]) -> Image.Image:
    """Rows of tiles with their names on the left; titles above, in two lines where they are
    long."""
    side, font = TILE + GAP, ImageFont.load_default(11)
    sheet = Image.new(
        "RGB", (LEFT + side * len(titles) + GAP, side * len(rows) + LABEL + GAP), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles):
        lines = title if font.getlength(title) <= TILE else title.replace("-", "-\n")
        draw.multiline_text(
            (LEFT + GAP + column * side + TILE / 2, LABEL - 2),
            lines,
            fill="black",
            font=font,
            anchor="md",
            align="center",
            spacing=1,
        )
    for row, (name, tiles) in enumerate(rows):
        top = LABEL + GAP + row * side
        draw.multiline_text(
            (LEFT - 4, top + TILE / 2), name, fill="black", font=font, anchor="rm", align="right"
        )
        for column, tile in enumerate(tiles):
            sheet.paste(
                tile.resize((TILE, TILE), Image.Resampling.LANCZOS),
                (LEFT + GAP + column * side, top),
            )
    return sheet


def _curves(done: Done) -> dict[str, dict[str, tuple[Tensor, Tensor, Tensor]]]:
    """Shares, means and standard errors [n + 1] by method and kind, of the methods that are
    done."""
    parts: dict[str, list[dict[str, Tensor]]] = {}
    for shard in done.store.finished(done.plan):
        parts.setdefault(shard.method, []).append(done.store.tensors(shard.id))
    found = {}
    for method, tensors in parts.items():
        known = [one for one in tensors if "shares" in one]
        if known:
            joined = {
                kind: torch.cat([one[kind] for one in known]) for kind in ("insertion", "deletion")
            }
            found[method] = {
                kind: (
                    known[0]["shares"],
                    v.mean(dim=0),
                    v.std(dim=0, correction=min(1, len(v) - 1)) / len(v) ** 0.5,
                )
                for kind, v in joined.items()
            }
    return found


def styles(shown: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each method is drawn: CAAP thick, controls black, every other in a colour and dashes of
    its own."""
    others = [m for m in shown if m != REFERENCE and m not in CONTROL_STYLES]
    found = (
        {REFERENCE: FIRST}
        | CONTROL_STYLES
        | {m: STYLES[place % len(STYLES)] for place, m in enumerate(others)}
    )
    return {
        m: {
            "color": found[m][0],
            "linestyle": found[m][1],
            "linewidth": 2.6 if m == REFERENCE else 1.4,
        }
        for m in shown
    }


def _all_begun(part: Done, shown: Sequence[str]) -> bool:
    """Whether every method that is shown has a map."""
    return set(shown) <= {shard.method for shard in part.store.finished(part.plan)}
