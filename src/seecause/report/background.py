"""Pages about the background: audits, repairs, scores and removal of heads, discovered shortcuts.

Each function returns sections: images first, then numbers, then the protocol.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from markupsafe import Markup
from torch import Tensor

from seecause import __version__
from seecause.report.figures import (
    Line,
    chart,
    charts,
    data_uri,
    display_image,
    fixed,
    number,
    thumbnail,
)
from seecause.report.pages import (
    REPRODUCE,
    Card,
    Section,
    Shot,
    cards_html,
    head_grid,
    part,
    protocol_section,
    rows_csv,
    skipped_section,
    table,
    verdict_box,
)
from seecause.target import Answer, best_answers, spread

if TYPE_CHECKING:
    from seecause.background.audit import BackgroundAudit
    from seecause.background.discover import Discovery, Finding
    from seecause.background.heads import Head, HeadScores
    from seecause.background.images import LabelledImages
    from seecause.background.prune import Curve, Examples, Outcome
    from seecause.background.repair import Candidate, Repair
    from seecause.models.base import ImageModel

SHOWN = 6  # images in a gallery
GAINS = {
    "FIG": "foreground information gain: how far the prediction moves without the object"
    " (Jensen-Shannon divergence in nats: 0 not at all, 0.69 at most)",
    "BIG": "background information gain: how far the prediction moves without the background",
    "BIR": "background influence, BIG / (FIG + BIG): 0 predicts from the object, 1 from the"
    " background; ratio of means, or mean of ratios where it says so",
}
TERMS = {
    "accuracy": "correct predictions on plain images",
    "flips": "of all predictions, those that change on the background of an image that is predicted"
    " otherwise",
    "flips, control": "flips on backgrounds of images predicted the same: what cutting alone does",
    "transplants": "correct predictions on backgrounds of images that are predicted otherwise",
    "transplant-worst": "the lowest accuracy over class x class of the background (few: pooled)",
    "worst group": "the lowest accuracy over groups of images, where the data names groups",
    "extra flips": "flips less those by cutting alone, over correctly predicted images",
    "low 95%": "lower end of the 95 % interval of extra flips (bootstrap over images)",
    "high 95%": "its upper end",
    "right answers": "images that the verdict is taken of",
    **GAINS,
}
OUTCOMES = {  # numbers before and after heads are removed: meaning, and which is better
    "accuracy": ("", "↑"),
    "worst group": ("accuracy in the worst group", "↑"),
    "worst of groups (0, 1) and (1, 0)": ("", "↑"),
    "mean of groups": ("accuracy, mean over groups", "↑"),
    "groups weighted as in training": ("accuracy, groups weighted as in training", "↑"),
    "NLL": ("negative log-likelihood of the true class in nats", "↓"),
    "ECE": ("expected calibration error: how far confidence is from accuracy", "↓"),
    "flips": ("predictions that change when the same object is drawn on another background", "↓"),
    "FIG": (GAINS["FIG"], ""),
    "BIG": (GAINS["BIG"], "↓"),
    "BIR": (GAINS["BIR"], "↓"),
    "BG-gap": ("accuracy lost when the background is one of another class", "↓"),
}
ERASURES = {  # ways to erase the background, each by what its name contains
    "discovered masks": "found by search: the part of the image that the model keeps its prediction"
    " with, which need not be the object",
    "true masks": "come with the data and are the object",
    "mean": "the gap is filled with the image's own mean colour",
    "grey": "the gap is filled with the mean colour of the training set",
    "blur": "the gap is filled with the image, blurred",
    "noise": "the gap is filled with noise",
    "exact swap": "the same image drawn again with another background, or with another object:"
    " nothing is cut out",
}


# Audits.


def audit_lines(audit: BackgroundAudit, *, notes: bool = True) -> list[str]:
    """The verdict in words, the conclusion first; without the `notes` of the masks where they were
    printed already."""
    from seecause.background.audit import ENOUGH, MOSTLY, SOME

    conclusions = {
        "yes": "Yes: the model predicts from the background.",
        "no": "No: these predictions hardly depend on the background.",
        "cannot tell": "These images do not show whether the background decides.",
        "perhaps": "Perhaps: it looks so, but only by the model's own masks.",
        "too few": f"Too few: fewer than {ENOUGH} correct predictions show nothing.",
    }
    numbers, (low, high) = audit.numbers(), audit.interval
    lines, few = [conclusions[audit.verdict]], audit.verdict == "too few"
    if low == low and not few:
        control = f"on that of one with the same prediction {audit.control_flips:.0%}"
        if math.isnan(audit.control_flips):
            control = "and no two images have the same prediction, to show what cutting alone does"
        lines.append(
            f"On the background of an image with another prediction {audit.flips:.0%} of correct"
            f" predictions change, {control}. Difference {numbers.get('extra flips', 0):+.0%} (95 %"
            f" interval {low:+.0%} to {high:+.0%}, {len(audit.extra_flips)} images; yes from"
            f" {SOME:+.0%} on)."
        )
    if audit.verdict == "cannot tell" and audit.control_flips > MOSTLY:
        lines.append("Cutting alone changes most predictions: check the cuts, or use other masks.")
    worst = f"; {audit.transplant_worst:.0%} in the worst class on the worst background"
    lines.append(f"Accuracy {audit.accuracy:.0%} on plain images{'' if few else worst}.")
    if audit.gains is not None:
        lines.append(
            f"BIR {audit.gains.bir_or_zero:.2f}: the background's share of what correct predictions"
            " lose when object or background turns grey (ratio of means, which --max-bir limits;"
            f" mean of ratios {audit.gains.bir_mean_of_ratios:.2f})."
        )
    if audit.masks is not None:
        overlap = audit.masks.overlap
        known = "" if overlap is None else f" (IoU with true masks {float(overlap.nanmean()):.2f})"
        lines.append(f"Object masks: {audit.masks.source}{known}.")
        shown = audit.masks.notes if notes else ()
        lines += [f"{note[:1].upper()}{note[1:].removesuffix('.')}." for note in shown]
    return lines


def audit_sections(
    model: ImageModel, audit: BackgroundAudit, *, limits: Sequence[str] = ()
) -> list[Section]:
    """Verdict, the worst images, how objects were cut, numbers, groups and protocol. `limits` are
    sentences about limits that are not met."""
    rows = [
        (name, f"{value:.{0 if name == 'right answers' else 3}f}", TERMS.get(name, ""))
        for name, value in audit.numbers().items()
    ]
    numbers = table(rows, head=("on these images", "", "what it is"))
    verdict = verdict_box([*audit_lines(audit), *limits])
    return [
        Section("Does it predict from the background?", verdict, short="Verdict"),
        worst_section([model], [audit], [""]),
        *sheet_section(model, audit),
        Section("Numbers", numbers),
        *groups_section(audit),
        *skipped_section(audit.data.skipped),
        protocol_section([audit.protocol]),
    ]


def worst_section(
    models: Sequence[ImageModel],
    audits: Sequence[BackgroundAudit],
    when: Sequence[str],
    *,
    title: str = "Where does it happen?",
    count: int = SHOWN,
) -> Section:
    """Correct predictions that the background changes, with the predictions of every model: the
    images that are worst for the first."""
    model, audit = models[0], audits[0]
    versions = audit.judged.versioned
    cards = []
    for place, version in audit.worst(count):
        truth = model.class_name(int(versions.labels[place]))
        image = versions.moved[torch.tensor([version], device=versions.moved.labels.device)][0]
        donor = model.class_name(int(versions.moved.donor_labels[version]))
        name = f"background: {donor}" if audit.masks is not None else "its other version"
        shown = [
            ("as it is", audit.data.images[place], [a.judged.plain for a in audits]),
            (name, image, [a.judged.moved for a in audits]),
        ]
        shots = [
            Shot(
                what,
                thumbnail(model.preprocess.raw(pixels[None])[0]),
                shot_answers(model, [rows[index] for rows in logits], truth, when),
            )
            for (what, pixels, logits), index in zip(shown, (place, version), strict=True)
        ]
        cards.append(Card(audit.data.ids[place], shots=shots))
    note = (
        "Each object as it is, and on the background of an image of another class. The bold class"
        " is the true one. Bad cuts are seen here at a glance: where the object is not what was cut"
        " out, the numbers mean little."
    )
    return Section(title, _gallery(cards), note)


def _gallery(cards: Sequence[Card]) -> Markup:
    return cards_html(cards) if cards else Markup("<p>There is no such image.</p>")


def sheet_section(model: ImageModel, audit: BackgroundAudit) -> list[Section]:
    """Object, background and transplant side by side; none where the data brings pairs."""
    if audit.masks is None:
        return []
    moved: Any = audit.judged.versioned.moved
    rows = moved.sheet(SHOWN, raw=model.preprocess.raw)
    body = Markup("")
    for sheet in map(display_image, rows.chunk(2 - min(SHOWN, len(moved)) % 2, dim=1)):
        sheet.thumbnail((620, 2000))
        image = Markup('<img alt="objects, backgrounds, transplants" src="{}">')
        body += image.format(data_uri(sheet, photo=True))
    note = "In each three: the object, the image whose background it gets, and the transplant."
    body = Markup('<div class="sheets">{}</div>').format(body)
    return [Section("How were they cut?", body, note)]


def groups_section(audit: Any) -> list[Section]:
    """Correct predictions by group: first code down, second code across. None without groups."""
    from seecause.background.gains import FEW

    groups = audit.groups
    if groups is None:
        return []
    cells = {}
    columns = groups.right.tolist(), groups.total.tolist(), groups.intervals().tolist()
    for group, right, total, (low, high) in zip(groups.groups, *columns, strict=True):
        about = f"accuracy {right / total:.2f}, 95 % interval {low:.2f} to {high:.2f}"
        shade = round(60 * right / total)
        cells[group] = {"text": f"{right} of {total}", "title": about, "strength": shade}
    head, rows = ["group", "correct"], [(str(group), cell) for group, cell in cells.items()]
    if all(len(group) == 2 for group in cells) and len(cells) > 2:
        down, across = (sorted({group[code] for group in cells}) for code in (0, 1))
        objects, places = audit.data.objects, audit.data.places
        head = ["object", *(places[b] if b < len(places) else f"background {b}" for b in across)]
        rows = [
            (objects[f] if f < len(objects) else f"{f}", *(cells.get((f, b), "") for b in across))
            for f in down
        ]
    fewest, most = int(groups.total.min()), int(groups.total.max())
    sizes = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    size = f"worst group {groups.worst:.3f}; {sizes} images a group, hover for 95 % intervals"
    if fewest < FEW:
        size = f"groups have {sizes} image{'s' * (most != 1)} each, too few for an accuracy of one"
    note = (
        f"Correct predictions by group. Average {groups.average:.3f}, mean of groups"
        f" {groups.unweighted_average:.3f}, {size}. A shortcut fails where object and background"
        " disagree."
    )
    return [Section("Accuracy by group", table(rows, head=head), note, short="Groups")]


def audit_csv(audit: BackgroundAudit, names: Sequence[str]) -> str:
    """One line for each image."""
    judged, pictures = audit.judged, audit.data
    answers, labels = judged.plain.argmax(dim=1), judged.versioned.labels
    moved, control = judged.flips_by_image(), judged.flips_by_image(control=True)
    rows = []
    for place, identity in enumerate(pictures.ids):
        row: dict[str, str | float] = {"image": identity}
        for column, label in (("prediction", int(answers[place])), ("label", int(labels[place]))):
            row[column] = names[label] if label < len(names) else str(label)
        if pictures.grouped:
            row["group"] = " ".join(map(str, pictures.groups[place] or ()))
        row["flips"], row["flips, control"] = float(moved[place]), float(control[place])
        if audit.masks is not None:
            row["mask confidence"] = float(audit.masks.confidence[place])
        rows.append(row)
    return rows_csv(rows)


# Repairs.


def repair_sections(result: Repair) -> list[Section]:
    """The same images before and after, then numbers, remedies, cuts and protocol."""
    from seecause.background.repair import NOT_TESTED

    pair, models = [result.before, result.after], [result.original, result.model]
    title = "The same images, before and after"
    settings = {k: v for k, v in result.record.items() if v not in (None, [], "")}
    return [
        worst_section(models, pair, ["before", "after"], title=title),
        repair_change_section(result),
        remedies_section(result),
        *sheet_section(result.original, result.before),
        Section("What was not tested", table([(line,) for line in NOT_TESTED])),
        *skipped_section(result.skipped),
        protocol_section([{**result.before.protocol, "options": settings}]),
    ]


def repair_change_section(result: Repair, *, title: str = "What changed?") -> Section:
    first, second = result.before.numbers(), result.after.numbers()
    rows = [
        (name, fixed(value), fixed(second[name]), TERMS.get(name, ""))
        for name, value in first.items()
        if name in second and name != "right answers"
    ]
    head = ("on images nothing was chosen by", "before", "after", "what it is")
    return Section(title, table(rows, head=head))


def remedies_section(result: Repair) -> Section:
    """What was tried, the chosen one shaded."""
    columns = ("accuracy", "flips", "transplants", "transplant-worst", "worst group")
    tried = [candidate for candidate in result.candidates.values() if not candidate.failed]
    known = [name for name in columns if any(_known(c.test, name) for c in tried)]
    rows = [
        (
            c.name,
            c.failed or c.done,
            fixed(c.validation.get(result.chosen_by, math.nan)),
            *(fixed(c.test.get(name, math.nan)) for name in known),
            f"{c.seconds:.1f}",
        )
        for c in result.candidates.values()
    ]
    head = ("remedy", "what was done", f"{result.chosen_by}, choosing", *known, "seconds")
    note = f"The shaded one was taken, by {result.chosen_by} on images that are not reported."
    if result.remedy == "nothing":
        note = "None was taken: the first sentence of this page says why."
    note = f"{note} The other numbers are of images that chose nothing.{_tie(result, tried)}"
    marked = [list(result.candidates).index(result.remedy)]
    return Section("Which remedy?", table(rows, head=head, marked=marked), note)


def _known(numbers: Mapping[str, float], name: str) -> bool:
    return not math.isnan(numbers.get(name, math.nan))


def _tie(result: Repair, tried: Sequence[Candidate]) -> str:
    """What decided between remedies with the same number that chooses."""
    chosen = result.candidates[result.remedy].validation

    def equal(to: Iterable[Candidate], name: str) -> list[Candidate]:
        return [c for c in to if c.validation.get(name) == chosen.get(name)]

    same = equal((c for c in tried if c.name != result.remedy), result.chosen_by)
    if result.remedy == "nothing" or not same:
        return ""
    names = ["the model as it was" if c.name == "nothing" else c.name for c in same]
    shared = f" The same {result.chosen_by} there: {', '.join(names)}"
    for name, words in (("transplants", "more correct transplants"), ("flips", "fewer flips")):
        same = equal(same, name)
        if not same:
            return f"{shared}; {words} decided."
    return f"{shared}; no number told them apart, and the first remedy was taken."


# Heads: scores, and what their removal changes.


def scores_section(scores: HeadScores, *, by: str, chosen: Sequence[Head] = ()) -> Section:
    """The grid of layer x head of the selector `by`; `chosen` heads are outlined."""
    from seecause.background.heads import selectors

    key = [*(["outlined: removed"] * bool(chosen))]
    key += ["hatched: not measured"] * bool(scores.value.isnan().any())
    grid = head_grid(
        f"score of each head, by {by}",
        scores.value,
        chosen=chosen,
        errors=scores.error,
        without={name: values for name, values in scores.after.items() if name != "response"},
        key="; ".join(key),
    )
    note = "Hover for standard errors and for what else the head's removal does."
    if by == "cigma":
        note = (
            "Orange heads make the prediction depend on the background: without them it depends"
            f" less. Blue heads do the opposite. {note}"
        )
    elif nothing := no_effect(scores):
        note = f"{by}: {nothing}. {note}"
    elif by in selectors():
        summary = selectors()[by].summary
        note = f"{by}: {summary} The highest (orange) are removed first. {note}"
    title = "Which heads carry the background?" if by == "cigma" else "Which heads go first?"
    return Section(title, grid, note, short="Heads")


def no_effect(scores: HeadScores) -> str:
    """Why scores by exchange are not shares: the effect cannot be told from none. Empty where it
    can."""
    if scores.protocol.get("mediated") != {}:
        return ""
    effect, error = (scores.protocol[name] for name in ("effect", "effect error"))
    count = scores.protocol["images"][0]
    interval = "" if error is None else f" ± {number(error)}"
    return (
        f"there is no effect to divide: the other versions of {count} image{'s' * (count != 1)}"
        f" move predictions by {number(effect)}{interval} nats, which cannot be told from none."
        " Scores are in nats"
    )


def curves_section(
    line: Curve, *, by: str, title: str = "What do more removed heads do?"
) -> Section:
    """Accuracy, worst group, flips and BIR against the number of removed heads, each with the band
    of as many random heads."""
    numbers = [outcome.numbers() for outcome in line.chosen]
    drawn, still = [], []
    for name in numbers[0]:
        if name not in ("accuracy", "worst group", "flips") and not name.startswith("BIR"):
            continue
        means, spreads = zip(*line.band(name), strict=True)
        values = [row[name] for row in numbers]
        if len({*means, *values}) == 1:  # one number says what a flat line shows
            still.append(f"{name} stays at {means[0]:.2f}")
            continue
        lines = {
            f"chosen by {by}": Line(line.ks, values),
            "as many random heads": Line(line.ks, means, spreads, control=True),
        }
        drawn.append(chart(lines, title=_spelled(name), x="heads removed", y="share", share=True))
    note = (
        "A repair raises the worst group and lowers BIR and flips more than random removals do, at"
        " no cost in accuracy. Heads with scores of 0 or less stay. Bands are the standard"
        " deviation over draws. BIR here is of all test images; an audit takes correct predictions"
        " only."
    )
    note += f" Not drawn, because nothing moves it: {'; '.join(still)}." if still else ""
    return Section(title, charts(drawn), note, short="Curves")


def change_section(
    before: Outcome,
    after: Outcome,
    images: LabelledImages,
    *,
    gaps: tuple[float, float] | None = None,
    title: str = "What changed?",
) -> Section:
    """Numbers before and after on the same `images`; `gaps` are the BG-gaps."""
    from seecause.background.gains import FEW
    from seecause.background.prune import changes

    numbers = changes(before, after, gaps)
    rows = [
        (
            _spelled(name),
            f"{first:.3f}",
            f"{second:.3f}",
            f"{second - first:+.3f}" if round(second - first, 3) else "none",
        )
        for name, (first, second) in numbers.items()
    ]
    heads = ", ".join(f"({layer}, {head})" for layer, head in after.heads) or "none"
    note = (
        f"Heads removed (layer, head): {heads}. {len(images)} images of {images.name}, with the"
        " same masks before and after. Arrows show which is better."
    )
    fewest = min(Counter(images.groups).values(), default=FEW) if images.grouped else FEW
    if fewest < FEW:
        note += f" The smallest group has {fewest} image{'s' * (fewest != 1)}, too few for its"
        note += " accuracy to mean much."
    return Section(
        title, table(rows, head=("", "before", "after", "change")), note, outcome_terms(numbers)
    )


def outcome_terms(names: Iterable[str]) -> dict[str, str]:
    """What the numbers in `names` mean, and what they were measured with."""
    kinds, how = zip(*(name.partition(", ")[::2] for name in names), strict=True)
    meanings = {name: meaning for name, (meaning, _) in OUTCOMES.items() if meaning}
    terms = {name: meaning for name, meaning in meanings.items() if name in kinds}
    return terms | erasure_terms(how)


def erasure_terms(names: Iterable[str]) -> dict[str, str]:
    """What the ways to erase a background are, of those that occur in `names`."""
    there = " ".join(names)
    return {word: meaning for word, meaning in ERASURES.items() if word in there}


def _spelled(name: str) -> str:
    """A number with an arrow to where it is better; what it was measured with is after a comma."""
    kind = name if name in OUTCOMES else name.partition(", ")[0]
    return f"{name} {OUTCOMES.get(kind, ('', ''))[1]}".strip()


def before_after_section(model: ImageModel, examples: Examples) -> Section:
    """Each version of each image with the predictions before and after heads are removed."""
    cards = [
        Card(identity, shots=version_shots(model, examples, place, ["before", "after"]))
        for place, identity in enumerate(examples.data.ids)
    ]
    note = "The bold class is the true one: a repair keeps it whatever the background."
    terms = version_terms(examples.versions, examples.erasure)
    return Section("The same images, before and after", cards_html(cards), note, terms)


def version_shots(
    model: ImageModel, examples: Examples, place: int, when: Sequence[str]
) -> list[Shot]:
    """Every version of an image, with the predictions of each model."""
    labels = examples.data.labels
    truth = None if labels is None else model.class_name(int(labels[place]))
    shots = []
    for name, images in examples.versions.items():
        logits = [each[place] for each in examples.logits[name]]
        answers = shot_answers(model, logits, truth, when)
        shots.append(Shot(name, thumbnail(model.preprocess.raw(images)[place]), answers))
    return shots


def shot_answers(
    model: ImageModel, logits: Sequence[Tensor], truth: str | None, when: Sequence[str]
) -> list[tuple[str, Sequence[Answer]]]:
    """The two likeliest classes of each model by its logits [C]; the true class is marked."""
    answers: list[tuple[str, Sequence[Answer]]] = []
    for word, row in zip(when, logits, strict=True):
        probabilities = spread(row[None].double(), "prob", sigmoid=model.sigmoid)
        (likeliest,) = best_answers(model, probabilities, count=2)
        answers.append((word, [replace(a, explained=a.name == truth) for a in likeliest]))
    return answers


def version_terms(versions: Iterable[str], erasure: str) -> dict[str, str]:
    """What the versions that are shown are."""
    terms, names = {}, " ".join(versions)
    if "its evidence" in names:
        terms["its evidence"] = "the discovered mask: what the model keeps its prediction with"
    if "no background" in names and erasure:
        masks, _, fill = erasure.rpartition(", ")
        terms["no background, no object"] = f"cut out with {masks} and filled ({fill})"
    if "elsewhere" in names:
        terms["elsewhere"] = "the same object drawn with another background"
    return terms


def settings_section(model: ImageModel, record: Mapping[str, Any]) -> Section:
    """Everything needed to get the same numbers again."""
    about = {
        "model": model.name,
        "fingerprint": model.fingerprint(),
        "readout": getattr(model, "readout_name", None),
        **record,
        "device, dtype": f"{model.device}, {str(model.dtype).removeprefix('torch.')}",
        "seecause": __version__,
    }
    rows = {key: str(value) for key, value in about.items() if value is not None}
    return Section("Protocol", part("protocol", [{}, rows]), f"{REPRODUCE}.")


def scores_csv(scores: HeadScores) -> str:
    """One line for each scored head, the best first, and what the model is like without it."""
    stay = [(int(layer), int(head)) for layer, head in (scores.value == -torch.inf).nonzero()]
    rows = []
    for layer, head in [*scores.order(positive=False), *stay]:
        row: dict[str, float] = {"layer": layer, "head": head}
        row["score"] = float(scores.value[layer, head])
        if scores.error is not None:
            row["standard error"] = float(scores.error[layer, head])
        for name, values in scores.after.items():
            if name != "response":
                row[f"{name} without it"] = float(values[layer, head])
        rows.append(row)
    return rows_csv(rows)


# Discovered shortcuts.


def discover_sections(result: Discovery) -> list[Section]:
    """A card for each kind of patch, then the protocol."""
    body = verdict_box(["No kind of patch turns images into a class by more than chance."])
    if result.findings:
        body = cards_html([_finding(result, *place) for place in enumerate(result.findings, 1)])
    note = (
        "Each card is a kind of patch: its examples; all of it in one image of that prediction, the"
        " rest faded; and what happens when it is pasted into an image that is predicted otherwise."
        " A part of the object does that rightly; anything else is a shortcut."
    )
    terms = {
        "flips": "images that are predicted so with the patches pasted in",
        "control": "the same with patches of images that are not predicted so, in the same places",
        "on the object": "share of the kind's patches that known masks count as object",
    }
    title = "Which kinds of patches turn images into which class?"
    skipped = skipped_section(result.data.skipped)
    return [Section(title, body, note, terms), *skipped, protocol_section([result.protocol])]


def _finding(result: Discovery, rank: int, finding: Finding) -> Card:
    from seecause.attribution.explain import top_answers

    assert finding.trials.flipped is not None
    trial = int(finding.trials.flipped.double().argmax())  # the first that flipped
    shown = finding.trials.take(torch.tensor([trial]))
    source, recipient = int(shown.sources[0]), int(shown.recipients[0])
    images, raw = result.data.images, result.model.preprocess.raw
    before, after = images[recipient : recipient + 1], shown.into(images)
    predicted = [
        [("", [replace(answer, explained=answer.name == finding.name) for answer in answers])]
        for answers in top_answers(result.model, torch.cat([before, after]))
    ]
    shots = [
        Shot("examples", _uri(_crops(result, finding))),
        Shot("in an image", _uri(_faded(raw(images[source]), shown.sets[0]))),
        Shot("before", _uri(raw(before)[0]), predicted[0]),
        Shot("with it", _uri(raw(after)[0]), predicted[1]),
    ]
    title = f"{rank}. {finding.name}: {finding.flips:.0%}, control {finding.control:.0%}"
    on_object = finding.on_object
    known = "" if on_object is None else f" {on_object:.0%} of these patches are on the object."
    return Card(title, shots=shots, caption=f"{finding.sentence()}.{known}")


def _crops(result: Discovery, finding: Finding, *, count: int = 9, around: int = 1) -> Tensor:
    """Examples with `around` patches around them in a square sheet [3, h, w]; of an image only the
    best one."""
    model, crops = result.model, dict[int, Tensor]()
    high, wide = model.patch
    edge = around * max(high, wide)
    for place, patch in finding.tokens.tolist():
        if place in crops or len(crops) == count:
            continue
        row, column = divmod(patch, model.layout.grid[1])
        image = model.preprocess.raw(result.data.images[place]).float().cpu().clamp(0, 1)
        image = F.pad(image, [edge] * 4, value=1.0)
        top, left = row * high, column * wide
        crop = image[:, top : top + high + 2 * edge, left : left + wide + 2 * edge]
        crops[place] = F.pad(crop, [1] * 4, value=1.0)
    side = math.ceil(math.sqrt(len(crops)))
    sheet = [*crops.values()]
    sheet += [torch.ones_like(sheet[0])] * (side * side - len(sheet))
    rows = [torch.cat(sheet[start : start + side], dim=2) for start in range(0, side * side, side)]
    return torch.cat(rows, dim=1)


def _faded(image: Tensor, chosen: Tensor) -> Tensor:
    """Raw pixels [3, H, W] whose patches outside chosen [gh, gw] are nearly white."""
    image = image.float().cpu().clamp(0, 1)
    high, wide = (size // cells for size, cells in zip(image.shape[1:], chosen.shape, strict=True))
    shown = chosen.repeat_interleave(high, dim=0).repeat_interleave(wide, dim=1)
    return torch.where(shown, image, image + (1 - image) * 0.8)


def _uri(image: Tensor) -> str:
    return data_uri(display_image(image.float().cpu().clamp(0, 1)), photo=True)


def write_pairs(result: Discovery, places: Sequence[int], folder: Path) -> int:
    """Write the pairs of some findings as two folders, `with` and `without`, as
    `pairs:WITH:WITHOUT` takes them; returns their number. NAME~1.png and NAME~2.png are pairs of
    one image: a repair keeps them together."""
    from seecause.data.images import to_pil

    pairs, model = result.pairs(places), result.model
    others = pairs.other_background
    assert pairs.labels is not None and others is not None
    for place, label in enumerate(pairs.labels.tolist()):
        plain = re.sub(r"[^\w~-]+", "-", pairs.ids[place])[-80:]
        name = Path(model.class_name(label).replace("/", "-")) / f"{plain}.png"
        for version, images in (("with", others), ("without", pairs.images)):
            file = folder / version / name
            file.parent.mkdir(parents=True, exist_ok=True)
            to_pil(model.preprocess.raw(images[place])).save(file)
    return len(pairs)
