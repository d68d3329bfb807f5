"""Pages about heads: the grid of scores, curves against the number of heads removed, numbers and
answers before and after, and tables of studies; what the short names on them mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seecause import __version__
from seecause.background._outcomes import ELSEWHERE, Curve, Examples, Outcome, changes
from seecause.background.erase import Erasure
from seecause.background.gains import FEW
from seecause.background.heads import Head, HeadScores, selectors
from seecause.background.images import Pictures
from seecause.models.base import ImageModel
from seecause.report.cards import WRITTEN, GridCell, HeadGrid, Shot, ShotCard, head_grids
from seecause.report.charts import COLOURS, DASHES, GREY, Series, chart
from seecause.report.folder import rows_csv
from seecause.report.overlay import number, thumbnail
from seecause.report.page import AGAIN, Section, chart_row, fragment, protocol_table, table
from seecause.target import Answer, best_answers, spread

MAIN = ("accuracy", "worst group", "flips")  # what charts show beside BIR
DRAWN = "as many random heads: mean and standard deviation of draws"
LINES = {"chosen heads": (COLOURS[0], ""), DRAWN: (GREY, DASHES[1])}
X = {"K": "K, heads removed at most"}  # axes of studies in words
RANDOM, SPREAD = ", random", ", random sd"  # endings of columns of studies
CIGMA_NOTE = (
    "Orange heads make the answer hang on the background: without them it hangs less. Blue heads do"
    " the opposite."
)
CURVES_NOTE = (
    "A repair raises the worst group and lowers BIR and flips more than random removals do, at no"
    " cost in accuracy. Heads with scores of 0 or less stay. BIR here is of all test pictures; an"
    " audit takes right answers only."
)
GRID_NOTE = "Hover for standard errors and for what else the head's removal does."
REPAIR_NOTE = "The bold answer is the true class: a repair keeps it whatever the background."
EVIDENCE = "its evidence"
VERSIONS = {
    EVIDENCE: "the discovered mask: the part of the picture that the model keeps its answer with",
    "no background, no object": "cut out with {masks} and filled ({fill})",
    ELSEWHERE: "the same object drawn with another background",
}
GAINS = {
    "FIG": (
        "foreground information gain: how far the answer moves when the object goes (Jensen-Shannon"
        " divergence in nats: 0 not at all, 0.69 at most)"
    ),
    "BIG": "background information gain: how far the answer moves when the background goes",
    "BIR": (
        "background's share, BIG / (FIG + BIG): 0 answers from the object, 1 from the background."
        " Of the averages (ratio of means: what gates and verdicts judge), or averaged by picture"
        " (mean of ratios)"
    ),
}
ERASURES = {  # each by what its name has in it
    "discovered masks": (
        "found by search: the part of the picture that the model keeps its answer with, which need"
        " not be the object"
    ),
    "true masks": "come with the data and are the object",
    "mean": "the gap is filled with the picture's own mean colour",
    "grey": "the gap is filled with the mean colour of the training set",
    "blur": "the gap is filled with the picture, blurred",
    "noise": "the gap is filled with noise",
    "exact swap": (
        "the same picture drawn again with another background, or with another object: nothing is"
        " cut out"
    ),
}
OUTCOMES = {  # names of numbers before and after: in words, and whether higher or lower is better
    "accuracy": ("accuracy", "↑"),
    "worst group": ("accuracy in the worst group", "↑"),
    "worst of groups (0, 1) and (1, 0)": ("accuracy in the worst of groups (0, 1) and (1, 0)", "↑"),
    "mean of groups": ("accuracy, mean of groups", "↑"),
    "groups weighted as in training": ("accuracy, groups weighted as in training", "↑"),
    "NLL": ("NLL", "↓"),
    "ECE": ("ECE", "↓"),
    "flips": ("flips", "↓"),
    "FIG": ("FIG", ""),
    "BIG": ("BIG", "↓"),
    "BIR": ("BIR", "↓"),
    "BG-gap": ("BG-gap", "↓"),
}
MEASURED = {
    "NLL": "negative log-likelihood, the surprise at the true class in nats",
    "ECE": "expected calibration error, how far confidence is from accuracy",
    "flips": "share of answers that change when the same object is drawn with another background",
    "BG-gap": "accuracy lost when the background is one of another class",
}


def score_grid(
    scores: HeadScores, *, title: str = "", chosen: Sequence[Head] = (), key: str = ""
) -> HeadGrid:
    """Scores of layer x head, as multiples of a power of ten by which the largest has two digits;
    `chosen` heads are outlined."""
    layers, heads = scores.value.shape
    finite = scores.value[scores.value.isfinite()].abs()
    most = float(finite.max()) if len(finite) else 0.0
    power = min(0, int(f"{most:.1e}".partition("e")[2]) - 1) if most > 0 else 0
    if power < 0 and heads <= WRITTEN:
        unit = f"numbers are multiples of {number(10.0**power)}"
        key = f"{key}; {unit}" if key else unit
    rows = []
    for layer in range(layers):
        places = [(layer, head) for head in range(heads)]
        rows.append([_cell(scores, place, most, power, place in chosen) for place in places])
    return HeadGrid(title, rows, key)


def _cell(scores: HeadScores, place: Head, most: float, power: int, chosen: bool) -> GridCell:
    value, where = float(scores.value[place]), f"layer {place[0]}, head {place[1]}"
    written = scores.value.shape[1] <= WRITTEN
    if value != value:
        return GridCell(0, "none", "", f"{where}: no such head, or not scored")
    if value == -torch.inf:
        must = f"{where}: must stay, its removal costs too much"
        return GridCell(0, "none", "stays" if written else "", must)
    spread = torch.nan if scores.error is None else float(scores.error[place])
    error = f" ± {number(spread)}" if spread == spread else ""
    after = {name: values for name, values in scores.after.items() if name != "response"}
    costs = ", ".join(f"{name} {number(float(values[place]))}" for name, values in after.items())
    without = f"; without it: {costs}" if costs else ""
    text = f"{value * 10**-power:z.0f}" if written else ""
    strength = round(90 * abs(value) / most) if most > 0 else 0
    about = f"{where}: {number(value)}{error}{without}"
    return GridCell(strength, "for" if value > 0 else "against", text, about, chosen)


def scores_section(scores: HeadScores, *, by: str, chosen: Sequence[Head] = ()) -> Section:
    """The grid of layer x head, and what the selector `by` scores."""
    outlined = "outlined: removed" if chosen else ""
    unknown = "hatched: not measured" if bool(scores.value.isnan().any()) else ""
    key = "; ".join(words for words in (outlined, unknown) if words)
    grid = score_grid(scores, title=f"score of each head, by {by}", chosen=chosen, key=key)
    title = "Which heads carry the background?" if by == "cigma" else "Which heads go first?"
    return Section(title, head_grids([grid]), _grid_note(by, scores))


def curves_section(
    line: Curve, *, by: str, title: str = "What do more removed heads do?"
) -> Section:
    """Accuracy, worst group, flips and BIR against K, each with the band of random sets. All are
    shares, drawn from zero."""
    numbers = [outcome.numbers() for outcome in line.chosen]
    charts, still = [], []
    for name in numbers[0]:
        if name not in MAIN and not name.startswith("BIR"):
            continue
        means, spreads = zip(*line.band(name), strict=True)
        if len({*means, *(row[name] for row in numbers)}) == 1:  # a flat line says one number
            still.append(f"{spelled(name)} stays at {means[0]:.2f}")
            continue
        random = Series("random", line.ks, means, spreads, *LINES[DRAWN])
        chosen = Series(by, line.ks, [row[name] for row in numbers], (), *LINES["chosen heads"])
        charts.append(
            chart(
                [random, chosen],
                title=spelled(name),
                x_title="heads removed at most",
                y_title="share",
                share=True,
            )
        )
    keys = {f"heads chosen by {by}": LINES["chosen heads"], DRAWN: LINES[DRAWN]}
    body = chart_row(charts, keys)
    unmoved = f" Not drawn, because nothing moves it: {'; '.join(still)}." if still else ""
    return Section(title, body, CURVES_NOTE + unmoved)


def change_section(
    before: Outcome,
    after: Outcome,
    pictures: Pictures,
    *,
    gaps: tuple[float, float] | None = None,
    title: str = "What changed?",
) -> Section:
    """Numbers before and after, on the same `pictures`; `gaps` are the BG-gaps before and after."""
    numbers = changes(before, after, gaps)
    rows = [
        (spelled(name), f"{first:.3f}", f"{second:.3f}", _change(second - first))
        for name, (first, second) in numbers.items()
    ]
    heads = ", ".join(f"({layer}, {head})" for layer, head in after.heads) or "none"
    note = (
        f"Heads removed (layer, head): {heads}. {len(pictures)} pictures of {pictures.name}, with"
        " the same masks before and after. Arrows show where better is."
    )
    fewest = min(Counter(pictures.groups).values(), default=FEW) if pictures.grouped else FEW
    if fewest < FEW:
        note += (
            f" The smallest group has {fewest} picture{'s' * (fewest != 1)}: the accuracy of the"
            " worst says little."
        )
    body = table(rows, head=("", "before", "after", "change"))
    return Section(title, body, note, outcome_terms(numbers))


def _change(value: float) -> str:
    return f"{value:+.3f}" if round(value, 3) else "none"


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
    rows = [(key, str(value)) for key, value in about.items() if value is not None]
    return Section("Protocol", protocol_table(rows), f"{AGAIN}.")


def scores_csv(scores: HeadScores) -> str:
    """One line for each head that was scored, the best first; then what the model is like without
    it."""
    stay = [(int(layer), int(head)) for layer, head in (scores.value == -torch.inf).nonzero()]
    after = {name: values for name, values in scores.after.items() if name != "response"}
    rows = []
    for layer, head in [*scores.order(positive=False), *stay]:
        row: dict[str, str | float] = {"layer": layer, "head": head}
        row["score"] = float(scores.value[layer, head])
        if scores.error is not None:
            row["standard error"] = float(scores.error[layer, head])
        for name, values in after.items():
            row[f"{name} without it"] = float(values[layer, head])
        rows.append(row)
    return rows_csv(rows)


def no_effect(scores: HeadScores) -> str:
    """Why scores by exchange are no shares, where what there is to share cannot be told from
    none."""
    if scores.protocol.get("mediated") != {}:
        return ""
    effect, error = (scores.protocol[name] for name in ("effect", "effect error"))
    count = scores.protocol["images"][0]
    versions = f"other versions of {count} picture{'s' * (count != 1)}"
    spread = "" if error is None else f" ± {number(error)}"
    return (
        f"there is no effect to share out: the {versions} move answers by"
        f" {number(effect)}{spread} nats, which cannot be told from none. Scores are nats"
    )


def _grid_note(by: str, scores: HeadScores) -> str:
    """CIGMA's colours speak of the background; other selectors score other things."""
    if by == "cigma":
        return f"{CIGMA_NOTE} {GRID_NOTE}"
    if nothing := no_effect(scores):
        return f"{by}: {nothing}. {GRID_NOTE}"
    registered = selectors()
    if by not in registered:
        return GRID_NOTE
    return f"{by}: {registered[by].summary} The highest (orange) are removed first. {GRID_NOTE}"


def erasure_terms(names: Iterable[str]) -> dict[str, str]:
    """What the ways to take a background away are, of those that occur in `names`."""
    there = " ".join(names)
    return {word: meaning for word, meaning in ERASURES.items() if word in there}


def outcome_terms(names: Iterable[str]) -> dict[str, str]:
    """What the numbers of an outcome mean, of those that occur in `names`, and what they were
    measured with."""
    kinds, how = zip(*(name.partition(", ")[::2] for name in names), strict=True)
    return {
        term: meaning for term, meaning in (MEASURED | GAINS).items() if term in kinds
    } | erasure_terms(how)


def spelled(name: str) -> str:
    """A number in words, with an arrow to where it is better; what it was measured with stands
    behind a comma."""
    kind, comma, how = (name, "", "") if name in OUTCOMES else name.partition(", ")
    words, better = OUTCOMES.get(kind, (kind, ""))
    return f"{words}{comma}{how} {better}".strip()


def repair_gallery(model: ImageModel, examples: Examples) -> Section:
    """Each version of each picture with the answers before and after heads go."""
    cards = [
        ShotCard(identity, version_shots(model, examples, i, ["before", "after"]))
        for i, identity in enumerate(examples.pictures.ids)
    ]
    title, body = "The same pictures, before and after", fragment("shots.html.j2", cards=cards)
    return Section(title, body, REPAIR_NOTE, version_terms(examples.versions, examples.erasure))


def version_shots(
    model: ImageModel, examples: Examples, place: int, when: Sequence[str]
) -> list[Shot]:
    """Every version of a picture, with what each model answers."""
    labels = examples.pictures.labels
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
    """What each model likeliest answers by its logits [C]; the true class is marked."""
    answers: list[tuple[str, Sequence[Answer]]] = []
    for word, row in zip(when, logits, strict=True):
        probabilities = spread(row[None].double(), "prob", sigmoid=model.sigmoid)
        (likeliest,) = best_answers(model, probabilities, count=2)
        marked = [replace(answer, explained=answer.name == truth) for answer in likeliest]
        answers.append((word, marked))
    return answers


def version_terms(versions: Iterable[str], erasure: Erasure | None) -> dict[str, str]:
    """What the versions that are shown are."""
    words = {"masks": "", "fill": ""}
    if erasure is not None and erasure.masks is not None:
        source = erasure.masks.source.replace("oracle", "true")
        words = {"masks": f"{source} masks", "fill": erasure.name.rpartition(", ")[2]}
    names = " ".join(versions)
    terms = {}
    for name, meaning in VERSIONS.items():
        if name.partition(",")[0] in names:
            terms[name] = meaning.format(**words)
    return terms
