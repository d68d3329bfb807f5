"""The page of the attribution study, from finished work alone: what is not there is shown as a hole."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import seecause as sc
from scripts import attribution_figures as figures
from scripts import tables as shared
from scripts.attribution_parts import STEPS, Done, Photoset, Sizes
from scripts.attribution_words import conclusions, standing
from scripts.tables import Values, differences, holes, losses, over, starred
from seecause.attribution.registry import find
from seecause.bench.ablate import STUDIES, Agreement, agreement
from seecause.bench.depth import read_depth
from seecause.bench.table import Table, table_of, to_csv, to_markdown
from seecause.metrics import summarise

NAME = "evidence-attribution"
CONTROLS = ("random", "center")  # in every picture; sobel is in every table
LEADERS = 6
TARGETS = {"label": "the given label", "predicted": "the predicted class"}
Tables = dict[tuple[str, str], Table]  # by set and target
By = Mapping[str, Done]  # parts by name


def write(out: Path, work: Path, sets: Sequence[Photoset], done: Sequence[Done], sizes: Sizes, *, command: str, machine: str) -> None:
    """The page, its CSV files and its pictures."""
    out.mkdir(parents=True, exist_ok=True)
    by = {one.part.name: one for one in done}
    found = {(photos.name, target): _starred(merged(photos, target, by)) for photos in sets for target in TARGETS}
    tables = {key: table_of(values, unranked=_fewer()) for key, values in found.items() if values}
    ablations = {study: (by[f"ablate-{study}"], _table(by[f"ablate-{study}"])) for study in STUDIES if f"ablate-{study}" in by}
    alike = {study: agreement(one.store, one.plan) for study, (one, _) in ablations.items()}
    sane = _sanity(by)
    drawn = _pictures(out, tables, by)
    ended = all(one.status.complete for one in done)
    page = [
        "# Which attribution method can be trusted on a real ViT?\n",
        *([] if ended else ["**This run is not complete.** Numbers below are of what is done; see Holes at the end, and run the same command again.\n"]),
        _accuracy(sets),
        "## In short\n",
        conclusions(tables, found, {study: table for study, (_, table) in ablations.items()}, alike, sane),
        "## Where does CAAP stand?\n",
        standing(tables),
        *drawn,
        *(text for photos in sets for target in TARGETS if (photos.name, target) in tables for text in _section(photos, target, tables, sizes)),
        *_sanity_section(sane, sizes),
        "## Do CAAP's settings decide the result?\n",
        f"One setting of CAAP changed at a time, {_size(sets[0])}, target = the given label. The first row is the default; the second table is the "
        "difference from it, image by image; the third is Spearman's rank correlation between the maps of two settings.\n",
        *(text for study, (one, table) in ablations.items() for text in _ablation(study, one, table, alike[study])),
        "## What does a map cost?\n",
        _cost(by),
        "## Protocol\n",
        _protocol(sets, done, sizes, command, machine, work),
        *holes([one.status for one in done]),
    ]
    (out / f"{NAME}.md").write_text("\n".join(page), encoding="utf-8")
    named = {f"{name}, {target}": table for (name, target), table in tables.items()} | ({"sanity": sane} if sane else {})
    (out / f"{NAME}.csv").write_text(_joined(named | {f"ablate {study}": table for study, (_, table) in ablations.items()}), encoding="utf-8")
    (out / f"{NAME}-agreement.csv").write_text(_agreements(alike), encoding="utf-8")


def merged(photos: Photoset, target: str, by: By) -> Values:
    """Values of all methods over all photos of a set. For the predicted class those of the label are taken where it is what the model answers."""
    found: Values = {}
    for few in ("", "-few"):
        label = by.get(f"{photos.name}-label{few}")
        if label is None:
            continue
        values = over(photos.names, label.store, label.plan)
        if target == "predicted":
            other = by.get(f"{photos.name}-predicted{few}")
            instead = over(photos.names, other.store, other.plan) if other else None
            wrong = photos.predicted != photos.labels
            for method, columns in values.items():
                for metric, value in columns.items():
                    value[wrong] = torch.nan if instead is None else instead[method][metric][wrong]
        found |= values
    return found


def _section(photos: Photoset, target: str, tables: Tables, sizes: Sizes) -> list[str]:
    table = tables[photos.name, target]
    few = [m for m in table.methods if m.endswith("*")]
    less = (
        f" {', '.join(m.removesuffix(' *') for m in few)} are asked about a fixed random {sizes.dear(photos)} of {_size(photos)} (*) and are not ranked."
        if few
        else ""
    )
    return [
        f"## {photos.title}, target = {TARGETS[target]}\n",
        f"{_so_far(photos, target, table)}.{less} Mean ± standard error; the best mean in bold, which is no claim that the next is worse.\n",
        to_markdown(table),
        "The method less CAAP, image by image over the photos both have, and how many standard errors that is. Positive favours the method, "
        "except for deletion.\n",
        differences(table),
        losses(table),
    ]


def _sanity(by: By) -> Table | None:
    """The checks of all methods; those of the expensive ones over fewer photos."""
    first = by.get("sanity")
    if first is None:
        return None
    found: Values = {}
    for name in ("sanity", "sanity-few"):
        if name in by:
            found |= over(first.plan.samples, by[name].store, by[name].plan)
    return table_of(_starred(found), unranked=_fewer())


def _sanity_section(table: Table | None, sizes: Sizes) -> list[str]:
    if table is None:
        return []
    same = [m for m in table.methods if not find(m.removesuffix(" *")).class_specific]
    return [
        "## Do the maps depend on the model and on the class?\n",
        f"Spearman's correlation of a map with the map of a randomised model (mprt: weights redrawn from the head down to the embedding, mean over "
        f"{STEPS} stages, the last with nothing left of the model) and of another class (random-logit); of signed values, and of their sizes (-abs). "
        f"Low is good: a map that stays the same shows neither. {sizes.sane} photos; {sizes.sane_expensive} for those with *. "
        f"Not class-specific by design: {', '.join(same)}; random, center and sobel do not look at the model at all.\n",
        to_markdown(table),
    ]


def _ablation(study: str, one: Done, table: Table, alike: Agreement) -> list[str]:
    if not alike.images:
        return [f"### {STUDIES[study]}\n", "Not done yet.\n"]
    text = [f"### {STUDIES[study]}\n", to_markdown(table), differences(table)]
    if study == "layers":  # too many settings for a square
        head = ["| layers | rank correlation with the default |", "|---|---|"]
        rows = [
            f"| {name} | {mean:.3f} ± {error:.3f} |" for name, mean, error in zip(alike.names, alike.mean[0].tolist(), alike.error[0].tolist(), strict=True)
        ]
        return [*text, "\n".join([*head, *rows]) + "\n", *_depth(one)]
    head = ["| | " + " | ".join(alike.names) + " |", "|---|" + "---|" * len(alike.names)]
    rows = [f"| {name} | " + " | ".join(f"{value:.3f}" for value in row) + " |" for name, row in zip(alike.names, alike.mean.tolist(), strict=True)]
    return [*text, "\n".join([*head, *rows]) + "\n"]


def _depth(one: Done) -> list[str]:
    """Where the class token looks, block by block."""
    found = read_depth(one.store)
    if found is None:
        return []
    lines = ["| block | attention to a patch of the animal | to a patch of the background |", "|---|---|---|"]
    for block, (seen, behind) in enumerate(zip(found.on_object.T, found.on_background.T, strict=True), start=1):
        lines.append(f"| {block} | " + " | ".join(f"{s.mean:.5f} ± {s.standard_error:.5f}" for s in (summarise(seen), summarise(behind))) + " |")
    return [f"Attention of the class token, mean over heads and photos; {found.uniform:.5f} if it looked everywhere alike.\n", "\n".join(lines) + "\n"]


def _cost(by: By) -> str:
    """Seconds for one map as they were measured, and what the registry says."""
    spent: dict[str, tuple[float, int]] = {}
    for name in ("pets-label", "pets-label-few"):
        for shard in by[name].store.finished(by[name].plan) if name in by else ():
            said = by[name].store.said(shard)
            before = spent.get(shard.method, (0.0, 0))
            spent[shard.method] = (before[0] + said["seconds"].get("attribute", 0.0), before[1] + said["images"])
    lines = ["| method | forwards | ms for one photo |", "|---|---|---|"]
    for method, (seconds, count) in sorted(spent.items(), key=lambda item: item[1][0] / max(1, item[1][1])):
        lines.append(f"| {method} | {find(method).forwards} | {1000 * seconds / max(1, count):.2f} |")
    return "All photos of a shard at once; the first call of a method, with what it compiles and loads, is included.\n\n" + "\n".join(lines) + "\n"


def _pictures(out: Path, tables: Tables, by: By) -> list[str]:
    """Curves, radar and gallery, as far as there is something to draw."""
    scaled = figures.axes({name: table for (name, target), table in tables.items() if target == "label"})
    shown, pets, text = figures.leaders(scaled, LEADERS, beside=CONTROLS), by.get("pets-label"), []
    if len(scaled) > 2 and shown:
        figures.radar(scaled, shown, out / f"{NAME}-radar.png")
        text += [
            f"![radar plot]({NAME}-radar.png)\n",
            "Every metric from its worst method (centre) to its best (rim), deletion turned round; CAAP, the others with the best mean over all axes, "
            "and two controls.\n",
        ]
    if pets is not None and all(any(shard.method == m for shard in pets.store.finished(pets.plan)) for m in shown) and shown:
        figures.curves(pets, shown, out / f"{NAME}-curves.png")
        figures.gallery(pets, shown, out / f"{NAME}-gallery.png", photos=False)
        figures.gallery(pets, shown, out / f"{NAME}-photos.png", photos=True)
        text += [
            f"![insertion and deletion curves]({NAME}-curves.png)\n",
            f"![gallery]({NAME}-gallery.png)\n",
            "Maps over the animal's outline. Rows: two photos each where CAAP does best (Ins-Del), where it does worst, and where these methods are "
            "furthest apart (the lowest rank correlations between their maps); a photo that is chosen twice is shown once. Red for, blue against, where a "
            f"map has both signs. The script writes the same maps over the photos beside this page, as `{NAME}-photos.png`; it is not in the repository "
            "because it shows photos. Photos and outlines: Oxford-IIIT Pet (Parkhi et al. 2012), CC BY-SA 4.0, cut and overlaid.\n",
        ]
    return text


def _protocol(sets: Sequence[Photoset], done: Sequence[Done], sizes: Sizes, command: str, machine: str, work: Path) -> str:
    plan = done[0].plan
    request, curve = plan.request, plan.request.measures["insertion-deletion"]
    size = sum(file.stat().st_size for file in work.rglob("*") if file.is_file()) / 2**20
    spent = sum(sum(one.store.said(shard)["seconds"].values()) for one in done for shard in one.store.finished(one.plan))
    rows = {
        "command": f"`{command}`",
        "model": f"{request.model}, fingerprint {plan.model['fingerprint']}",
        "photos": "; ".join(f"{photos.name}: {len(photos.data)}, fingerprint {photos.data.fingerprint}" for photos in sets),
        "insertion, deletion": ", ".join(f"{key} {value}" for key, value in curve.items()),
        "localization": "upsampled bilinearly; trimap border ignored; pointing game without tolerance",
        "methods": "default options of this version",
        "target": "of photos that are answered right, the maps of the label are those of the predicted class",
        "fewer photos": f"{', '.join(shared.EXPENSIVE)}: {', '.join(f'{sizes.dear(photos)} {photos.name}' for photos in sets)}; "
        f"sanity checks: {sizes.sane}, {sizes.sane_expensive} for those; drawn with the seed",
        "numbers": f"{request.dtype}, matrix products {'in TF32' if request.precision == 'high' else 'in full precision'}; seed {request.seed}",
        "machine": f"{machine}, {request.threads} threads; {spent:.0f} s in shards; run folder {size:.0f} MiB",
        "versions": f"seecause {sc.__version__}, " + ", ".join(f"{name} {version}" for name, version in plan.versions.items() if name != "seecause"),
    }
    return "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows.items()) + "\n"


def _accuracy(sets: Sequence[Photoset]) -> str:
    lines = ["| photos | number | answered right |", "|---|---|---|"]
    for photos in sets:
        right = summarise(photos.right.double())
        lines.append(f"| {photos.title} | {right.n} | {right.mean:.1%} ± {right.standard_error:.1%} |")
    return "\n".join(lines) + "\n"


def _agreements(alike: Mapping[str, Agreement]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["study", "setting", "other setting", "rank correlation", "standard error", "images"])
    for study, found in alike.items():
        for i, name in enumerate(found.names if found.images else ()):
            writer.writerows([study, name, found.names[j], float(found.mean[i, j]), float(found.error[i, j]), found.images] for j in range(i))
    return text.getvalue()


def _joined(tables: Mapping[str, Table]) -> str:
    """All tables in one file; `difference` is to the first method of each."""
    lines = []
    for name, table in tables.items():
        head, *rows = to_csv(table).replace(f"difference to {table.reference}", "difference").splitlines()
        lines += [] if lines else [f"table,{head}"]
        lines += [f'"{name}",{row}' for row in rows]
    return "\n".join(lines) + "\n"


def _table(one: Done) -> Table:
    return table_of(over(one.plan.samples, one.store, one.plan))


def _starred(values: Values) -> Values:
    return {starred(method): columns for method, columns in values.items()}


def _fewer() -> list[str]:
    return [starred(method) for method in shared.EXPENSIVE]


def _so_far(photos: Photoset, target: str, table: Table) -> str:
    """How many photos the reference has seen, and which they are if those with another predicted class are not done."""
    count, right = table.cells[shared.REFERENCE][table.metrics[0]].n, int(photos.right.sum())
    if count == len(photos.data):
        return _size(photos)
    return f"{count} of {_size(photos)}" + (
        ", those that are answered right: the others are not done yet" if target == "predicted" and 0 < count == right else " so far"
    )


def _size(photos: Photoset) -> str:
    return f"{len(photos.data)} photos"
