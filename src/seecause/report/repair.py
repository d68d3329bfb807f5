"""Pages of an audit by transplants and of a repair: pictures first, then numbers, then how."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from markupsafe import Markup

from seecause.background.audit import ENOUGH, MOSTLY, SOME, BackgroundAudit
from seecause.background.result import NOT_TESTED, Repair
from seecause.background.transplant import Transplants
from seecause.models.base import ImageModel
from seecause.report.cards import Shot, ShotCard
from seecause.report.folder import rows_csv
from seecause.report.heads import GAINS, shot_answers
from seecause.report.heads_audit import groups_section
from seecause.report.overlay import data_uri, fixed, picture, thumbnail
from seecause.report.page import (
    Section,
    fragment,
    holes_section,
    protocol_section,
    table,
    verdict_box,
)

SHOWN = 6
TERMS = {
    "accuracy": "right answers on plain pictures",
    "flips": "of all answers, right or wrong, those that change on the background of a picture that"
    " is answered otherwise",
    "flips, control": "the same where that picture is answered the same: what cutting alone does",
    "transplants": "right answers on backgrounds of pictures that are answered otherwise",
    "transplant-worst": "the lowest accuracy over class x class of the background (few: pooled)",
    "worst group": "the lowest accuracy over groups of pictures, where the data names groups",
    "extra flips": "flips less those by cutting alone, over pictures that are answered right",
    "low 95%": "where the 95 % interval of extra flips begins (bootstrap over pictures)",
    "high 95%": "where it ends",
    "right answers": "pictures that the verdict is taken of",
}
ANSWERS = {
    "yes": "Yes: the model answers from the background.",
    "no": "No: these answers hardly follow the background.",
    "cannot tell": "It cannot be told from these pictures whether the background decides.",
    "perhaps": "Perhaps: it looks so, but only by the model's own masks.",
    "too few": f"Too few: fewer than {ENOUGH} right answers tell nothing.",
}
PICTURES_NOTE = (
    "Each object as it is, and on the background of a picture of another class. The bold answer is"
    " the true class."
    " Bad cuts are seen here at a glance: where the object is not what was cut out, the numbers"
    " mean little."
)


def audit_lines(audit: BackgroundAudit, *, notes: bool = True) -> list[str]:
    """The verdict in plain words, the conclusion first; without the eye's `notes` where it has said
    them already."""
    numbers, (low, high) = audit.numbers(), audit.interval
    lines = [ANSWERS[audit.verdict]]
    few = audit.verdict == "too few"
    if low == low and not few:
        lines.append(
            f"On the background of a picture with another answer {audit.flips:.0%} of right answers"
            f" change, {_control(audit)}. Difference {numbers.get('extra flips', 0):+.0%} (95 %"
            f" interval {low:+.0%} to {high:+.0%}, {len(audit.extra_flips)} pictures; yes from"
            f" {SOME:+.0%} on)."
        )
    if audit.verdict == "cannot tell" and audit.control_flips > MOSTLY:
        lines.append("Cutting alone changes most answers: look at the cuts, or give better masks.")
    worst = f"; {audit.transplant_worst:.0%} in the worst class on the worst background"
    lines.append(f"Accuracy {audit.accuracy:.0%} on plain pictures{'' if few else worst}.")
    if audit.gains is not None:
        lines.append(
            f"BIR {audit.gains.bir_or_zero:.2f}: the background's share of what right answers lose"
            " when object or background turns grey (ratio of means, as --max-bir takes it;"
            f" mean of ratios {audit.gains.bir_mean_of_ratios:.2f})."
        )
    if audit.masks is not None:
        lines.append(f"Objects: {audit.masks.source}{_overlap(audit)}.")
        shown = audit.masks.notes if notes else ()
        lines += [f"{note[:1].upper()}{note[1:].removesuffix('.')}." for note in shown]
    return lines


def _control(audit: BackgroundAudit) -> str:
    if audit.control_flips != audit.control_flips:
        return "and no two pictures have the same answer, to tell what cutting alone does"
    return f"on that of one with the same answer {audit.control_flips:.0%}"


def _overlap(audit: BackgroundAudit) -> str:
    assert audit.masks is not None
    if audit.masks.overlap is None:
        return ""
    return f" (IoU with known masks {float(audit.masks.overlap.nanmean()):.2f})"


def audit_sections(model: ImageModel, audit: BackgroundAudit) -> list[Section]:
    """Verdict, the worst pictures, cuts, numbers, groups and protocol."""
    body = verdict_box(audit_lines(audit))
    rows = [(name, _number(name, value), _meaning(name)) for name, value in audit.numbers().items()]
    numbers = table(rows, head=("on these pictures", "", "what it is"))
    return [
        Section("Does it answer from the background?", body, "", short="Verdict"),
        worst_section([model], [audit], [""]),
        *sheet_section(model, audit),
        Section("Numbers", numbers, ""),
        *groups_section(audit),  # type: ignore[arg-type]
        *holes_section(audit.pictures.holes),
        protocol_section([audit.protocol]),
    ]


def _meaning(name: str) -> str:
    return TERMS.get(name, GAINS.get(name, ""))


def sheet_section(model: ImageModel, audit: BackgroundAudit) -> list[Section]:
    """Object, background and transplant side by side."""
    moved = audit.judged.versioned.moved
    if not isinstance(moved, Transplants):
        return []
    rows = moved.sheet(SHOWN, raw=model.preprocess.raw)
    halves = 2 if min(SHOWN, len(moved)) % 2 == 0 else 1  # side by side where a page is wide
    image = Markup('<img alt="objects, backgrounds, transplants" src="{}">')
    body = Markup("")
    for sheet in map(picture, rows.chunk(halves, dim=1)):
        sheet.thumbnail((620, 2000))
        body += image.format(data_uri(sheet, photo=True))
    note = "Each three: where the object is from, whose background it gets, and the transplant."
    return [
        Section("How were they cut?", Markup('<div class="sheets">{}</div>').format(body), note)
    ]


def worst_section(
    models: Sequence[ImageModel],
    audits: Sequence[BackgroundAudit],
    when: Sequence[str],
    *,
    title: str = "Where does it happen?",
    count: int = SHOWN,
) -> Section:
    """Right answers that the background changes, with the answers of every model: the pictures that
    are worst for the first."""
    model, audit = models[0], audits[0]
    moved, labels = audit.judged.versioned.moved, audit.judged.versioned.labels
    cards = []
    for place, version in audit.worst(count):
        truth = model.class_name(int(labels[place]))
        plain = [each.judged.logits.plain[place] for each in audits]
        other = [each.judged.logits.moved[version] for each in audits]
        image = moved[torch.tensor([version], device=moved.labels.device)][0]
        donor = model.class_name(int(moved.donor_labels[version]))
        name = f"background: {donor}" if isinstance(moved, Transplants) else "its other version"
        versions = {"as it is": (audit.pictures.images[place], plain), name: (image, other)}
        shots = [
            Shot(
                title,
                thumbnail(model.preprocess.raw(pixels[None])[0]),
                shot_answers(model, logits, truth, when),
            )
            for title, (pixels, logits) in versions.items()
        ]
        cards.append(ShotCard(audit.pictures.ids[place], shots))
    return Section(title, fragment("shots.html.j2", cards=cards), PICTURES_NOTE)


def repair_sections(result: Repair) -> list[Section]:
    """Pictures first: the same before and after; then numbers, remedies, cuts and protocol."""
    pair = [result.before, result.after]
    models = [result.original, result.model]
    return [
        worst_section(
            models, pair, ["before", "after"], title="The same pictures, before and after"
        ),
        change_section(result),
        remedies_section(result),
        *sheet_section(result.original, result.before),
        Section("What was not tested", table([(line,) for line in NOT_TESTED])),
        *holes_section(result.holes),
        protocol_section([{**result.before.protocol, "options": _settings(result.record)}]),
    ]


def change_section(result: Repair, *, title: str = "What changed?") -> Section:
    first, second = result.before.numbers(), result.after.numbers()
    rows = [
        (name, _number(name, value), _number(name, second[name]), _meaning(name))
        for name, value in first.items()
        if name in second
    ]
    head = ("on pictures nothing was chosen by", "before", "after", "what it is")
    return Section(title, table(rows, head=head))


def remedies_section(result: Repair) -> Section:
    """What was tried, the chosen one marked."""
    columns = ("accuracy", "flips", "transplants", "transplant-worst", "worst group")
    known = [
        name
        for name in columns
        if any(c.report.get(name, math.nan) == c.report.get(name) for c in _tried(result))
    ]
    rows = []
    for c in result.candidates.values():
        numbers = [fixed(c.report.get(name, math.nan), 3) for name in known]
        chosen_by = fixed(c.choose.get(result.chosen_by, math.nan), 3)
        rows.append((c.name, c.failed or c.done, chosen_by, *numbers, f"{c.seconds:.1f}"))
    head = ("remedy", "what was done", f"{result.chosen_by}, choosing", *known, "seconds")
    marked = [list(result.candidates).index(result.remedy)]
    way = (
        "None was taken: the first sentence of this page says why."
        if result.remedy == "nothing"
        else f"The shaded one was taken, by {result.chosen_by} on pictures that are not reported."
    )
    note = f"{way} The other numbers are of pictures that chose nothing.{_tie(result)}"
    return Section("Which remedy?", table(rows, head=head, marked=marked), note)


def _tie(result: Repair) -> str:
    """What decided where remedies were equal by the number that chooses (repair/_repair.py)."""
    chosen = result.candidates[result.remedy]
    others = [c for c in _tried(result) if c.name != chosen.name]
    equal = _equal(others, chosen, result.chosen_by)
    if chosen.name == "nothing" or not equal:
        return ""
    names = ["the model as it was" if c.name == "nothing" else c.name for c in equal]
    shared = f" The same {result.chosen_by} there: {', '.join(names)}"
    for name, words in (
        ("transplants", "more transplants answered right"),
        ("flips", "fewer flips"),
    ):
        equal = _equal(equal, chosen, name)
        if not equal:
            return f"{shared}; {words} decided."
    return f"{shared}; no number told them apart, and the first remedy was taken."


def _equal(others: Sequence[Any], chosen: Any, name: str) -> list[Any]:
    return [c for c in others if c.choose.get(name) == chosen.choose.get(name)]


def _tried(result: Repair) -> list[Any]:
    return [candidate for candidate in result.candidates.values() if not candidate.failed]


def audit_csv(audit: BackgroundAudit, names: Sequence[str]) -> str:
    """One line for each picture."""
    judged = audit.judged
    answers, labels = judged.logits.plain.argmax(dim=1), judged.versioned.labels
    moved, control = judged.flips_of(), judged.flips_of(control=True)
    rows = []
    for place, identity in enumerate(audit.pictures.ids):
        row: dict[str, str | float] = {"picture": identity}
        row["answer"] = _named(names, int(answers[place]))
        row["label"] = _named(names, int(labels[place]))
        if audit.pictures.grouped:
            row["group"] = " ".join(map(str, audit.pictures.groups[place] or ()))
        row["flips"], row["flips, control"] = float(moved[place]), float(control[place])
        if audit.masks is not None:
            row["eye's confidence"] = float(audit.masks.confidence[place])
        rows.append(row)
    return rows_csv(rows)


def _named(names: Sequence[str], place: int) -> str:
    return names[place] if place < len(names) else str(place)


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value not in (None, [], "")}


def _number(name: str, value: float) -> str:
    return f"{value:.{0 if name == 'right answers' else 3}f}"
