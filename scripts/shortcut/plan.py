"""Which trainings the study needs, most important first, given what is known already.

Every method is tuned on seed 0 over a grid of settings, and the setting with the best worst group on validation pictures (then average) is
trained with the other seeds. Test pictures decide nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from scripts.shortcut.methods import Job, Method

SEEDS = (0, 1, 2)
RATES = (1e-5, 3e-5, 1e-4, 3e-4)  # of methods with one backbone to fine-tune
PART_RATES = (3e-5, 1e-4)
SHAPING = ((2.0, 1.0), (2.0, 0.3), (5.0, 0.3))  # weights of background and total variation; the first are the paper's, for grids of 37 x 37
OTHER_PARTS = (1, 8)  # iFAM again, at the settings found for 4
TUNED: tuple[Method, ...] = ("erm", "ifam", "pdisco", "mask")
Results = dict[str, dict[str, Any]]  # by the job's file


def tuning(method: Method) -> list[Job]:
    """All settings, on seed 0."""
    if method in ("erm", "mask"):
        return [Job(method, SEEDS[0], rate) for rate in RATES]
    return [Job(method, SEEDS[0], rate, *weights, whole) for whole, weights, rate in itertools.product((True, False), SHAPING, PART_RATES)]


def chosen(method: Method, results: Results) -> Job | None:
    """The best setting on validation pictures, once all are tried; the first of equals."""
    jobs = tuning(method)
    if any(job.file not in results for job in jobs):
        return None
    return max(jobs, key=lambda job: (results[job.file]["val"]["worst"], results[job.file]["val"]["average"]))


def seeds_of(job: Job) -> list[Job]:
    return [dataclasses.replace(job, seed=seed) for seed in SEEDS]


def plan(results: Results) -> list[Job]:
    """What is known to be needed so far. When all of it is done, the study is."""
    best = {method: chosen(method, results) for method in TUNED}
    jobs = [job for method in TUNED for job in tuning(method)]
    jobs += [job for method in TUNED if (found := best[method]) is not None for job in seeds_of(found)]
    if best["erm"] is not None:
        jobs += [dataclasses.replace(job, method="repair") for job in seeds_of(best["erm"]) if job.file in results]
    if best["ifam"] is not None:
        jobs += [job for parts in OTHER_PARTS for job in seeds_of(dataclasses.replace(best["ifam"], parts=parts))]
    return list(dict.fromkeys(jobs))


def is_complete(results: Results) -> bool:
    return all(job.file in results for job in plan(results))
