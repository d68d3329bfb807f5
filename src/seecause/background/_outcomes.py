"""What a model is like without some of its heads: accuracy, groups, BIR and flips, for many sets of
heads at once, and what it answers to a few pictures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import torch
from torch import Tensor

from seecause.background.erase import ErasedViews, Erasure
from seecause.background.gains import Gains, jensen_shannon, log_probs
from seecause.background.heads import Head, HeadScores, gates_without, need_heads, random_sets
from seecause.background.images import Pictures, logits_of
from seecause.data.batch import Group
from seecause.data.dataset import Hole
from seecause.engine.forks import logits_of_sets
from seecause.metrics.accuracy import (
    GroupAccuracy,
    background_gap,
    calibration,
    nll,
)
from seecause.models.base import ImageModel
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel

log = logging.getLogger(__name__)
SWAP = "exact swap"
ELSEWHERE = "elsewhere"
_TOGETHER = 16  # pictures whose versions are made at once: often enough to tell how far it is


@dataclass(frozen=True, eq=False)
class Outcome:
    """A model without `heads`, measured. NaN: the data does not tell."""

    heads: list[Head]
    accuracy: float
    worst: float  # accuracy of the worst group
    nll: float
    ece: float
    flips: float  # share of answers that change with the background (exact swaps only)
    gains: Mapping[str, Gains] = field(default_factory=dict)  # by the name of the erasure
    averages: Mapping[str, float] = field(default_factory=dict)  # over groups, by their own names

    def numbers(self) -> dict[str, float]:
        """By name, for tables, without what the data does not tell. BIR is the ratio of means, one
        half where neither region matters."""
        numbers = {
            "removed": len(self.heads),
            "accuracy": self.accuracy,
            "worst group": self.worst,
            **self.averages,
            "NLL": self.nll,
            "ECE": self.ece,
            "flips": self.flips,
        }
        for name, gains in self.gains.items():
            ratio = gains.bir_ratio_of_means
            numbers |= {
                f"FIG, {name}": float(gains.fig.mean()),
                f"BIG, {name}": float(gains.big.mean()),
                f"BIR, {name}": ratio if ratio == ratio else 0.5,
            }
        return {name: value for name, value in numbers.items() if value == value}


def changes(
    before: Outcome, after: Outcome, gaps: tuple[float, float] | None = None
) -> dict[str, tuple[float, float]]:
    """Numbers by name, before and after, that both have; `gaps` are the BG-gaps."""
    first, second = before.numbers(), after.numbers()
    both = {name: (first[name], second[name]) for name in first if name in second}
    del both["removed"]
    return both if gaps is None else {**both, "BG-gap": gaps}


@in_eval_mode
@torch.no_grad()
def logits_without(model: ImageModel, images: Tensor, sets: Sequence[Sequence[Head]]) -> Tensor:
    """Logits [S, N, C] of images [N, 3, H, W] without each set of heads, on the model's device; of
    a model that is not read by heads, where no set has any."""
    if not any(sets):
        return logits_of(model, images).expand(len(sets), -1, -1)
    view = need_heads(model, "head ablation")
    gates = torch.stack([gates_without(view, heads) for heads in sets])
    return logits_of_sets(view, images, gates)


@in_eval_mode
def outcomes(
    model: VisionModel,
    pictures: Pictures,
    sets: Sequence[Sequence[Head]],
    erasures: Sequence[Erasure] = (),
    *,
    train: Mapping[Group, float] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Measure the model without each set. The erased pictures are the same for all sets, so the
    numbers are paired.

    `train` is how often training met each group, for the average that is weighted so. `progress` is
    told how many pictures are done.
    """
    train = _usable_shares(train, pictures)
    views = {
        erasure.name: ErasedViews(model, pictures.images, erasure.masks, erasure.baseline)
        for erasure in erasures
    }
    parts = []
    for start in range(0, len(pictures), _TOGETHER):
        rows = slice(start, min(start + _TOGETHER, len(pictures)))
        parts.append(_measure_rows(model, pictures, rows, sets, views))
        if progress is not None:
            progress(rows.stop - rows.start)
    logits, flips, *gains = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    measured = []
    for place, heads in enumerate(sets):
        by_name = {
            name: Gains(gains[2 * i][place], gains[2 * i + 1][place], 0.0)
            for i, name in enumerate(views)
        }
        moved = float(flips[place].mean())
        measured.append(_outcome(list(heads), logits[place], pictures, moved, by_name, train))
    return measured


def _measure_rows(
    model: VisionModel,
    pictures: Pictures,
    rows: slice,
    sets: Sequence[Sequence[Head]],
    views: Mapping[str, ErasedViews],
) -> tuple[Tensor, ...]:
    """Of some pictures, for every set: logits [S, b, C], whether a swap flips the answer [S, b]
    (NaN without swaps), then FIG and BIG [S, b] by every view."""
    versions = [pictures.images[rows]]
    for view in views.values():
        versions += view.erased(rows)
    swapped_at = 1 + 2 * list(views).index(SWAP) if SWAP in views else len(versions)
    if pictures.swapped is not None and swapped_at == len(versions):
        versions.append(pictures.swapped.background[rows])
    logits = logits_without(model, torch.cat(versions), sets)
    logits = logits.unflatten(1, (len(versions), -1)).cpu()  # [S, V, b, C]
    answers = log_probs(logits)
    gains = []
    for place in range(len(views)):
        gains.append(jensen_shannon(answers[:, 0], answers[:, 2 + 2 * place]).double())
        gains.append(jensen_shannon(answers[:, 0], answers[:, 1 + 2 * place]).double())
    answer = logits[:, 0].argmax(dim=-1)
    flips = torch.full_like(answer, torch.nan, dtype=torch.float64)
    if pictures.swapped is not None:
        flips = (logits[:, swapped_at].argmax(dim=-1) != answer).double()
    return logits[:, 0], flips, *gains


def _usable_shares(
    train: Mapping[Group, float] | None, pictures: Pictures
) -> Mapping[Group, float] | None:
    """Shares of groups in training; None, with a warning, where the pictures lack a group."""
    if not train or not pictures.grouped:
        return train
    missing = [
        group for group, share in train.items() if share > 0 and group not in pictures.groups
    ]
    if not missing:
        return train
    log.warning(
        "%s has no picture of group %s, so there is no average with the weights of training",
        pictures.name,
        ", ".join(map(str, missing)),
    )
    return None


def _outcome(
    heads: list[Head],
    logits: Tensor,
    pictures: Pictures,
    flips: float,
    gains: dict[str, Gains],
    train: Mapping[Group, float] | None,
) -> Outcome:
    if pictures.labels is None:
        return Outcome(heads, torch.nan, torch.nan, torch.nan, torch.nan, flips, gains)
    labels = pictures.labels.cpu()
    right = logits.argmax(dim=1) == labels
    groups = pictures.by_group(right)
    return Outcome(
        heads,
        float(right.double().mean()),
        torch.nan if groups is None else groups.worst,
        float(nll(logits, labels).mean()),
        calibration(logits, labels).error,
        flips,
        gains,
        {} if groups is None else over_groups(groups, train),
    )


def over_groups(
    groups: GroupAccuracy, train: Mapping[Group, float] | None = None
) -> dict[str, float]:
    """What papers call worst-group accuracy and adjusted average, where the data has what each
    needs; names say which is which."""
    averages = {"mean of groups": groups.unweighted_average}  # SubpopBench's adjusted accuracy
    if train:  # Sagawa et al.
        weighted = groups.train_weighted_average(dict(train.items()))
        averages["groups weighted as in training"] = weighted
    if set(groups.groups) == {(0, 0), (0, 1), (1, 0), (1, 1)}:
        averages["worst of groups (0, 1) and (1, 0)"] = groups.worst_among([(0, 1), (1, 0)])
    return averages


@dataclass(frozen=True, eq=False)
class Curve:
    """Outcomes against how many heads may go: by scores, and by lot."""

    ks: list[int]
    chosen: list[Outcome]
    random: list[list[Outcome]]  # draws for each k

    def at(self, k: int) -> Outcome:
        """The outcome of the chosen heads where `k` may go."""
        return self.chosen[self.ks.index(k)]

    def band(self, name: str) -> list[tuple[float, float]]:
        """Mean and standard deviation over draws of a number, for each k."""
        band = []
        for draws in self.random:
            values = torch.tensor([draw.numbers()[name] for draw in draws], dtype=torch.float64)
            band.append((float(values.mean()), float(values.std(correction=0))))
        return band


@in_eval_mode
def curve(
    model: VisionModel,
    pictures: Pictures,
    scores: HeadScores,
    ks: Sequence[int],
    erasures: Sequence[Erasure] = (),
    *,
    draws: int = 20,
    seed: int = 0,
    train: Mapping[Group, float] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Curve:
    """Remove the best k heads for every k, and `draws` random sets beside it, as large as what was
    really removed: scores of 0 or less stay."""
    chosen = [scores.top(k) for k in ks]
    sets = [*chosen]
    for heads in chosen:
        sets += random_sets(model, len(heads), draws=draws, seed=seed)
    measured = outcomes(model, pictures, sets, erasures, train=train, progress=progress)
    drawn = measured[len(ks) :]
    random = [drawn[i * draws : (i + 1) * draws] for i in range(len(ks))]
    return Curve(list(ks), measured[: len(ks)], random)


def background_gaps(
    model: ImageModel, same: Pictures, random: Pictures, sets: Sequence[Sequence[Head]]
) -> list[float]:
    """BG-gap of the Backgrounds Challenge without each set of heads: accuracy on mixed_same less
    that on mixed_rand, of objects that could be read in both."""
    right = []
    for pictures in readable_twins(same, random):
        assert pictures.labels is not None
        answers = logits_without(model, pictures.images, sets).argmax(dim=-1)  # [S, N]
        right.append((answers == pictures.labels).cpu())
    return [background_gap(first, second) for first, second in zip(*right, strict=True)]


def readable_twins(same: Pictures, random: Pictures) -> tuple[Pictures, Pictures]:
    """Both without the objects that could not be read in the other: accuracies of different objects
    have no difference that means anything."""
    return _without(same, random.holes), _without(random, same.holes)


def _without(pictures: Pictures, holes: Sequence[Hole]) -> Pictures:
    missing = {_object_named(hole.name) for hole in holes}
    rows = [i for i, name in enumerate(pictures.ids) if _object_named(name) not in missing]
    return pictures if len(rows) == len(pictures) else pictures.take(torch.tensor(rows))


def _object_named(name: str) -> str:
    """Of a photo of ImageNet-9, `class/fg_<photo>_bg_<photo>.JPEG`: what is alike in all
    variants."""
    from seecause.data.backgrounds import object_of

    path = PurePosixPath(name)
    return str(path.with_name(object_of(path.stem)))


@dataclass(frozen=True, eq=False)
class Examples:
    """A few pictures in several versions, and what the model answers to each."""

    pictures: Pictures
    erasure: Erasure | None  # of these pictures
    versions: dict[str, Tensor]  # [N, 3, H, W] by name
    logits: dict[str, Tensor]  # [S, N, C] by the same names: of every set of heads that was removed


def examples(
    model: ImageModel,
    pictures: Pictures,
    erasure: Erasure | None,
    sets: Sequence[Sequence[Head]] = ((),),
) -> Examples:
    """Answers to pictures as they are, without background, without object, and elsewhere where
    exact swaps exist, by the model without each set of heads."""
    versions = {"picture": pictures.images}
    if erasure is not None and erasure.masks is not None:
        views = ErasedViews(model, pictures.images, erasure.masks, erasure.baseline)
        versions["no background"], versions["no object"] = views.erased(slice(None))
    if pictures.swapped is not None:
        versions[ELSEWHERE] = pictures.swapped.background
    logits = {name: logits_without(model, images, sets) for name, images in versions.items()}
    return Examples(pictures, erasure, versions, logits)
