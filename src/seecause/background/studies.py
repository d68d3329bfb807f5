"""What decides the result of CIGMA? The paper's Tables 3 to 6 and its two other ablations, one
function each.

    k            how many heads go, with as many random ones beside them
    fraction     how many right answers the scores are made from
    masks        kept share, grid, weights and fill of the mask search (Table 3)
    temperature  of the answers that are compared (Table 4). Accuracy can only change because other
                 heads are chosen
    layers       heads of the first, middle and last third of the blocks alone (Table 5)
    stability    scores from other halves of the pictures (Table 6)

Heads are scored on `train`, numbers are those of `test`; both come with the model's right answers
or without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from seecause.background._outcomes import curve, outcomes
from seecause.background._score import score
from seecause.background.erase import Erasure, Fill, Masks
from seecause.background.gains import information_gains
from seecause.background.heads import HeadScores, all_heads, need_heads, penalised
from seecause.background.images import (
    AnswerSampling,
    Pictures,
    Progress,
    answered_right,
    model_for,
    no_progress,
    pictures_of,
)
from seecause.background.masks import discover_masks, iou
from seecause.background.prune import Background
from seecause.data.dataset import Dataset, Hole
from seecause.data.registry import as_data
from seecause.errors import BadOption, UnknownName
from seecause.metrics.statistics import rank_correlation
from seecause.models.view import VisionModel

KS = (0, 4, 8, 16, 24, 32)
FRACTIONS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
TEMPERATURES = (0.5, 1.0, 2.0)
THIRDS = ("first third", "middle third", "last third")
HALVES = 6  # random halves of the pictures
FAR = 5  # ranks
MASKS: dict[str, dict[str, Any]] = {
    "default": {},
    "rho 0.25": {"rho": 0.25},
    "rho 0.45": {"rho": 0.45},
    "grid 16": {"grid": 16},
    "grid 64": {"grid": 64},
    "TV 0.05": {"weights": (1.0, 0.01, 0.05)},
    "TV 0.2": {"weights": (1.0, 0.01, 0.2)},
    "area 0.005": {"weights": (1.0, 0.005, 0.1)},
    "area 0.02": {"weights": (1.0, 0.02, 0.1)},
    "blurred fill": {"baseline": "blur"},
}
Row = dict[str, str | float]


@dataclass(frozen=True, eq=False)
class StudySetup:
    """A model, pictures to score heads on and to measure on, and what stays the same."""

    model: VisionModel
    train: Pictures
    test: Pictures
    masks: Masks  # of `train`
    erasures: tuple[Erasure, ...] = ()  # of `test`
    top: int = 4
    fill: Fill = "grey"
    guard: bool = True
    draws: int = 20
    search: Mapping[str, Any] = field(default_factory=dict)  # options of `discover_masks`
    seed: int = 0

    def scores(
        self,
        *,
        train: Pictures | None = None,
        masks: Masks | None = None,
        fill: Fill | None = None,
        temperature: float = 1.0,
    ) -> HeadScores:
        """Of every head, with the setting that a study changes."""
        pictures = train or self.train
        scores = score(
            self.model,
            pictures.images,
            masks or self.masks,
            target=pictures.labels,
            baseline=fill or self.fill,
            guard=self.guard,
            temperature=temperature,
        )
        return penalised(scores) if self.guard else scores

    def subset(self, rows: Tensor) -> tuple[Pictures, Masks]:
        return self.train.take(rows), self.masks.take(rows)

    def rows(self, about: Sequence[Row], chosen: Sequence[HeadScores | None]) -> list[Row]:
        """What is said of each setting, and the numbers without the top heads of its scores."""
        sets = [[] if scores is None else scores.top(self.top) for scores in chosen]
        measured = outcomes(self.model, self.test, sets, self.erasures)
        return [{**row, **after.numbers()} for row, after in zip(about, measured, strict=True)]


@dataclass(frozen=True, eq=False)
class StudyTable:
    """A study's table. `x` names the column that charts run along; the first column of a table
    names its rows."""

    name: str
    question: str
    rows: list[Row]
    x: str | None = None
    note: str = ""
    train: Pictures | None = None  # what heads were scored on
    test: Pictures | None = None  # what was measured
    masks: Masks | None = None  # of `train`

    @property
    def holes(self) -> tuple[Hole, ...]:
        """Pictures that could not be read."""
        read = (part for part in (self.train, self.test) if part is not None)
        return tuple(dict.fromkeys(hole for part in read for hole in part.holes))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows for key in row))


def ablation_study(
    name: str,
    model: VisionModel,
    train: Dataset | Pictures | str,
    test: Dataset | Pictures | str,
    *,
    top: int = 4,
    sampling: AnswerSampling | None = None,
    background: Background | None = None,
    guard: bool = True,
    draws: int = 20,
    seed: int = 0,
    progress: Progress = no_progress,
) -> StudyTable:
    """What one setting of CIGMA changes: heads are scored on right answers of `train`, the `top`
    of them removed, and the rest is measured on `test`.

    `name` is a setting of `STUDIES`; `draws` random sets stand beside study k. `sampling` and
    `background` are as in `score_heads`.
    """
    check_study(name, model, top)
    background = background or Background()
    background.check()
    if background.fill == "swap":
        raise BadOption("fill", "swap", "mean, grey, blur or noise: studies compare masks")
    sampling = sampling or AnswerSampling()
    if name == "fraction":  # it takes shares of all right answers itself
        sampling = replace(sampling, share=1.0)
    train, test = as_data(train), as_data(test)
    judge = need_heads(model_for(model, train), "an ablation study")
    chosen = pictures_of(judge, train, progress)
    chosen = answered_right(judge, chosen, seed=seed, **asdict(sampling))
    tested = pictures_of(judge, test, progress)
    setup = StudySetup(
        model=judge,
        train=chosen,
        test=tested,
        masks=background.masks_of(judge, chosen, progress),
        erasures=tuple(background.test_erasures(judge, tested, progress)),
        top=top,
        fill=background.fill,
        guard=guard,
        draws=draws,
        search=background.search,
        seed=seed,
    )
    with progress(f"study {name}", 1) as advance:
        table = ablation_table(name, setup)
        advance(1)
    return table


def check_study(name: str, model: VisionModel, top: int) -> None:
    """Refuse, before any picture is read, a study or a number of heads that there is not."""
    if name not in STUDIES:
        raise UnknownName("study", name, STUDIES)
    total = len(all_heads(need_heads(model, "an ablation study")))
    if not 0 < top <= total:
        raise BadOption("top", top, f"a count from 1 to {total} heads, as many as the model has")


def ablation_table(name: str, setup: StudySetup) -> StudyTable:
    """One of `STUDIES`."""
    check_study(name, setup.model, setup.top)
    table = STUDIES[name](setup)
    return replace(table, train=setup.train, test=setup.test, masks=setup.masks)


def _k(setup: StudySetup) -> StudyTable:
    total = len(all_heads(setup.model))
    ks = sorted({k for k in (*KS, setup.top) if k <= total})
    line = curve(
        setup.model,
        setup.test,
        setup.scores(),
        ks,
        setup.erasures,
        draws=setup.draws,
        seed=setup.seed,
    )
    rows: list[Row] = []
    for place, (k, chosen) in enumerate(zip(ks, line.chosen, strict=True)):
        row: Row = {"K": k, **chosen.numbers()}
        for name in chosen.numbers():
            if name in ("accuracy", "worst group", "flips") or name.startswith("BIR"):
                mean, spread = line.band(name)[place]
                row |= {f"{name}, random": mean, f"{name}, random sd": spread}
        rows.append(row)
    note = (
        "Heads with a score of 0 or less stay, so `removed` may be below K. Beside them: mean and"
        f" deviation of {setup.draws} random sets of as many."
    )
    return StudyTable("k", "How many heads should go?", rows, "K", note)


def _fraction(setup: StudySetup) -> StudyTable:
    order = torch.randperm(len(setup.train), generator=torch.Generator().manual_seed(setup.seed))
    # of few pictures, several shares are the same ones
    counts = {max(2, round(share * len(order))): share for share in FRACTIONS}
    chosen = []
    for count in counts:
        pictures, masks = setup.subset(order[:count].sort().values)
        chosen.append(setup.scores(train=pictures, masks=masks))
    rows: list[Row] = [
        {"share": s, "pictures": n, "rank correlation with all": _agreement(scores, chosen[-1])}
        for (n, s), scores in zip(counts.items(), chosen, strict=True)
    ]
    note = "Each smaller set is part of the larger ones."
    question = "How many pictures do scores need?"
    return StudyTable("fraction", question, setup.rows(rows, chosen), "share", note)


def _masks(setup: StudySetup) -> StudyTable:
    chosen, rows = [], list[Row]()
    for name, options in MASKS.items():
        masks = discover_masks(setup.model, setup.train.images, **{**setup.search, **options})
        fill = options.get("baseline", setup.fill)
        chosen.append(setup.scores(masks=masks, fill=fill))
        gains = information_gains(setup.model, setup.train.images, masks, baseline=fill)
        row: Row = {"setting": name}
        if setup.train.truth is not None:
            row["IoU"] = float(iou(masks, setup.train.truth).nanmean())
        row |= {"FIG": float(gains.fig.mean()), "BIG": float(gains.big.mean())}
        row["BIR"] = gains.bir_ratio_of_means
        row["rank correlation with default"] = _agreement(chosen[-1], chosen[0])
        rows.append(row)
    note = "Masks are always discovered here; FIG, BIG and BIR are those of the scored pictures."
    question = "Does the mask search decide the result?"
    return StudyTable("masks", question, setup.rows(rows, chosen), note=note)


def _temperature(setup: StudySetup) -> StudyTable:
    chosen = [setup.scores(temperature=t) for t in TEMPERATURES]
    usual = chosen[TEMPERATURES.index(1.0)]
    rows: list[Row] = [
        {"temperature": t, "rank correlation with 1": _agreement(scores, usual)}
        for t, scores in zip(TEMPERATURES, chosen, strict=True)
    ]
    note = (
        "The largest logit does not depend on the temperature: numbers differ only where other"
        " heads are chosen."
    )
    question = "Does the temperature decide the result?"
    return StudyTable("temperature", question, setup.rows(rows, chosen), "temperature", note)


def _layers(setup: StudySetup) -> StudyTable:
    scores, depth = setup.scores(), setup.model.n_layers
    third = 3 * torch.arange(depth) // depth
    parts = {"none": None, "all": scores}
    for place, name in enumerate(THIRDS):
        stays = (third == place)[:, None] | scores.value.isnan()
        parts[name] = replace(scores, value=torch.where(stays, scores.value, -torch.inf))
    rows: list[Row] = [{"blocks": name} for name in parts]
    note = (
        f"The {setup.top} best heads of those blocks alone go; fewer where fewer have a score"
        " above 0."
    )
    question = "Where do the heads sit that matter?"
    return StudyTable("layers", question, setup.rows(rows, list(parts.values())), note=note)


def _stability(setup: StudySetup) -> StudyTable:
    count, generator = len(setup.train), torch.Generator().manual_seed(setup.seed)
    halves = [
        torch.randperm(count, generator=generator)[: max(2, count // 2)].sort().values
        for _ in range(HALVES)
    ]
    chosen = [
        setup.scores(train=pictures, masks=masks)
        for pictures, masks in (setup.subset(rows) for rows in halves)
    ]
    whole = setup.scores()
    exists = ~whole.value.isnan()
    ranks = torch.stack(
        [s.value[exists].argsort(descending=True).argsort() for s in chosen]
    ).double()  # [halves, heads]
    top = whole.value[exists].argsort(descending=True)[: setup.top]
    rows: list[Row] = []
    for place, scores in enumerate(chosen):
        others = [_agreement(scores, other) for other in chosen if other is not scores]
        moved = float(((ranks[place] - ranks.mean(dim=0)).abs() > FAR).double().mean())
        same = len(set(scores.top(setup.top)) & set(whole.top(setup.top)))
        row: Row = {"half": place, "rank correlation with the others": sum(others) / len(others)}
        row |= {f"heads that moved over {FAR} ranks": moved, "in the top of all pictures": same}
        rows.append(row)
    spread = float(ranks[:, top].std(dim=0, correction=0).mean())
    note = f"The rank of the top {setup.top} heads varies by {spread:.1f} between halves."
    question = "Would other pictures choose other heads?"
    return StudyTable("stability", question, setup.rows(rows, chosen), note=note)


STUDIES: Mapping[str, Callable[[StudySetup], StudyTable]] = {
    "k": _k, "fraction": _fraction, "masks": _masks, "temperature": _temperature,
    "layers": _layers, "stability": _stability,
}  # fmt: skip


def _agreement(first: HeadScores, second: HeadScores) -> float:
    """Spearman's correlation over the heads there are."""
    exists = ~first.value.isnan() & ~second.value.isnan()
    return float(rank_correlation(first.value[exists][None], second.value[exists][None])[0])
