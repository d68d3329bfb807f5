"""The page of a study over many samples: which heads are used how often, whether the rankings hold,
what groups samples, and where the effect comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from seecause._files import write_atomic
from seecause.bench.traces import Study, Traced, to_csv
from seecause.lvlm import (
    LVLM,
    RankingCurves,
    embed,
    group_heads,
    grouping,
    importance_map,
    picture_map,
    seen_picture,
)
from seecause.lvlm.analysis import STRONG, correlations
from seecause.lvlm.trace import RANKINGS
from seecause.metrics import Summary, summarise
from seecause.report.cards import Card, MapView, Strip, render_cards
from seecause.report.charts import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, padded, styled
from seecause.report.lvlm import HeadGrid, curves_section, prompt_words, table
from seecause.report.overlay import scale_of
from seecause.report.page import Section, fragment, write_page

GALLERY, COLUMN = 8, 4  # pictures shown, and under one another
FEWEST = 10  # samples that a map of samples needs


def write_study(
    folder: Path,
    study: Study,
    *,
    lvlm: LVLM,
    question: str,
    data: str,
    picture_of: Callable[[Traced], Image.Image],
) -> list[Path]:
    """report.html and samples.csv in the folder of a study."""
    sections = [holes_section(study)]
    if study.known:
        found = [
            importance_section(study),
            study_curves_section(study),
            *groups_section(study),
            *text_section(study),
        ]
        sections = [*found, *gallery_section(study, lvlm, question, picture_of), *sections]
    lead = f"{len(study.known)} of {len(study.samples)} samples of {data}. {question}"
    written = [
        write_page(
            folder / "report.html",
            f"Which heads of {lvlm.name} carry the picture?",
            sections,
            lead=lead,
        ),
        folder / "samples.csv",
    ]
    write_atomic(written[1], to_csv(study).encode())
    return written


def importance_section(study: Study) -> Section:
    """How often each head is one of the fewest that are enough, beside mean coefficient and
    attention."""
    coefficients, attention = study.stacked("coefficients"), study.stacked("attention")
    shape = attention.shape[1:]
    grids = [
        HeadGrid(
            "share of samples where this head is one of the fewest that are enough",
            importance_map(study.stacked("chosen").reshape(-1, *shape)),
        ),
        HeadGrid("mean coefficient", coefficients.mean(dim=0)),
        HeadGrid("mean attention on the picture", attention.mean(dim=0)),
    ]
    facts = [
        ("R² on unseen masks", spelled(summarise(study.column("r2")))),
        ("correlation on unseen masks", spelled(summarise(study.column("pearson")))),
        ("agreement of two half fits", spelled(summarise(study.column("split_half")))),
        (
            "correlation of coefficients with attention",
            spelled(summarise(correlations(coefficients, attention))),
        ),
        (
            "largest coefficient of any head",
            spelled(summarise(coefficients.flatten(1).max(dim=1).values)),
        ),
        *_head_groups(coefficients),
    ]
    note = (
        "Mean ± standard error over samples. If attention told which heads matter, the grids would"
        " look alike."
    )
    return Section(
        "Which heads are used?", fragment("head_grid.html.j2", grids=grids) + table(facts), note
    )


def _head_groups(coefficients: Tensor) -> list[tuple[str, str]]:
    """Heads that matter somewhere, in two clusters by the samples they matter in; nothing where
    there are too few."""
    if int((coefficients > STRONG).any(dim=0).sum()) <= 2 or len(coefficients) < FEWEST:
        return []
    found = group_heads(coefficients)
    said = [
        f"{len(use)} {'heads' if len(use) > 1 else 'head'} in {float(use.mean()):.0%} of the"
        " samples"
        for use in map(found.use, (0, 1))
    ]
    return [(f"coefficients over {STRONG}, in two clusters of heads", ", ".join(said))]


def study_curves_section(study: Study) -> Section:
    curves = {
        name: RankingCurves(
            study.stacked(f"faithfulness.{name}"), study.stacked(f"completeness.{name}")
        )
        for name in RANKINGS
    }
    counts = {
        name: (
            spelled(summarise(study.column(f"enough_{name}")), 1),
            spelled(summarise(study.column(f"needed_{name}")), 1),
        )
        for name in RANKINGS
    }
    return curves_section(curves, counts)


def groups_section(study: Study) -> list[Section]:
    """Samples by their heads (t-SNE), coloured by class, with numbers; none where classes or
    samples are too few."""
    labels = [sample.label for sample in study.known]
    kinds = [label for label in dict.fromkeys(labels) if label is not None]
    if len(labels) < FEWEST or None in labels or not 2 <= len(kinds) < len(labels):
        return []
    vectors = study.stacked("coefficients").flatten(1)
    found = grouping(vectors, labels, neighbours=min(5, len(labels) - 1))
    facts = [
        ("neighbours of the same class", f"{found.purity:.2f} (by chance {found.chance:.2f})"),
        ("silhouette by class", f"{found.silhouette:.2f}"),
    ]
    note = (
        "Each dot is a sample, placed by the coefficients of all heads. Dots of one colour"
        " together: the model uses other heads for other classes."
    )
    drawn = scatter(
        embed(vectors), [str(label) for label in labels], title="samples by their heads (t-SNE)"
    )
    return [Section("Do classes use heads of their own?", drawn + table(facts), note)]


def text_section(study: Study) -> list[Section]:
    if study.text is None:
        return []
    deltas = study.stacked("deltas").mean(dim=0)
    images = next(
        (sample.tensors["gamma"].numel() for sample in study.known if "gamma" in sample.tensors),
        None,
    )
    body = prompt_words(study.pieces, deltas, study.text, answer="answer", images=images)
    note = (
        "Mean share of the effect that is lost when the picture may not reach a word. Framed words"
        " are those that matter"
    )
    note += (
        " (no image tokens were asked for)."
        if images is None
        else "; they are kept for image tokens."
    )
    rows = (
        [("kept words alone bring", spelled(summarise(study.column("sufficiency"))))]
        if len(study.column("sufficiency"))
        else []
    )
    return [Section("Into which words?", body + (table(rows) if rows else Markup("")), note)]


def gallery_section(
    study: Study, lvlm: LVLM, question: str, picture_of: Callable[[Traced], Image.Image]
) -> list[Section]:
    """Where the effect comes from: the first pictures, and numbers over all of them."""
    known = [sample for sample in study.known if "gamma" in sample.tensors]
    if not known:
        return []
    strips = []
    for sample in known[:GALLERY]:
        shown = picture_of(sample)
        prompt = lvlm.prompt(shown, question)
        maps = [
            (name, picture_map(prompt.tokens, sample.tensors[key]))
            for name, key in (("image tokens", "gamma"), ("weighted attention", "weighted"))
        ]
        views = [MapView(name, values, scale_of(values)) for name, values in maps]
        strips.append(
            Strip(
                seen_picture(lvlm, prompt, shown),
                views,
                label=f"{sample.id}: {sample.numbers['answer']}",
            )
        )
    cards = [
        Card(
            f"pictures {start + 1} to {min(start + COLUMN, len(strips))}",
            strips[start : start + COLUMN],
        )
        for start in range(0, len(strips), COLUMN)
    ]
    rows = [
        (
            "correlation of image tokens with weighted attention",
            spelled(summarise(study.column("token_attention"))),
        ),
        ("R² on unseen masks", spelled(summarise(study.column("token_r2")))),
        ("agreement of two half fits", spelled(summarise(study.column("token_split_half")))),
    ]
    if len(study.column("object_share")):
        rows += [
            (
                "share of the positive effect on the object",
                spelled(summarise(study.column("object_share"))),
            ),
            (
                "share of weighted attention on the object",
                spelled(summarise(study.column("weighted_object_share"))),
            ),
            (
                "share of the picture that the object is",
                spelled(summarise(study.column("object_area"))),
            ),
        ]
    note = (
        f"The first {min(GALLERY, len(known))} pictures; numbers are means ± standard errors over"
        f" all {len(known)}."
    )
    return [Section("From where in the picture?", table(rows) + render_cards(cards), note)]


def holes_section(study: Study) -> Section:
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
    drawn = fragment("scatter.svg.j2", title=title, groups=groups, width=WIDTH, height=HEIGHT)
    keys = {name: (colour, "") for name, (colour, _) in looks.items()}
    return fragment("bench_charts.html.j2", charts=[drawn], keys=keys)


def spelled(found: Summary, digits: int = 3) -> str:
    return found.text(digits)
