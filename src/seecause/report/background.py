"""Pages about the background: audits, repairs, scores and removal of heads, discovered shortcuts,
and parts that a network reads (iFAM).

Each function returns sections: images first, then numbers, then the protocol.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from markupsafe import Markup
from torch import Tensor

from seecause.models.base import protocol
from seecause.report import (
    Card,
    Section,
    Shot,
    cards_html,
    head_grid,
    part,
    protocol_section,
    sentences,
    skipped_section,
    table,
    verdict_box,
    warnings,
)
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
from seecause.target import Answer, best_answers, spread

if TYPE_CHECKING:
    from seecause.background.audit import BackgroundAudit
    from seecause.background.discover import Discovery, Finding
    from seecause.background.heads import Curve, Head, HeadScores, Outcome
    from seecause.background.images import LabelledImages
    from seecause.background.repair import Repair
    from seecause.faithful.evaluation import PartExamples
    from seecause.faithful.net import IFAM
    from seecause.models.base import ImageModel

SHOWN = 6  # images in a gallery
GROUPS = 12  # maximum number of groups in a table, the worst first
TERMS = {  # numbers of audits, repairs and pruning
    "accuracy": "correct predictions on plain images",
    "flips": "share of predictions that change when the object is pasted on the background of an"
    " image with another predicted class; of pairs, in the second version",
    "control flips": "flips on backgrounds of images predicted the same: what cutting alone does",
    "other accuracy": "correct predictions on backgrounds of images that are predicted otherwise;"
    " of pairs, on both versions",
    "gain": "change of other accuracy, over the same images and versions",
    "loss": "share of plain images whose correct predictions are lost, less those won; without"
    " labels, by the probabilities that the model gave before",
    "transplant-worst": "lowest accuracy over pairs (object class, class of the background image);"
    " pairs with few images are pooled",
    "worst group": "the lowest accuracy over groups of images, where the data names groups",
    "extra flips": "flips less control flips, over the same images",
    "extra flips low": "lower end of the 95 % interval of extra flips (bootstrap over images)",
    "extra flips high": "its upper end",
    "compared images": "correctly predicted images that flips are taken of",
    "NLL": "negative log-likelihood of the true class in nats",
    "ECE": "expected calibration error: how far confidence is from accuracy",
    "FIG": "foreground information gain: how far the prediction moves without the object"
    " (Jensen-Shannon divergence in nats: 0 not at all, 0.69 at most)",
    "BIG": "background information gain: how far the prediction moves without the background",
    "BIR": "background influence, BIG / (FIG + BIG), a ratio of means: 0 predicts from the object,"
    " 1 from the background",
}


def meaning(name: str) -> str:
    """The explanation of a number by its name; the fill in the name follows a comma."""
    return TERMS.get(name, TERMS.get(name.partition(", ")[0], ""))


def _named(name: str, words: str = "") -> Markup:
    """A name with its explanation in small letters below."""
    return Markup("{}<small>{}</small>").format(name, words or meaning(name))


# Audits.


def audit_lines(audit: BackgroundAudit) -> list[str]:
    """The verdict in words, the conclusion first."""
    from seecause.background.audit import ENOUGH, MOSTLY, SOME

    limits = {"enough": ENOUGH, "mostly": MOSTLY, "some": SOME}
    return sentences("audit", audit=audit, n=audit.numbers(), **limits)


def audit_sections(
    model: ImageModel,
    audit: BackgroundAudit,
    *,
    limits: Sequence[str] = (),
    places: Sequence[str] = (),
) -> list[Section]:
    """Verdict, the worst images, numbers, groups and protocol. `limits` are sentences about limits
    that are not met, `places` the names of backgrounds in groups."""
    notes = () if audit.masks is None else audit.masks.notes
    verdict = verdict_box([*audit_lines(audit), *limits]) + warnings(notes)
    rows = [(_named(name), number(value)) for name, value in audit.numbers().items()]
    return [
        Section("Verdict", verdict),
        worst_section([model], [audit], [""]),
        *cuts_section(model, audit.data),
        Section("Numbers", table(rows)),
        *groups_section(model, audit, places),
        *skipped_section(audit.data.skipped),
        protocol_section([audit.protocol]),
    ]


def cuts_section(model: ImageModel, data: LabelledImages) -> list[Section]:
    """A sheet of accepted cuts, and one of refused cuts with their reasons; none for pairs."""
    from seecause.background.transplant import REFUSALS

    if data.masks is None:
        return []
    masks, reasons = data.masks.hard, data.masks.refused
    reasons = torch.zeros(len(data), dtype=torch.long) if reasons is None else reasons.cpu()
    cards = []
    for refused in (False, True):
        for place in ((reasons > 0) == refused).nonzero()[:SHOWN, 0].tolist():
            cut = torch.where(masks[place], model.preprocess.raw(data.images[place]), 0.5)
            title = f"refused: {REFUSALS[int(reasons[place])]}" if refused else "accepted"
            cards.append(Card(data.ids[place], shots=[Shot(title, thumbnail(cut))]))
    refused_count = int((reasons > 0).sum())
    note = f"{len(data) - refused_count} cuts are accepted, {refused_count} refused; refused cuts"
    note += " are in no number. The controls use the same cuts."
    return [Section("What was cut out?", cards_html(cards), note)]


def worst_section(
    models: Sequence[ImageModel],
    audits: Sequence[BackgroundAudit],
    when: Sequence[str],
    *,
    count: int = SHOWN,
) -> Section:
    """Correct predictions that the background changes, with the predictions of every model: the
    images that are worst for the first."""
    model, audit = models[0], audits[0]
    versions, cards = audit.judged.versions, []
    for place, version in audit.worst(count):
        truth = model.class_name(int(audit.data.need_labels()[place]))
        image = versions[version : version + 1][0]
        donor = model.class_name(int(versions.donor_labels[version]))
        name = f"background of: {donor}" if audit.masks is not None else "its other version"
        plain = [each.judged.plain[place] for each in audits]
        moved = [each.judged.moved[version] for each in audits]
        shots = [
            Shot(
                title,
                thumbnail(model.preprocess.raw(pixels[None])[0]),
                shot_answers(model, logits, truth, when),
            )
            for title, pixels, logits in (
                ("as it is", audit.data.images[place], plain),
                (name, image, moved),
            )
        ]
        cards.append(Card(audit.data.ids[place], shots=shots))
    note = (
        "Each object as it is, and on the background of an image with another prediction, whose"
        " class is named; the true class is bold. Where the object is not what was cut out, the"
        " numbers mean little."
    )
    if audit.masks is None:
        note = "Each image, and its second version; the true class is bold."
    return Section("Where does it happen?", cards_html(cards), note)


def shot_answers(
    model: ImageModel, logits: Sequence[Tensor], truth: str, when: Sequence[str]
) -> list[tuple[str, Sequence[Answer]]]:
    """The two likeliest classes of each model by its logits [C]; the true class is marked."""
    answers: list[tuple[str, Sequence[Answer]]] = []
    for word, row in zip(when, logits, strict=True):
        probabilities = spread(row[None].double(), "prob", sigmoid=model.sigmoid)
        (likeliest,) = best_answers(model, probabilities, count=2)
        answers.append((word, [replace(a, explained=a.name == truth) for a in likeliest]))
    return answers


def groups_section(
    model: ImageModel, audit: BackgroundAudit, places: Sequence[str] = ()
) -> list[Section]:
    """Correct predictions by group. None without groups."""
    groups = audit.groups
    if groups is None:
        return []
    columns = groups.right.tolist(), groups.total.tolist(), groups.intervals().tolist()
    objects, backgrounds = dict(enumerate(model.classes)), dict(enumerate(places))
    rows = [
        (
            f"{objects.get(group[0], group[0])} on {backgrounds.get(group[1], group[1])}",
            f"{right} of {total}",
            fixed(right / total, 2),
            f"{low:.2f} to {high:.2f}",
        )
        for group, right, total, (low, high) in zip(groups.groups, *columns, strict=True)
    ]
    rows.sort(key=lambda row: row[2])
    head = ("object on background", "correct", "accuracy", "95 % interval")
    note = f"The worst of {len(rows)} groups." if len(rows) > GROUPS else ""
    return [Section("Accuracy by group", table(rows[:GROUPS], head=head), note)]


def audit_rows(audit: BackgroundAudit, names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each image."""
    judged, data = audit.judged, audit.data
    columns: dict[str, Sequence[Any]] = {"image": data.ids}
    for column, codes in (
        ("prediction", judged.plain.argmax(dim=1)),
        ("label", data.need_labels()),
    ):
        known = dict(enumerate(names))
        columns[column] = [known.get(code, str(code)) for code in codes.tolist()]
    if data.grouped:
        columns["group"] = [" ".join(map(str, group or ())) for group in data.groups]
    columns["flips"] = judged.flips_by_image().tolist()
    columns["control flips"] = judged.flips_by_image(control=True).tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


# Repairs.


def repair_sections(result: Repair) -> list[Section]:
    """Images before and after the repair, then numbers, remedies and protocol."""
    from seecause.background.repair import NOT_TESTED

    settings = {k: v for k, v in result.record.items() if v not in (None, [], "")}
    return [
        before_after_section(result),
        repair_change_section(result),
        remedies_section(result),
        Section("What was not tested", table([(line,) for line in NOT_TESTED])),
        *skipped_section(result.skipped),
        protocol_section([{**result.before.protocol, "options": settings}]),
    ]


def before_after_section(result: Repair, *, count: int = SHOWN) -> Section:
    """Images whose predictions the background changed, before and after the repair."""
    pair, models = [result.before, result.after], [result.original, result.model]
    section = worst_section(models, pair, ["before", "after"], count=count)
    return replace(section, title="The same images, before and after")


def repair_change_section(result: Repair) -> Section:
    """Numbers before and after, on held-out images."""
    numbers = [result.before.numbers(), result.after.numbers()]
    return Section("What changed?", change_table(*numbers, title="held-out images"))


def remedies_section(result: Repair) -> Section:
    """The remedies that were tried, the chosen one shaded."""
    names = ("accuracy", "flips", "other accuracy", "transplant-worst", "worst group")
    known = [n for n in names if any(n in each.test for each in result.candidates.values())]
    rows = [
        (
            _named(candidate.name, candidate.failed or candidate.done),
            fixed(candidate.validation.get(result.chosen_by, math.nan)),
            *(fixed(candidate.test.get(name, math.nan)) for name in known),
            part("loss", candidate.test, result.record.get("max loss")),
            f"{candidate.seconds:.1f}",
        )
        for candidate in result.candidates.values()
    ]
    head = ("remedy", f"{result.chosen_by}, choosing", *known, "loss", "seconds")
    note = f"The shaded one was taken, by {result.chosen_by} on images that are not reported."
    if result.remedy == "nothing":
        note = "None was taken: the first sentence of this page says why."
    marked = [list(result.candidates).index(result.remedy)]
    return Section("Which remedy?", table(rows, head=head, marked=marked), note)


# Heads: scores, and what their removal changes.


def scores_section(scores: HeadScores, *, by: str, chosen: Sequence[Head] = ()) -> Section:
    """The grid of layer x head of the selector `by`; `chosen` heads are outlined."""
    grid = head_grid(
        f"score of each head, by {by}", scores.value, chosen=chosen, errors=scores.error
    )
    note = sentences("scores", by=by, chosen=chosen, about=scores.protocol)[0]
    return Section("Which heads?", grid, note)


def curves_section(curve: Curve, *, by: str) -> Section:
    """Accuracy, worst group, flips and BIR against the number of removed heads, each with the band
    of as many random heads."""
    numbers, drawn = [outcome.numbers for outcome in curve.chosen], []
    for name in numbers[0]:
        if name in ("accuracy", "worst group", "flips") or name.startswith("BIR"):
            means, deviations = zip(*curve.band(name), strict=True)
            lines = {
                f"chosen by {by}": Line(curve.ks, [row[name] for row in numbers]),
                "as many random heads": Line(curve.ks, means, deviations, control=True),
            }
            drawn.append(chart(lines, title=name, x="heads removed", y="share"))
    note = (
        "Whether the removal helps is for these curves to show: it does if the worst group rises"
        " and BIR and flips fall, more than by random removals, at no cost in accuracy. Bands are"
        " standard deviations over draws."
    )
    return Section("What do more removed heads do?", charts(drawn), note)


def change_section(before: Outcome, after: Outcome, images: LabelledImages) -> Section:
    """Numbers before and after on the same `images`."""
    heads = ", ".join(f"({layer}, {head})" for layer, head in after.heads) or "none"
    note = f"Heads removed (layer, head): {heads}. {len(images)} images of {images.name}."
    return Section("What changed?", change_table(before.numbers, after.numbers), note)


def change_table(
    before: Mapping[str, float], after: Mapping[str, float], *, title: str = ""
) -> Markup:
    """Numbers before and after, where both are known."""
    rows = []
    for name, first in before.items():
        if name in after and name != "compared images":
            change = fixed(after[name] - first, sign="+")
            rows.append((_named(name), fixed(first), fixed(after[name]), change))
    return table(rows, head=(title, "before", "after", "change"))


def heads_protocol(model: ImageModel, scores: HeadScores) -> Section:
    """How heads were scored."""
    options = {**scores.protocol["scored"]}
    assert scores.data is not None
    record = {"method": options.pop("by"), "options": options}
    return protocol_section([record | protocol(model, scores.data.images)])


def scores_rows(scores: HeadScores) -> list[dict[str, float]]:
    """One row for each scored head, the best first, and what the model is like without it."""
    columns = {"score": scores.value}
    if scores.error is not None:
        columns["standard error"] = scores.error
    columns |= {f"{name} without it": v for name, v in scores.after.items() if name != "response"}
    return [
        {"layer": at[0], "head": at[1], **{name: float(v[at]) for name, v in columns.items()}}
        for at in scores.order(positive=False)
    ]


# Discovered shortcuts.


def discover_sections(result: Discovery) -> list[Section]:
    """A card for each kind of patch, then the protocol."""
    body = verdict_box(["No kind of patch turns images into a class by more than chance."])
    if result.findings:
        body = cards_html([_finding(result, *place) for place in enumerate(result.findings, 1)])
    note = (
        "Each card is a kind of patch: examples of it, and what happens when it is pasted into an"
        " image that is predicted otherwise, beside a control (patches of other images in the same"
        " places). A part of the object does that rightly; anything else is a shortcut."
    )
    return [
        Section("Which kinds of patches turn images into which class?", body, note),
        *skipped_section(result.data.skipped),
        protocol_section([result.protocol]),
    ]


def _finding(result: Discovery, rank: int, finding: Finding) -> Card:
    from seecause.attribution.attribute import top_answers

    trial = int(finding.trials.flipped.double().argmax())  # the first that flipped
    shown = finding.trials.take(torch.tensor([trial]))
    images, recipient = result.data.images, int(shown.recipients[0])
    pair = torch.cat(
        [images[recipient : recipient + 1], shown.paste(images, shown.sources, shown.recipients)]
    )
    shots = [Shot("examples", thumbnail(example_sheet(result, finding)))]
    raw, answers = result.model.preprocess.raw(pair), top_answers(result.model, pair)
    for title, image, row in zip(("before", "with it"), raw, answers, strict=True):
        marked = [replace(answer, explained=answer.name == finding.name) for answer in row]
        shots.append(Shot(title, thumbnail(image), [("", marked)]))
    title = f"{rank}. {finding.name}: {finding.flips:.0%}, control {finding.control:.0%}"
    return Card(title, shots=shots, caption=f"{finding.sentence()}.")


def example_sheet(result: Discovery, finding: Finding, *, count: int = 9) -> Tensor:
    """Patches of a kind, each with its neighbours, in a sheet [3, h, w]; of an image the best."""
    from torchvision.utils import make_grid

    model, crops = result.model, dict[int, Tensor]()
    high, wide = model.patch
    for place, patch in finding.tokens.tolist():
        if place not in crops and len(crops) < count:
            row, column = divmod(patch, model.layout.grid[1])
            image = model.preprocess.raw(result.data.images[place]).float().cpu().clamp(0, 1)
            image = F.pad(image, [wide, wide, high, high], value=1.0)
            top, left = row * high, column * wide
            crops[place] = image[:, top : top + 3 * high, left : left + 3 * wide]
    across = math.ceil(math.sqrt(len(crops)))
    return make_grid(list(crops.values()), nrow=across, padding=1, pad_value=1.0)


def write_pairs(result: Discovery, places: Sequence[int], folder: Path) -> int:
    """Write the pairs of some findings as two folders, `with` and `without`, as
    `pairs:WITH:WITHOUT` takes them; returns their number. NAME~1.png and NAME~2.png are pairs of
    one image: a repair keeps them together."""
    from seecause.data.dataset import to_pil

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


# Parts of images that a network reads (iFAM).


def parts_section(examples: PartExamples) -> Section:
    """One card for each image: its parts, what stage 2 sees, and the prediction without each
    part."""
    net = examples.net
    assert net.preprocess is not None
    raw = net.preprocess.raw(examples.images)
    cards = [_part_card(examples, raw[index], index) for index in range(len(raw))]
    body = part("swatches", css_colours(net.parts)) + cards_html(cards)
    return Section("What can it look at?", body, note_of(net))


def _part_card(examples: PartExamples, raw: Tensor, index: int) -> Card:
    from seecause.faithful.evaluation import part_image

    output, classes = examples.output, examples.net.class_names
    maps, mask = output.maps[index], output.mask[index]

    def answers(logits: Tensor) -> list[tuple[str, list[Answer]]]:
        values, best = logits[index].double().softmax(dim=0).topk(min(2, logits.shape[1]))
        names = [classes[label] if classes else f"class {label}" for label in best.tolist()]
        return [("", list(map(Answer, names, values.tolist(), (True, False))))]

    seen = data_uri(display_image(seen_pixels(raw, mask)), photo=True)
    shots = [
        Shot("image", data_uri(display_image(raw), photo=True)),
        Shot("parts", data_uri(part_image(raw, maps))),
        Shot(f"selected: {float(mask.double().mean()):.0%}", seen, answers(output.logits)),
    ]
    base, flips = int(output.logits[index].argmax()), list[str]()
    for number_, without in examples.without.items():
        if changed := int(without.logits[index].argmax()) != base:
            flips.append(str(number_))
        image = data_uri(part_image(raw, maps, removed=[number_]))
        shots.append(Shot(f"without part {number_}", image, answers(without.logits), changed))
    end = f"changes without part {', '.join(flips)}" if flips else "whichever part is removed"
    empty = "no patch is selected: the prediction says nothing about the image"
    return Card(
        examples.titles[index],
        shots=shots,
        caption=f"prediction: {answers(output.logits)[0][1][0].name}; {end}",
        warnings=[empty] if bool(output.empty[index]) else [],
    )


def note_of(net: IFAM) -> str:
    """The guarantees of this network's mask, and their limits."""
    return sentences("mask", net=net)[0]


def css_colours(parts: int) -> list[str]:
    """The colours of parts, as CSS names them."""
    from matplotlib.colors import to_hex

    from seecause.faithful.evaluation import part_colours

    return [to_hex(colour) for colour in part_colours(parts).tolist()]


def seen_pixels(raw: Tensor, mask: Tensor) -> Tensor:
    """The image [3, H, W] with hidden patches grey."""
    from seecause.faithful.evaluation import mask_pixels

    return torch.where(mask_pixels(mask[None], (raw.shape[1], raw.shape[2])), raw, 0.5)


def part_sentences(examples: PartExamples) -> list[str]:
    """How many predictions change without each part."""
    predicted = examples.output.logits.argmax(dim=1)
    lines = []
    for part_, without in examples.without.items():
        changed = int((without.logits.argmax(dim=1) != predicted).sum())
        lines.append(f"part {part_}: {changed} of {len(predicted)} predictions change without it")
    return lines


def known_rows(columns: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Numbers by name, one column for each mapping; a dash where one is not known."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return [[n, *(fixed(c.get(n, math.nan), 4) for c in columns.values())] for n in names]
