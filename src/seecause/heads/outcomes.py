"""What a model is like without some of its heads: accuracy, groups, BIR and flips, for many sets of
heads at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from seecause.data.answers import Group
from seecause.data.imagenet9 import CLASSES
from seecause.engine.forks import logits_of_sets
from seecause.errors import BadOption
from seecause.heads.erase import ErasedViews, Erasure
from seecause.heads.gains import Gains, jensen_shannon, log_probs
from seecause.heads.pictures import Pictures
from seecause.heads.scores import Head, HeadScores, gates_without
from seecause.heads.simple_selectors import random_sets
from seecause.metrics.calibration import calibration, nll
from seecause.metrics.groups import GroupAccuracy, background_gap, group_accuracy
from seecause.models.block import chain
from seecause.models.view import VisionModel

log = logging.getLogger(__name__)


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
    model: VisionModel,
    cases: Pictures,
    sets: Sequence[Sequence[Head]],
    looks: Sequence[Erasure] = (),
    *,
    train: Mapping[Group, float] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Outcome]:
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
    views = {
        look.name: ErasedViews(model, cases.images, look.masks, look.baseline) for look in looks
    }
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
    model: VisionModel, cases: Pictures, scores: HeadScores, ks: Sequence[int],
    looks: Sequence[Erasure] = (), *, draws: int = 20, seed: int = 0,
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
    cases: Pictures,
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


NONE = "none of the nine"


def imagenet9_model(model: VisionModel, mapping: Tensor) -> VisionModel:
    """The same view with ten answers: `mapping` [1000] (`read_in9_map`) says which of the nine each
    ImageNet class is, -1 for none."""
    members = [(mapping == place).nonzero()[:, 0] for place in (*range(len(CLASSES)), -1)]
    if any(len(some) == 0 for some in members):
        raise BadOption(
            "mapping",
            mapping.unique().tolist(),
            "classes for each of the nine, and some that are none of them (-1)",
        )

    def best(logits: Tensor) -> Tensor:
        return torch.stack(
            [logits[..., some.to(logits.device)].amax(dim=-1) for some in members], dim=-1
        )

    native = model.native
    readout = replace(model.readout, head=chain(model.readout.head, best))
    told: dict[str, Any] = {
        "classes": (*CLASSES, NONE),
        "merged": tuple(mapping.tolist()),
        "memo": {},
    }
    return replace(model, readout=readout, native=lambda images: best(native(images)), **told)


def background_gaps(
    model: VisionModel, same: Pictures, random: Pictures, sets: Sequence[Sequence[Head]]
) -> list[float]:
    """BG-gap of a model without each set of heads, on the variants mixed_same and mixed_rand."""
    right = []
    for cases in (same, random):
        assert cases.labels is not None
        right.append(
            logits_without(model, cases.images, sets).argmax(dim=-1) == cases.labels
        )  # [S, N]
    return [background_gap(a.cpu(), b.cpu()) for a, b in zip(*right, strict=True)]
