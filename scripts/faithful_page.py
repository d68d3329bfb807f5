"""What `faithful_study.py` found, as a page and a CSV file: every sentence about a result is put
together from its numbers, by rules the page states."""

from __future__ import annotations

import csv
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

import seecause
from scripts.faithful_plan import (
    ABLATIONS,
    BASE,
    CHANGEABLE,
    EARLY,
    ERM,
    FAILS,
    IFAM4,
    MAIN,
    NO_PATH,
    PDISCO,
    RATES,
    RELIABILITIES,
    SEEDS,
    TEST,
    VAL,
    WHOLE,
    Result,
    first_plan,
    second_plan,
    seeds,
    simplicity,
    where_erm_fails,
)
from scripts.seeds import spread
from seecause.critters import REGIMES, joint

FEW_MANY, FROZEN, PAPERS_WEIGHT = (
    ("iFAM, K = 1", "iFAM, K = 8"),
    "stage 2 frozen",
    "background loss at the paper's weight 2",
)
CLEAR, WANTED = (
    1.0,
    10.0,
)  # points of WGA, mean over seeds: what counts as a difference, and what iFAM was to gain over ERM
_COLUMNS = (
    "row",
    "regime",
    "seed",
    "average",
    "worst",
    "iou",
    "kept",
    "changed_average",
    "changed_worst",
    "drop",
    "quantile",
    "seconds",
)


def page(results: Sequence[Result]) -> str:
    """All of it; what is missing is said first."""
    chosen = where_erm_fails(results)
    lines = [
        "# iFAM on Critters",
        "",
        *_missing(results, chosen),
        *_protocol(results),
        "",
        *_where(results, chosen),
        "",
        *_findings(results, chosen),
    ]
    for regime in (chosen, "certified"):
        rows = [line for row in MAIN for line in _lines(results, row, regime)]
        lines += ["", f"## `{regime}`", "", *_head("method"), *rows] if rows else []
    rows = [
        _line(row, found, found, _words(gains(results, row, IFAM4, chosen)))
        for row in ABLATIONS
        if (found := seeds(results, row, chosen))
    ]
    if rows:
        reference = [
            _line(row, found, found, "")
            for row in (IFAM4, PDISCO)
            if (found := seeds(results, row, chosen))
        ]
        lines += [
            "",
            f"## What matters? (`{chosen}`, K = 4 unless said)",
            "",
            *_head("change", f"WGA against {IFAM4}, seed by seed"),
            *reference,
            *rows,
        ]
    return "\n".join(lines) + "\n"


def gains(
    results: Sequence[Result], row: str, other: str, regime: str, *, key: str = "worst"
) -> list[float]:
    """`row` minus `other` in points, seed by seed, where both are there."""
    a, b = (
        {r["seed"]: r[key] for r in seeds(results, name, regime) if key in r}
        for name in (row, other)
    )
    return [100 * (a[seed] - b[seed]) for seed in SEEDS if seed in a and seed in b]


def verdict(found: Sequence[float]) -> str:
    """By the rule of the page."""
    if not found:
        return "not measured yet"
    if abs(statistics.mean(found)) >= CLEAR and (min(found) > 0 or max(found) < 0):
        word = "better" if found[0] > 0 else "worse"
        return word if len(found) == len(SEEDS) else f"{word} so far"
    return "undecided"


def _missing(results: Sequence[Result], chosen: str) -> list[str]:
    there = {(r["row"], r["regime"], r["seed"]) for r in results}
    jobs = first_plan() + second_plan(chosen)
    lost = [job for job in jobs if (job.row, job.regime, job.seed) not in there]
    if not lost:
        return []
    said = []
    for regime in dict.fromkeys(job.regime for job in lost):
        counts = Counter(job.row for job in lost if job.regime == regime)
        names = (
            row if count == len(SEEDS) else f"{row} ({count} of {len(SEEDS)} seeds)"
            for row, count in counts.items()
        )
        said.append(f"On `{regime}`: {'; '.join(names)}.")
    return [
        f"**Not finished: {len(lost)} of {len(jobs)} trainings are missing.** {' '.join(said)}",
        "",
    ]


def _protocol(results: Sequence[Result]) -> list[str]:
    machines = " and ".join(sorted({f"torch {r['torch']}, {r['device']}" for r in results}))
    old = sum("digest" not in r for r in results)
    return [
        f"Written by `python scripts/faithful_study.py report` (seecause {seecause.__version__},"
        f" {machines}). Percent, mean ± standard deviation over seeds {', '.join(map(str, SEEDS))}."
        + (
            f" {old} of {len(results)} results carry no digest of their settings and were taken at"
            " their word (`--accept-old`)."
            if old
            else ""
        ),
        "",
        (
            "AA is the accuracy against the creature on balanced test pictures (every creature on"
            " every background equally often), WGA that of the worst of the 32 groups (creature,"
            f" background), {TEST // 32} pictures each. IoU: selected patches against the"
            " creature's pixels, over all test pictures. Kept: the share of patches the classifier"
            " reads."
        ),
        "",
        (
            "All rows of a seed start from the same backbone, pretrained on `clean` by naming"
            f" parts ({BASE.pretraining_samples:,} pictures). Then come {BASE.samples:,} pictures"
            f" of the regime in batches of {BASE.batch}, with the paper's loss weights but"
            f" {BASE.weights.background:g} for the background. That weight was chosen once, before"
            " this study, on small runs, by how well selections overlap true masks of training"
            " pictures: labels that iFAM itself does not get, and that no other row's settings"
            " were chosen by (PDiscoFormer shares the weight). A row has the paper's 2. The"
            " average of the last weights is tested, and nothing is chosen on test."
        ),
        "",
        (
            f"ERM is trained at {len(RATES)} rates (its head as fast as its backbone), and for"
            f" every seed by itself the one with the best worst group on {VAL:,} balanced"
            " validation pictures is kept; other rows are trained once, at one rate (prototypes"
            f" and heads {BASE.head_factor:g} times as fast). `with interventions`: one part left"
            " out, tokens beyond a quantile rejected, both or neither, whatever has the best WGA"
            f" on {VAL:,} balanced validation pictures. The early mask with ground truth shows the"
            " patches that the creature covers by half or more: its edge, with some background"
            " around it. `whole patches`: only those that it covers wholly, so that no pixel of"
            " the background is read."
        ),
    ]


def _where(results: Sequence[Result], chosen: str) -> list[str]:
    lines = [
        "## Where does ERM fail?",
        "",
        "| pictures | WGA, validation | AA | WGA |",
        "|---|---|---|---|",
    ]
    for regime in (*map(simplicity, RELIABILITIES), "certified"):
        if found := seeds(results, ERM, regime):
            columns = (
                [r["val"]["worst"] for r in found],
                [r["average"] for r in found],
                [r["worst"] for r in found],
            )
            lines.append(f"| `{regime}` | " + " | ".join(map(spread, columns)) + " |")
    rule = (
        f"the least reliable background at which its WGA on validation is below {100 * FAILS:.0f},"
        " or else the most reliable"
    )
    return [*lines, "", f"Compared with the others on `{chosen}`: {rule}."]


def _findings(results: Sequence[Result], chosen: str) -> list[str]:
    def against(row: str, other: str) -> list[float]:
        return gains(results, row, other, chosen)

    over_erm, over_baseline = against(IFAM4, ERM), against(IFAM4, PDISCO)
    found = [
        ("iFAM against ERM", over_erm, _goal(over_erm)),
        *((f"{row} against ERM", against(row, ERM), "") for row in FEW_MANY),
        ("PDiscoFormer against ERM", against(PDISCO, ERM), ""),
        (
            "iFAM against PDiscoFormer, the baseline it builds on",
            over_baseline,
            _loss(over_baseline, against(FROZEN, PDISCO)),
        ),
        (
            "The true mask against iFAM",
            against(EARLY, IFAM4),
            (
                "It shows the same second stage the creature, and no other row can be expected to"
                " pass it by selecting better. What iFAM lacks is the doing of its selection, and"
                " of the noise and dropped parts that selection is trained with."
            ),
        ),
        (
            f"Our background weight of {BASE.weights.background:g} against the paper's 2",
            against(IFAM4, PAPERS_WEIGHT),
            (
                "The tables keep our weight, which was chosen before: to take the other now would"
                " be to choose on test pictures."
            ),
        ),
        (
            "iFAM with interventions, chosen on validation, against iFAM",
            _changed(results, IFAM4, chosen),
            "",
        ),
        (
            "The straight-through gradient (`ste` against `none`)",
            against(IFAM4, NO_PATH),
            _masks(gains(results, IFAM4, NO_PATH, chosen, key="iou")),
        ),
    ]
    return [
        "## What it shows",
        "",
        (
            "The rule: two rows differ if the difference of their WGA has one sign in every seed"
            f" and is {CLEAR:g} point or more on average; otherwise it is undecided. Three seeds"
            " are few: a difference that holds in all of them is a finding on these pictures, not"
            f" a law. K = 4 on `{chosen}` unless said."
        ),
        "",
        *(
            " ".join(
                filter(
                    None, [f"- **{title}: {verdict(points)}.**", _words(points, judged=False), more]
                )
            )
            for title, points, more in found
        ),
        f"- **`certified`:** {_certified(results)}",
    ]


def _goal(found: Sequence[float]) -> str:
    if not found:
        return ""
    mean, rest = statistics.mean(found), sorted(found)[:-1]
    said = (
        f"The goal of {WANTED:g} points on average is {'reached' if mean >= WANTED else 'missed'}."
    )
    return (
        f"{said} Without its best seed the mean would be {statistics.mean(rest):+.1f}."
        if rest
        else said
    )


def _masks(found: Sequence[float]) -> str:
    """What the path does to the selection it was made for."""
    said = "The paper claims this path; its public code cuts it."
    return f"{said} IoU with the creature, by the same rule: {_words(found)}." if found else said


def _loss(found: Sequence[float], frozen: Sequence[float]) -> str:
    """Our method's defeat is said as plainly as its victory."""
    if not found or statistics.mean(found) >= 0:
        return ""
    said = (
        "iFAM loses to its own baseline here."
        if verdict(found).startswith("worse")
        else "On average iFAM is behind its own baseline."
    )
    more = (
        f"{said} PDiscoFormer keeps the backbone that `clean` taught; iFAM trains a second one on"
        " the regime, which can learn what is left of the background."
    )
    tells = "`stage 2 frozen` takes that difference away"
    return f"{more} {tells}, against PDiscoFormer: {_words(frozen) or 'not measured yet'}."


def _certified(results: Sequence[Result]) -> str:
    law, table = REGIMES["certified"], joint("certified")  # [C, C, B]
    right = (
        table.argmax(dim=0) == torch.arange(table.shape[1])[:, None]
    ).double()  # the best answer is the creature: [C, B]
    said = (
        f"the label is the creature in {100 * law.creature_reliability:.0f} % of training pictures"
        f" and goes with the background in {100 * law.background_reliability:.0f} %, so the best"
        " answer to its labels needs the background. Whoever gives that answer has AA"
        f" {100 * right.mean():.1f} and WGA {100 * right.min():.1f} here. So a low WGA is no"
        " failure to learn, and a method that sees the creature alone should show as an AA far"
        " above that figure. It can show how much of the background gets through a mask; it cannot"
        " show who classifies better."
    )
    if edge := seeds(results, EARLY, "certified"):
        said += (
            f" The true mask of half-covered patches has AA {spread([r['average'] for r in edge])}:"
            " what it shows of the background is enough to read it."
        )
    whole = seeds(results, WHOLE, "certified")
    said += (
        " Whole patches only:"
        f" {'AA ' + spread([r['average'] for r in whole]) if whole else 'not measured yet'}."
    )
    ours = [
        f"{row} {spread([r['average'] for r in found])}"
        for row in (IFAM4, PDISCO)
        if (found := seeds(results, row, "certified"))
    ]
    return f"{said} AA of the methods: {'; '.join(ours)}." if ours else said


def _changed(results: Sequence[Result], row: str, regime: str) -> list[float]:
    return [
        100 * (r["changed"]["worst"] - r["worst"])
        for r in seeds(results, row, regime)
        if "changed" in r
    ]


def _words(found: Sequence[float], *, judged: bool = True) -> str:
    if not found:
        return ""
    listed = ", ".join(f"{gain:+.1f}" for gain in found)
    return (
        f"{listed}: {verdict(found)}"
        if judged
        else f"WGA seed by seed {listed} points, mean {statistics.mean(found):+.1f}."
    )


def _lines(results: Sequence[Result], row: str, regime: str) -> list[str]:
    found = seeds(results, row, regime)
    lines = [_line(row, found, found)] if found else []
    return (
        [
            *lines,
            _line(f"{row}, with interventions", found, [result["changed"] for result in found]),
        ]
        if found and row in CHANGEABLE
        else lines
    )


def _head(first: str, *more: str) -> list[str]:
    names = (first, "AA", "WGA", "IoU", "kept", *more)
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def _line(title: str, runs: Sequence[Result], values: Sequence[Result], *more: str) -> str:
    few = "" if len(runs) == len(SEEDS) else f" ({len(runs)} of {len(SEEDS)} seeds)"
    return (
        "| "
        + " | ".join(
            [
                title + few,
                *(
                    spread([v[key] for v in values if key in v])
                    for key in ("average", "worst", "iou", "kept")
                ),
                *more,
            ]
        )
        + " |"
    )


def write_csv(results: Sequence[Result], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for r in results:
            changed, chosen = r.get("changed", {}), r.get("chosen", {})
            numbers = [
                f"{r[key]:.4f}" if key in r else "" for key in ("average", "worst", "iou", "kept")
            ]
            after = [
                f"{changed[key]:.4f}" if key in changed else "" for key in ("average", "worst")
            ]
            writer.writerow(
                (
                    r["row"],
                    r["regime"],
                    r["seed"],
                    *numbers,
                    *after,
                    chosen.get("drop", ""),
                    chosen.get("quantile", ""),
                    f"{r['seconds']:.1f}",
                )
            )
