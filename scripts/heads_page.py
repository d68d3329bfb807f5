"""The page of `heads_study.py`: tables with intervals over seeds, and the hypotheses answered from the numbers."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import t as student

from scripts.head_methods import GREY, PRINTED
from seecause import __version__

if TYPE_CHECKING:
    from scripts.heads_study import Study

Row = dict[str, Any]
ERM, DFR, RANDOM = "none (ERM)", "retrained last layer (DFR)", "random"
AS_MANY = "worst groups without as many random heads"  # as H5's method really removed: heads with scores of 0 or less stay
SHOWN = {
    "test worst group": "worst group", "test accuracy": "balanced accuracy", "iid accuracy": "i.i.d. accuracy", "flips": "flips",
    "BIR, exact swap": "BIR, swap", "BIR, true masks, grey": "BIR, true masks, grey", "BIR, true masks, mean": "BIR, true masks, mean",
    "BIR, discovered masks, mean": "BIR, discovered, mean",
}  # fmt: skip

ALWAYS = ("test worst group", "test accuracy", "iid accuracy", "flips", "BIR, exact swap")  # what random sets are measured by too


def write(study: Study, out: Path) -> None:
    """heads-critters.md and .csv in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    picked = {name: choose(study, name) for name in methods(study)}
    page = [
        "# Which heads read the background, and what if they go? CIGMA on Critters\n",
        protocol(study),
        "\n## In short\n",
        summary(picked),
        "\n## Before and after\n",
        "K is chosen for each seed on balanced validation pictures: the highest worst-group accuracy, then accuracy, then the fewest heads; 0 is allowed. "
        "Mean ± half of the 95 % interval over seeds. `random` is the mean of its draws. Flips: answers that change with the background.\n",
        chosen_table(picked),
        "\n## Every K\n",
        "Worst-group accuracy / balanced accuracy, means over seeds.\n",
        k_table(study),
        "\n## Does the ranking agree with the gold score?\n",
        "Gold: how far the answer moves when one head is given what it carries on another background (interchange, NIE_bg). Mediated: the share of "
        "the whole effect of another background that passes through the four best heads together. Costly: heads among these whose removal costs more "
        "than 5 % of FIG or a point of accuracy. AUROC: background heads among the router heads of `critters-planted`, whose roles are known.\n",
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
        writer.writerows({key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()} for row in study.rows)


def methods(study: Study) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in study.rows))


def protocol(study: Study) -> str:
    s, about = study.sizes, study.about
    small = f" **A small run (--limit {about['limit']}): its numbers mean nothing.**" if about["limit"] is not None else ""
    versions = f"seecause {__version__}, torch {torch.__version__}, {about['device']}, float32{', TF32 in gating and removals' if about['tf32'] else ''}"
    return (
        f"Written by `python scripts/heads_study.py` ({versions}).{small} {len(about['seeds'])} seeds of `critters-biased`.\n\n"
        f"- Heads are scored on {s.scored} training pictures of `certified` that are answered right; K is chosen on {s.val} balanced validation pictures.\n"
        f"- Accuracies are those of {s.test} balanced test pictures (random sets: {s.draws} draws), i.i.d. accuracy that of {s.iid} "
        f"of `certified`, BIR and flips those of {s.measured} balanced test pictures. BIR is the ratio of means.\n"
        f"- Masks: {s.mask_steps} steps. Causal Head Gating: 5 masks, {s.gating_steps} updates in each fit (its authors take 500).\n"
        f"- DFR: {about['dfr']['refits']} refits, strengths {', '.join(map(str, about['dfr']['strengths']))}, {s.retrained} balanced pictures and their groups."
    )


def choose(study: Study, name: str) -> list[Row]:
    """For each seed, the row whose K is best on validation pictures; random draws are averaged first."""
    found = []
    for seed in study.about["seeds"]:
        none = next(row for row in study.rows if row["seed"] == seed and row["method"] == ERM)
        mine = averaged([row for row in study.rows if row["seed"] == seed and row["method"] == name])
        rows = mine if name in (ERM, DFR) else [none, *mine]
        found.append(max(rows, key=lambda row: (row["val worst group"], row["val accuracy"], -row["K"])))
    return found


def averaged(rows: Sequence[Row]) -> list[Row]:
    """One row for each K: means over draws."""
    found = []
    for k in sorted({row["K"] for row in rows}):
        same = [row for row in rows if row["K"] == k]
        numbers = [key for key, value in same[0].items() if isinstance(value, int | float)]
        found.append({**same[0], **{key: statistics.fmean(row[key] for row in same) for key in numbers}, "K": k})
    return found


def interval(values: Sequence[float], digits: int = 3) -> str:
    known = [v for v in values if v == v]
    if not known:
        return "-"
    return f"{statistics.fmean(known):.{digits}f}" + (f" ± {reach(known):.{digits}f}" if len(known) > 1 else "")


def reach(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean (Student)."""
    return float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def chosen_table(picked: dict[str, list[Row]]) -> str:
    lines = ["| heads removed by | K | " + " | ".join(SHOWN.values()) + " |", "|---|---|" + "---|" * len(SHOWN)]
    for name, rows in sorted(picked.items(), key=lambda item: -statistics.fmean(row["test worst group"] for row in item[1])):
        shown = ALWAYS if name == RANDOM else SHOWN
        cells = [interval([row[key] for row in rows]) if key in shown else "-" for key in SHOWN]
        lines.append(f"| {name} | {', '.join(str(row['K']) for row in rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def k_table(study: Study) -> str:
    ks = sorted({row["K"] for row in study.rows if row["K"]})
    lines = ["| heads removed by | " + " | ".join(f"K = {k}" for k in ks) + " |", "|---|" + "---|" * len(ks)]
    for name in methods(study):
        if name not in (ERM, DFR):
            cells = []
            for k in ks:
                rows = [row for row in study.rows if row["method"] == name and row["K"] == k]
                cells.append(f"{statistics.fmean(r['test worst group'] for r in rows):.3f} / {statistics.fmean(r['test accuracy'] for r in rows):.3f}")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def agreement_table(study: Study) -> str:
    auroc = {row["method"]: row["AUROC"] for row in study.planted}
    columns = ("Spearman with gold", "mediated by top 4", "costly among top 4")
    lines = ["| method | " + " | ".join(columns) + " | AUROC, planted |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(row["method"] for row in study.heads):
        cells = [interval([row[column] for row in study.heads if row["method"] == name]) for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {auroc[name]:.3f} |")
    return "\n".join(lines)


def removed(study: Study) -> str:
    found = study.removed
    return (
        f"\n`critters-planted` without its {found['heads']} background heads: the largest change of a logit under another background falls from "
        f"{found['largest difference before']:.2f} to {found['largest difference after']:.1e}; balanced accuracy goes from {found['accuracy before']:.3f} to "
        f"{found['accuracy after']:.3f}."
    )


def facts_table(study: Study) -> str:
    columns = ["r_s", "IoU", "flips", *(name for name in study.facts[0] if name.startswith(("BIR,", "BIR (mean")))]
    lines = ["| model | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {row['model']} | " + " | ".join(f"{row[c]:.3f}" for c in columns) + " |" for row in study.facts)])


def summary(picked: dict[str, list[Row]]) -> str:
    """What helps, what does not, and what retraining does."""

    def both(name: str) -> str:
        worst, average = (statistics.fmean(row[key] for row in picked[name]) for key in ("test worst group", "test accuracy"))
        return f"{worst:.3f} / {average:.3f}"

    by_group, on_average = (helpful(picked, key) for key in ("test worst group", "test accuracy"))
    fails = [name for name in picked if name not in (ERM, DFR, RANDOM, *by_group, *on_average)]
    flips = statistics.fmean(row["flips"] for row in picked[ERM])
    printed = "It helps." if PRINTED in by_group else "It helps on average, not in the worst group." if PRINTED in on_average else "**It does not help.**"
    lines = [
        "Numbers are worst-group / balanced accuracy. Helps: above random heads by more than the interval over seeds.\n",
        f"- As trained: {both(ERM)}; {100 * flips:.0f} % of the answers flip with the background. Random heads removed: {both(RANDOM)}.",
        f"- CIGMA as printed: {both(PRINTED)}. {printed}",
        f"- Retraining the last layer with group labels: {both(DFR)}.",
        f"- Helps the worst group: {'; '.join(f'{name} ({both(name)})' for name in by_group) or 'nothing'}.",
        f"- Helps the average alone: {'; '.join(f'{name} ({both(name)})' for name in on_average if name not in by_group) or 'nothing'}.",
        f"- Does not help: {'; '.join(f'{name} ({both(name)})' for name in fails) or 'nothing'}.",
    ]
    return "\n".join(lines)


def helpful(picked: dict[str, list[Row]], key: str) -> list[str]:
    """Methods whose gain over random heads is larger than its interval over seeds, the best first. One seed has no interval: any gain counts."""
    gains = {name: [mine[key] - lot[key] for mine, lot in zip(rows, picked[RANDOM], strict=True)] for name, rows in picked.items()}
    found = [name for name, gap in gains.items() if name not in (ERM, DFR, RANDOM) and statistics.fmean(gap) > 0 and not statistics.fmean(gap) <= reach(gap)]
    return sorted(found, key=lambda name: -statistics.fmean(gains[name]))


def hypotheses(study: Study) -> list[str]:
    """Yes, no or undecided, with the numbers that say so."""
    return [f"{number}\n" for number in (_h1(study), _h2(study), _h3(study), _h4(study), _h5(study))]


def _h1(study: Study) -> str:
    biased, clean = [row for row in study.facts if row["r_s"] > 0.5], [row for row in study.facts if row["r_s"] <= 0.5]

    def pair(key: str) -> tuple[float, float]:
        return statistics.fmean(r[key] for r in clean), statistics.fmean(r[key] for r in biased)

    keys = ("IoU", "BIR, discovered masks, mean", "BIR, true masks, mean", "BIR, true masks, grey", "flips")
    found = {key: pair(key) for key in keys}
    first = found["IoU"][1] < found["IoU"][0] and found["BIR, discovered masks, mean"][1] < 0.1
    rises = {key: found[key][1] > found[key][0] + 0.05 for key in keys[2:]}
    answer = "yes" if first and all(rises.values()) else "in part" if first or any(rises.values()) else "no"
    told = "; ".join(f"{key} {low:.3f} -> {high:.3f}" for key, (low, high) in found.items())
    points = sorted({row["r_s"] for row in study.facts})
    along = ", ".join(f"{r:g}: {statistics.fmean(row['flips'] for row in study.facts if row['r_s'] == r):.3f}" for r in points)
    few = f"Only {len(points)} values of r_s were there to compare: no trend, only ends."
    return (
        f"**H1. As the background becomes reliable, IoU falls and BIR with discovered masks stays low, while BIR with true masks and flips rise: {answer}.** "
        f"r_s up to 0.5 -> above: {told}. {few if len(points) < 3 else f'Flips by r_s: {along}.'}"
    )


def _h2(study: Study) -> str:
    def costly(name: str) -> float:
        """NaN where no seed chose a head."""
        known = [r["costly among top 4"] for r in study.heads if r["method"] == name and r["costly among top 4"] == r["costly among top 4"]]
        return statistics.fmean(known) if known else float("nan")

    def shown(share: float) -> str:
        return f"{share:.2f}" if share == share else "no head chosen"

    base = statistics.fmean(row["costly among all"] for row in study.heads)
    pairs = {name: (costly(name), costly(f"{name} + guard")) for name in (PRINTED, GREY, "cigma, exact swap")}
    worse, fixed = pairs[PRINTED][0] > base, pairs[PRINTED][1] < pairs[PRINTED][0]
    told = "; ".join(f"{name} {shown(plain)}, with guard {shown(guarded)}" for name, (plain, guarded) in pairs.items())
    answer = "yes" if worse and fixed else "in part" if worse or fixed else "no"
    return (
        f"**H2. Without a guard CIGMA ranks costly heads high, and the guard mends it: {answer}.** "
        f"Share of costly heads among the top 4 (all heads: {base:.2f}): {told}."
    )


def _h3(study: Study) -> str:
    auroc = {row["method"]: row["AUROC"] for row in study.planted}
    pairs = {"mean fill": (PRINTED, "cigma, true masks"), "grey fill": ("cigma, discovered masks, grey", GREY)}
    better = [auroc[true] > auroc[own] for own, true in pairs.values()]
    told = []
    for fill, (own, true) in pairs.items():
        ranks = [statistics.fmean(r["Spearman with gold"] for r in study.heads if r["method"] == name) for name in (own, true)]
        told.append(
            f"{fill}: AUROC {auroc[own]:.3f} (discovered), {auroc[true]:.3f} (true); Spearman with gold on critters-biased {ranks[0]:.3f}, {ranks[1]:.3f}"
        )
    answer = "yes" if all(better) else "in part" if any(better) else "no"
    return f"**H3. True masks find planted background heads better than discovered ones: {answer}.** {'. '.join(told)}."


def _h4(study: Study) -> str:
    rows = [row for row in study.facts if "recall at 16, grey" in row]
    recalls = {name: [row[f"recall at 16, {name}"] for row in rows] for name in ("grey", "exact swap")}
    answer = "yes" if all(statistics.fmean(values) >= 0.9 for values in recalls.values()) else "no"
    told = "; ".join(f"{name} {interval(values, 2)}" for name, values in recalls.items())
    chance = min(1.0, 16 / rows[0]["heads"])
    return f"**H4. A first-order screen finds at least 90 % of the exact top 4 among its first 16: {answer}.** Recall: {told}; by chance {chance:.2f}."


def _h5(study: Study) -> str:
    gini = {row["model"].rpartition(" ")[2]: row["Gini"] for row in study.facts if "Gini" in row}
    found = []
    for seed, value in gini.items():
        lots = next(row[AS_MANY] for row in study.facts if row["model"].rpartition(" ")[2] == seed and AS_MANY in row)
        mine = next(row["test worst group"] for row in study.rows if row["seed"] == seed and row["method"] == f"{GREY} + guard" and row["K"] == 4)
        found.append((seed, value, mine - statistics.fmean(lots), mine > statistics.fmean(lots) + 2 * statistics.pstdev(lots)))
    told = "; ".join(f"seed {s}: Gini {g:.2f}, gain {gain:+.3f} ({'beyond' if far else 'within'} two deviations of random)" for s, g, gain, far in found)
    spread = max(gini.values()) - min(gini.values())
    if len({far for *_, far in found}) == 1:
        answer = f"not decided, since {'every' if found[0][3] else 'no'} model gains"
    elif spread < 0.1:
        answer = "not decided, since all models are equally concentrated"
    else:
        low = statistics.fmean(g for _, g, _, far in found if not far)
        answer = "yes" if statistics.fmean(g for _, g, _, far in found if far) > low else "no"
    return f"**H5. Removal beats random heads only where the background's effect is concentrated: {answer}.** {GREY} + guard at K = 4, worst group: {told}."
