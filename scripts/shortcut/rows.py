"""The rows of the study's tables: methods, what they are told, and the numbers of each reported
seed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from scripts.shortcut.data import SPECIES
from scripts.shortcut.methods import Job, Method
from scripts.shortcut.plan import (
    OTHER_PARTS,
    SEEDS,
    Results,
    best_so_far,
    controls,
    is_tuned,
    seeds_of,
    tried,
    tuning,
)
from scripts.shortcut.textures import FAMILIES

NAMES: dict[Method, str] = {
    "erm": "ERM: fine-tuned whole",
    "pdisco": "PDiscoFormer",
    "ifam": "iFAM",
    "mask": "early mask by the true trimap",
    "centre": "early mask in the centre",
    "scatter": "early mask of random patches",
}
OF_PARTS: tuple[Method, ...] = ("pdisco", "ifam")
CHANGED = ", with interventions"  # ends the title of such a row
CHOOSE = "class labels; groups of validation pictures, to choose"
GRID = f"{CHOOSE}; trimaps of training pictures, to choose the grid of settings"
REPAIRS = {
    "dfr": ("DFR: ERM with a new last layer", f"{CHOOSE} and to fit"),
    "printed": ("ERM without heads: CIGMA as printed", CHOOSE),
    "random, printed": ("ERM without as many random heads as CIGMA as printed", CHOOSE),
    "guarded": (
        "ERM without heads: CIGMA, true masks, guard",
        f"{CHOOSE}; trimaps of training pictures",
    ),
    "random, guarded": ("ERM without as many random heads as CIGMA, true masks, guard", CHOOSE),
    "random, chosen": ("ERM without heads: a random order, chosen like CIGMA", CHOOSE),
}


@dataclass(frozen=True)
class Line:
    """One row: a method with the numbers of each seed, on test pictures. `settled`: its setting is
    chosen from all that the plan names."""

    title: str
    uses: str
    seeds: dict[int, dict[str, Any]]
    settled: bool = True

    def values(self, key: str) -> list[float]:
        return [row[key] for row in self.seeds.values() if key in row]

    @property
    def is_ready(self) -> bool:
        return self.settled and len(self.seeds) == len(SEEDS)

    @property
    def few(self) -> str:
        """What it lacks, in brackets."""
        lacks = (
            [] if len(self.seeds) == len(SEEDS) else [f"{len(self.seeds)} of {len(SEEDS)} seeds"]
        )
        lacks += [] if self.settled else ["setting not final"]
        return f" ({', '.join(lacks)})" if lacks else ""


def lines(results: Results) -> list[Line]:
    """Every row whose method has a setting so far, also those without a seed."""
    found: list[Line] = []
    if (best := best_so_far("erm", results)) is not None:
        settled = is_tuned("erm", results)
        found.append(Line(NAMES["erm"], CHOOSE, _seeds(best, results, "test"), settled))
        repair = dataclasses.replace(best, method="repair")
        found += [
            Line(title, uses, _seeds(repair, results, key, "test"), settled)
            for key, (title, uses) in REPAIRS.items()
        ]
    for method in OF_PARTS:
        for job in part_jobs(method, results):
            title, settled = f"{NAMES[method]}, K = {job.parts}", is_tuned(method, results)
            found.append(Line(title, GRID, _seeds(job, results, "test"), settled))
            found.append(Line(f"{title}{CHANGED}", GRID, _seeds(job, results, "changed"), settled))
    mask, ifam = best_so_far("mask", results), best_so_far("ifam", results)
    if mask is not None:
        uses = f"{CHOOSE}; trimaps of all pictures, also at test"
        found.append(
            Line(NAMES["mask"], uses, _seeds(mask, results, "test"), is_tuned("mask", results))
        )
    if mask is not None and ifam is not None:
        settled = is_tuned("mask", results) and is_tuned("ifam", results)
        found += [
            Line(NAMES[job.method], CHOOSE, _seeds(job, results, "test"), settled)
            for job in controls(mask, ifam, results)
        ]
    return found


def part_jobs(method: Method, results: Results) -> list[Job]:
    """The best setting so far; of iFAM with other numbers of parts too."""
    best = best_so_far(method, results)
    return (
        []
        if best is None
        else [
            best,
            *(
                dataclasses.replace(best, parts=parts)
                for parts in (OTHER_PARTS if method == "ifam" else ())
            ),
        ]
    )


def repair_of(job: Job, results: Results) -> dict[str, Any] | None:
    """Repairs of a seed; where only the first version is there, without its random controls, which
    had other sizes and more tries."""
    first = results.get(job.file.replace("repair-v2", "repair"))
    old = (
        None
        if first is None
        else {key: value for key, value in first.items() if not key.startswith("random")}
    )
    return results.get(job.file, old)


def settings_tried(method: Method, results: Results) -> str:
    done, planned = len(tried(method, results)), len(tuning(method))
    return f"{done}" if done == planned else f"{done} of {planned}"


def group_name(group: tuple[int, int]) -> str:
    return f"{SPECIES[group[0]]} on {FAMILIES[group[1]]}"


def _seeds(job: Job, results: Results, *keys: str) -> dict[int, dict[str, Any]]:
    """What is found under `keys` for each seed that has it."""
    found = {}
    for one in seeds_of(job):
        row: Any = repair_of(one, results) if one.method == "repair" else results.get(one.file)
        for key in keys:
            row = None if row is None else row.get(key)
        if row is not None:
            found[one.seed] = row
    return found
