"""The page of `heads_study.py`: tables with intervals over seeds, and the hypotheses answered from
the numbers."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from scripts.head_methods import PRINTED
from scripts.heads_hypotheses import hypotheses
from scripts.heads_numbers import AS_MANY, DFR, ERM, RANDOM, choose, interval, lot, reach
from seecause import __version__

if TYPE_CHECKING:
    from scripts.heads_study import Study

Row = dict[str, Any]
SHOWN = {
    "test worst group": "worst group", "test accuracy": "balanced accuracy",
    "iid accuracy": "i.i.d. accuracy", "flips": "flips",
    "BIR, exact swap": "BIR, swap", "BIR, true masks, grey": "BIR, true masks, grey", "BIR, true masks, mean": "BIR, true masks, mean",
    "BIR, discovered masks, mean": "BIR, discovered, mean",
}  # fmt: skip


def write(study: Study, out: Path) -> None:
    """heads-critters.md and .csv in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    picked = {name: choose(study, name) for name in methods(study)}
    page = [
        "# Which heads read the background, and what if they go? CIGMA on Critters\n",
        protocol(study),
        "\n## In short\n",
        summary(study, picked),
        "\n## Before and after\n",
        (
            "K is chosen for each seed on balanced validation pictures: the highest worst-group"
            " accuracy, then accuracy, then the fewest heads; 0 is allowed. Mean ± half of the 95 %"
            " interval over seeds. Heads with scores of 0 or less stay, so fewer than K may go:"
            ' "removed" is what went, and "as many at random" is worst-group / balanced accuracy of'
            " random sets of that size. `random` is the mean of its draws. Flips: answers that"
            " change with the background.\n"
        ),
        chosen_table(study, picked),
        "\n## Every K\n",
        (
            "Worst-group accuracy / balanced accuracy, means over seeds; in brackets how many heads"
            " went, where that is fewer than K.\n"
        ),
        k_table(study),
        "\n## Does the ranking agree with the gold score?\n",
        (
            "Gold: how far the answer moves when one head is given what it carries on another"
            " background (interchange, NIE_bg). Mediated: the share of the whole effect of another"
            " background that passes through the four best heads together. Costly: heads among"
            " these whose removal costs more than 5 % of FIG or a point of accuracy. AUROC:"
            " background heads among the router heads of `critters-planted`, whose roles are"
            " known.\n"
        ),
        agreement_table(study),
        removed(study),
        "\n## What an audit says of the whole models\n",
        facts_table(study),
        "\n## The five hypotheses\n",
        *hypotheses(study),
        "\n## Seconds\n",
        "\n".join(f"- {what}: {seconds:.1f}" for what, seconds in study.seconds.items()),
    ]
    (out / "heads-critters.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    columns = list(dict.fromkeys(key for row in study.rows for key in row))
    with (out / "heads-critters.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {
                key: round(value, 5) if isinstance(value, float) else value
                for key, value in row.items()
            }
            for row in study.rows
        )


def methods(study: Study) -> list[str]:
    return [name for name in dict.fromkeys(row["method"] for row in study.rows) if name != AS_MANY]


def protocol(study: Study) -> str:
    s, about = study.sizes, study.about
    small = (
        f" **A small run (--limit {about['limit']}): its numbers mean nothing.**"
        if about["limit"] is not None
        else ""
    )
    precision = "TF32 in gating and removals, float32 in all scores" if about["tf32"] else "float32"
    versions = f"seecause {__version__}, torch {torch.__version__}, {about['device']}, {precision}"
    return (
        f"Written by `{about['command']}` ({versions}).{small} {len(about['seeds'])} seeds of"
        f" `critters-biased`.\n\n- Heads are scored on {s.scored} training pictures of `certified`"
        f" that are answered right; K is chosen on {s.val} balanced validation pictures.\n-"
        f" Accuracies are those of {s.test} balanced test pictures (random sets: {s.draws} draws),"
        f" i.i.d. accuracy that of {s.iid} of `certified`, BIR and flips those of {s.measured}"
        " balanced test pictures. BIR is the ratio of means; of random sets, BIR by masks is that"
        f" of {s.bir_draws} draws.\n- Masks: {s.mask_steps} steps. Causal Head Gating: 5 masks,"
        f" {s.gating_steps} updates in each fit (its authors take 500). It removes heads it calls"
        " interfering: both gates, pushed open and pushed shut, at most 0.5 in the mean over"
        ' masks. "Forced" removes the K most interfering, whatever they are called.\n- Weight'
        " norm, output norm, attention mass and loss change remove the largest first, loss gain"
        " the heads whose removal lowers the loss most, taylor the smallest.\n- DFR:"
        f" {about['dfr']['refits']} refits, strengths"
        f" {', '.join(map(str, about['dfr']['strengths']))}, {s.retrained} balanced pictures and"
        " their groups."
    )


def chosen_table(study: Study, picked: dict[str, list[Row]]) -> str:
    lines = [
        "| heads removed by | K | removed | "
        + " | ".join(SHOWN.values())
        + " | as many at random |",
        "|---|---|---|" + "---|" * (len(SHOWN) + 1),
    ]
    for name, rows in sorted(
        picked.items(),
        key=lambda item: -statistics.fmean(row["test worst group"] for row in item[1]),
    ):
        cells = [interval([row[key] for row in rows]) for key in SHOWN]
        beside = "-"
        if name not in (ERM, DFR, RANDOM):
            beside = " / ".join(
                f"{statistics.fmean(lot(study, row, key) for row in rows):.3f}"
                for key in ("test worst group", "test accuracy")
            )
        counts = (", ".join(f"{row[key]:g}" for row in rows) for key in ("K", "removed"))
        lines.append(f"| {name} | {' | '.join(counts)} | " + " | ".join(cells) + f" | {beside} |")
    return "\n".join(lines)


def k_table(study: Study) -> str:
    ks = sorted({row["K"] for row in study.rows if row["K"] and row["method"] != AS_MANY})
    lines = [
        "| heads removed by | " + " | ".join(f"K = {k}" for k in ks) + " |",
        "|---|" + "---|" * len(ks),
    ]
    for name in methods(study):
        if name not in (ERM, DFR):
            cells = []
            for k in ks:
                rows = [row for row in study.rows if row["method"] == name and row["K"] == k]
                worst, average, went = (
                    statistics.fmean(r[key] for r in rows)
                    for key in ("test worst group", "test accuracy", "removed")
                )
                cells.append(f"{worst:.3f} / {average:.3f}" + (f" ({went:g})" if went < k else ""))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def agreement_table(study: Study) -> str:
    auroc = {row["method"]: row["AUROC"] for row in study.planted}
    columns = ("Spearman with gold", "mediated by top 4", "costly among top 4")
    lines = ["| method | " + " | ".join(columns) + " | AUROC, planted |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(row["method"] for row in study.heads):
        cells = [
            interval([row[column] for row in study.heads if row["method"] == name])
            for column in columns
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {auroc[name]:.3f} |")
    return "\n".join(lines)


def removed(study: Study) -> str:
    found = study.removed
    return (
        f"\n`critters-planted` without its {found['heads']} background heads: the largest change of"
        f" a logit under another background falls from {found['largest difference before']:.2f} to"
        f" {found['largest difference after']:.1e}; balanced accuracy goes from"
        f" {found['accuracy before']:.3f} to {found['accuracy after']:.3f}."
    )


def facts_table(study: Study) -> str:
    columns = [
        "r_s",
        "IoU",
        "flips",
        *(name for name in study.facts[0] if name.startswith(("BIR,", "BIR (mean"))),
    ]
    lines = ["| model | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    return "\n".join(
        [
            *lines,
            *(
                f"| {row['model']} | " + " | ".join(f"{row[c]:.3f}" for c in columns) + " |"
                for row in study.facts
            ),
        ]
    )


def summary(study: Study, picked: dict[str, list[Row]]) -> str:
    """What helps, what does not, and what retraining does."""

    def both(name: str) -> str:
        worst, average = (
            statistics.fmean(row[key] for row in picked[name])
            for key in ("test worst group", "test accuracy")
        )
        return f"{worst:.3f} / {average:.3f}"

    by_group, on_average = (
        helpful(study, picked, key) for key in ("test worst group", "test accuracy")
    )
    fails = [name for name in picked if name not in (ERM, DFR, RANDOM, *by_group, *on_average)]
    flips = statistics.fmean(row["flips"] for row in picked[ERM])
    printed = (
        "It helps."
        if PRINTED in by_group
        else (
            "It helps on average, not in the worst group."
            if PRINTED in on_average
            else "**It does not help.**"
        )
    )
    lines = [
        (
            "Numbers are worst-group / balanced accuracy. Helps: above as many random heads by more"
            " than the interval over seeds.\n"
        ),
        (
            f"- As trained: {both(ERM)}; {100 * flips:.0f} % of the answers flip with the"
            f" background. Random heads removed: {both(RANDOM)}."
        ),
        f"- CIGMA as printed: {both(PRINTED)}. {printed}",
        f"- Retraining the last layer with group labels: {both(DFR)}.",
        (
            "- Helps the worst group:"
            f" {'; '.join(f'{name} ({both(name)})' for name in by_group) or 'nothing'}."
        ),
        (
            "- Helps the average alone:"
            f" {'; '.join(f'{name} ({both(name)})' for name in on_average if name not in by_group) or 'nothing'}."
        ),
        f"- Does not help: {'; '.join(f'{name} ({both(name)})' for name in fails) or 'nothing'}.",
    ]
    return "\n".join(lines)


def helpful(study: Study, picked: dict[str, list[Row]], key: str) -> list[str]:
    """Methods whose gain over as many random heads is larger than its interval over seeds, the best
    first. One seed has no interval: any gain counts."""
    chosen = {name: rows for name, rows in picked.items() if name not in (ERM, DFR, RANDOM)}
    gains = {
        name: [row[key] - lot(study, row, key) for row in rows] for name, rows in chosen.items()
    }
    found = [
        name
        for name, gap in gains.items()
        if statistics.fmean(gap) > 0 and not statistics.fmean(gap) <= reach(gap)
    ]
    return sorted(found, key=lambda name: -statistics.fmean(gains[name]))
