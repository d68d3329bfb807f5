"""The page of a study over many samples: which heads are used how often, whether the rankings hold,
what groups samples, and where the effect comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from markupsafe import Markup
from torch import Tensor

from seecause._files import write_atomic
from seecause.bench.lvlm_table import LVLMStudy, TokenMaps, to_csv, token_maps
from seecause.data.dataset import Dataset
from seecause.lvlm import LVLM, HeadGroups, importance_map
from seecause.lvlm.analysis import STRONG, correlations
from seecause.lvlm.trace import RANKINGS
from seecause.metrics import standard_error, summarise
from seecause.report.cards import Card, MapView, Strip, grid_of, head_grids, render_cards
from seecause.report.charts import (
    HEIGHT,
    LEFT,
    LETTER,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    padded,
    styled,
)
from seecause.report.lvlm import curves_section, depth_chart, prompt_words
from seecause.report.overlay import data_uri, grid_image, scale_of
from seecause.report.page import Section, chart_row, fragment, table, warnings, write_page

GALLERY, COLUMN = 8, 4  # pictures shown, and under one another


def write_study(
    folder: Path,
    study: LVLMStudy,
    *,
    lvlm: LVLM,
    question: str,
    data: Dataset,
    wordings: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> list[Path]:
    """index.html and samples.csv in the folder of a study; `notes` stand on top of the page."""
    sections = []
    if study.traced:
        maps = token_maps(study, lvlm, data, question, GALLERY)
        sections = [
            importance_section(study, notes),
            study_curves_section(study),
            *wordings_section(study, wordings),
            *ratios_section(study),
            *groups_section(study),
            *text_section(study),
            *gallery_section(study, maps),
        ]
    lead = f"{len(study.traced)} of {len(study.samples)} samples of {data.name}. {question}"
    title = f"Which heads of {lvlm.name} carry the picture?"
    page, rows = folder / "index.html", folder / "samples.csv"
    write_page(page, title, [*sections, holes_section(study)], lead=lead)
    write_atomic(rows, to_csv(study))
    return [page, rows]


def importance_section(study: LVLMStudy, notes: Sequence[str] = ()) -> Section:
    """How often each head is one of the fewest that are enough, beside mean coefficient and
    attention."""
    coefficients, attention = study.stacked("coefficients"), study.stacked("attention")
    often = importance_map(study.stacked("chosen").reshape(attention.shape))
    grids = [
        grid_of("share of samples where this head is one of the fewest that are enough", often),
        grid_of("mean coefficient", coefficients.mean(dim=0)),
        grid_of("mean attention on the picture", attention.mean(dim=0)),
    ]
    facts = [
        ("R² on unseen masks", _mean(study.column("r2"))),
        ("correlation on unseen masks", _mean(study.column("pearson"))),
        ("agreement of two halves", _mean(study.column("split_half"))),
        ("standard error of a coefficient", _mean(study.column("standard_error"), 4)),
        (
            "correlation of coefficients with attention",
            _mean(correlations(coefficients, attention)),
        ),
        ("largest coefficient of any head", _mean(coefficients.flatten(1).max(dim=1).values)),
        *_head_groups(study),
    ]
    note = (
        "Mean ± standard error over samples. If attention told which heads matter, the grids would"
        " look alike."
    )
    layers = coefficients.sum(dim=2)  # [S, L]
    charts = [depth_chart(layers.mean(dim=0), standard_error(layers))]
    groups = study.head_groups()
    if groups is not None:
        charts.append(heads_heat(study, groups))
    body = warnings(notes) + head_grids(grids) + table(facts)
    body += chart_row(charts)
    return Section("Which heads are used?", body, note, short="Heads")


def heads_heat(study: LVLMStudy, groups: HeadGroups) -> Markup:
    """Heads that matter somewhere, alike beside alike, and the samples in which they do, by
    class."""
    labels = [sample.label or "" for sample in study.traced]
    samples = sorted(range(len(labels)), key=lambda place: (labels[place], place))
    order = groups.order[groups.groups[groups.order].argsort(stable=True)]  # by group, then tree
    heat = groups.vectors[order][:, samples]  # [K, S]
    row = max(12.0, min(22.0, HEIGHT / len(order)))
    high, wide, top = row * len(order), WIDTH - LEFT - RIGHT, 20
    named = [groups.heads[place] for place in order.tolist()]
    rows = [(top + row * (k + 0.5), str(head)) for k, head in enumerate(named)]
    columns, step = [], wide / len(samples)
    for name in dict.fromkeys(labels[place] for place in samples):
        places = [k for k, place in enumerate(samples) if labels[place] == name]
        if step * len(places) >= LETTER * len(name):
            columns.append((LEFT + step * (places[0] + len(places) / 2), name))
    always = int((groups.groups == 0).sum())
    return fragment(
        "heat.svg.j2", title="heads over samples, in two groups", rows=rows, columns=columns,
        image=data_uri(grid_image(heat, scale_of(heat, signed=True))), rules=[top + row * always],
        left=LEFT, top=top, wide=wide, high=high, width=WIDTH, height=top + high + 4,
        note=f"rows: heads (layer, head) whose coefficient passes {STRONG} in some sample, alike"
        " beside alike; columns: samples by class. Red for, blue against; the line parts the"
        " groups.",
    )  # fmt: skip


def wordings_section(study: LVLMStudy, wordings: Sequence[str]) -> list[Section]:
    """Whether the same question in other words uses the same heads."""
    ceiling = study.column("ceiling")
    if not len(ceiling):
        return []
    rows = [
        (wording, _mean(study.column(f"cosine_wording_{place}")))
        for place, wording in enumerate(wordings, 1)
    ]
    rows.append(("the first wording again, on fresh masks", _mean(ceiling)))
    note = (
        "Cosine of the coefficients with those of the first wording, for the same answer. The last"
        " row is what masks alone allow: near it, the wording changes nothing."
    )
    body = table(rows, head=("wording", "cosine"))
    return [Section("Do other wordings use the same heads?", body, note, short="Wordings")]


def ratios_section(study: LVLMStudy) -> list[Section]:
    """Whether the share of ablated heads matters."""
    prefix = "cosine_p_"
    names = dict.fromkeys(name for sample in study.traced for name in sample.numbers)
    shares = sorted((n.removeprefix(prefix) for n in names if n.startswith(prefix)), key=float)
    if not shares:
        return []
    columns = {"cosine": 3, "r2": 3, "enough": 1, "needed": 1}
    rows = [
        (share, *(_mean(study.column(f"{name}_p_{share}"), d) for name, d in columns.items()))
        for share in shares
    ]
    head = ("ablated", "cosine", "R² on unseen masks", "heads enough", "heads needed")
    note = "Coefficients with other shares of heads ablated, beside those above (cosine)."
    body = table(rows, head=head)
    return [Section("Does the share of ablated heads matter?", body, note, short="Shares")]


def _head_groups(study: LVLMStudy) -> list[tuple[str, str]]:
    groups = study.head_groups()
    if groups is None:
        return []
    parts = []
    for use in map(groups.use, (0, 1)):
        heads = "heads" if len(use) > 1 else "head"
        parts.append(f"{len(use)} {heads} in {float(use.mean()):.0%} of the samples")
    return [(f"coefficients over {STRONG}, in two clusters of heads", ", ".join(parts))]


def study_curves_section(study: LVLMStudy) -> Section:
    counts = {}
    for name in RANKINGS:
        enough, needed = study.column(f"enough_{name}"), study.column(f"needed_{name}")
        counts[name] = (_mean(enough, 1), _mean(needed, 1))
    return curves_section(study.curves(), counts)


def groups_section(study: LVLMStudy) -> list[Section]:
    """Samples by their heads (t-SNE), coloured by class, with numbers; none where classes or
    samples are too few."""
    groups = study.class_groups()
    if groups is None:
        return []
    numbers = groups.grouping
    facts = [
        ("neighbours of the same class", f"{numbers.purity:.2f} (by chance {numbers.chance:.2f})"),
        ("silhouette by class", f"{numbers.silhouette:.2f}"),
    ]
    note = (
        "Each dot is a sample, placed by the coefficients of all heads. Dots of one colour"
        " together: the model uses other heads for other classes."
    )
    dots = scatter(groups.points, groups.labels, title="samples by their heads (t-SNE)")
    body = dots + table(facts)
    return [Section("Do classes use heads of their own?", body, note, short="Classes")]


def text_section(study: LVLMStudy) -> list[Section]:
    if study.text is None:
        return []
    deltas = study.stacked("deltas").mean(dim=0)
    with_tokens = [sample for sample in study.traced if "gamma" in sample.tensors]
    images = with_tokens[0].tensors["gamma"].numel() if with_tokens else None
    body = prompt_words(study.pieces, deltas, study.text, answer="answer", images=images)
    note = (
        "Mean share of the effect that is lost when the picture may not reach a word. Framed words"
        " are those that matter"
    )
    ending = "; they are kept for image tokens." if images else " (no image tokens were asked for)."
    if len(study.column("sufficiency")):
        body += table([("kept words alone bring", _mean(study.column("sufficiency")))])
    return [Section("Into which words?", body, note + ending, short="Words")]


def gallery_section(study: LVLMStudy, maps: Sequence[TokenMaps]) -> list[Section]:
    """Where the effect comes from: the first pictures, and numbers over all of them."""
    if not maps:
        return []
    strips = []
    for sample in maps:
        named = {"image tokens": sample.coefficients, "weighted attention": sample.weighted}
        views = [MapView(name, values, scale_of(values)) for name, values in named.items()]
        strips.append(Strip(sample.picture, views, label=sample.label))
    cards = []
    for start in range(0, len(strips), COLUMN):
        column = strips[start : start + COLUMN]
        cards.append(Card(f"pictures {start + 1} to {start + len(column)}", column))
    named_columns = {
        "correlation of image tokens with weighted attention": "token_attention",
        "R² on unseen masks": "token_r2",
        "agreement of two halves": "token_split_half",
    }
    if len(study.column("object_share")):
        named_columns |= {
            "share of the positive effect on the object": "object_share",
            "share of weighted attention on the object": "weighted_object_share",
            "share of the picture that the object is": "object_area",
        }
    rows = [(title, _mean(study.column(column))) for title, column in named_columns.items()]
    total = sum("gamma" in sample.tensors for sample in study.traced)
    note = f"The first {len(maps)} pictures; numbers are means ± standard errors over all {total}."
    body = table(rows) + render_cards(cards)
    return [Section("From where in the picture?", body, note, short="Pictures")]


def holes_section(study: LVLMStudy) -> Section:
    holes = [(sample.id, "", sample.hole) for sample in study.samples if sample.hole]
    rows = holes or [("nothing is missing", f"{len(study.samples)} samples", "")]
    return Section("Holes", table(rows))


def scatter(points: Tensor, labels: Sequence[str], *, title: str) -> Markup:
    """Points [S, 2], one colour a label."""
    x = Axis(*padded(points[:, 0].tolist()), LEFT / 4, WIDTH - RIGHT)
    y = Axis(*padded(points[:, 1].tolist()), HEIGHT - TOP, TOP)
    looks = styled(list(dict.fromkeys(labels)))
    groups = []
    for name, (colour, _) in looks.items():
        own = points[torch.tensor([label == name for label in labels])].tolist()
        groups.append((name, colour, [(x.at(a), y.at(b)) for a, b in own]))
    dots = fragment("scatter.svg.j2", title=title, groups=groups, width=WIDTH, height=HEIGHT)
    keys = {name: (colour, "") for name, (colour, _) in looks.items()}
    return chart_row([dots], keys)


def _mean(values: Tensor, digits: int = 3) -> str:
    """Mean and standard error."""
    return summarise(values).text(digits)
