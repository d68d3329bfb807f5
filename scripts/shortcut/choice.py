"""What was chosen on validation pictures, and what another choice would have given, for the study's
page."""

from __future__ import annotations

import statistics
from typing import Any

from scripts.seeds import percent
from scripts.shortcut.methods import Job, Method
from scripts.shortcut.plan import (
    SEEDS,
    TUNED,
    TUNING_SEED,
    Results,
    best_so_far,
    is_tuned,
    plan,
    seeds_of,
    tried,
    tuning,
)
from scripts.shortcut.rows import NAMES, OF_PARTS, part_jobs, repair_of, settings_tried

Row = dict[str, Any]
AXES = {
    "rate": "rate",
    "length": "length",
    "background": "background",
    "total variation": "variation",
}  # of a grid of settings, as words and in a job


def as_trained(row: dict[str, list[float]], shares: list[float]) -> float:
    """Accuracy of groups weighted as training meets them [len(GROUPS)]: what validation pictures
    made like training pictures would show."""
    return sum(
        share * accuracy for share, accuracy in zip(shares, row["groups"], strict=True)
    ) / sum(shares)


def best_as_trained(method: Method, results: Results, shares: list[float]) -> Job | None:
    """The setting that would be chosen without group labels; the first of equals."""
    return max(
        tried(method, results),
        key=lambda job: as_trained(results[job.file]["val"], shares),
        default=None,
    )


def rules(results: Results, shares: list[float], photos: int) -> list[str]:
    """A table: how much hangs on the choice. `photos`: validation photos."""
    rows = [
        (
            f"\nHow much hangs on the choice, on seed {TUNING_SEED} and test pictures: worst group"
            " of all settings, and average and worst group of the setting that each rule takes.\n"
        ),
        (
            "| method | ViTs | settings | lowest | median | highest | by worst group | by accuracy"
            " as in training | within one photo of that |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method in TUNED:
        by_group, by_accuracy = (
            best_so_far(method, results),
            best_as_trained(method, results, shares),
        )
        if by_group is not None and by_accuracy is not None:
            all_worst = [results[job.file]["test"]["worst"] for job in tried(method, results)]
            near = near_best(method, results, shares, 1 / photos)
            cells = [
                NAMES[method],
                "2" if method == "ifam" else "1",
                settings_tried(method, results),
            ]
            cells += [
                percent(value)
                for value in (min(all_worst), statistics.median(all_worst), max(all_worst))
            ]
            cells += [_reached(job, results) for job in (by_group, by_accuracy)]
            cells.append(
                percent(near[0])
                if len(near) == 1
                else f"{percent(min(near))} to {percent(max(near))} ({len(near)} settings)"
            )
            rows.append("| " + " | ".join(cells) + " |")
    shown = ", ".join(percent(share) for share in shares)
    return [
        *rows,
        (
            "\nBy worst group: the study's rule, which needs the groups of validation pictures. By"
            " accuracy as in training: the four groups' accuracies on validation pictures,"
            f" weighted {shown} %, the shares of training. It needs no group labels, only"
            f" validation pictures made like the training ones; of {photos} such photos few would"
            " be unusual, so it would be noisier than it is here. Within one photo of that: worst"
            f" groups of the settings whose accuracy is at most 1 / {photos} below the best."
        ),
    ]


def near_best(method: Method, results: Results, shares: list[float], margin: float) -> list[float]:
    """Worst groups on test pictures of the settings whose weighted validation accuracy is within
    `margin` of the best."""
    reached = [
        (as_trained(results[job.file]["val"], shares), results[job.file]["test"]["worst"])
        for job in tried(method, results)
    ]
    return [worst for accuracy, worst in reached if accuracy >= max(reached)[0] - margin]


def choice_told(results: Results, shares: list[float]) -> list[str]:
    """What the table says of iFAM and ERM, as a conclusion."""
    told = []
    for method in ("ifam", "erm"):
        by_group, by_accuracy = (
            best_so_far(method, results),
            best_as_trained(method, results, shares),
        )
        if by_group is None or by_accuracy is None:
            return []
        every = [results[job.file]["test"]["worst"] for job in tried(method, results)]
        took, other = (
            percent(results[job.file]["test"]["worst"]) for job in (by_group, by_accuracy)
        )
        told.append(
            f"{NAMES[method].partition(':')[0]}'s {settings_tried(method, results)} settings give a"
            f" worst group of {percent(min(every))} to {percent(max(every))} % (median"
            f" {percent(statistics.median(every))}). The worst group of validation pictures chose"
            f" one with {took} %; their accuracy weighted as in training, which needs no group"
            f" labels, would have chosen one with {other} %."
        )
    return [
        f"- **The choice of settings** (seed {TUNING_SEED}, test pictures). {' '.join(told)} iFAM"
        " trains two transformers, ERM one."
    ]


def settings(results: Results) -> list[str]:
    """Every setting that was tried."""
    rows = [
        (
            f"Every setting that was tried, on seed {TUNING_SEED}, which is not reported. The one"
            " with the best worst group on validation pictures is bold and is trained with seeds"
            f" {', '.join(map(str, SEEDS))}. The last two columns decided nothing.\n"
        ),
        (
            "| method | rate | length | background, total variation | trained of stage 1 | worst"
            " group | average | IoU | test: worst group | test: average |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method in TUNED:
        best = best_so_far(method, results)
        for job in tried(method, results):
            val, test, mark = (
                results[job.file]["val"],
                results[job.file]["test"],
                "**" if job == best else "",
            )
            of_parts = (
                (
                    f"{job.background:g}, {job.variation:g}",
                    "everything" if job.whole else "tokens, positions",
                )
                if method in OF_PARTS
                else ("-", "-")
            )
            reached = (
                percent(val["worst"]),
                percent(val["average"]),
                percent(val["iou"]) if "iou" in val else "-",
            )
            cells = (
                f"{job.rate:g}",
                f"{job.length:.2g}",
                *of_parts,
                *reached,
                percent(test["worst"]),
                percent(test["average"]),
            )
            rows.append(f"| {mark}{NAMES[method]}{mark} | " + " | ".join(cells) + " |")
    open_ones = [
        f"{NAMES[method]} ({settings_tried(method, results)})"
        for method in TUNED
        if not is_tuned(method, results)
    ]
    return [
        *rows,
        *(
            [f"\nNot all settings are tried yet, so bold may change: {', '.join(open_ones)}."]
            if open_ones
            else []
        ),
    ]


def removals(results: Results) -> list[str]:
    """Which heads went."""
    told = []
    for job in plan(results, guess=True):
        row = repair_of(job, results) if job.method == "repair" else None
        if row is not None:
            taken = {
                key: " ".join(f"{layer}.{head}" for layer, head in row[key]["heads"]) or "none"
                for key in ("printed", "guarded")
            }
            text = (
                f"- Seed {job.seed}, heads removed (layer.head). CIGMA as printed:"
                f" {taken['printed']}, of {row['positive']['printed']} with a positive score. True"
                f" masks and guard: {taken['guarded']}, of {row['positive']['guarded']}. IoU of"
                f" discovered masks: {row['scored']['iou']:.2f}, on {row['scored']['pictures']}"
                " training pictures."
            )
            if "random, chosen" in row:
                text += (
                    " At least as good (worst group, test) as CIGMA as printed are"
                    f" {as_good(row, 'printed')}; as true masks and guard"
                    f" {as_good(row, 'guarded')}. Random orders lose"
                    f" {statistics.fmean(row['random, chosen']['removed']):.1f} heads on average."
                    f" The model itself: {percent(row['whole']['test']['worst'])} %."
                )
            told.append(text)
    return told


def as_good(row: Row, name: str) -> str:
    """How many draws of the two random ways have a worst group on test pictures that is not below
    CIGMA's."""
    own, alike, sets = (
        row[name]["test"]["worst"],
        row["random, chosen"]["worst"],
        row[f"random, {name}"]["worst"],
    )
    count = f"{sum(worst >= own for worst in alike)} of {len(alike)} random orders chosen alike"
    if not row[name]["heads"]:
        return f"{count} (it removes no head)"
    return (
        f"{count} and {sum(worst >= own for worst in sets)} of {len(sets)} random sets of as many"
        " heads, which nothing chose"
    )


def unchanged(method: Method, results: Results) -> tuple[int, int]:
    """In how many runs of how many the choice was to change nothing at test time."""
    took = [
        results[job.file]["chosen"]
        for best in part_jobs(method, results)
        for job in seeds_of(best)
        if job.file in results
    ]
    return sum(not one["drop"] and one["quantile"] is None for one in took), len(took)


def edges(best: Job) -> dict[str, str]:
    """Whether each number of a setting lies inside what was tried, or at which end of it."""
    found = {}
    for name, axis in AXES.items():
        values = sorted({getattr(job, axis) for job in tuning(best.method)})
        if len(values) > 1:
            own = getattr(best, axis)
            found[name] = (
                f"the lowest of {len(values)}"
                if own == values[0]
                else f"the highest of {len(values)}"
                if own == values[-1]
                else "inside"
            )
    return found


def edges_told(results: Results) -> list[str]:
    """Where a better setting may lie outside the grid."""
    told, ends = [], dict[str, bool]()
    for method in TUNED:
        if (best := best_so_far(method, results)) is not None:
            found = edges(best)
            ends[method] = any(where != "inside" for where in found.values())
            words = ", ".join(
                f"{name} {getattr(best, AXES[name]):.2g} {where}" for name, where in found.items()
            )
            told.append(
                f"{NAMES[method].partition(':')[0]}: {'at an edge' if ends[method] else 'inside'}"
                f" ({words})"
            )
    if not told:
        return []
    erm = (
        " ERM is the measure of all, and all repairs begin with it: it may be undertuned, and gains"
        " over it overstated."
        if ends.get("erm")
        else ""
    )
    return [
        f"- **Chosen settings and the edges of their grids.** {'; '.join(told)}. At an edge, a"
        f" better setting may lie beyond; of two values either is an edge.{erm}"
    ]


def interventions(results: Results) -> list[str]:
    """What was changed at test time."""
    told = []
    for job in (
        one for method in OF_PARTS for best in part_jobs(method, results) for one in seeds_of(best)
    ):
        if job.file in results:
            took = results[job.file]["chosen"]
            words = [f"part {', '.join(map(str, took['drop']))} left out"] if took["drop"] else []
            words += (
                []
                if took["quantile"] is None
                else [f"tokens beyond quantile {took['quantile']:g} rejected"]
            )
            told.append(
                f"- {NAMES[job.method]}, K = {job.parts}, seed {job.seed}:"
                f" {' and '.join(words) or 'nothing changed'}."
            )
    return told


def _reached(job: Job, results: Results) -> str:
    test = results[job.file]["test"]
    return f"{percent(test['average'])}, {percent(test['worst'])}"
