"""Pages of an audit: the verdict in words, right answers by group, and the worst pictures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seecause.background._heads_audit import ENOUGH, SHOWN, SOME, Audit
from seecause.background._outcomes import SWAP
from seecause.background.erase import Erasure
from seecause.background.gains import FEW
from seecause.metrics.accuracy import GroupAccuracy
from seecause.models.base import ImageModel
from seecause.report.background import (
    GAINS,
    erasure_terms,
    version_shots,
    version_terms,
)
from seecause.report.figures import fixed, number, thumbnail
from seecause.report.pages import (
    Card,
    Section,
    Shot,
    cards_html,
    folded,
    rows_csv,
    table,
    verdict_box,
)

EVIDENCE = "its evidence"

ERASURES_NOTE = (
    "Object or background are taken away, and the answer is compared. Several ways of doing so"
    " stand side by side, because each alone can be fooled; the shaded one is believed."
)
COLUMNS = {
    "degenerate": "pictures that lose nothing either way; their BIR counts as one half",
    "noise floor": "what rounding alone does; smaller effects mean nothing",
}
OVERLAP = (
    "intersection over union of two masks: 1 where they are the same, 0 where they do not meet"
)
AUDIT_NOTE = (
    "The pictures whose answers hang most on the background. The bold answer is the true class. A"
    " model that answers from the object keeps its answer without the background, and loses it"
    " without the object."
)
FINDINGS = {
    "hardly": "Nothing to repair: these answers hardly depend on the background.",
    "perhaps": (
        "Perhaps the model answers from the background: only masks of its own say so. Give data"
        " with masks, or `seecause audit --eye`."
    ),
    "cannot tell": (
        f"It cannot be told whether the background decides: the interval holds {SOME:g}. Give more"
        " pictures."
    ),
    "too few": f"Too few answers to tell: fewer than {ENOUGH}.",
}


def verdict(audit: Audit) -> list[str]:
    """In plain words, the conclusion first."""
    means, trusted = audit.means, audit.trusted
    ratio, share = means[trusted].bir_or_zero, audit.background_share
    lines = [FINDINGS.get(audit.finding, f"The model answers {audit.finding} from the background.")]
    if audit.flips is not None:
        lines.append(
            f"Another background behind the same object changes {int(audit.flips.sum())} of"
            f" {len(audit.flips)} answers."
        )
    lines.append(_ratio_line(audit, trusted))
    least = min(means, key=lambda name: means[name].bir_or_zero)
    if share >= SOME and least != trusted and means[least].bir_or_zero < share / 2:
        lines.append(
            f"Do not be fooled by BIR {_shown(means[least].bir_or_zero, 3)} with {least}:"
            f" {_why(audit.erasures[least])}"
        )
    most = max(means, key=lambda name: means[name].bir_or_zero)
    only_discovered = audit.is_discovered(most) and not audit.is_discovered(trusted)
    if only_discovered and means[most].bir_or_zero > max(SOME, 2 * ratio):
        lines.append(
            f"BIR {means[most].bir_or_zero:.2f} with {most} is no proof: those masks keep a fixed"
            " share of a picture, so what they erase can be the object."
        )
    if trusted != SWAP:
        lines.append(
            "Erased pictures look odd, which alone moves answers: check a large BIR with"
            " counterfactual pictures if you can make some."
        )
    if audit.overlap is not None and float(audit.overlap.nanmean()) < 0.5:
        lines.append(
            f"Discovered masks hardly meet the object (IoU {float(audit.overlap.nanmean()):.2f}):"
            " what they call foreground is the model's evidence."
        )
    if audit.groups is not None and len(audit.groups.groups) > 1:
        lines.append(_groups_line(audit.groups))
    if audit.gap is not None:
        lines.append(
            f"BG-gap {audit.gap[0]:.3f}: that much accuracy is lost when the background is one of"
            f" another class ({audit.gap[1]} and {audit.gap[2]} pictures)."
        )
    return lines


def _ratio_line(audit: Audit, trusted: str) -> str:
    gains = audit.means[trusted]
    count = len(gains.big)
    over = f"{count} {'' if audit.counted is None else 'right '}answer{'s' * (count != 1)}"
    about = f"{trusted}, {over}, too few for an interval"
    if count >= FEW:
        about = f"95 % interval {gains.interval_text(2)}, {trusted}, {over}"
    return (
        f"BIR is {_shown(gains.bir_or_zero, 2)} ({about}): of what the answers lose without object"
        " or background, that share is the background's."
    )


def _groups_line(groups: GroupAccuracy) -> str:
    size = int(groups.total[groups.groups.index(groups.worst_group)])
    worst_of = f"the worst of {len(groups.groups)} groups"
    pictures = f"{size} picture{'s' * (size != 1)}"
    worst = f"{worst_of} has only {pictures}, too few to tell its accuracy"
    if size >= FEW:
        worst = f"{groups.worst:.2f} in {worst_of} ({pictures})"
    return f"Accuracy {groups.average:.2f} on average; {worst}."


def _shown(ratio: float, digits: int) -> str:
    """Without a zero that only rounding made."""
    if ratio == 0 or round(ratio, digits) > 0:
        return f"{ratio:.{digits}f}"
    return f"below {10**-digits:.{digits}f}"


def _why(erasure: Erasure) -> str:
    if erasure.masks is not None and erasure.masks.source == "discovered":
        return "those masks keep what the model answers from, also where that is the background."
    if erasure.baseline == "mean":
        return "that fill can give the background away."
    return "that fill hides little."


def verdict_section(
    audit: Audit, *, title: str = "What was found", explained: bool = True, brief: bool = False
) -> Section:
    """The conclusion in plain words, and every measurement behind it (folded if `brief`); its terms
    are `explained` once on a page."""
    rows = []
    for name, gains in audit.means.items():
        values = (float(gains.fig.mean()), float(gains.big.mean()), gains.bir_ratio_of_means)
        rows.append(
            (
                name,
                *(fixed(value, 3) for value in values),
                gains.interval_text().replace(" to ", "\u00a0to\u00a0"),
                f"{gains.bir_mean_of_ratios:.3f}",
                f"{int(gains.degenerate.sum())} of {len(gains.big)}",
                number(gains.noise_floor),
            )
        )
    head = ("taken away by", "FIG", "BIG", "BIR (ratio of means)", "its 95 % interval")
    head += ("BIR (mean of ratios)", "degenerate", "noise floor")
    marked = [list(audit.gains).index(audit.trusted)]
    body = verdict_box(verdict(audit))
    measured = table(rows, head=head, marked=marked)
    body += folded("What was measured", measured) if brief else measured
    counted = "all pictures"
    if audit.counted is not None:
        right = f"{int(audit.counted.sum())} of {len(audit.counted)}"
        counted = f"the {right} pictures that are answered right"
    terms: dict[str, str] = {}
    if explained:
        terms = GAINS | erasure_terms(audit.gains) | COLUMNS
        terms |= {} if audit.overlap is None else {"IoU": OVERLAP}
    note = ERASURES_NOTE if explained else "The same of another model."
    return Section(title, body, f"{note} Means over {counted}.", terms)


def audit_csv(audit: Audit, names: Sequence[str]) -> str:
    """One line for each picture."""

    def named(place: int) -> str:
        return names[place] if place < len(names) else str(place)

    answers = audit.logits.argmax(dim=1).tolist()
    rows = []
    for place, identity in enumerate(audit.pictures.ids):
        row: dict[str, str | float] = {"picture": identity, "answer": named(answers[place])}
        if audit.pictures.labels is not None:
            row["label"] = named(int(audit.pictures.labels[place]))
        if audit.pictures.grouped:
            row["group"] = " ".join(map(str, audit.pictures.groups[place] or ()))
        if audit.overlap is not None:
            row["IoU"] = float(audit.overlap[place])
        if audit.flips is not None:
            row["flips"] = int(audit.flips[place])
        for name, gains in audit.gains.items():
            row[f"FIG, {name}"] = float(gains.fig[place])
            row[f"BIG, {name}"] = float(gains.big[place])
            row[f"BIR, {name}"] = float(gains.bir[place])
        rows.append(row)
    return rows_csv(rows)


def audit_gallery(model: ImageModel, audit: Audit, *, count: int = SHOWN) -> Section:
    """The worst pictures: as they are, what was discovered in them, without background, without
    object, and elsewhere where exact swaps exist."""
    examples = audit.examples
    assert examples is not None
    names = [name for name in audit.erasures if audit.is_discovered(name)]
    discovered = audit.erasures[names[0]].masks if names else None
    raw = model.preprocess.raw(examples.pictures.images)
    gains = audit.gains[audit.trusted]
    cards = []
    for i, place in enumerate(audit.worst(min(count, SHOWN))):
        shots = version_shots(model, examples, i, [""])
        if discovered is not None:
            faded = _dimmed(raw[i], discovered.hard[place].to(raw.device))
            shots.insert(1, Shot(EVIDENCE, thumbnail(faded)))
        about = f"BIR {float(gains.bir[place]):.2f} ({audit.trusted})"
        cards.append(Card(examples.pictures.ids[i], shots=shots, caption=about))
    versions = list(examples.versions)
    terms = version_terms(
        [EVIDENCE, *versions] if discovered is not None else versions, examples.erasure
    )
    body = cards_html(cards)
    return Section("Where does it happen?", body, AUDIT_NOTE, terms)


def _dimmed(raw: Tensor, mask: Tensor) -> Tensor:
    """The picture [3, H, W] with everything outside mask [H, W] faded."""
    return torch.where(mask, raw, 0.75 + 0.2 * (raw.mean(dim=0, keepdim=True) - 0.5))
