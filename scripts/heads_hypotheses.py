"""The five hypotheses of `heads_study.py`, written down before it ran: each is answered yes, no, in
part or not decided, by a rule, with its numbers."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from scipy.stats import spearmanr

from scripts.head_methods import GREY, GUARD, PRINTED
from scripts.heads_numbers import as_many, choose, interval

if TYPE_CHECKING:
    from scripts.heads_study import Study

Row = dict[str, Any]
POINTS = 3  # values of r_s that a trend takes
TREND, STEP = (
    0.5,
    {"IoU": 0.02},
)  # a trend is a rank correlation with r_s beyond 0.5, and ends apart by 0.05 (IoU: 0.02)
# of all heads: above this, that a ranking's first heads are costly says nothing about the ranking
MOST_COSTLY = 0.75


def hypotheses(study: Study) -> list[str]:
    """In words."""
    return [
        f"{number}\n" for number in (_h1(study), _h2(study), _h3(study), _h4(study), _h5(study))
    ]


def _h1(study: Study) -> str:
    rows = [
        row for row in study.facts if row["model"].startswith("critters-biased")
    ]  # the same recipe, r_s alone differs
    points = sorted({row["r_s"] for row in rows})
    own, rising = (
        "BIR, discovered masks, mean",
        (
            "BIR, true masks, mean",
            "BIR, true masks, grey",
            "flips",
        ),
    )
    along = {
        key: [statistics.fmean(row[key] for row in rows if row["r_s"] == r) for r in points]
        for key in ("IoU", own, *rising)
    }
    said = (
        "H1. As the background becomes reliable, IoU falls and BIR with discovered masks stays low,"
        " while BIR with true masks and flips rise"
    )
    told = "; ".join(
        f"{key} {', '.join(f'{value:.3f}' for value in values)}" for key, values in along.items()
    )
    told = f"At r_s = {', '.join(f'{r:g}' for r in points)}: {told}."
    if len(points) < POINTS:
        return (
            f"**{said}: not decided.** A trend takes {POINTS} values of r_s or more, and here"
            f" {'is' if len(points) == 1 else 'are'} {len(points)}. {told}"
        )

    def trend(key: str) -> int:
        """1: rises, -1: falls, 0: neither."""
        step = along[key][-1] - along[key][0]
        if abs(step) <= STEP.get(key, 0.05):
            return 0
        rank = float(spearmanr([row["r_s"] for row in rows], [row[key] for row in rows]).statistic)
        return (rank > TREND and step > 0) - (rank < -TREND and step < 0)

    parts = {
        "IoU falls": trend("IoU") < 0,
        f"{own} stays below 0.1": max(along[own]) < 0.1,
        **{f"{key} rises": trend(key) > 0 for key in rising},
    }
    answer = "yes" if all(parts.values()) else "in part" if any(parts.values()) else "no"
    judged = "; ".join(f"{part}: {'yes' if seen else 'no'}" for part, seen in parts.items())
    rule = (
        f"To rise or fall: a rank correlation with r_s beyond {TREND} over {len(rows)} models, and"
        f" ends apart by 0.05 (IoU: {STEP['IoU']})."
    )
    return f"**{said}: {answer}.** {judged}. {rule} {told}"


def _h2(study: Study) -> str:
    def costly(name: str) -> float:
        """NaN where no seed chose a head."""
        known = [
            r["costly among top 4"]
            for r in study.heads
            if r["method"] == name and r["costly among top 4"] == r["costly among top 4"]
        ]
        return statistics.fmean(known) if known else float("nan")

    def shown(share: float) -> str:
        return f"{share:.2f}" if share == share else "no head chosen"

    base = statistics.fmean(row["costly among all"] for row in study.heads)
    pairs = {
        name: (costly(name), costly(name + GUARD)) for name in (PRINTED, GREY, "cigma, exact swap")
    }
    worse, fixed = pairs[PRINTED][0] > base, pairs[PRINTED][1] < pairs[PRINTED][0]
    told = "; ".join(
        f"{name} {shown(plain)}, with guard {shown(guarded)}"
        for name, (plain, guarded) in pairs.items()
    )
    answer = "yes" if worse and fixed else "in part" if worse or fixed else "no"
    if base > MOST_COSTLY:
        answer = (
            f"not decided, since more than {MOST_COSTLY:.0%} of all heads are costly, and any"
            " ranking begins with costly ones"
        )
    return (
        f"**H2. Without a guard CIGMA ranks costly heads high, and the guard mends it: {answer}.** "
        f"Share of costly heads among the top 4 (all heads: {base:.2f}): {told}."
    )


def _h3(study: Study) -> str:
    auroc = {row["method"]: row["AUROC"] for row in study.planted}
    pairs = {
        "mean fill": (PRINTED, "cigma, true masks"),
        "grey fill": ("cigma, discovered masks, grey", GREY),
    }
    better = [auroc[true] > auroc[own] for own, true in pairs.values()]
    told = []
    for fill, (own, true) in pairs.items():
        ranks = [
            statistics.fmean(r["Spearman with gold"] for r in study.heads if r["method"] == name)
            for name in (own, true)
        ]
        told.append(
            f"{fill}: AUROC {auroc[own]:.3f} (discovered), {auroc[true]:.3f} (true); Spearman with"
            f" gold on critters-biased {ranks[0]:.3f}, {ranks[1]:.3f}"
        )
    answer = "yes" if all(better) else "in part" if any(better) else "no"
    return (
        f"**H3. True masks find planted background heads better than discovered ones: {answer}.**"
        f" {'. '.join(told)}."
    )


def _h4(study: Study) -> str:
    rows = [row for row in study.facts if "recall at 16, grey" in row]
    recalls = {
        name: [row[f"recall at 16, {name}"] for row in rows] for name in ("grey", "exact swap")
    }
    answer = "yes" if all(statistics.fmean(values) >= 0.9 for values in recalls.values()) else "no"
    told = "; ".join(f"{name} {interval(values, 2)}" for name, values in recalls.items())
    chance = min(1.0, 16 / rows[0]["heads"])
    return (
        "**H4. A first-order screen finds at least 90 % of the exact top 4 among its first 16:"
        f" {answer}.** Recall: {told}; by chance {chance:.2f}."
    )


def _h5(study: Study) -> str:
    gini = {row["model"].rpartition(" ")[2]: row["Gini"] for row in study.facts if "Gini" in row}
    name = GREY + GUARD
    fixed = {row["seed"]: row for row in study.rows if row["method"] == name and row["K"] == 4}
    found = [(gini[seed], *_gain(study, fixed[seed], "test worst group")) for seed in gini]
    answer = _concentrated(found)
    said = (
        "**H5. Removal beats random heads only where the background's effect is concentrated:"
        f" {answer}.** {name} at K = 4, worst group: "
    )
    told = "; ".join(
        f"seed {seed}: Gini {g:.2f}, gain {_words(gain, far)}"
        for seed, (g, gain, far) in zip(gini, found, strict=True)
    )
    chosen = [row for row in choose(study, name) if row["seed"] in gini]
    after = [(row, *_gain(study, row, "test accuracy")) for row in chosen]
    later = "; ".join(
        f"seed {row['seed']}: {row['removed']:g} removed, gain {_words(gain, far)}"
        for row, gain, far in after
    )
    post = _concentrated([(gini[row["seed"]], gain, far) for row, gain, far in after])
    return (
        f"{said}{told}. Gains are over as many random heads. Post hoc, balanced accuracy at the K"
        f" that validation chose: {later}; so judged: {post}."
    )


def _gain(study: Study, row: Row, key: str) -> tuple[float, bool]:
    """Over the mean of as many random heads, and whether that is more than two deviations of
    theirs."""
    lots = [one[key] for one in as_many(study, row)]
    gain = row[key] - statistics.fmean(lots)
    return gain, gain > 2 * statistics.pstdev(lots)


def _words(gain: float, far: bool) -> str:
    return f"{gain:+.3f} ({'beyond' if far else 'within'} two deviations of random)"


def _concentrated(found: list[tuple[float, float, bool]]) -> str:
    """(Gini, gain, beyond random) of each model -> does gain need concentration?"""
    if len({far for *_, far in found}) == 1:
        return f"not decided, since {'every' if found[0][2] else 'no'} model gains"
    if max(g for g, *_ in found) - min(g for g, *_ in found) < 0.1:
        return "not decided, since all models are equally concentrated"
    low = statistics.fmean(g for g, _, far in found if not far)
    return "yes" if statistics.fmean(g for g, _, far in found if far) > low else "no"
