"""Which trainings the study needs, most important first, given what is known already.

Every method is tuned on one seed over a grid of settings, and the setting with the best worst group
on validation pictures (then average) is trained with other seeds, which are reported. Test pictures
decide nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from scripts.shortcut.methods import Job, Method

TUNING_SEED = 0
SEEDS = (1, 2, 3)  # reported: none of them chose a setting
RATES = (1e-5, 3e-5, 1e-4, 3e-4)  # of methods with one backbone to fine-tune
LENGTHS = (1.0, 1 / 3, 3.0)  # of ERM's training: so it has as many settings as the methods of parts
PART_RATES = (3e-5, 1e-4)
SHAPING = (
    (2.0, 1.0),
    (2.0, 0.3),
    (5.0, 0.3),
)  # weights of background and total variation; the first are the paper's, for grids of 37 x 37
OTHER_PARTS = (1, 8)  # iFAM again, at the settings found for 4
TUNED: tuple[Method, ...] = ("erm", "ifam", "pdisco", "mask")
CONTROLS: tuple[Method, ...] = (
    "centre",
    "scatter",
)  # of the early mask: its setting, iFAM's share of patches
UNKNOWN = 60.0  # seconds a job is expected to take before one of its kind is done
Results = dict[str, dict[str, Any]]  # by the job's file


def tuning(method: Method) -> list[Job]:
    """All settings, on the seed that is for it."""
    if method == "erm":
        return [
            Job(method, TUNING_SEED, rate, length=length)
            for length, rate in itertools.product(LENGTHS, RATES)
        ]
    if method == "mask":
        return [Job(method, TUNING_SEED, rate) for rate in RATES]
    return [
        Job(method, TUNING_SEED, rate, *weights, whole)
        for whole, weights, rate in itertools.product((True, False), SHAPING, PART_RATES)
    ]


def tried(method: Method, results: Results) -> list[Job]:
    return [job for job in tuning(method) if job.file in results]


def best_so_far(method: Method, results: Results) -> Job | None:
    """The best of the settings that were tried, on validation pictures; the first of equals."""
    return max(
        tried(method, results),
        key=lambda job: (results[job.file]["val"]["worst"], results[job.file]["val"]["average"]),
        default=None,
    )


def chosen(method: Method, results: Results) -> Job | None:
    """The best setting on validation pictures, once all are tried."""
    return best_so_far(method, results) if is_tuned(method, results) else None


def is_tuned(method: Method, results: Results) -> bool:
    return all(job.file in results for job in tuning(method))


def seeds_of(job: Job) -> list[Job]:
    return [dataclasses.replace(job, seed=seed) for seed in SEEDS]


def controls(mask: Job, ifam: Job, results: Results) -> list[Job]:
    """Masks that know nothing of the animal, with the setting of the true one and about as many
    patches as iFAM keeps."""
    kept = round(results[ifam.file]["val"]["kept"], 2)
    return [dataclasses.replace(mask, method=method, kept=kept) for method in CONTROLS]


def plan(results: Results, *, guess: bool = False) -> list[Job]:
    """What is known to be needed so far; when all of it is done, the study is. `guess`: as if the
    best settings so far were the chosen ones."""
    best = {method: (best_so_far if guess else chosen)(method, results) for method in TUNED}
    jobs = [job for method in TUNED for job in tuning(method)]
    jobs += [
        job for method in TUNED if (found := best[method]) is not None for job in seeds_of(found)
    ]
    if best["erm"] is not None:
        jobs += [
            dataclasses.replace(job, method="repair")
            for job in seeds_of(best["erm"])
            if guess or job.file in results
        ]
    if best["mask"] is not None and best["ifam"] is not None:
        jobs += [
            job
            for control in controls(best["mask"], best["ifam"], results)
            for job in seeds_of(control)
        ]
    if best["ifam"] is not None:
        jobs += [
            job
            for parts in OTHER_PARTS
            for job in seeds_of(dataclasses.replace(best["ifam"], parts=parts))
        ]
    return list(dict.fromkeys(jobs))


def missing(results: Results, *, guess: bool = False) -> list[Job]:
    return [job for job in plan(results, guess=guess) if job.file not in results]


def is_complete(results: Results) -> bool:
    return not missing(results)


def expected(job: Job, results: Results) -> float:
    """Seconds: the longest of its kind so far."""
    kind = "mask" if job.method in CONTROLS else job.method
    took = [
        found["seconds"] / max(1.0, found.get("length", 1.0))
        for found in results.values()
        if found["method"] == kind
    ]
    return max(1.0, job.length) * max(took) if took else UNKNOWN
