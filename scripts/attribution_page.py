"""The page of the attribution study, from finished work alone: what is not there is shown as a
hole."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import seecause as sc
from scripts import tables as shared
from scripts.attribution_fair import on_equal_terms, signs_section, smoothing_section
from scripts.attribution_figures import pictures
from scripts.attribution_parts import FAITHFUL, PIXELS, STEPS, Done, Photoset, Sizes
from scripts.attribution_patches import Patched
from scripts.attribution_tables import (
    By,
    beside_controls,
    costs,
    counted,
    fewer,
    marked,
    merged,
    missing,
    on_patches,
    plain,
    sanity,
    undefined,
)
from scripts.attribution_words import TARGETS, Findings, conclusions, losses, standing
from scripts.tables import differences, holes, over
from seecause.attribution.registry import find
from seecause.bench.ablate import STUDIES, Agreement, agreement, read_depth
from seecause.bench.measures import PAPER
from seecause.bench.tables import Table, table_of, to_csv, to_markdown
from seecause.metrics import summarise

NAME = "evidence-attribution"
Tables = dict[tuple[str, str], Table]  # by set and target


def write(
    out: Path,
    work: Path,
    sets: Sequence[Photoset],
    done: Sequence[Done],
    patches: Mapping[str, Patched],
    changed: Mapping[str, Patched],
    sizes: Sizes,
    *,
    command: str,
    machine: str,
) -> None:
    """The page, its CSV files and its pictures."""
    out.mkdir(parents=True, exist_ok=True)
    by = {one.part.name: one for one in done}
    asked = [
        method
        for one in done
        if one.part.name in ("pets-label", "pets-label-few")
        for method in one.plan.request.methods
    ]
    studies = {study: by[f"ablate-{study}"] for study in STUDIES if f"ablate-{study}" in by}
    ended = {study: one for study, one in studies.items() if not one.status.pending}
    found = _findings(sets, by, patches, changed, ended)
    shown = {
        study: beside_controls(one, sets[0], found.values.get((sets[0].name, "label"), {}))
        for study, one in ended.items()
    }
    equal = {
        photos.name: table for photos in sets if (table := found.equal.get((photos.name, "label")))
    }
    gaps = _holes(done, patches, changed)
    page = [
        "# Which attribution method can be trusted on a real ViT?\n",
        *(
            [
                "**This run is not complete.** Only what is done is shown; see Holes at the end,"
                " and run the same command again.\n"
            ]
            if gaps
            else []
        ),
        _accuracy(sets),
        "## In short\n",
        conclusions(found, asked, done[0].plan.request),
        "## Where does CAAP stand?\n",
        standing(found.tables),
        *pictures(out / NAME, found.tables, by, sets),
        *(
            text
            for photos in sets
            for target in TARGETS
            if (photos.name, target) in found.tables
            for text in _section(photos, target, found.tables, asked)
        ),
        *_patches_section(sets, found.coarse),
        *(
            text
            for table in equal.values()
            for section in (signs_section, smoothing_section)
            for text in section(table)
        ),
        *_sanity_section(found.sane, asked),
        "## Do CAAP's settings decide the result?\n",
        (
            f"One setting of CAAP changed at a time, {_size(sets[0])}, target = the given label."
            " The first row is the default, the last two are controls and not ranked; the second"
            " table is the difference from the default, image by image; the third is Spearman's"
            " rank correlation between the maps of two settings.\n"
        ),
        *(
            text
            for study, table in shown.items()
            for text in _ablation(study, ended[study], table, found.alike[study])
        ),
        *(
            [f"Not done yet: {', '.join(study for study in studies if study not in ended)}.\n"]
            if len(ended) < len(studies)
            else []
        ),
        "## What does a map cost?\n",
        _cost(done),
        "## Protocol\n",
        _protocol(sets, done, sizes, command, machine, work),
        *undefined(done),
        *gaps,
    ]
    (out / f"{NAME}.md").write_text("\n".join(page), encoding="utf-8")
    named = {f"{name}, {target}": table for (name, target), table in found.tables.items()}
    named |= {f"{name}, pixels and patches": table for name, table in found.coarse.items() if table}
    named |= {
        f"{name}, {target}, changed maps": table for (name, target), table in found.equal.items()
    } | ({"sanity": found.sane} if found.sane else {})
    (out / f"{NAME}.csv").write_text(
        _joined(named | {f"ablate {study}": table for study, table in shown.items()}),
        encoding="utf-8",
    )
    (out / f"{NAME}-agreement.csv").write_text(_agreements(found.alike), encoding="utf-8")


def _findings(
    sets: Sequence[Photoset],
    by: By,
    patches: Mapping[str, Patched],
    changed: Mapping[str, Patched],
    ended: By,
) -> Findings:
    values = {
        (photos.name, target): merged(photos, target, by) for photos in sets for target in TARGETS
    }
    again = {
        (photos.name, target): on_equal_terms(
            photos, target, values[photos.name, target], by, changed
        )
        for photos in sets
        for target in TARGETS
    }
    tables = {
        key: table_of(columns, unranked=fewer()) for key, columns in values.items() if columns
    }
    return Findings(
        tables=tables,
        values=values,
        changed=again,
        equal={
            key: table_of(columns, unranked=list(columns))
            for key, columns in again.items()
            if columns
        },
        coarse={
            photos.name: on_patches(photos, values[photos.name, "label"], by, patches)
            for photos in sets
            if (photos.name, "label") in tables
        },
        ablations={
            study: table_of(over(one.plan.samples, one.store, one.plan))
            for study, one in ended.items()
        },
        alike={study: agreement(one.store, one.plan) for study, one in ended.items()},
        sane=sanity(by),
    )


def _section(photos: Photoset, target: str, tables: Tables, asked: Sequence[str]) -> list[str]:
    table = tables[photos.name, target]
    seen, metric = table.cells[shared.REFERENCE], table.metrics[0]
    few = [f"{plain(m)} {table.cells[m][metric].n}" for m in table.methods if m.endswith("*")]
    left = missing(asked, table)
    return [
        f"## {photos.title}, target = {TARGETS[target]}\n",
        f"{seen[metric].n} photos. Mean ± standard error; the best mean in bold, which is no claim"
        " that the next is worse. "
        + (
            f"Methods with * saw a fixed random part of the photos ({', '.join(few)}) and are not"
            " ranked. "
            if few
            else ""
        )
        + (f"Not done yet: {', '.join(left)}. " if left else "")
        + "† is scored on its own map of pixels, all others on a map of patches, upsampled."
        + " AUPR and the pointing game take signed values as they are: see *Signed or absolute?*"
        * ("aupr1" in table.metrics)
        + "\n",
        to_markdown(marked(table)),
        (
            "The method less CAAP, image by image over the photos both have, and how many standard"
            " errors that is. Positive favours the method, except for deletion.\n"
        ),
        differences(marked(table)),
        losses(table),
    ]


def _patches_section(sets: Sequence[Photoset], coarse: Mapping[str, Table | None]) -> list[str]:
    text = [
        "## Pixels or patches?\n",
        (
            f"{', '.join(PIXELS)} give a value to every pixel, and the tables above score that; all"
            " other methods give one to every patch, which is upsampled bilinearly. Here the maps"
            " of those methods are summed or averaged by patch and treated like the others', from"
            " the maps that the run kept; localization needs no model then. Two controls stand"
            " beside. The second table is the difference from CAAP, image by image, with how many"
            " standard errors that is.\n"
        ),
    ]
    for photos in sets:
        table = coarse.get(photos.name)
        if table is None:
            text.append(f"{photos.title}: not done yet.\n")
            continue
        left = [
            m
            for m in (PAPER if photos.data.read_mask is not None else FAITHFUL)
            if m not in table.metrics
        ]
        text += [
            f"### {photos.title}, target = the given label\n",
            to_markdown(table),
            differences(table),
        ]
        text += [f"Not done yet: {', '.join(left)}.\n"] if left else []
    return text


def _sanity_section(table: Table | None, asked: Sequence[str]) -> list[str]:
    title = "## Do the maps depend on the model and on the class?\n"
    if table is None:
        return [title, "Not done yet.\n"]
    same, left = (
        [m for m in table.methods if not find(plain(m)).class_specific],
        missing(asked, table),
    )
    return [
        title,
        "Spearman's correlation of a map with the map of a randomised model (mprt: weights redrawn"
        f" from the head down to the embedding, mean over {STEPS} stages, the last with nothing"
        " left of the model) and of another class (random-logit); of signed values, and of their"
        " sizes (-abs). A map that stays the same, near 1, shows neither; near 0 is good, and"
        " below 0 is no better than 0: the map is turned round. In brackets how many photos have a"
        " value: a flat map has no ranks. "
        + (f"Not done yet: {', '.join(left)}. " if left else "")
        + f"Not class-specific by design: {', '.join(same)}; random, center and sobel do not look"
        " at the model at all.\n",
        counted(table),
    ]


def _ablation(study: str, one: Done, table: Table, alike: Agreement) -> list[str]:
    text = [f"### {STUDIES[study]}\n", to_markdown(table), differences(table)]
    if study == "layers":  # too many settings for a square
        head = ["| layers | rank correlation with the default |", "|---|---|"]
        rows = [
            f"| {name} | {mean:.3f} ± {error:.3f} |"
            for name, mean, error in zip(
                alike.names, alike.mean[0].tolist(), alike.error[0].tolist(), strict=True
            )
        ]
        return [*text, "\n".join([*head, *rows]) + "\n", *_depth(one)]
    head = ["| | " + " | ".join(alike.names) + " |", "|---|" + "---|" * len(alike.names)]
    rows = [
        f"| {name} | " + " | ".join(f"{value:.3f}" for value in row) + " |"
        for name, row in zip(alike.names, alike.mean.tolist(), strict=True)
    ]
    return [*text, "\n".join([*head, *rows]) + "\n"]


def _depth(one: Done) -> list[str]:
    """Where the class token looks, block by block."""
    found = read_depth(one.store)
    if found is None:
        return []
    lines = [
        "| block | attention to a patch of the animal | to a patch of the background |",
        "|---|---|---|",
    ]
    for block, (seen, behind) in enumerate(
        zip(found.on_object.T, found.on_background.T, strict=True), start=1
    ):
        lines.append(
            f"| {block} | "
            + " | ".join(
                f"{s.mean:.5f} ± {s.standard_error:.5f}"
                for s in (summarise(seen), summarise(behind))
            )
            + " |"
        )
    return [
        (
            f"Attention of the class token, mean over heads and photos; {found.uniform:.5f} if it"
            " looked everywhere alike.\n"
        ),
        "\n".join(lines) + "\n",
    ]


def _cost(done: Sequence[Done]) -> str:
    """Milliseconds for one map as they were measured, and what the registry says."""
    timed = [one for one in done if one.part.name.partition("-")[2] in ("label", "label-few")]
    lines = ["| method | forwards | ms for one photo | shards |", "|---|---|---|---|"]
    lines += [
        f"| {method} | {find(method).forwards} | {spent:.2f} | {count} |"
        for method, (spent, count) in costs(timed).items()
    ]
    return (
        "All photos of a shard at once; the median over shards. The first shard of a run is left"
        " out, because it pays for starting the device. With one or two shards the first call of a"
        " method, and what it loads, still shows. The row of center, which computes nothing, is"
        " what any call costs. Other work may have shared the device: `benchmarks/methods.py`"
        " measures methods alone and side by side.\n\n" + "\n".join(lines) + "\n"
    )


def _holes(
    done: Sequence[Done], patches: Mapping[str, Patched], changed: Mapping[str, Patched]
) -> list[str]:
    """What is not there, one line for each part, and why; nothing if all is there."""
    lines = [
        f"- {one.part.name}: {one.status.done} of {one.status.total} shards are done"
        f" ({len(one.plan.request.methods)} methods, {len(one.plan.samples)} photos)"
        for one in done
        if one.status.pending
    ]
    lines += [
        f"- {name}: scores on patches that are not made yet: {found.missing}"
        for name, found in patches.items()
        if found.missing
    ]
    lines += [
        f"- {name}: scores of changed maps that are not made yet: {found.missing}"
        for name, found in changed.items()
        if found.missing
    ]
    _, *rest = holes([replace(one.status, pending=()) for one in done]) or [""]
    return (
        ["## Holes\n", "\n".join(lines) + "\n" * bool(lines) + "".join(rest)]
        if lines or rest
        else []
    )


def _protocol(
    sets: Sequence[Photoset],
    done: Sequence[Done],
    sizes: Sizes,
    command: str,
    machine: str,
    work: Path,
) -> str:
    plan = done[0].plan
    request, curve = plan.request, plan.request.measures["insertion-deletion"]
    size = sum(file.stat().st_size for file in work.rglob("*") if file.is_file()) / 2**20
    spent = sum(
        sum(one.store.metadata(shard.id)["seconds"].values())
        for one in done
        for shard in one.store.finished(one.plan)
    )
    rows = {
        "command": f"`{command}`",
        "model": f"{request.model}, fingerprint {plan.model['fingerprint']}",
        "photos": "; ".join(
            f"{photos.name}: {len(photos.data)}, fingerprint {photos.data.fingerprint}"
            for photos in sets
        ),
        "insertion, deletion": ", ".join(f"{key} {value}" for key, value in curve.items()),
        "maps": f"of patches, upsampled bilinearly; of pixels as they are ({', '.join(PIXELS)})",
        "localization": "trimap border ignored; pointing game without tolerance",
        "methods": "default options of this version",
        "target": (
            "of photos that are answered right, the maps of the label are those of the predicted"
            " class"
        ),
        "fewer photos": (
            f"{', '.join(shared.EXPENSIVE)}:"
            f" {', '.join(f'{sizes.dear(photos)} {photos.name}' for photos in sets)}; sanity"
            f" checks: {sizes.sane}, {sizes.sane_expensive} for those; drawn with the seed"
        ),
        "numbers": (
            f"{request.dtype}, matrix products"
            f" {'in TF32' if request.precision == 'high' else 'in full precision'}; seed"
            f" {request.seed}"
        ),
        "machine": (
            f"{machine}, {request.threads} threads; {spent:.0f} s in shards; run folder"
            f" {size:.0f} MiB"
        ),
        "versions": (
            f"seecause {sc.__version__}, "
            + ", ".join(
                f"{name} {version}" for name, version in plan.versions.items() if name != "seecause"
            )
        ),
    }
    return (
        "| | |\n|---|---|\n"
        + "\n".join(f"| {key} | {value} |" for key, value in rows.items())
        + "\n"
    )


def _accuracy(sets: Sequence[Photoset]) -> str:
    lines = ["| photos | number | answered right |", "|---|---|---|"]
    for photos in sets:
        right = summarise(photos.right.double())
        lines.append(
            f"| {photos.title} | {right.n} | {right.mean:.1%} ± {right.standard_error:.1%} |"
        )
    return "\n".join(lines) + "\n"


def _agreements(alike: Mapping[str, Agreement]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["study", "setting", "other setting", "rank correlation", "standard error", "images"]
    )
    for study, found in alike.items():
        for i, name in enumerate(found.names if found.images else ()):
            writer.writerows(
                [
                    study,
                    name,
                    found.names[j],
                    float(found.mean[i, j]),
                    float(found.error[i, j]),
                    found.images,
                ]
                for j in range(i)
            )
    return text.getvalue()


def _joined(tables: Mapping[str, Table]) -> str:
    """All tables in one file; `difference` is to the first method of each."""
    lines = []
    for name, table in tables.items():
        head, *rows = (
            to_csv(table).replace(f"difference to {table.reference}", "difference").splitlines()
        )
        lines += [] if lines else [f"table,{head}"]
        lines += [f'"{name}",{row}' for row in rows]
    return "\n".join(lines) + "\n"


def _size(photos: Photoset) -> str:
    return f"{len(photos.data)} photos"
