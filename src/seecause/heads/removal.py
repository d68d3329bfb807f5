"""What a model is like without some of its heads: accuracy, groups, BIR and flips, for many sets of
heads at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seecause.data.answers import Group
from seecause.engine.forks import logits_of_sets
from seecause.heads.ablate import gates_without
from seecause.heads.cases import Cases
from seecause.heads.divergence import jensen_shannon, log_probs
from seecause.heads.erase import Baseline, describe
from seecause.heads.gains import Gains, Views
from seecause.heads.masks import Masks
from seecause.heads.random_heads import random_sets
from seecause.heads.result import Head, HeadScores
from seecause.metrics.calibration import calibration, nll
from seecause.metrics.groups import GroupAccuracy, group_accuracy
from seecause.models.view import VisionModel

log = logging.getLogger(__name__)
_TOGETHER = 16  # pictures whose versions are made at once: often enough to tell how far it is


@dataclass(frozen=True, eq=False)
class Look:
    """One way to take the background away: masks and what fills their outside, or whole
    counterfactual pictures."""

    masks: Masks | None
    baseline: Baseline

    @property
    def name(self) -> str:
        return (
            "exact swap"
            if self.masks is None
            else (
                f"{'true' if self.masks.source == 'oracle' else 'discovered'} masks,"
                f" {describe(self.baseline)}"
            )
        )

    def take(self, rows: Tensor) -> Look:
        """Of some images; masks with a fill by name only."""
        return Look(None if self.masks is None else self.masks.take(rows), self.baseline)


@dataclass(frozen=True, eq=False)
class Outcome:
    """A model without `heads`, measured. NaN: the data does not tell."""

    heads: list[Head]
    accuracy: float
    worst: float  # accuracy of the worst group
    nll: float
    ece: float
    flips: float  # share of answers that change with the background (exact swaps only)
    gains: Mapping[str, Gains] = field(default_factory=dict)  # by the name of the look
    averages: Mapping[str, float] = field(
        default_factory=dict
    )  # over groups, each by its own name: there are several

    def numbers(self) -> dict[str, float]:
        """By name, for tables, without what the data does not tell. BIR is the ratio of means, one
        half where neither region matters."""
        found = {
            "removed": len(self.heads),
            "accuracy": self.accuracy,
            "worst group": self.worst,
            **self.averages,
        }
        found |= {"NLL": self.nll, "ECE": self.ece, "flips": self.flips}
        for name, gains in self.gains.items():
            found |= {
                f"FIG, {name}": float(gains.fig.mean()),
                f"BIG, {name}": float(gains.big.mean()),
                f"BIR, {name}": _or_half(gains.bir_ratio_of_means),
            }
        return {name: value for name, value in found.items() if value == value}


@torch.no_grad()
def logits_without(model: VisionModel, images: Tensor, sets: Sequence[Sequence[Head]]) -> Tensor:
    """Logits [S, N, C] of images [N, 3, H, W] without each set of heads, on the model's device."""
    return logits_of_sets(
        model, images, torch.stack([gates_without(model, heads) for heads in sets]).to(model.device)
    )


def outcomes(
    model: VisionModel, cases: Cases, sets: Sequence[Sequence[Head]], looks: Sequence[Look] = (),
    *, train: Mapping[Group, float] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Outcome]:  # fmt: skip
    """Measure the model without each set. The erased pictures are the same for all sets, so the
    numbers are paired.

    `train` is how often training met each group, for the average that is weighted so. `progress` is
    told how many pictures are done.
    """
    missing = (
        [group for group, share in (train or {}).items() if share > 0 and group not in cases.groups]
        if cases.grouped
        else []
    )
    if missing:
        log.warning(
            "%s has no picture of group %s, so there is no average with the weights of training",
            cases.name,
            ", ".join(map(str, missing)),
        )
        train = None
    views = {look.name: Views(model, cases.images, look.masks, look.baseline) for look in looks}
    flipping = cases.swapped is not None and "exact swap" not in views
    logits, big, fig, moved = (
        list[Tensor](),
        {n: list[Tensor]() for n in views},
        {n: list[Tensor]() for n in views},
        list[Tensor](),
    )
    for start in range(0, len(cases), _TOGETHER):
        rows = slice(start, min(start + _TOGETHER, len(cases)))
        pictures = [cases.images[rows]]
        for view in views.values():
            erased = view.erased(rows)
            assert erased.no_foreground is not None
            pictures += [erased.no_background, erased.no_foreground]
        if flipping and cases.swapped is not None:
            pictures.append(cases.swapped.background[rows])
        found = (
            logits_without(model, torch.cat(pictures), sets).unflatten(1, (len(pictures), -1)).cpu()
        )  # [S, V, b, C]
        answers = log_probs(found)
        logits.append(found[:, 0])
        for place, name in enumerate(views):
            big[name].append(jensen_shannon(answers[:, 0], answers[:, 1 + 2 * place]).double())
            fig[name].append(jensen_shannon(answers[:, 0], answers[:, 2 + 2 * place]).double())
        if cases.swapped is not None:
            other = found[:, -1] if flipping else found[:, 1 + 2 * list(views).index("exact swap")]
            moved.append(other.argmax(dim=-1) != found[:, 0].argmax(dim=-1))
        if progress is not None:
            progress(rows.stop - rows.start)
    whole = torch.cat(logits, dim=1)  # [S, N, C]
    flips = (
        torch.cat(moved, dim=1).double().mean(dim=1).tolist() if moved else [torch.nan] * len(sets)
    )
    made = []
    for place, heads in enumerate(sets):
        gains = {
            name: Gains(torch.cat(fig[name], dim=1)[place], torch.cat(big[name], dim=1)[place], 0.0)
            for name in views
        }
        made.append(_outcome(list(heads), whole[place], cases, flips[place], gains, train))
    return made


@dataclass(frozen=True, eq=False)
class Curve:
    """Outcomes against how many heads may go: by scores, and by lot."""

    ks: list[int]
    chosen: list[Outcome]
    random: list[list[Outcome]]  # draws for each k

    def band(self, name: str) -> list[tuple[float, float]]:
        """Mean and standard deviation over draws of a number, for each k."""
        values = [
            torch.tensor([draw.numbers()[name] for draw in draws], dtype=torch.float64)
            for draws in self.random
        ]
        return [(float(v.mean()), float(v.std(correction=0))) for v in values]


def curve(
    model: VisionModel, cases: Cases, scores: HeadScores, ks: Sequence[int],
    looks: Sequence[Look] = (), *, draws: int = 20, seed: int = 0,
    train: Mapping[Group, float] | None = None, progress: Callable[[int], None] | None = None,
) -> Curve:  # fmt: skip
    """Remove the best k heads for every k, and `draws` random sets beside it, as large as what was
    really removed: scores of 0 or less stay."""
    chosen = [scores.top(k) for k in ks]
    lots = [
        heads for some in chosen for heads in random_sets(model, len(some), draws=draws, seed=seed)
    ]
    found = outcomes(model, cases, [*chosen, *lots], looks, train=train, progress=progress)
    drawn = found[len(ks) :]
    return Curve(
        list(ks), found[: len(ks)], [drawn[i * draws : (i + 1) * draws] for i in range(len(ks))]
    )


def _outcome(
    heads: list[Head],
    logits: Tensor,
    cases: Cases,
    flips: float,
    gains: dict[str, Gains],
    train: Mapping[Group, float] | None,
) -> Outcome:
    if cases.labels is None:
        return Outcome(heads, torch.nan, torch.nan, torch.nan, torch.nan, flips, gains)
    labels = cases.labels.cpu()
    right = logits.argmax(dim=1) == labels
    groups = group_accuracy(right, cases.groups) if cases.grouped else None
    worst, averages = (
        (torch.nan, {}) if groups is None else (groups.worst, over_groups(groups, train))
    )
    return Outcome(
        heads,
        float(right.double().mean()),
        worst,
        float(nll(logits, labels).mean()),
        calibration(logits, labels).error,
        flips,
        gains,
        averages,
    )


def over_groups(
    groups: GroupAccuracy, train: Mapping[Group, float] | None = None
) -> dict[str, float]:
    """What papers call worst-group accuracy and adjusted average, where the data has what each
    needs; names say which is which."""
    found = {"mean of groups": groups.unweighted_average}  # SubpopBench's adjusted accuracy
    if train:
        found["groups weighted as in training"] = groups.train_weighted_average(
            dict(train.items())
        )  # Sagawa et al.
    if set(groups.groups) == {(0, 0), (0, 1), (1, 0), (1, 1)}:
        found["worst of groups (0, 1) and (1, 0)"] = groups.worst_among([(0, 1), (1, 0)])
    return found


def _or_half(ratio: float) -> float:
    return ratio if ratio == ratio else 0.5
