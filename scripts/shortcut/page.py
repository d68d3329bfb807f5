"""The page of `evidence_shortcut.py`: its tables. `words.py` says what they show."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import torch

from scripts.seeds import percent, spread
from scripts.shortcut.choice import (
    choice_told,
    edges_told,
    interventions,
    removals,
    rules,
    settings,
)
from scripts.shortcut.data import GROUPS, SPECIES, Cutouts, training_shares
from scripts.shortcut.figure import draw
from scripts.shortcut.methods import Job, Setup, open_cutouts
from scripts.shortcut.plan import SEEDS, TUNING_SEED, Results, chosen, expected, missing
from scripts.shortcut.protocol import protocol
from scripts.shortcut.rows import NAMES, OF_PARTS, Line, group_name, lines
from scripts.shortcut.words import conclusions


def write(setup: Setup, results: Results, out: Path) -> None:
    """evidence-shortcut.md, .csv and .png, and evidence-shortcut-photos.png, of what is there."""
    out.mkdir(parents=True, exist_ok=True)
    table, cutouts = lines(results), open_cutouts(setup)
    there, shares, photos = (
        [line for line in table if line.seeds],
        training_shares(cutouts),
        of_species(cutouts),
    )
    (out / "evidence-shortcut.png").write_bytes(draw(setup, results, cutouts, photos=False))
    (out / "evidence-shortcut-photos.png").write_bytes(draw(setup, results, cutouts, photos=True))
    page = [
        "# Cats on boards, dogs on leaves: a shortcut on real photos\n",
        (
            "![Pictures of the four groups and their parts; silhouettes stand for the"
            " animals](evidence-shortcut.png)\n"
        ),
        caption(results),
        *status(setup, results),
        "\n## What the numbers say\n",
        *conclusions(table, results, photos),
        *edges_told(results),
        *choice_told(results, shares),
        "\n## Results\n",
        *main_table(table, min(photos)),
        "\n## By group\n",
        *group_table(there),
        "\n## What was chosen on validation pictures\n",
        *settings(results),
        *rules(results, shares, len(cutouts.rows("val"))),
        "",
        *removals(results),
        *interventions(results),
        "\n## How it was made\n",
        *protocol(setup, results, cutouts),
    ]
    (out / "evidence-shortcut.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    with (out / "evidence-shortcut.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            (
                "method",
                "seed",
                "average",
                "worst",
                *map(group_name, GROUPS),
                "flips",
                "iou",
                "kept",
                "empty",
            )
        )
        for line in there:
            for seed, row in line.seeds.items():
                numbers = [
                    row["average"],
                    row["worst"],
                    *row["groups"],
                    row["flips"],
                    *(row.get(key) for key in ("iou", "kept", "empty")),
                ]
                writer.writerow(
                    (
                        line.title,
                        seed,
                        *("" if value is None else round(value, 5) for value in numbers),
                    )
                )


def of_species(cutouts: Cutouts) -> list[int]:
    """Test photos of each species: so many pictures has each of its groups."""
    return torch.bincount(cutouts.species[cutouts.rows("test")], minlength=len(SPECIES)).tolist()


def main_table(table: list[Line], smallest: int) -> list[str]:
    rows = [
        (
            f"| method | average | worst group | seeds {' / '.join(map(str, SEEDS))} | flips | IoU"
            " | kept | uses |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in (one for one in table if one.seeds):
        each = " / ".join(
            percent(line.seeds[seed]["worst"]) if seed in line.seeds else "-" for seed in SEEDS
        )
        cells = [
            *(spread(line.values(key)) for key in ("average", "worst")),
            each,
            *(spread(line.values(key)) for key in ("flips", "iou", "kept")),
        ]
        rows.append(f"| {line.title}{line.few} | " + " | ".join(cells) + f" | {line.uses} |")
    empty = [line.title for line in table if not line.seeds]
    return [
        *rows,
        *([f"\nNo reported seed is done of: {'; '.join(empty)}."] if empty else []),
        (
            "\nPercent, mean ± standard deviation over seeds. Worst group: the lowest accuracy of"
            " the four groups; in rows of random heads a mean over draws of each draw's lowest, so"
            " a mean of minima. Flips: test photos whose answer changes with the texture. IoU:"
            " patches of the mask against the animal's pixels, over all test pictures. Kept:"
            " patches that belong to the mask. PDiscoFormer has a mask too, but its features have"
            " seen everything. Uses: settings of every method were chosen by the worst group of"
            " validation pictures, so every method uses their groups; interventions, and how many"
            f" heads go, were chosen so on each seed. The smallest groups have {smallest} test"
            " pictures: there an accuracy of 80 % has a standard error of"
            f" {percent((0.8 * 0.2 / smallest) ** 0.5)} points."
        ),
    ]


def group_table(table: list[Line]) -> list[str]:
    rows = [
        "| method | " + " | ".join(map(group_name, GROUPS)) + " |",
        "|---|" + "---|" * len(GROUPS),
    ]
    for line in table:
        cells = [
            spread([row["groups"][place] for row in line.seeds.values()])
            for place in range(len(GROUPS))
        ]
        rows.append(f"| {line.title}{line.few} | " + " | ".join(cells) + " |")
    return rows


def status(setup: Setup, results: Results) -> list[str]:
    told = (
        ["\n**A small run: its numbers mean nothing.**"]
        if setup.limit is not None or setup.architecture is not None
        else []
    )
    if holes := missing(results, guess=True):
        seconds = sum(expected(job, results) for job in holes)
        kinds = "; ".join(f"{count} x {kind}" for kind, count in Counter(map(_kind, holes)).items())
        told.append(
            f"\n**Not finished.** {len(holes)} trainings or repairs are missing, at most about"
            f" {seconds:.0f} seconds of work, if the best settings so far stay the best: {kinds}."
        )
    return told


def caption(results: Results) -> str:
    rows = [
        f"parts of {NAMES[method]} (K = {best.parts})"
        for method in OF_PARTS
        if (best := chosen(method, results)) is not None
    ]
    seed = (
        f" Parts are those of seed {TUNING_SEED}, which chose the settings and is not among the"
        " reported ones."
        if rows
        else ""
    )
    return (
        f"From the top: {'; '.join(['two test pictures of each group', *rows])}.{seed} The models"
        " saw the animals; silhouettes stand for them here. The script writes the same figure with"
        " the animals beside this page, as `evidence-shortcut-photos.png`; it is not in the"
        " repository because it shows photos. Photos and outlines: Oxford-IIIT Pet (Parkhi et al."
        " 2012), CC BY-SA 4.0, cut out here."
    )


def _kind(job: Job) -> str:
    name = "repairs of ERM" if job.method == "repair" else NAMES[job.method].partition(":")[0]
    return (
        f"settings of {name}"
        if job.seed == TUNING_SEED
        else f"{name}, K = {job.parts}"
        if job.method in OF_PARTS
        else name
    )
