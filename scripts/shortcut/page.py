"""The page of `evidence_shortcut.py`: tables, and what the numbers say by rules that are stated."""

from __future__ import annotations

import csv
import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.shortcut.data import GROUPS, SPECIES, Cutouts
from scripts.shortcut.figure import draw
from scripts.shortcut.methods import Job, Method, Setup, open_cutouts
from scripts.shortcut.plan import OTHER_PARTS, SEEDS, TUNED, Results, chosen, is_complete, plan, seeds_of, tuning
from scripts.shortcut.protocol import protocol
from scripts.shortcut.textures import FAMILIES

CLEAR = 0.02  # a gain in worst-group accuracy that is told as one, if every seed has the same sign
USUAL, OTHER = (GROUPS.index((0, 0)), GROUPS.index((1, 1))), (GROUPS.index((0, 1)), GROUPS.index((1, 0)))
NAMES: dict[Method, str] = {
    "erm": "ERM: fine-tuned whole",
    "pdisco": "PDiscoFormer",
    "ifam": "iFAM",
    "mask": "early mask by the true trimap",
}
OF_PARTS: tuple[Method, ...] = ("pdisco", "ifam")
LABELS, GROUPS_TO_CHOOSE = "class labels", "class labels; groups of validation pictures, to choose"
REPAIRS = {
    "dfr": ("DFR: ERM with a new last layer", "class labels; groups of validation pictures, to fit"),
    "printed": ("ERM without heads: CIGMA as printed", GROUPS_TO_CHOOSE),
    "guarded": ("ERM without heads: CIGMA, true masks, guard", f"{GROUPS_TO_CHOOSE}; trimaps of training pictures"),
    "random": ("ERM without as many random heads", LABELS),
    "random best": ("ERM without heads: the best random set", GROUPS_TO_CHOOSE),
}


@dataclass(frozen=True)
class Line:
    """One row of the table: a method with the numbers of each seed, on test pictures."""

    title: str
    uses: str
    seeds: dict[int, dict[str, Any]]

    def values(self, key: str) -> list[float]:
        return [row[key] for row in self.seeds.values() if key in row]

    @property
    def few(self) -> str:
        return "" if len(self.seeds) == len(SEEDS) else f" ({len(self.seeds)} of {len(SEEDS)} seeds)"


def write(setup: Setup, results: Results, out: Path) -> None:
    """evidence-shortcut.md, .csv and .png, and evidence-shortcut-photos.png, of what is there."""
    out.mkdir(parents=True, exist_ok=True)
    table, cutouts = lines(results), open_cutouts(setup)
    (out / "evidence-shortcut.png").write_bytes(draw(setup, results, cutouts, photos=False))
    (out / "evidence-shortcut-photos.png").write_bytes(draw(setup, results, cutouts, photos=True))
    page = [
        "# Cats on boards, dogs on leaves: a shortcut on real photos\n",
        "![Pictures of the four groups and their parts; silhouettes stand for the animals](evidence-shortcut.png)\n",
        caption(results),
        *status(setup, results),
        "\n## What the numbers say\n",
        *conclusions(table),
        "\n## Results\n",
        *main_table(table, fewest(cutouts)),
        "\n## By group\n",
        *group_table(table),
        "\n## What was chosen on validation pictures\n",
        *settings(results),
        *removals(results),
        *interventions(results),
        "\n## How it was made\n",
        *protocol(setup, results, cutouts),
    ]
    (out / "evidence-shortcut.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    with (out / "evidence-shortcut.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("method", "seed", "average", "worst", *map(_group, GROUPS), "flips", "iou", "kept", "empty"))
        for line in table:
            for seed, row in line.seeds.items():
                numbers = [row["average"], row["worst"], *row["groups"], row["flips"], *(row.get(key) for key in ("iou", "kept", "empty"))]
                writer.writerow((line.title, seed, *("" if value is None else round(value, 5) for value in numbers)))


def lines(results: Results) -> list[Line]:
    """Every row of which at least one seed is there."""
    found: list[Line] = []
    if (best := chosen("erm", results)) is not None:
        found.append(Line(NAMES["erm"], LABELS, _seeds(best, results, "test")))
        repair = dataclasses.replace(best, method="repair")
        found += [Line(title, uses, _seeds(repair, results, key, "test")) for key, (title, uses) in REPAIRS.items()]
    for method in OF_PARTS:
        for job in _part_jobs(method, results):
            title = f"{NAMES[method]}, K = {job.parts}"
            found.append(Line(title, LABELS, _seeds(job, results, "test")))
            found.append(Line(f"{title}, with interventions", GROUPS_TO_CHOOSE, _seeds(job, results, "changed")))
    if (best := chosen("mask", results)) is not None:
        found.append(Line(NAMES["mask"], "class labels; trimaps of all pictures, also at test", _seeds(best, results, "test")))
    return [line for line in found if line.seeds]


def conclusions(table: list[Line]) -> list[str]:
    """One sentence a row, by the rule that stands first."""
    erm = next((line for line in table if line.title == NAMES["erm"]), None)
    if erm is None:
        return ["Nothing yet: ERM is not tuned."]
    usual, other = (statistics.fmean(row["groups"][place] for row in erm.seeds.values() for place in places) for places in (USUAL, OTHER))
    told = [
        "Rule: accuracy of the worst group (WGA) is compared with ERM's, seed by seed. A method *helps* or *costs* if all seeds have the same sign and "
        f"the mean is at least {100 * CLEAR:.0f} points; otherwise it makes no clear difference. {len(SEEDS)} seeds describe; they do not prove.\n",
        f"- **The shortcut.** ERM is right on {_percent(usual)} % of the animals on their usual texture and on {_percent(other)} % on the other one; "
        f"{_percent(statistics.fmean(erm.values('flips')))} % of its answers change with the texture. "
        + ("It has learnt the shortcut." if usual - other >= CLEAR else "It has hardly learnt the shortcut, so there is little to mend."),
        *(f"- **{line.title}** {verdict(line, erm)}" for line in table if line is not erm),
    ]
    others = [line for line in table if line.title != NAMES["mask"]]
    best = max(others, key=lambda line: statistics.fmean(line.values("worst")))
    return [*told, f"- **The best worst group**, the true mask aside: {best.title}{best.few}, {_spread(best.values('worst'))} %. It uses {best.uses}."]


def verdict(line: Line, erm: Line) -> str:
    """What a row does to the worst group, beside ERM."""
    shared = [seed for seed in line.seeds if seed in erm.seeds]
    gains = [line.seeds[seed]["worst"] - erm.seeds[seed]["worst"] for seed in shared]
    if not gains:
        return "cannot be compared yet."
    mean = statistics.fmean(gains)
    word = "helps" if min(gains) > 0 and mean >= CLEAR else "costs" if max(gains) < 0 and mean <= -CLEAR else "makes no clear difference"
    average = statistics.fmean(line.seeds[seed]["average"] - erm.seeds[seed]["average"] for seed in shared)
    each = ", ".join(f"{100 * gain:+.1f}" for gain in gains)
    return f"{word}{line.few}: WGA {100 * mean:+.1f} points ({each}), average accuracy {100 * average:+.1f}."


def fewest(cutouts: Cutouts) -> int:
    """Test pictures of the smallest group."""
    return int(torch.bincount(cutouts.species[cutouts.rows("test")]).min())


def main_table(table: list[Line], smallest: int) -> list[str]:
    rows = ["| method | average | worst group | each seed | flips | IoU | kept | uses |", "|---|---|---|---|---|---|---|---|"]
    for line in table:
        each = " / ".join(map(_percent, line.values("worst")))
        cells = [*(_spread(line.values(key)) for key in ("average", "worst")), each, *(_spread(line.values(key)) for key in ("flips", "iou", "kept"))]
        rows.append(f"| {line.title}{line.few} | " + " | ".join(cells) + f" | {line.uses} |")
    return [
        *rows,
        "\nPercent, mean ± standard deviation over seeds. Worst group: the lowest accuracy of the four groups. Flips: test photos whose answer changes with "
        "the texture. IoU: patches of the mask against the animal's pixels, over all test pictures. Kept: patches that belong to the mask. PDiscoFormer has a "
        "mask too, but its features have seen everything. Settings of every method were chosen by the worst group of "
        f"validation pictures. The smallest groups have {smallest} test pictures: there an accuracy of 80 % has a standard error of "
        f"{_percent((0.8 * 0.2 / smallest) ** 0.5)} points.",
    ]


def group_table(table: list[Line]) -> list[str]:
    rows = ["| method | " + " | ".join(map(_group, GROUPS)) + " |", "|---|" + "---|" * len(GROUPS)]
    for line in table:
        rows.append(f"| {line.title} | " + " | ".join(_spread([row["groups"][place] for row in line.seeds.values()]) for place in range(len(GROUPS))) + " |")
    return rows


def settings(results: Results) -> list[str]:
    """Every setting that was tried."""
    rows = [
        f"Every setting that was tried, on seed {SEEDS[0]}, with what it reached on validation pictures. The chosen one is bold.\n",
        "| method | rate of backbones | background, total variation | trained of stage 1 | worst group | average | IoU |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in TUNED:
        best = chosen(method, results)
        for job in tuning(method):
            if job.file in results:
                val, mark = results[job.file]["val"], "**" if job == best else ""
                of_parts = (f"{job.background:g}, {job.variation:g}", "everything" if job.whole else "tokens, positions") if method in OF_PARTS else ("-", "-")
                reached = (_percent(val["worst"]), _percent(val["average"]), _percent(val["iou"]) if "iou" in val else "-")
                rows.append(f"| {mark}{NAMES[method]}{mark} | {job.rate:g} | " + " | ".join((*of_parts, *reached)) + " |")
    return [*rows, ""]


def removals(results: Results) -> list[str]:
    """Which heads went."""
    told = []
    for job in plan(results):
        if job.method == "repair" and job.file in results:
            row = results[job.file]
            taken = {key: " ".join(f"{layer}.{head}" for layer, head in row[key]["heads"]) or "none" for key in ("printed", "guarded", "random best")}
            told.append(
                f"- Seed {job.seed}, heads removed (layer.head). CIGMA as printed: {taken['printed']}, of {row['positive']['printed']} with a positive score. "
                f"True masks and guard: {taken['guarded']}, of {row['positive']['guarded']}. Best random set: {taken['random best']}. Random control: "
                f"{row['random']['removed']}. IoU of discovered masks: {row['scored']['iou']:.2f}, on {row['scored']['pictures']} training pictures."
            )
    return told


def interventions(results: Results) -> list[str]:
    """What was changed at test time."""
    told = []
    for job in (one for method in OF_PARTS for best in _part_jobs(method, results) for one in seeds_of(best)):
        if job.file in results:
            took = results[job.file]["chosen"]
            words = [f"part {', '.join(map(str, took['drop']))} left out"] if took["drop"] else []
            words += [] if took["quantile"] is None else [f"tokens beyond quantile {took['quantile']:g} rejected"]
            told.append(f"- {NAMES[job.method]}, K = {job.parts}, seed {job.seed}: {' and '.join(words) or 'nothing changed'}.")
    return told


def status(setup: Setup, results: Results) -> list[str]:
    told = ["\n**A small run: its numbers mean nothing.**"] if setup.limit is not None or setup.architecture is not None else []
    if not is_complete(results):
        holes = [job.file.removesuffix(".json") for job in plan(results) if job.file not in results]
        told.append(f"\n**Not finished.** Missing, as far as is known: {', '.join(holes)}.")
    return told


def caption(results: Results) -> str:
    rows = [f"parts of {NAMES[method]} (K = {best.parts}, seed {best.seed})" for method in OF_PARTS if (best := chosen(method, results)) is not None]
    return (
        f"From the top: {'; '.join(['two test pictures of each group', *rows])}. The models saw the animals; silhouettes stand for them here. The script "
        "writes the same figure with the animals beside this page, as `evidence-shortcut-photos.png`; it is not in the repository because it shows photos. "
        "Photos and outlines: Oxford-IIIT Pet (Parkhi et al. 2012), CC BY-SA 4.0, cut out here."
    )


def _part_jobs(method: Method, results: Results) -> list[Job]:
    """The chosen setting; of iFAM with other numbers of parts too."""
    best = chosen(method, results)
    return [] if best is None else [best, *(dataclasses.replace(best, parts=parts) for parts in (OTHER_PARTS if method == "ifam" else ()))]


def _seeds(job: Job, results: Results, *keys: str) -> dict[int, dict[str, Any]]:
    """What is found under `keys` for each seed that is there."""
    found = {}
    for one in seeds_of(job):
        row: Any = results.get(one.file)
        if row is not None:
            for key in keys:
                row = row[key]
            found[one.seed] = row
    return found


def _group(group: tuple[int, int]) -> str:
    return f"{SPECIES[group[0]]} on {FAMILIES[group[1]]}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    return _percent(statistics.fmean(values)) + (f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else "")
