"""Pages about heads: what an audit found, the grid of scores, curves against the number of heads
removed, and tables of studies."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from markupsafe import Markup

from seecause.heads.ablation_study import StudyTable
from seecause.heads.audit import Audit
from seecause.heads.gains import FEW
from seecause.heads.outcomes import Curve, Outcome
from seecause.heads.pictures import Pictures
from seecause.heads.registry import selectors
from seecause.heads.scores import Head, HeadScores
from seecause.report.cell import Cell
from seecause.report.charts import COLOURS, DASHES, GREY, Series, chart
from seecause.report.forest import Difference, forest
from seecause.report.heads_words import (
    AUDITED,
    GAINS,
    LOOKS_NOTE,
    looks_terms,
    outcome_terms,
    spelled,
)
from seecause.report.overlay import number
from seecause.report.page import Section, fragment

WRITTEN = 16  # heads in a row that still have room for their numbers
MAIN = ("accuracy", "worst group", "flips")  # what charts show beside BIR
DRAWN = "as many random heads: mean and standard deviation of draws"
X = {"K": "K, heads removed at most"}  # axes of studies in words
RANDOM, SPREAD = ", random", ", random sd"  # endings of columns of studies
CIGMA_NOTE = (
    "Orange heads make the answer hang on the background: without them it hangs less. Blue heads do"
    " the opposite."
)
GRID_NOTE = "Hover for standard errors and for what else the head's removal does."


@dataclass(frozen=True, eq=False)
class ScoreGrid:
    """Scores of layer x head; `chosen` heads are outlined."""

    title: str
    scores: HeadScores
    chosen: Sequence[Head] = ()
    key: str = ""

    @property
    def width(self) -> int:
        return self.scores.value.shape[1]

    def rows(self) -> list[list[Cell]]:
        return [
            [self._cell(layer, head) for head in range(self.width)]
            for layer in range(len(self.scores.value))
        ]

    @cached_property
    def most(self) -> float:
        """The largest score by size."""
        finite = self.scores.value[self.scores.value.isfinite()].abs()
        return float(finite.max()) if len(finite) else 0.0

    @property
    def power(self) -> int:
        """Numbers in the cells are multiples of ten to this: the largest has two digits."""
        return min(0, int(f"{self.most:.1e}".partition("e")[2]) - 1) if self.most > 0 else 0

    @property
    def unit(self) -> str:
        """What the numbers in the cells are multiples of, in words."""
        return (
            f"numbers are multiples of {number(10.0**self.power)}"
            if self.power < 0 and self.width <= WRITTEN
            else ""
        )

    def _cell(self, layer: int, head: int) -> Cell:
        value = float(self.scores.value[layer, head])
        if value != value:
            return Cell(0, "none", "", f"layer {layer}, head {head}: no such head, or not scored")
        where = f"layer {layer}, head {head}"
        if value == -torch.inf:
            return Cell(
                0,
                "none",
                "stays" if self.width <= WRITTEN else "",
                f"{where}: must stay, its removal costs too much",
            )
        spread = torch.nan if self.scores.error is None else float(self.scores.error[layer, head])
        error = f" ± {number(spread)}" if spread == spread else ""
        told = [
            f"{name} {number(float(table[layer, head]))}"
            for name, table in self.scores.after.items()
            if name != "response"
        ]
        text = f"{value * 10**-self.power:z.0f}" if self.width <= WRITTEN else ""
        without = f"; without it: {', '.join(told)}" if told else ""
        strength = round(90 * abs(value) / self.most) if self.most > 0 else 0
        return Cell(
            strength,
            "for" if value > 0 else "against",
            text,
            f"{where}: {number(value)}{error}{without}",
            (layer, head) in self.chosen,
        )


def verdict_section(
    found: Audit,
    said: Sequence[str] | None = None,
    *,
    title: str = "What was found",
    explained: bool = True,
) -> Section:
    """The conclusion in plain words (`said`, or the audit's own), and every measurement behind it;
    its terms are `explained` once on a page."""
    rows = []
    for name, gains in found.means.items():
        values = (float(gains.fig.mean()), float(gains.big.mean()), gains.bir_ratio_of_means)
        more = (
            f"{gains.bir_mean_of_ratios:.3f}",
            f"{int(gains.degenerate.sum())} of {len(gains.big)}",
            number(gains.noise_floor),
        )
        rows.append(
            (
                name,
                *("-" if value != value else f"{value:.3f}" for value in values),
                gains.interval_text().replace(" to ", "\u00a0to\u00a0"),
                *more,
            )
        )
    head = (
        "taken away by",
        "FIG",
        "BIG",
        "BIR (of means)",
        "its 95 % interval",
        "BIR (mean of ratios)",
        "degenerate",
        "noise floor",
    )
    marked = [list(found.gains).index(found.trusted)]
    body = fragment(
        "heads_verdict.html.j2", verdict=found.verdict() if said is None else said
    ) + table(rows, head=head, marked=marked)
    counted = (
        "all pictures"
        if found.counted is None
        else (
            f"the {int(found.counted.sum())} of {len(found.counted)} pictures that are answered"
            " right"
        )
    )
    overlap = (
        {}
        if found.overlap is None
        else {
            "IoU": (
                "intersection over union of two masks: 1 where they are the same, 0 where they do"
                " not meet"
            )
        }
    )
    terms = GAINS | looks_terms(found.gains) | AUDITED | overlap if explained else {}
    return Section(
        title,
        body,
        f"{LOOKS_NOTE if explained else 'The same of another model.'} Means over {counted}.",
        terms,
    )


def groups_section(found: Audit) -> list[Section]:
    """Right answers by group: first code down, second code across, by the data's own names. None
    without groups."""
    if found.groups is None:
        return []
    groups, names, places = found.groups, found.cases.objects, found.cases.places
    cells = {
        group: _right(*numbers)
        for group, *numbers in zip(
            groups.groups,
            groups.right.tolist(),
            groups.total.tolist(),
            groups.intervals().tolist(),
            strict=True,
        )
    }
    if all(len(group) == 2 for group in groups.groups) and len(groups.groups) > 2:
        down, across = (sorted({group[code] for group in groups.groups}) for code in (0, 1))
        corner, head = (
            "object",
            [places[code] if code < len(places) else f"background {code}" for code in across],
        )
        nothing = Cell(0, "none", "", "no picture")
        rows = [
            (names[f] if f < len(names) else str(f), [cells.get((f, b), nothing) for b in across])
            for f in down
        ]
    else:
        corner, head, rows = (
            "group",
            ["right answers"],
            [(str(group), [cell]) for group, cell in cells.items()],
        )
    fewest, most = int(groups.total.min()), int(groups.total.max())
    sizes = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    note = (
        f"Right answers by group, darker where there are more. Average {groups.average:.3f}, mean"
        f" of groups {groups.unweighted_average:.3f}"
    )
    if fewest < FEW:
        note += (
            f". Groups have {sizes} picture{'s' * (most != 1)} each: too few to tell the accuracy"
            " of one; read rows and columns, or audit more pictures"
        )
    else:
        note += (
            f", worst group {groups.worst:.3f}; {sizes} pictures a group, hover for 95 % intervals"
        )
    body = fragment("shaded.html.j2", corner=corner, names=head, rows=rows)
    return [
        Section(
            "Who pays for it?",
            body,
            f"{note}. A shortcut fails where object and background disagree.",
        )
    ]


def _right(right: int, total: int, span: Sequence[float]) -> Cell:
    said = f"accuracy {right / total:.2f}, 95 % interval {span[0]:.2f} to {span[1]:.2f}"
    return Cell(round(60 * right / total), "for", f"{right} of {total}", said)


def scores_section(
    scores: HeadScores,
    *,
    by: str,
    chosen: Sequence[Head] = (),
    title: str = "Which heads carry the background?",
    note: str | None = None,
) -> Section:
    """The grid of layer x head. Without `note`, what the selector `by` scores is said."""
    unknown = "hatched: not measured" if bool(scores.value.isnan().any()) else ""
    key = "; ".join(
        said
        for said in ("outlined: removed" if chosen else "", unknown, ScoreGrid("", scores).unit)
        if said
    )
    grid = ScoreGrid(f"score of each head, by {by}", scores, chosen, key=key)
    return Section(
        title, fragment("head_grid.html.j2", grids=[grid]), _grid_note(by) if note is None else note
    )


def curves_section(
    found: Curve, *, by: str, title: str = "What do more removed heads do?"
) -> Section:
    """Accuracy, worst group, flips and BIR against K, each with the band of random sets. All are
    shares, drawn from zero."""
    numbers = [outcome.numbers() for outcome in found.chosen]
    shown = [name for name in numbers[0] if name in MAIN or name.startswith("BIR")]
    looks = {f"heads chosen by {by}": (COLOURS[0], ""), DRAWN: (GREY, DASHES[1])}
    charts = []
    for name in shown:
        band = found.band(name)
        random = Series(
            "random",
            found.ks,
            [mean for mean, _ in band],
            [spread for _, spread in band],
            GREY,
            DASHES[1],
        )
        chosen = Series(by, found.ks, [row[name] for row in numbers], (), COLOURS[0])
        charts.append(
            chart(
                [random, chosen],
                title=spelled(name),
                x_title="heads removed at most",
                y_title="share",
                share=True,
            )
        )
    note = (
        "A repair raises the worst group and lowers BIR and flips more than random removals do, at"
        " no cost in accuracy. Heads with scores of 0 or less stay. BIR here is of all test"
        " pictures, right or wrong, so that the same ones are compared before and after; an audit"
        " takes right answers only."
    )
    return Section(title, fragment("bench_charts.html.j2", charts=charts, keys=looks), note)


def change_section(
    before: Outcome,
    after: Outcome,
    cases: Pictures,
    *,
    gaps: Sequence[float] = (),
    title: str = "What changed?",
) -> Section:
    """Numbers before and after, on the same pictures, `cases`; `gaps` are the BG-gaps before and
    after."""
    first, second = changes(before, after, gaps)
    shown = [key for key in first if key in second and key != "removed"]
    rows = [
        (spelled(key), f"{first[key]:.3f}", f"{second[key]:.3f}", _change(second[key] - first[key]))
        for key in shown
    ]
    heads = ", ".join(f"({layer}, {head})" for layer, head in after.heads) or "none"
    note = (
        f"Heads removed (layer, head): {heads}. {len(cases)} pictures of {cases.name}, with the"
        " same masks before and after. Arrows show where better is."
    )
    fewest = min(Counter(cases.groups).values(), default=FEW) if cases.grouped else FEW
    note += (
        f" The smallest group has {fewest} picture{'s' * (fewest != 1)}: the accuracy of the worst"
        " says little."
        if fewest < FEW
        else ""
    )
    return Section(
        title, table(rows, head=("", "before", "after", "change")), note, outcome_terms(shown)
    )


def _change(value: float) -> str:
    return f"{value:+.3f}" if round(value, 3) else "none"


def changes(
    before: Outcome, after: Outcome, gaps: Sequence[float] = ()
) -> tuple[dict[str, float], dict[str, float]]:
    """The numbers of two outcomes by name, with BG-gaps where they were measured."""
    first, second = before.numbers(), after.numbers()
    return (first | {"BG-gap": gaps[0]}, second | {"BG-gap": gaps[1]}) if gaps else (first, second)


def study_section(found: StudyTable) -> Section:
    """Charts of the main columns, along `x` or as differences to the first row, and a table. What
    random heads do is in the charts and the CSV."""
    looks = {"chosen heads": (COLOURS[0], ""), DRAWN: (GREY, DASHES[1])}
    columns = [name for name in found.columns if not name.endswith((RANDOM, SPREAD))]
    first = columns[0]
    charts = []
    for name in columns:
        known = [row for row in found.rows if name in row]
        if name not in MAIN and not name.startswith(("BIR", "rank")):
            continue
        if found.x is None:
            rows = [
                Difference(str(row[first]), float(row[name]) - float(known[0][name]), math.nan)
                for row in known[1:]
            ]
            charts.append(
                forest(rows, title=spelled(name), x_title=f"difference to {known[0][first]}")
            )
            continue
        along = [row[found.x] for row in known]
        series = [
            Series(
                "chosen heads",
                along,
                [float(row[name]) for row in known],
                (),
                *looks["chosen heads"],
            )
        ]  # type: ignore[arg-type]
        if name + RANDOM in found.columns:
            means, spreads = (
                [float(row[name + ending]) for row in known] for ending in (RANDOM, SPREAD)
            )
            series.insert(0, Series("random heads", along, means, spreads, *looks[DRAWN]))  # type: ignore[arg-type]
        charts.append(
            chart(
                series,
                title=spelled(name),
                x_title=X.get(found.x, found.x),
                y_title=name if name.startswith("rank") else "share",
                share=True,
            )
        )
    cells = [
        (f"{row[first]}", *(_shown(row.get(name, "")) for name in columns[1:]))
        for row in found.rows
    ]
    keys = looks if any(name.endswith(RANDOM) for name in found.columns) else {}
    note = (
        found.note
        if found.x is not None
        else f"{found.note} Differences are of single runs, without intervals."
    )
    body = fragment("bench_charts.html.j2", charts=charts, keys=keys) + table(cells, head=columns)
    return Section(found.question, body, note.strip(), outcome_terms(columns))


def table(
    rows: Iterable[Sequence[str]], *, head: Sequence[str] = (), marked: Sequence[int] = ()
) -> Markup:
    return fragment("facts.html.j2", rows=list(rows), head=head, marked=marked)


def audit_csv(found: Audit, names: Sequence[str]) -> str:
    """One line for each picture."""
    answers = found.logits.argmax(dim=1).tolist()
    rows = []
    for place, picture in enumerate(found.cases.ids):
        row: dict[str, str | float] = {
            "picture": picture,
            "answer": names[answers[place]] if answers[place] < len(names) else str(answers[place]),
        }
        if found.cases.labels is not None:
            label = int(found.cases.labels[place])
            row["label"] = names[label] if label < len(names) else str(label)
        if found.cases.grouped:
            row["group"] = " ".join(map(str, found.cases.groups[place] or ()))
        if found.overlap is not None:
            row["IoU"] = float(found.overlap[place])
        if found.flips is not None:
            row["flips"] = int(found.flips[place])
        for look, gains in found.gains.items():
            row |= {
                f"FIG, {look}": float(gains.fig[place]),
                f"BIG, {look}": float(gains.big[place]),
                f"BIR, {look}": float(gains.bir[place]),
            }
        rows.append(row)
    return rows_csv(rows)


def scores_csv(scores: HeadScores) -> str:
    """One line for each head that was scored, the best first; then what the model is like without
    it."""
    order = [
        *scores.order(positive=False),
        *((int(a), int(b)) for a, b in (scores.value == -torch.inf).nonzero()),
    ]
    rows = []
    for layer, head in order:
        row: dict[str, str | float] = {
            "layer": layer,
            "head": head,
            "score": float(scores.value[layer, head]),
        }
        if scores.error is not None:
            row["standard error"] = float(scores.error[layer, head])
        rows.append(
            {
                **row,
                **{
                    f"{name} without it": float(values[layer, head])
                    for name, values in scores.after.items()
                    if name != "response"
                },
            }
        )
    return rows_csv(rows)


def rows_csv(rows: Sequence[Mapping[str, str | float]]) -> str:
    """CSV of rows that may lack columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _grid_note(by: str) -> str:
    """CIGMA's colours speak of the background; other selectors score other things."""
    if by == "cigma":
        return f"{CIGMA_NOTE} {GRID_NOTE}"
    known = selectors()
    return (
        f"{by}: {known[by].summary} The highest (orange) are removed first. {GRID_NOTE}"
        if by in known
        else GRID_NOTE
    )


def _shown(value: str | float) -> str:
    return f"{value}" if isinstance(value, str | int) else f"{value:.3f}"
